"""Coverage of full attention, against definitions in float64 by loops; and the command."""

import json
import math
from collections import defaultdict

import pytest
import torch

from megasparse.attention.ngram import ngram_codes
from megasparse.cli.main import door
from megasparse.evaluation.attention.coverage import (
    Patterns,
    Reach,
    gradient_norms,
    lsh_codes,
    report,
    restricted_nats,
    sums,
)
from megasparse.evaluation.attention.quality import record_calls
from megasparse.model.build import build_model
from megasparse.ops.bucketed_attention.reference import visible
from megasparse.ops.random import RngContext
from tests.helpers.commands import refused, run
from tests.helpers.models import attention, random_tokens, small
from tests.helpers.trained import prepared, trained

main = door("attention-coverage")
PATTERNS = Patterns(windows=(4, 8), best=(3,), rounds=(1, 2), ngrams=(2,))
BOUNDS = [4, 16, 64]
CONTEXT, CHUNK, LENGTH = 2, 8, 64


@pytest.fixture(scope="module")
def measured():
    """A model of full attention and LSH with shared QK, tokens that repeat themselves, and the calls of both layers."""
    model, tokens = (
        build_model(small(("full", "lsh"), layers=2, activations="stored"), 0),
        random_tokens(1, LENGTH, vocabulary=4),
    )
    for parameter in model.parameters():
        parameter.data *= 3.0  # weights far from even
    return model, tokens, record_calls(model, tokens, 0)


def logits_of(call, head, i, keys):
    q, k = (x[0, head].double() for x in (call.inputs.q, call.inputs.k))
    return [call.scale * sum(a * b for a, b in zip(q[i].tolist(), k[j].tolist(), strict=True)) for j in keys]


def softmax(logits):
    return [math.exp(x - max(logits)) / sum(math.exp(y - max(logits)) for y in logits) for x in logits]


def seen_by(tokens, call, head, i):
    """Each pattern's strictly earlier keys of a query, by going through them one by one."""
    logits = logits_of(call, head, i, range(i))
    found = {f"window {width}": set(range(max(0, i - width), i)) for width in PATTERNS.windows}
    found["best 3"] = set(sorted(range(max(0, i - 4)), key=lambda j: -logits[j])[:3])
    queries, keys = (codes[head].tolist() for codes in lsh_codes(call, attention("lsh"), 2))
    for name in PATTERNS.hashes:
        bucket = {"lsh": keys, "lsh of queries": queries, "lsh shifted": [[None, *own[:-1]] for own in queries]}[name]
        shown = [[j for j in range(i + 1) if bucket[r][j] == queries[r][i]][-CHUNK:] for r in range(2)]
        found |= {f"{name}, {rounds} rounds": set().union(*shown[:rounds]) - {i} for rounds in (1, 2)}
    codes = ngram_codes(torch.tensor([[-1, *tokens[:-1]]]), 2, 128)[0].tolist()
    ends = [j for j in range(1, i + 1) if codes[j - 1] == codes[i]]
    found["n-gram 2"] = {j for j in ends[-(CHUNK - 1) :]} - {i}
    return found


def defined(tokens, call):
    total = defaultdict(float)
    for head in range(call.inputs.q.shape[1]):
        for i in range(1, LENGTH):
            logits = logits_of(call, head, i, range(i + 1))
            weights, own = softmax(logits[:-1]), softmax(logits)[-1]
            mean = sum(logits[:-1]) / i
            band = [next(b for b, bound in enumerate(BOUNDS) if i - j <= bound) for j in range(i)]
            earlier = [e + 1 for e in range(CONTEXT, i) if tokens[e - CONTEXT : e] == tokens[i - CONTEXT : i]]
            key = earlier[-1] if i >= CONTEXT and earlier and earlier[-1] < i else None
            total["queries"] += 1
            total["self"] += own
            total["deviation/as trained"] += math.sqrt(sum((x - mean) ** 2 for x in logits[:-1]) / i)
            total["entropy/as trained"] -= sum(w * math.log2(w) for w in weights if w > 0)
            for j in range(i):
                total["mass", band[j]] += weights[j]
            if key is not None:
                total["sources", band[key]] += 1
                total["source_weight", band[key]] += weights[key]
            for name, shown in seen_by(tokens, call, head, i).items():
                total[f"keys/{name}"] += len(shown)
                for j in shown:
                    total[f"held/{name}", band[j]] += weights[j]
                total[f"reached/{name}", band[key] if key in shown else -1] += 1
    return total


@pytest.mark.parametrize("layer", [0, 1], ids=["full", "lsh"])
def test_sums_are_as_defined(measured, layer):
    _, tokens, calls = measured
    found = sums(calls[layer], tokens, attention("lsh"), PATTERNS, BOUNDS, LENGTH, CONTEXT)
    wanted = defined(tokens[0].tolist(), calls[layer])
    checked = [name for name in found if not name.startswith(("empty/", "overfull/")) and "norm 1" not in name]
    for name in checked:
        value = [wanted[name, band] for band in range(3)] if found[name].dim() else wanted[name]
        assert found[name].tolist() == pytest.approx(value, rel=1e-4, abs=1e-4), name
    assert (found["sources"] > 0).all() and len(checked) == 7 + 3 * (2 + 1 + 6 + 1)


def test_buckets_without_and_with_too_many_keys_are_counted(measured):
    _, tokens, (call, _) = measured
    found = report(sums(call, tokens, attention("lsh"), PATTERNS, BOUNDS, LENGTH, CONTEXT))["buckets"]["lsh of queries"]
    codes = lsh_codes(call, attention("lsh"), 2)[0].flatten(0, 1).tolist()
    before = [own[:i].count(own[i]) for own in codes for i in range(1, LENGTH)]
    assert found["empty"] == pytest.approx(before.count(0) / len(before))
    assert found["overfull"] == pytest.approx(sum(n + 1 > CHUNK for n in before) / len(before))


def test_keys_of_norm_1_are_what_shared_queries_and_keys_have(measured):
    _, tokens, (_, shared) = measured
    logits = report(sums(shared, tokens, attention("lsh"), PATTERNS, BOUNDS, LENGTH, CONTEXT))["logits"]
    assert logits["keys of norm 1"] == pytest.approx(logits["as trained"], rel=1e-4)


def test_the_pattern_of_lsh_is_what_the_mechanism_sees(measured):
    _, tokens, (_, call) = measured
    rows = torch.arange(LENGTH)
    reach = Reach(call, tokens, attention("lsh"), PATTERNS)
    shown = dict(reach.visible(rows, reach.logits(rows)))["lsh, 2 rounds"]
    codes, _ = call.mechanism.assign(call.inputs, call.context)
    seen = visible(codes, call.mechanism.window, causal=True)[0].any(1) & ~torch.eye(LENGTH, dtype=torch.bool)
    assert torch.equal(shown, seen) and seen.any()


def test_restricted_attention_is_a_softmax_over_the_keys_it_names(measured):
    _, tokens, (call, _) = measured
    patterns = Patterns((4,), (3,), (), (), ())
    out, v = Reach(call, tokens, attention("lsh"), patterns).restricted()[0], call.inputs.v[0].double()
    for head, i in [(0, 0), (1, 30), (1, 63)]:
        seen = seen_by(tokens[0].tolist(), call, head, i)
        keys = sorted(seen["window 4"] | seen["best 3"] | {i})
        wanted = sum(w * v[head, j] for w, j in zip(softmax(logits_of(call, head, i, keys)), keys, strict=True))
        torch.testing.assert_close(out[head, i].double(), wanted, rtol=1e-4, atol=1e-5)


def test_a_window_as_long_as_the_sequence_restricts_nothing(measured):
    model, tokens, _ = measured
    nats = [
        restricted_nats(model, tokens, 0, attention("lsh"), Patterns((width,), (), (), (), ())) for width in (1, LENGTH)
    ]
    free = restricted_nats(model, tokens, 0, attention("lsh"), None)
    assert nats[1] == pytest.approx(free, rel=1e-5) and nats[0] != pytest.approx(free, rel=1e-3)


def test_gradients_are_those_of_the_loss(measured):
    model, tokens, _ = measured
    weight = model.layers[1].attention.attention.value.weight
    (gradient,) = torch.autograd.grad(model(tokens, RngContext.evaluation(0, 1))[0], weight)
    norms = gradient_norms(model, tokens, 0)
    assert norms[1]["value"] == pytest.approx(float(gradient.norm()), rel=1e-4) and weight.grad is None
    assert set(norms[0]) == {"query", "key", "value", "output"} and set(norms[1]) == {"query", "value", "output"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("coverage")
    trained(prepared(folder), folder / "run", ["full", "local"], 2)
    return folder


def basics(folder):
    return ["--checkpoint", folder / "run", "--sequences", 2, "--queries", 16, "--context", 1]


def test_the_command_writes_what_it_prints_and_the_same_again(folder, capsys):
    for name in ("a", "b"):
        plotted = ["--restricted", "--json", folder / f"{name}.json", "--plot", folder / f"{name}.svg"]
        run(main, *basics(folder), *plotted)
    first, again = (json.loads((folder / f"{name}.json").read_text()) for name in ("a", "b"))
    assert first["checkpoints"] == again["checkpoints"] and (folder / "a.svg").read_text().startswith("<?xml")
    (entry,) = first["checkpoints"]
    assert [layer["kind"] for layer in entry["layers"]] == ["full", "local"] and entry["step"] == 2
    assert entry["bits_per_token"]["window 64"] == pytest.approx(entry["bits_per_token"]["all earlier keys"])
    assert sum(entry["layers"][0]["mass"]) == pytest.approx(1.0) and first["protocol"]["bounds"] == [64]
    assert f"sees window 64: {entry['bits_per_token']['window 64']:.3f}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--length", 65], "error: --length: 65"),
        (["--sequences", 20], "error: --sequences: 20 of 64 tokens do not fit"),
        (["--data", "nowhere"], "there is no data here"),
    ],
)
def test_mistakes_are_refused_in_a_line(folder, capsys, words, message):
    assert message in refused(capsys, main, *basics(folder), *words)
