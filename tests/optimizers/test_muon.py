"""Muon against torch's and its definition by singular values, on pieces of weights, and the weights that it updates."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch
from torch import Tensor

from megasparse.config.schema import ModelConfig, OptimizerConfig
from megasparse.errors import ConfigError
from megasparse.model.build import empty_model
from megasparse.optimizers import build_optimizer
from megasparse.optimizers import muon as implementation
from megasparse.optimizers.muon import Muon, is_hidden, orthogonalise
from megasparse.settings.load import build_config
from tests.optimizers.test_partitioned_adafactor import RANKS, cut

SHAPES = {"blocks.0.up": (12, 5), "blocks.0.gate": (12, 5), "blocks.0.down": (5, 12), "blocks.1.query": (6, 6)}
CONFIG = OptimizerConfig(name="muon", weight_decay=0.3, betas=(0.8, 0.9), eps=1e-6)


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in {**SHAPES, "head": (7, 6)}.items()}


def test_five_steps_are_those_of_torch():
    """torch orthogonalises in bf16, so updates differ by its rounding."""
    ours, theirs = drawn(0), drawn(0)
    optimizer = build_optimizer({name: weight.requires_grad_() for name, weight in ours.items()}, CONFIG)
    matrices = [weight.requires_grad_() for name, weight in theirs.items() if name in SHAPES]
    muon = torch.optim.Muon(matrices, weight_decay=0.3, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([theirs["head"].requires_grad_()], betas=CONFIG.betas, eps=CONFIG.eps, weight_decay=0.3)
    for step in range(1, 6):
        for group in (*optimizer.param_groups, *muon.param_groups, *adamw.param_groups):
            group["lr"] = 0.1 / step
        for name, gradient in drawn(step).items():
            ours[name].grad = theirs[name].grad = gradient
        for each in (optimizer, muon, adamw):
            each.step()
    for name, start in drawn(0).items():
        update, expected = ours[name] - start, theirs[name] - start
        assert (update - expected).norm() < 0.01 * expected.norm() * (name in SHAPES) + 1e-6, name


@pytest.mark.parametrize("batch", [50, 1000])
@pytest.mark.parametrize("ends", [[40, 83, 216], [3, 4, 216], [60, 216, 216], [216, 216, 216]])
def test_matrices_in_pieces_are_updated_as_whole_ones(ends, batch, monkeypatch):
    """The ranks are threads. batch: numbers orthogonalised at a time, less than a matrix or more than all."""
    monkeypatch.setattr(implementation, "BATCH", batch)
    barrier, sent = Barrier(RANKS), [list[Tensor]()] * RANKS
    flat = {step: torch.cat([drawn(step)[name].flatten() for name in SHAPES]) for step in range(4)}
    spans = {
        piece[0].name: [(part.start, part.numel) for part in piece]
        for piece in zip(*(cut(SHAPES, ends, rank)[2] for rank in range(RANKS)), strict=True)
    }

    def train(rank: int) -> tuple[Tensor, Tensor]:
        def exchange(vectors: list[Tensor], lengths: list[int]) -> list[Tensor]:
            sent[rank] = vectors
            barrier.wait()
            received = [sent[other][rank] for other in range(RANKS)]
            barrier.wait()
            assert [len(vector) for vector in received] == lengths
            return received

        begin, end, pieces = cut(SHAPES, ends, rank)
        vector = flat[0][begin:end].clone().requires_grad_()
        optimizer = Muon([{"params": [vector], "weight_decay": 0.3, "hidden": True, "lr": 0.1}], (0.9, 0.9), 1e-8)
        vector.grad = torch.ones_like(vector)
        optimizer.step()  # not attached yet: nothing to do
        optimizer.attach({vector: pieces}, spans, rank, exchange)
        for step in range(1, 4):
            vector.grad = flat[step][begin:end].clone()
            optimizer.step()
        return vector.detach(), optimizer.state[vector]["momentum_buffer"]

    with ThreadPoolExecutor(RANKS) as pool:
        vectors, momenta = (torch.cat(parts) for parts in zip(*pool.map(train, range(RANKS)), strict=True))
    whole = {name: weight.requires_grad_() for name, weight in drawn(0).items() if name in SHAPES}
    optimizer = build_optimizer(whole, CONFIG)
    optimizer.param_groups[0]["lr"] = 0.1
    for step in range(1, 4):
        for name, weight in whole.items():
            weight.grad = drawn(step)[name]
        optimizer.step()
    torch.testing.assert_close(vectors, torch.cat([weight.detach().flatten() for weight in whole.values()]))
    buffers = [optimizer.state[weight]["momentum_buffer"].flatten() for weight in whole.values()]
    torch.testing.assert_close(momenta, torch.cat(buffers))


@pytest.mark.parametrize("sparse", [False, True])
def test_rows_of_tables_in_use_are_updated_without_momentum(sparse, monkeypatch):
    """300 steps: the state is rescaled after 263 with this β2. The second batch of numbers is smaller."""
    monkeypatch.setattr(implementation, "BATCH", 120)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(50, 4, generator=generator)
    ours, theirs = table.clone().requires_grad_(), table.clone().requires_grad_()
    matrix = torch.ones(2, 2).requires_grad_()
    optimizer = build_optimizer({"embedding.ngrams.tables.0": ours, "blocks.0.up": matrix}, CONFIG)
    adamw = torch.optim.AdamW([theirs], betas=(0.0, CONFIG.betas[1]), eps=CONFIG.eps, weight_decay=0.3)
    for _ in range(300):
        rows = torch.randint(50, (5,), generator=generator)
        drawn = torch.sparse_coo_tensor(rows[None], torch.randn(5, 4, generator=generator), (50, 4))  # rows may repeat
        ours.grad, theirs.grad = drawn if sparse else drawn.to_dense(), drawn.to_dense()
        for group in (*optimizer.param_groups, *adamw.param_groups):
            group["lr"] = 0.01
        optimizer.step()
        adamw.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("shape", [(3, 4, 9), (1, 5, 5), (2, 1, 3)])
def test_singular_values_are_those_of_the_polynomial(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    left, values, right = torch.linalg.svd(matrices.double(), full_matrices=False)
    values = values / values.square().sum(-1, keepdim=True).sqrt()
    for _ in range(5):
        values = 3.4445 * values - 4.7750 * values**3 + 2.0315 * values**5
    expected = left @ (values.unsqueeze(-1) * right)
    torch.testing.assert_close(orthogonalise(matrices).double(), expected, rtol=0, atol=1e-4)
    assert not orthogonalise(torch.zeros(shape)).any()


@pytest.mark.parametrize("kind", ["decoder", "encoder", "encoder_decoder"])
def test_hidden_matrices_are_those_of_attention_and_feed_forward(kind):
    attention = {"pattern": ["smart_bird", "yoso", "lha", "ranked"], "yoso": {"convolution": 3}}
    attention["lha"] = {"sinusoidal_positions": True, "project_positions": True}
    sections = {"ngrams": {"lengths": [2], "rows": 9, "width": 4}, "feed_forward": "swiglu", "tied_embeddings": False}
    source = {"source": {"length": 32, "attention": attention}} if kind == "encoder_decoder" else {}
    model = {"kind": kind, "layers": 4, "max_length": 32, "d_model": 16, "d_ff": 24, "heads": 4} | sections | source
    with torch.device("meta"):
        built = empty_model(ModelConfig.model_validate({**model, "attention": attention}))
    names = {name for name, weight in built.named_parameters() if is_hidden(name, weight.shape)}
    ends = {name.removesuffix(".weight").rpartition(".")[2] for name in names}
    assert ends == {"query", "key", "value", "output", "up", "gate", "down"}
    assert len(names) == {"decoder": 4 * 7, "encoder": 4 * 7, "encoder_decoder": 4 * 7 + 4 * 11}[kind]


def test_adapters_and_models_without_blocks_are_rejected():
    with pytest.raises(ConfigError, match='"muon" updates whole matrices, and lora trains only adapters'):
        build_config({}, ["optimizer.name=muon", 'lora.targets=["query"]'])
    with pytest.raises(ConfigError, match="updates the matrices of megasparse's blocks, and none is trained"):
        build_optimizer({"bert.encoder.layer.0.output.dense.weight": torch.zeros(3, 4)}, CONFIG)
