"""A model is built a weight at a time, under ZeRO 3 each rank its own pieces: the numbers of a model that is built
whole, from the seed and from a checkpoint, and no more memory than a rank keeps and one weight."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megasparse.config.schema import Config
from megasparse.hub.importing import write_checkpoint
from megasparse.model.build import build_model, deferred_model, initial_weight
from megasparse.ops.random import RngContext
from megasparse.planning.passes import ConfiguredPass, LiveBytes
from megasparse.planning.states import Zero, building
from megasparse.training.checkpoints.checkpoint import Checkpoint, persistent_buffers
from megasparse.training.engines import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import tiny_config

pytestmark = pytest.mark.slow

CPU = {"device": "cpu"}
ZERO: dict[str, dict[str, Any]] = {f"zero-{stage}": {"stage": stage} for stage in (3, 2, 1, 0)}
ZERO["zero-3-offload"] = {"stage": 3, "offload_optimizer": CPU, "offload_param": CPU}
# Widths that no number of ranks divides, tied embeddings, and a persistent buffer
MODEL: dict[str, Any] = {
    "max_length": 32, "layers": 2, "d_model": 33, "d_ff": 45, "heads": 3, "tied_embeddings": True,
    "attention": {"pattern": ["lsh", "routing"], "lsh": {"chunk": 4}, "routing": {"chunk": 8}},
}  # fmt: skip
STARTS = [(precision, start) for precision in ("fp32", "bf16") for start in ("seed", "checkpoint")]
CASES = [(zero, *each) for zero in ZERO for each in (STARTS if "zero-3" in zero else [STARTS[0], STARTS[3]])]
COUNTED = [("zero-3", "fp32"), ("zero-3", "bf16"), ("zero-3-offload", "bf16")]
WIDE = {"d_model": 128, "d_ff": 512, "heads": 4, "layers": 6}
"""Many weights, of which the largest is a small part."""


def config_of(folder: Path, zero: str, precision: str, **model: Any) -> Config:
    section = {"zero_optimization": {**ZERO[zero], "reduce_bucket_size": 1000}}
    return tiny_config(folder, "deepspeed", model=MODEL | model, training={"precision": precision}, deepspeed=section)


def engine_of(config: Config, ranks: Ranks, model: nn.Module, checkpoint: Checkpoint | None = None) -> Engine:
    initial = partial(initial_weight, config.model, 0)
    return build_engine(model, config, partial(RngContext, 0, training=True), ranks, checkpoint, initial)


def whole_model(config: Config, seed: int) -> dict[str, Tensor]:
    model = build_model(config.model, seed)
    return {**dict(model.named_parameters()), **persistent_buffers(model)}


def unlike(engine: Engine, expected: dict[str, Tensor], precision: str, start: str) -> list[str]:
    """Return this rank's pieces of the model and optimizer that differ in any bit from the whole ones."""
    found, parameters = [], dict(engine.module.named_parameters())
    for name, own in engine.weights():
        whole = expected[name].detach().reshape(-1)
        whole = whole.bfloat16() if precision == "bf16" and name in parameters else whole
        first = 0 if own.numel() == len(whole) else engine.ranks.rank * own.numel()
        piece = whole[first : first + own.numel()]
        if own.dtype != piece.dtype or not torch.equal(own.detach().reshape(-1)[: len(piece)], piece):
            found.append(name)
    for f in engine.fragments():
        whole = expected[f.name].detach().reshape(-1)
        if precision == "bf16" and start == "seed" and f.name in parameters:  # DeepSpeed's begin as what passes have
            whole = whole.bfloat16().float()
        if not torch.equal(f.memory.cpu(), whole[f.start : f.start + f.numel]):
            found.append(f"{f.kind} {f.name}")
    return found


def peaks(config: Config, ranks: Ranks) -> dict[str, int]:
    """Bytes: the peak while pieces are filled, the peak overall, and the final amount."""
    import deepspeed

    filled, initialize, model = [], deepspeed.initialize, deferred_model(config.model, 0)
    with LiveBytes() as bytes_:

        def marked(**arguments: Any) -> Any:
            filled.append(bytes_.mark())
            return initialize(**arguments)

        deepspeed.initialize = marked
        engine = engine_of(config, ranks, model)
        deepspeed.initialize = initialize
        found = {"filling": filled[0], "all": max(filled[0], bytes_.mark()), "held": bytes_.live}
    engine.close()
    return found


def everything(folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    ranks, found = start_ranks(config_of(Path(folder), "zero-0", "fp32").run), {}
    checkpoint = Checkpoint.open(f"{folder}/start/checkpoints/00000000")
    for zero, precision, start in CASES:
        config = config_of(Path(folder), zero, precision)
        saved = checkpoint if start == "checkpoint" else None
        engine = engine_of(config, ranks, deferred_model(config.model, 0), saved)
        expected = whole_model(config, 5 if start == "checkpoint" else 0)
        covered = sum(f.numel for f in engine.fragments())
        found[f"{zero} {precision} {start}"] = [unlike(engine, expected, precision, start), covered]
        engine.close()
    found["peaks"] = {f"{zero} {p}": peaks(config_of(Path(folder), zero, p, **WIDE), ranks) for zero, p in COUNTED}
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("pieces")
    config = config_of(folder, "zero-0", "fp32")
    tensors = {name: partial(Tensor.detach, value) for name, value in whole_model(config, 5).items()}
    write_checkpoint(config, tensors, folder / "start")
    return {ranks: run_ranks(everything, ranks, timeout=400, folder=str(folder)) for ranks in (1, 2)}


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", [" ".join(case) for case in CASES])
def test_weights_equal_the_whole_model(results, ranks, case):
    assert [found[case][0] for found in results[ranks]] == [[]] * ranks
    whole = whole_model(config_of(Path(), "zero-0", "fp32"), 0)
    assert sum(found[case][1] for found in results[ranks]) == sum(value.numel() for value in whole.values())


@pytest.mark.parametrize(("zero", "precision"), COUNTED)
def test_no_rank_holds_more_than_its_share_and_one_weight(results, zero, precision):
    """By the bytes of every tensor that is made. Filling: a rank's pieces, and the largest weight. Then DeepSpeed makes
    its optimizer: at no time more than what the rank has in the end, and a layer; it gathers every weight once."""
    config = config_of(Path(), zero, precision, **WIDE)
    weights = dict(build_model(config.model, 0).named_parameters())
    sizes, size = {name: p.numel() for name, p in weights.items()}, 2 if precision == "bf16" else 4
    share, largest, small = sum(-(-n // 2) for n in sizes.values()) * size, 4 * max(sizes.values()), 100_000
    layer = size * sum(n for name, n in sizes.items() if name.startswith("blocks.0."))
    assert share + largest + small < 0.7 * 4 * sum(sizes.values())  # a whole model on each rank does not pass
    for found in results[2]:
        measured = found["peaks"][f"{zero} {precision}"]
        assert share <= measured["filling"] <= share + largest + small
        assert measured["held"] >= share and measured["all"] <= measured["held"] + layer + small
        states = ConfiguredPass(config).states
        planned = sum(building(states, Zero.of(config.zero, True), 2))
        planned -= 0 if "offload" in zero else share  # the copy via the CPU, which is the device here
        assert measured["all"] == pytest.approx(planned, rel=0.05)
