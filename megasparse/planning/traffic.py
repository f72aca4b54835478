"""Bytes that a step moves: between ranks, and to CPU memory and NVMe. Of one rank, one way (it receives as many).

Ψ parameters, s bytes of one, n ranks that share the states, A micro-batches a rank and step, S ranks that share a
sequence, L tokens, H·D width of the heads.

    ZeRO 0     gradients all-reduced once                      2·Ψ·s·(n−1)/n
    ZeRO 1     gradients reduced once, weights gathered        2·Ψ·s·(n−1)/n
    ZeRO 2     gradients reduced in every micro-batch          (A + 1)·Ψ·s·(n−1)/n
    ZeRO 3     weights gathered forward and backward, too      3·A·Ψ·s·(n−1)/n
    sequence   4 tensors (q, k, v, out) in each of P passes    A·layers·P·4·B·(L/S)·H·D·s·(S−1)/S

P is 2, and 3 where the backward computes layers again. Shared queries and keys send 3 tensors. ZeRO 3's recomputation
gathers no more: DeepSpeed keeps a weight that is needed again at once.
"""

from dataclasses import dataclass

import torch

from megasparse.attention.heads import build_mechanism, head_dim
from megasparse.config.pattern import heads_of_layer
from megasparse.config.schema import Config, ModelConfig
from megasparse.planning.hardware import Hardware
from megasparse.planning.states import States, Zero


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run. gpus: of all nodes. sequence: ranks that share a sequence, next to each other in a node."""

    gpus: int
    per_node: int
    sequence: int

    @property
    def nodes(self) -> int:
        return -(-self.gpus // self.per_node)

    @property
    def local(self) -> int:
        """GPUs of a node that take part."""
        return min(self.gpus, self.per_node)


@dataclass(frozen=True)
class Communication:
    """Bytes a rank sends in a step, and seconds that it takes at the hardware's bandwidths, none of it hidden. network:
    bytes that a node sends to others, for all its GPUs.
    """

    zero: float
    sequence: float
    zero_seconds: float
    sequence_seconds: float
    network: float = 0.0

    @property
    def seconds(self) -> float:
        return self.zero_seconds + self.sequence_seconds


def communication(
    config: Config, states: States, zero: Zero, cluster: Cluster, micro_batches: int, gpu: Hardware
) -> Communication:
    """A ring over all ranks: each node takes in what others hold, (nodes − 1)/nodes of it, once for all its GPUs."""
    whole = states.trained * states.size
    times = {0: 2, 1: 2, 2: micro_batches + 1, 3: 3 * micro_batches}[zero.stage]
    sent = times * whole * (cluster.gpus - 1) / cluster.gpus
    between = times * whole * (cluster.nodes - 1) / cluster.nodes
    zero_seconds = max(sent / gpu.link, between / gpu.network)
    moved = _all_to_all(config, cluster.sequence) * micro_batches
    outside = max(0.0, 1 - cluster.local / cluster.sequence)  # of a group that does not fit into a node
    away = moved * outside * cluster.local
    seconds = max(moved * (1 - outside) / gpu.link, away / gpu.network)
    return Communication(sent, moved, zero_seconds, seconds, between + away)


def _all_to_all(config: Config, sequence: int) -> float:
    """Bytes that all-to-alls send in one micro-batch."""
    model, training = config.model, config.training
    if sequence == 1:
        return 0.0
    passes = 2 if model.activations == "stored" else 3
    tensor = training.micro_batch * config.data.sequence_length / sequence * model.heads * head_dim(model)
    tensor *= 2 if training.precision == "bf16" else 4
    return _tensors(model) * passes * tensor * (sequence - 1) / sequence


def _tensors(model: ModelConfig) -> float:
    """Count the tensors q, k, v and out of all layers; heads that share queries and keys send no keys."""
    total = 0.0
    for layer in range(model.layers):
        for kind, heads in heads_of_layer(model, layer).items():
            with torch.device("meta"):
                total += (3 if build_mechanism(kind, model, heads).shared_qk else 4) * heads / model.heads
    return total


@dataclass(frozen=True)
class Offload:
    """Bytes a rank moves in a step to and from CPU memory over PCIe, and to and from NVMe; and the seconds of each."""

    weights: float
    gradients: float
    optimizer: float
    nvme: float
    pcie_seconds: float
    nvme_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.pcie_seconds, self.nvme_seconds)


def offload(states: States, zero: Zero, cluster: Cluster, micro_batches: int, gpu: Hardware) -> Offload:
    """Return the traffic of offloading. weights: a rank's piece of them, fetched forward and backward in each
    micro-batch, written back once a step.
    gradients: its piece to the CPU in each micro-batch. optimizer: its fp32 weights and moments read and written on
    NVMe, or, where the weights stay on the GPU, the new weights that come back.
    """
    shared = cluster.gpus if zero.stage > 0 else 1
    piece = states.trained * states.size / shared
    weights = (2 * micro_batches + 1) * piece if zero.weights != "none" else 0.0
    away = zero.optimizer != "none"
    gradients = micro_batches * piece if away else 0.0
    back = piece if away and zero.weights == "none" else 0.0
    numbers = (4 * states.trained + states.moments) / shared
    swapped = 2 * numbers if zero.optimizer == "nvme" else 0.0
    on_disk = swapped + (weights if zero.weights == "nvme" else 0.0)
    pcie = weights + gradients + back
    return Offload(weights, gradients, back, on_disk, pcie / gpu.pcie, on_disk * cluster.local / gpu.nvme)
