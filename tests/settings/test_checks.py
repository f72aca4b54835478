"""The rules between keys, of an encoder–decoder's two sides too: each message names the key, its value and a hint; what
is just inside a rule loads. The attention of each layer."""

import json
from functools import partial
from typing import get_args

import pytest

from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.config.schema import PositionsConfig, heads_of_layer, kinds, layers_with
from megasparse.errors import ConfigError
from megasparse.settings.load import build_config
from tests.helpers.cases import together
from tests.helpers.commands import refusal

SMALL = {"model": {"max_length": 64, "d_model": 32, "heads": 4, "layers": 4}, "data": {"sequence_length": 64}}

ENCODER = ["model.kind=encoder", "model.vocabulary=257"]
ATTENTION, ZERO = "model.attention", "deepspeed.zero_optimization"
SHIFTED = f"{ATTENTION}.lsh.shifted_keys"
PARAM, OPTIMIZER = f"{ZERO}.offload_param", f"{ZERO}.offload_optimizer"


def by(pattern: str) -> list[str]:
    return [f"model.attention.pattern=[{pattern}]"]


def using(kind: str, *settings: str) -> list[str]:
    """Overrides that give every layer this mechanism, with settings."""
    return [*by(f'"{kind}"'), *(f"model.attention.{kind}.{setting}" for setting in settings)]


def graphed(*settings: str) -> list[str]:
    return ["run.cuda_graph=true", "run.engine=torch", "model.vocabulary=260", *settings]


def axial(shape: str, dims: str) -> list[str]:
    return ["model.positions.kind=axial", f"model.positions.axial_shape={shape}", f"model.positions.axial_dims={dims}"]


def scaled(positions: str, kind: str, **settings: float) -> list[str]:
    values = {"kind": positions, "scaling": {"kind": kind, "factor": 2.0, **settings}}
    return [f"model.positions={json.dumps(values)}"]


@together(
    ("overrides", "key", "words"),
    [
        (["model.heads=5"], "model.heads", ["5 heads", "d_model = 32", "such as 4", "model.head_dim"]),
        (["model.d_ff=2147483648"], "model.d_ff", ["2147483648", "less than or equal to 2147483647"]),
        ([f"model.max_length={10**30}"], "model.max_length", ["2147483647"]),
        ([f"model.attention.lsh.buckets=[2, {10**18}]"], f"{ATTENTION}.lsh.buckets[1]", ["2147483647"]),
        ([f"run.seed={2**63}"], "run.seed", ["less than", str(2**63)]),
        (["model.positions.kind=rotary", "model.head_dim=7"], "model.positions.kind", ["rotary", "7", "even"]),
        (axial("[8, 7]", "[16, 16]"), "model.positions.axial_shape", ["56 positions", "max_length = 64"]),
        (["model.key_heads=3"], "model.key_heads", ["3 does not divide", "heads = 4"]),
        (["model.key_heads=2", *by('{"local": 1, "lsh": 3}')], f"{ATTENTION}.pattern[0]", ["1 heads of local", "of 2"]),
        ([*ENCODER, "model.start_token=3"], "model.start_token", ["3 is given", "only a decoder"]),
        (["model.start_token=256"], "model.start_token", ["256", "vocabulary = 256"]),
        (["model.ngrams.lengths=[2, 3, 2]"], "model.ngrams.lengths", ["[2, 3, 2]", "twice"]),
        (["model.positions.base=500.0"], "model.positions.base", ["500.0 is given", '"rotary"']),
        (scaled("sinusoidal", "linear"), "model.positions.scaling", ['"rotary"']),
        (scaled("rotary", "yarn"), "model.positions.scaling.original_length", ["null", "Give this length"]),
        (
            scaled("rotary", "linear", attention_factor=2.0),
            "model.positions.scaling.attention_factor",
            ["2.0 is given"],
        ),
        ([*scaled("rotary", "ntk"), "model.head_dim=2"], "model.positions.scaling.kind", ["4 or more"]),
        (axial("[8, 8]", "[16, 8]"), "model.positions.axial_dims", ["sums to 24", "d_model = 32"]),
        (axial("[8, 8]", "[32]"), "model.positions.axial_dims", ["1 widths", "2 axes"]),
        (axial("null", "[32]"), "model.positions.axial_shape", ["null", "[128, 512]"]),
        (["model.positions.axial_shape=[8, 8]"], "model.positions.axial_shape", ["[8, 8]", '"axial"']),
        (["data.sequence_length=65"], "data.sequence_length", ["65", "max_length = 64"]),
        (["evaluation.sequence_length=65"], "evaluation.sequence_length", ["65", "max_length = 64"]),
        (
            ["model.positions.kind=learned", "data.sequence_length=32", "evaluation.sequence_length=33"],
            "evaluation.sequence_length",
            ["33", "data.sequence_length = 32", '"learned"'],
        ),
        (
            [*axial("[8, 8]", "[16, 16]"), "data.sequence_length=32", "evaluation.sequence_length=33"],
            "evaluation.sequence_length",
            ["33", "data.sequence_length = 32", '"axial"'],
        ),
        (["evaluation.sequence_length=8", "model.score_from=8"], "model.score_from", ["8", "evaluation.sequence_len"]),
        (["evaluation.sample_tokens=65"], "evaluation.sample_tokens", ["65", "max_length = 64"]),
        (["model.score_from=64"], "model.score_from", ["64", "sequence_length = 64"]),
        (["model.blocks=ordinary"], "model.activations", ['"reversible"', '"ordinary"', '"stored"']),
        (["model.activations=checkpoint"], "model.activations", ['"checkpoint"', "ordinary"]),
        (["model.attention.lsh.buckets=7"], f"{ATTENTION}.lsh.buckets", ["7 is odd", "Write 8"]),
        (["model.attention.lsh.buckets=[2, 2, 2]"], f"{ATTENTION}.lsh.buckets", ["[2, 2, 2]", "3 factors"]),
        (["model.attention.lsh.buckets=130"], f"{ATTENTION}.lsh.buckets", ["130", "multiple of 4"]),
        (using("lha", "local=true", "window=top_k"), f"{ATTENTION}.lha.local", ["top_k"]),
        (["model.attention.lsh.same_bucket=false"], f"{ATTENTION}.lsh.same_bucket", ["false", "causal", '"chunk"']),
        (using("lsh", "sinks=4", "window=chunk"), f"{ATTENTION}.lsh.sinks", ["4 needs a band", '"chunk"']),
        (using("local", "sinks=4", "relative=true"), f"{ATTENTION}.local.sinks", ["4", "relative"]),
        (using("yoso", "local=true"), f"{ATTENTION}.yoso", ["local", "needs a softmax", "convolution"]),
        (using("lsh", "window=chunk", "shared_qk=false"), f"{ATTENTION}.lsh.window", ["shared_qk = false", '"band"']),
        (
            using("lha", "shifted_keys=true", "joint=false"),
            f"{ATTENTION}.lha.shifted_keys",
            ["joint = false"],
        ),
        ([f"{SHIFTED}=true", *by('"lsh"'), *ENCODER], f"{ATTENTION}.pattern[0]", ["see both ways: with shifted_keys"]),
        ([f"{SHIFTED}=true", *by('{"local": 2, "lsh": 2}'), "model.positions.kind=rotary"], SHIFTED, ["layer 0"]),
        ([*using("local", "relative=true"), "model.positions.kind=rotary"], f"{ATTENTION}.local.relative", ["rotary"]),
        (using("smart_bird", "objective=pooled"), f"{ATTENTION}.smart_bird.labels", ["null", '"pooled"']),
        (using("smart_bird", "objective=answer"), f"{ATTENTION}.smart_bird.objective", ['"answer"', '"token"']),
        (using("smart_bird", "labels=3"), f"{ATTENTION}.smart_bird.labels", ["3", '"token"', "null"]),
        (using("smart_bird", "sketch=heads"), f"{ATTENTION}.smart_bird.objective", ['"token"', '"attention"']),
        (
            using("smart_bird", "sketch=transformer", "objective=attention"),
            f"{ATTENTION}.smart_bird.sketch",
            ['"transformer"', '"heads"'],
        ),
        (using("smart_bird", "sketch_heads=2"), f"{ATTENTION}.smart_bird.sketch_heads", ["2 heads share", "to 1"]),
        (
            using("smart_bird", "sketch=heads", "objective=attention", "sketch_heads=7"),
            f"{ATTENTION}.smart_bird.sketch_heads",
            ["7 does not divide", "a divisor"],
        ),
        (using("lha", "utility=collisions"), f"{ATTENTION}.lha.utility", ['"collisions"', "joint to false"]),
        (["model.attention.lsh.chunk=65"], f"{ATTENTION}.lsh.chunk", ["65", "max_length = 64"]),
        (using("yoso", "code_bits=31"), f"{ATTENTION}.yoso.code_bits", ["31", "30"]),
        (using("yoso", "convolution=4"), f"{ATTENTION}.yoso.convolution", ["4 is even", "Write 5"]),
        (by('{"local": 2, "lsh": 3}'), f"{ATTENTION}.pattern[0]", ["has 5 heads", "sum to 4"]),
        (using("smyrf"), f"{ATTENTION}.pattern[0]", ['"smyrf" cannot be causal', '"encoder"']),
        (by('{"local": 2, "linformer": 2}'), f"{ATTENTION}.pattern[0]", ['"linformer" cannot be causal']),
        ([*ENCODER, *using("ngram")], f"{ATTENTION}.pattern[0]", ['"ngram" cannot see both ways', '"decoder"']),
        (by('"lhs"'), f"{ATTENTION}.pattern[0]", ['"lsh"']),
        (["model.layers=3"], f"{ATTENTION}.pattern", ["4 layers", "model.layers = 3", "Shorten"]),
        (["model.vocabulary=255"], "model.vocabulary", ["255", "256"]),
        (["model.kind=encoder"], "model.vocabulary", ["256", "masking.token = 256", "to 257", "multiple of 8"]),
        ([*ENCODER, "model.masking.token=32"], "model.masking.token", ["32 is a byte", "256"]),
        *(
            ([*ENCODER, f"model.{key}=256"], f"model.{key}", ["256 is also model.masking.token"])
            for key in ("padding_token", "document_separator")
        ),
        ([*ENCODER, "model.masking.token=257"], "model.vocabulary", ["257", "to 258"]),
        ([*ENCODER, "model.score_from=3"], "model.score_from", ["3", "only a decoder"]),
        ([*ENCODER, "evaluation.sample_tokens=9"], "evaluation.sample_tokens", ["9", "encoder", "0"]),
        (["model.masking.rate=0.3"], "model.masking", ["0.3", "decoder", '"encoder"']),
        (["training.global_batch=6", "training.micro_batch=4"], "training.global_batch", ["6", "micro_batch = 4"]),
        ([f"{ZERO}.stage=2", f"{PARAM}.device=cpu"], f"{PARAM}.device", ['"cpu"', "stage 3", "stage = 2"]),
        ([f"{OPTIMIZER}.device=cpu"], f"{OPTIMIZER}.device", ['"cpu"', "stage 1 or more", "stage = 0"]),
        *(
            (graphed(*overrides), "run.cuda_graph", ["true", *words, "to false"])
            for overrides, *words in (
                (["run.engine=deepspeed"], 'run.engine = "deepspeed"'),
                (["model.kind=encoder", "model.masking.token=256"], "only decoders"),
                (["model.document_separator=257"], "padding_token = null", "document_separator = 257"),
                (["model.padding_token=257"], "padding_token = 257", "token counts"),
                (["model.attention.dropout=0.1"], "model.attention.dropout = 0.1"),
                (["model.adaptive_cutoffs=[64]", "model.tied_embeddings=false"], "model.adaptive_cutoffs"),
                (["model.blocks=ordinary", "model.activations=checkpoint_cpu"], "checkpoint_cpu", "CPU memory"),
                (["model.ngrams.lengths=[2]", "optimizer.name=muon"], '"muon"', "model.ngrams"),
                (["lora.rank=4"], "lora"),
                (by('"lsh", "ranked"'), '"ranked"'),
                (using("lha", "window=top_k"), "model.attention.lha", '"band"', '"sampled"'),
            )
        ),
    ],
)
def test_rule(overrides, key, words):
    message = refusal(lambda: build_config(SMALL, overrides), ConfigError)
    assert message.startswith(f"{key}: "), message
    for word in words:
        assert word in message, message


@pytest.mark.slow
@together("kind", get_args(PositionsConfig.model_fields["kind"].annotation))
def test_positions_that_are_not_trained_are_not_evaluated(kind):
    shape = axial("[8, 8]", "[16, 16]") if kind == "axial" else [f"model.positions.kind={kind}"]
    for length in (32, 33, 64):
        overrides = [*shape, "data.sequence_length=32", f"evaluation.sequence_length={length}"]
        if length > 32 and kind in ("learned", "axial"):
            message = refusal(partial(build_config, SMALL, overrides), ConfigError)
            assert message.startswith("evaluation.sequence_length: ")
        else:
            assert build_config(SMALL, overrides).evaluation_length == length


@together(
    "overrides",
    [
        [],
        ["model.heads=5", "model.head_dim=8"],
        [f"run.seed={2**63 - 1}", "model.d_ff=2147483647"],
        axial("[8, 8]", "[16, 16]"),
        axial("[2, 4, 8]", "[8, 8, 16]"),
        ["model.score_from=63"],
        ENCODER,
        ["model.kind=encoder", "model.vocabulary=264", "model.masking.token=263", "model.masking.rate=0.5"],
        ["model.blocks=ordinary", "model.activations=checkpoint_cpu"],
        ["model.attention.lsh.buckets=[8, 6]"],
        ["model.attention.lsh.buckets=132"],
        using("yoso", "code_bits=30", "convolution=5"),
        ["model.attention.lsh.window=chunk", "model.attention.lsh.same_bucket=false"],
        ['model.attention.pattern=["full"]', "model.attention.lsh.chunk=99"],
        ["training.global_batch=6", "training.micro_batch=3"],
        ["optimizer.name=adafactor", "training.precision=bf16", f"{ZERO}.stage=3"],
        [f"{ZERO}.stage=1", f"{OPTIMIZER}.device=cpu"],
        [f"{PARAM}.device=none"],
        graphed(*by('"lsh", "lha", {"yoso": 2, "full": 2}, "ngram"'), "model.ngrams.lengths=[2]"),
    ],
)
def test_just_inside_the_rules(overrides):
    build_config(SMALL, overrides)


FULL = {"pattern": ["full"]}
MODEL = {"kind": "encoder_decoder", "max_length": 60, "layers": 2, "attention": FULL}
SOURCE = {"length": 40, "attention": FULL}
SAME = {"layers": None}
BIRD = {"pattern": ["smart_bird"]}
POOLED = {**BIRD, "smart_bird": {"objective": "pooled", "labels": 2}}


def built(source, **changes):
    model = {**MODEL, "source": source and {**SOURCE, **source}, **changes}
    return build_config({"model": model, "data": {"sequence_length": 100}})


@together(
    ("source", "changes", "key", "words"),
    [
        (None, {}, "model.source", ["null", "length"]),
        (SAME, {"kind": "decoder"}, "model.source", ["given", '"decoder"']),
        (SAME, {"score_from": 3}, "model.score_from", ["3"]),
        ({"attention": {"pattern": ["full"] * 3}}, {}, "model.source.attention.pattern", ["3 layers"]),
        ({"attention": BIRD}, {}, "model.source.attention.smart_bird.objective", ['"token"', '"answer"']),
        ({"attention": POOLED}, {}, "model.source.attention.smart_bird.objective", ['"pooled"', '"answer"']),
        ({"length": 100}, {}, "data.sequence_length", ["100", "target"]),
        ({"length": 39}, {}, "data.sequence_length", ["61", "60"]),
    ],
)
def test_rule_of_two_sides(source, changes, key, words):
    message = refusal(lambda: built(source, **changes), ConfigError)
    assert message.startswith(f"{key}: ") and all(word in message for word in words), message


def test_just_inside_the_rules_of_two_sides():
    built(SAME, attention={**FULL, "lsh": {"buckets": 7}})
    built({"cross_attention": "full"})
    built({"attention": {"pattern": ["full", "smyrf"]}, "layers": 2}, padding_token=300, vocabulary=301)


def model_of(pattern):
    return build_config(SMALL, by(json.dumps(pattern)[1:-1])).model


def test_a_pattern_repeats_over_the_depth():
    mixed = model_of(["local", {"local": 1, "lsh": 3}])
    assert [heads_of_layer(mixed, layer) for layer in range(4)] == [{"local": 4}, {"local": 1, "lsh": 3}] * 2
    assert layers_with(mixed, "local") == 4 and layers_with(mixed, "lsh") == 2 and layers_with(mixed, "lha") == 0
    assert kinds(mixed) == ["local", "lsh"]


def test_the_order_of_an_objects_keys_means_nothing():
    """A checkpoint's manifest sorts them."""
    one, other = model_of([{"lsh": 3, "local": 1}]), model_of([{"local": 1, "lsh": 3}])
    assert list(heads_of_layer(one, 0).items()) == list(heads_of_layer(other, 0).items()) == [("local", 1), ("lsh", 3)]


def test_a_list_as_long_as_the_depth_puts_mechanisms_on_top():
    top = model_of(["local", "local", "lha", "lha"])
    assert [list(heads_of_layer(top, layer)) for layer in range(4)] == [["local"], ["local"], ["lha"], ["lha"]]


def test_the_order_of_the_mechanisms_never_changes():
    """It is the order of the heads of a layer that several share, and so of the rows of its weights."""
    shipped = ["full", "local", "lsh", "lha", "yoso", "smart_bird", "smyrf", "routing", "random", "sparse_transformer"]
    shipped += ["longformer", "bigbird", "performer", "linformer", "ngram", "ranked"]
    shipped += ["linear", "synthesizer", "sinkhorn", "clustered"]
    assert [kind for kind in MECHANISMS if not kind.startswith("toy")] == shipped
    assert [name for name in AttentionConfig.model_fields if name in MECHANISMS] == list(MECHANISMS)
