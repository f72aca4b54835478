"""Ranks that share every sequence: losses and gradients of every mechanism equal one rank, to 1e-5.

A launch of gloo ranks goes through many cases: each rank has its part of the tokens, and rank 0 compares the mean of
the ranks' gradients with the gradient of the whole batch. Then two ranks train under every ZeRO stage. With more ranks
than heads, 2 and 4 share a head's pairs; encoder–decoders have a part of source and target on each of 2 and 4."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.config.schema import Config, LoRAConfig, RunConfig
from megasparse.files import CONVERSATION_END, UNSCORED
from megasparse.model.adapters import add_adapters
from megasparse.model.build import build_model
from megasparse.model.stack import cut
from megasparse.ops.bucketed_attention import spec
from megasparse.ops.random import RngContext
from megasparse.training.ranks import Ranks, start_ranks
from tests.helpers import models
from tests.helpers.models import attention, causal_names, encoder_names, named, small, small_pair
from tests.helpers.run_ranks import run_ranks
from tests.helpers.tiny import dummy_steps, tiny_config

PAD, SEPARATOR = 257, 258
LENGTH = 96
SPLIT = [{"local": 2, "lha": 2}, {"lsh": 2, "full": 2}]
PADDED = {"padding_token": PAD, "document_separator": SEPARATOR}
ORDINARY = {"blocks": "ordinary", "activations": "stored"}


def grouped(layers: AttentionConfig) -> AttentionConfig:
    return layers.model_copy(update={"head_groups": 2})


EXTRA: dict[str, dict[str, Any]] = {
    "split": {"attention": attention(*SPLIT), "ngrams": models.NGRAMS},
    "rotary": {"attention": attention(*SPLIT), "positions": {"kind": "rotary"}},
    "learned": {"attention": attention(*SPLIT), "positions": {"kind": "learned", "offset": 2}},
    "sinusoidal": {"attention": attention(*SPLIT, lha={"sinusoidal_positions": True})},
    "stored": {"attention": attention(*SPLIT), **ORDINARY},
    "checkpoint": {"attention": attention(*SPLIT), **ORDINARY, "activations": "checkpoint"},
    "score_from": {"attention": attention("lsh"), "score_from": 70},
    "whole words": {"attention": attention("lsh"), "masking": {"whole_words": True}},
    "parts": {"attention": attention(*SPLIT), **models.PARTS, "key_heads": 2},
    "head groups": {
        "attention": grouped(attention("lsh", {"lha": 4, "yoso": 4}, lsh={"shared_qk": False})),
        "heads": 8,
        "feed_forward_tiles": 3,
    },
    "bert": {"attention": named("yoso expectation"), "style": "bert", **ORDINARY, "token_types": 2},
}
TILES: dict[str, Any] = {
    "attention": attention({"local": 4, "full": 4}, "full", local={"chunk": 8, "sinks": 3}),
    **models.PARTS, **ORDINARY, "heads": 8, "key_heads": 4, "activations": "checkpoint", "checkpoint_layers": 2,
    "feed_forward_tiles": 5, "layers": 3, "document_separator": SEPARATOR,
}  # fmt: skip
"""Layers recomputed tile by tile, on packed conversations. On four ranks the heads of the first cannot be divided."""
FAST = ["full", "lsh", "yoso", "split"]
"""Names that `make test` runs, each in a decoder and an encoder."""
RAGGED = [(kind, padded) for kind in ("decoder", "encoder") for padded in (False, True)]


def model_of(kind: str, name: str, padded: bool) -> Any:
    settings = EXTRA.get(name) or {"attention": named(name)}
    fixed = {"kind": kind, "vocabulary": 260, "heads": 4, "layers": 2, "dropout": 0.1, "positions": models.AXIAL}
    config = small(**{**fixed, **settings, **(PADDED if padded else {})})
    model: Any = models.with_tables(build_model(config, 0))
    if config.masking.whole_words:
        model.set_word_starts(torch.arange(256) % 3 == 0)
    return model


def batch_of(padded: bool) -> Tensor:
    tokens = models.random_tokens(2, LENGTH)
    if padded:  # the second sequence ends in the first half, and begins with padding
        tokens[0, [20, 47, 70]] = SEPARATOR
        tokens[1, 40:] = tokens[1, :3] = PAD
        tokens[1, 25] = SEPARATOR
    return tokens


def by_turns(decoders: list[str], encoders: list[str], first: bool) -> list[tuple[str, str, bool]]:
    """(kind, name, padded): each name with padding and documents in one kind and without in the other; in which, the
    next name has it the other way round, and so has each mechanism where `first` is another."""
    turns = dict.fromkeys([*models.all_names(), *decoders, *encoders])
    padded = {name: (number % 2 == 0) == first for number, name in enumerate(turns)}
    return [("decoder", n, padded[n]) for n in decoders] + [("encoder", n, not padded[n]) for n in encoders]


def cases(names: Sequence[str] = ()) -> list[tuple[str, str, bool]]:
    """With those of one head (test_beyond_heads), all four of kind and padding for each mechanism and variant; of these
    names only, where any are given."""
    decoders = [*causal_names(), *(name for name in EXTRA if name not in ("whole words", "bert"))]
    all_cases = by_turns(decoders, [*encoder_names(), *(name for name in EXTRA if name != "score_from")], first=False)
    return [case for case in all_cases if not names or case[1] in names]


def gradients(model: Any, tokens: Tensor, divisor: float, **shared: Any) -> tuple[Tensor, dict[str, Tensor], Any]:
    model.zero_grad()
    objective, statistics = model(tokens, models.training_draws(len(tokens)), divisor=divisor, **shared)
    objective.backward()
    return objective.detach(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}, statistics


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.isfinite().all() and expected.isfinite().all()
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def summed(ranks: Ranks, values: dict[str, Tensor], divisor: int) -> list[Tensor]:
    """Each of them summed over the ranks, divided; all in one message, of which four busy ranks wait for few."""
    total = ranks.sum(torch.cat([x.double().flatten() for x in values.values()])) / divisor
    parts = total.split([x.numel() for x in values.values()])
    return [part.view(x.shape) for part, x in zip(parts, values.values(), strict=True)]


def compare(ranks: Ranks, model: Any, tokens: Tensor) -> dict[str, float]:
    """On rank 0, the largest relative difference of each sum over the ranks to that of the whole batch, which all
    ranks that share a sequence have. Packed tokens of a decoder are marked as in conversations."""
    if model.config.kind == "decoder" and model.config.document_separator is not None:
        model.config = model.config.model_copy(update={"document_separator": CONVERSATION_END + SEPARATOR})
        model.marked = True
        marks = UNSCORED * ((tokens < 250) & (torch.arange(tokens.shape[1]) % 5 < 2))
        tokens = tokens + marks.masked_fill(tokens == SEPARATOR, CONVERSATION_END)
    scored = float(model.count_scored(tokens))
    own = tokens.chunk(ranks.sequence_size, dim=1)[ranks.sequence_rank]
    counted = ranks.sum(model.count_scored(own, sequence=ranks.sequence).double()) / ranks.data_ranks
    divided = scored / ranks.sequence_size  # as the engine has it: scored tokens a rank
    objective, found, statistics = gradients(model, own, divided, sequence=ranks.sequence)
    missing = [name for name, gradient in found.items() if gradient is None]
    assert not missing, f"ZeRO waits for the gradients of {missing}"
    totals, means = {name: statistics[name] for name in ("nats", "tokens")}, {"objective": objective, **found}
    sums = dict(zip(totals, summed(ranks, totals, ranks.data_ranks), strict=True))
    sums |= dict(zip(means, summed(ranks, means, ranks.world_size), strict=True))
    if ranks.rank:
        return {}
    alone, expected, reported = gradients(model, tokens, scored)
    exact = {"objective": alone, "nats": reported["nats"].double(), "tokens": reported["tokens"].double(), **expected}
    worst = {name: difference(sums[name], x) for name, x in exact.items() if x.abs().max() > 0}
    accuracy = float((statistics["accuracy"] - reported["accuracy"]).abs())
    return worst | {"counted": float(counted) - scored, "accuracy": accuracy}


def compare_tiles(ranks: Ranks, adapters: bool) -> dict[str, float]:
    model, tokens = build_model(small(**{"vocabulary": 260, "dropout": 0.1, **TILES}), 0), batch_of(True)
    if adapters:
        add_adapters(model, LoRAConfig(targets=["query", "key", "value", "output"]), 0)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                weight.data += 0.1
    return compare(ranks, model, tokens.masked_fill(tokens == PAD, 5))


def ragged(ranks: Ranks, kind: str, padded: bool) -> dict[str, float]:
    model, tokens = model_of(kind, "split", padded), batch_of(padded)[:, :-1]
    rng = RngContext.evaluation(0, len(tokens))
    with torch.no_grad():
        expected = model(tokens, rng)[1]
        own, padding = cut(tokens, model.config, ranks.sequence)
        found = model(own, rng, padding)[1]
    sums = {name: ranks.sum(found[name].double()) for name in ("nats", "tokens")}
    return {name: difference(value, expected[name].double()) for name, value in sums.items()}


TRAINED = [("lha", "local", "routing"), ("smart_bird", "lsh", "bigbird")]


def trained_config(folder: Path, engine: str, each: int = 2, **sections: dict[str, Any]) -> Config:
    """Sequences of 24 tokens, without tokens of id 7: unequal numbers on the ranks. each: heads per mechanism."""
    pattern = [dict.fromkeys(kinds, each) for kinds in TRAINED]
    model = {
        "max_length": 24, "layers": 2, "d_model": 18, "d_ff": 17, "heads": 3 * each, "head_dim": 4, "dropout": 0.1,
        "score_from": 5, "padding_token": 7, "positions": {"kind": "learned"},
        "attention": {"pattern": pattern, **models.SMALL, "local": {"chunk": 8, "relative": True}},
    }  # fmt: skip
    return tiny_config(folder, engine, model=model, data={"sequence_length": 24}, **sections)


def losses(config: Config, ranks: Ranks) -> list[float]:
    found = dummy_steps(config, ranks, 3)
    return [v for r in found for v in (r.loss, r.grad_norm, r.statistics["accuracy"], float(r.tokens))]


def of_stage(folder: str, stage: int, each: int = 2) -> list[float]:
    shared = {"parallel": {"sequence": 2}, "deepspeed": {"zero_optimization": {"stage": stage}}}
    config = trained_config(Path(folder, f"{stage}-{each}"), "deepspeed", each, **shared)
    return losses(config, start_ranks(config.run, 2))


def on_four_ranks(folder: str) -> list[float]:
    found = of_stage(folder, 2)
    torch.distributed.destroy_process_group()
    return found


def on_two_ranks(folder: str, names: list[str]) -> dict[str, Any]:
    ranks = start_ranks(RunConfig(device="cpu"), 2)
    found = {" ".join(map(str, case)): compare(ranks, model_of(*case), batch_of(case[2])) for case in cases(names)}
    if "full" in names:
        found |= {f"ragged {kind} {padded}": ragged(ranks, kind, padded) for kind, padded in RAGGED}
        found |= {f"tiles {adapters}": compare_tiles(ranks, adapters) for adapters in (False, True)}
        found["stage 2"] = of_stage(folder, 2)
    else:
        found |= {f"stage {stage}": of_stage(folder, stage) for stage in (0, 1, 3)}
        found |= {f"stage {stage}, 1 head": of_stage(folder, stage, 1) for stage in (2, 3)}
    torch.distributed.destroy_process_group()
    return found


def launched(names: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return run_ranks(on_two_ranks, timeout=900, folder=str(tmp_path_factory.mktemp("two")), names=names)[0]


@pytest.fixture(scope="module")
def fast(tmp_path_factory):
    return launched(FAST, tmp_path_factory)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return launched([name for _, name, _ in cases() if name not in FAST], tmp_path_factory)


@cache
def alone(each: int = 2) -> list[float]:
    return losses(trained_config(Path("never"), "torch", each), Ranks())


TRAININGS = [(stage, 2) for stage in (2, 0, 1, 3)] + [(2, 1), (3, 1)]
"""(stage of ZeRO, heads of every mechanism)."""


@pytest.mark.parametrize(
    ("stage", "each"), [pytest.param(*case, marks=() if case == (2, 2) else pytest.mark.slow) for case in TRAININGS]
)
def test_a_training_on_two_ranks_is_that_on_one(request, stage, each):
    results = request.getfixturevalue("fast" if (stage, each) == (2, 2) else "found")
    assert results[f"stage {stage}" + ", 1 head" * (each == 1)] == pytest.approx(alone(each), rel=1e-5)


@pytest.mark.soak
def test_two_pairs_are_one(tmp_path):
    for rank in run_ranks(on_four_ranks, 4, timeout=900, folder=str(tmp_path)):
        assert rank == pytest.approx(alone(), rel=1e-5)


def test_every_mechanism_is_there():
    assert {models.kind_of(name) for kind, name, _ in cases() if name not in EXTRA} == set(MECHANISMS)


@pytest.mark.parametrize(("kind", "padded"), RAGGED)
def test_a_ragged_window_scores_as_on_one_rank(fast, kind, padded):
    assert max(fast[f"ragged {kind} {padded}"].values()) < 1e-6


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=" ".join(map(str, c)), marks=() if c[1] in FAST else pytest.mark.slow) for c in cases()]
)
def test_two_ranks_are_one(request, case):
    results = request.getfixturevalue("fast" if case[1] in FAST else "found")
    assert_equal(results[" ".join(map(str, case))])


@pytest.mark.parametrize("adapters", [False, True])
def test_packed_conversations_in_tiles_are_those_of_one_rank(fast, adapters):
    assert_equal(fast[f"tiles {adapters}"])


def assert_equal(worst: dict[str, float]) -> None:
    assert {name: value for name, value in worst.items() if not abs(value) <= 1e-5} == {}


BOTH = [{"local": 2, "lsh": 1}, {"ngram": 1, "lha": 2}]
FEW_HEADS: dict[str, dict[str, Any]] = {
    "split": {"attention": attention(*BOTH), "heads": 3},
    "stored, rotary": {"attention": attention(*BOTH), "heads": 3, **ORDINARY, "positions": {"kind": "rotary"}},
    "head groups": {
        "attention": grouped(attention("lsh", {"lha": 2, "yoso": 2}, lsh={"shared_qk": False})),
        "heads": 4,
        "key_heads": 2,
        "feed_forward_tiles": 3,
    },
    "sketches of two heads": {"attention": named("smart_bird heads", sketch_heads=2), "heads": 4},
}


def cases_of_few_heads(world: int) -> list[tuple[str, str, bool]]:
    """(kind, name, padded): on four ranks without the variants of mechanisms."""
    every = by_turns([*causal_names(), *FEW_HEADS], [*encoder_names(), *FEW_HEADS], first=True)
    return [case for case in every if world == 2 or case[1] not in models.VARIANTS]


def model_of_few_heads(kind: str, name: str, padded: bool) -> Any:
    """One head unless the case sets more, with dropout, also of attention probabilities if documents are padded."""
    settings = FEW_HEADS.get(name) or {"attention": named(name, 0.1 if padded else 0.0)}
    if kind == "encoder" and name in FEW_HEADS and "ngram" in str(settings["attention"].pattern):
        settings = settings | {"attention": attention({"local": 2, "lsh": 1}, {"random": 1, "lha": 2})}
    fixed = {"kind": kind, "vocabulary": 260, "heads": 1, "layers": 2, "dropout": 0.1, "positions": models.AXIAL}
    return build_model(small(**{**fixed, **settings, **(PADDED if padded else {})}), 0)


def few_heads_on_ranks(world: int) -> dict[str, Any]:
    spec.PLACES = 8  # so that each rank has a share of 96 places
    ranks = start_ranks(RunConfig(device="cpu"), world)
    found = {}
    for case in cases_of_few_heads(world):
        found[" ".join(map(str, case))] = compare(ranks, model_of_few_heads(*case), batch_of(case[2]))
    torch.distributed.destroy_process_group()
    return found


@cache
def with_few_heads(world: int) -> dict[str, Any]:
    return run_ranks(few_heads_on_ranks, world, timeout=900, world=world)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "case"), [(world, case) for world in (2, 4) for case in cases_of_few_heads(world)], ids=str
)
def test_ranks_beyond_the_heads_are_one(world, case):
    assert_equal(with_few_heads(world)[" ".join(map(str, case))])


SIZES = (2, 4)
TARGET = 48
PAIRS: dict[str, dict[str, Any]] = {
    "stored": ORDINARY,
    "checkpoint": {**ORDINARY, "activations": "checkpoint"},
    "tied, learned": {"tied_embeddings": True, "positions": {"kind": "learned"}},
    "rotary": {"positions": {"kind": "rotary"}},
    "own embedding": {"source": {"shared_embedding": False}, "ngrams": {"rows": 50}},
    "not padded": {},
    "one head": {"heads": 1},
}


def settings_of_pair(name: str) -> dict[str, Any]:
    """The mechanism in both stacks, or full attention where it cannot be; in an encoder a sketch learns the answer."""
    if name in PAIRS:
        return PAIRS[name]
    decoder = named(name if models.can_be_causal(name) else "full", 0.1)
    encoder = named(name if name in encoder_names() else "full", 0.1)
    bird = encoder.smart_bird.model_copy(update={"objective": "answer"})
    encoder = encoder.model_copy(update={"smart_bird": bird})
    return {"attention": decoder, "source": {"attention": encoder}}


def compare_pair(ranks: Ranks, name: str) -> dict[str, float]:
    fixed = {"layers": 2, "heads": 4, "dropout": 0.1}
    model: Any = build_model(small_pair(**{**fixed, **settings_of_pair(name)}), 0)
    tokens = models.padded_pairs(3, TARGET)
    return compare(ranks, model, tokens.clamp_max(255) if name == "not padded" else tokens)


def pairs_on_four_ranks() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for size in SIZES:
        ranks = start_ranks(RunConfig(device="cpu"), size)
        found |= {f"{size} {name}": compare_pair(ranks, name) for name in (*PAIRS, *MECHANISMS)}
        found[f"{size} tiles"] = compare_tiles(ranks, True)
    torch.distributed.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def pairs():
    return run_ranks(pairs_on_four_ranks, 4, timeout=900)[0]


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", [*PAIRS, *MECHANISMS, "tiles"])
def test_ranks_that_share_pairs_are_one(pairs, size, name):
    assert_equal(pairs[f"{size} {name}"])
