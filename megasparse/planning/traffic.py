"""Bytes that a step moves: between ranks, and to CPU memory and NVMe. Of one rank, one way (it receives as many).

Ψ parameters, s bytes of one, n ranks that share the states, A micro-batches a rank and step, S ranks that share a
sequence, L tokens, H·D width of the heads.

    ZeRO 0     gradients all-reduced once                      2·Ψ·s·(n−1)/n
    ZeRO 1     gradients reduced once, weights gathered        2·Ψ·s·(n−1)/n
    ZeRO 2     gradients reduced in every micro-batch          (A + 1)·Ψ·s·(n−1)/n
    ZeRO 3     weights gathered forward and backward, too      3·A·Ψ·s·(n−1)/n
    sequence   4 tensors (q, k, v, out) in each of P passes    A·layers·P·4·B·(L/S)·H·D·s·(S−1)/S
               C ranks with the same H/W heads, W = S/C        A·layers·P·B·(L/S)·(H/W)·(3·D·s·(S−1) + out)
               out, of pairs that they share out               (D·s + 4)·(S−1)
               out, of heads that each of them computes        D·s·(W−1)

P is 2, and 3 where the backward computes layers again. Shared queries and keys send one tensor less. ZeRO 3's
recomputation gathers no more: DeepSpeed keeps a weight that is needed again at once.
"""

from dataclasses import dataclass

from megasparse.attention.contract import Attention
from megasparse.attention.heads import ranks_with_the_same_heads
from megasparse.config.schema import Config, ModelConfig
from megasparse.planning.flops import mechanisms_of
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
    tokens = config.training.micro_batch * config.data.sequence_length
    size = 2 if config.training.precision == "bf16" else 4
    moved = all_to_all(config.model, tokens, cluster.sequence, size) * micro_batches
    outside = max(0.0, 1 - cluster.local / cluster.sequence)  # of a group that does not fit into a node
    away = moved * outside * cluster.local
    seconds = max(moved * (1 - outside) / gpu.link, away / gpu.network)
    return Communication(sent, moved, zero_seconds, seconds, between + away)


def all_to_all(model: ModelConfig, tokens: int, ranks: int, size: int) -> float:
    """Bytes that a rank's all-to-alls send to others in a forward and backward pass of so many tokens, of whole
    sequences. size: bytes of a number.
    """
    if ranks == 1:
        return 0.0
    passes = 2 if model.activations == "stored" and model.attention.head_groups == 1 else 3
    each = sum(_exchanged(mechanism, model, ranks, size) for mechanism in mechanisms_of(model))
    return each * passes * tokens / ranks


def _exchanged(mechanism: Attention, model: ModelConfig, ranks: int, size: int) -> float:
    """Bytes that a rank sends of each of its tokens, there and back."""
    copies, vector = ranks_with_the_same_heads(mechanism, model, ranks), mechanism.spec.head_dim * size
    ways = ranks // copies
    there = (2 if mechanism.shared_qk else 3) * vector * (ranks - 1)
    parts = mechanism.shares_pairs and copies > 1
    back = (vector + 4) * (ranks - 1) if parts else vector * (ways - 1)
    return (there + back) * mechanism.spec.heads / ways


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
