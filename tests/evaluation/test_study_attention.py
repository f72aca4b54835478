"""tools/study_attention.py: its measures against definitions, and the script on a small model."""

import dataclasses
import itertools
import json
import math

import pytest
import torch
import torch.nn.functional as F

from megasparse.evaluation.attention_quality import attention_utility, record_calls
from megasparse.model.build import build_model
from tests.helpers.cases import together
from tests.helpers.commands import refused
from tests.helpers.models import attention, random_tokens, small
from tests.helpers.trained import prepared, trained
from tools import study_attention
from tools.study_attention import balanced, coverage_sums, cut, hash_scores, repetitions, same_bucket, train_hashes

BOUNDS = [0, 4, 16, 64]


@together("length,buckets", [(64, 4), (37, 4), (4, 4)])
@together("scale", [0.0, 1.0, 1e4])
def test_balanced_buckets_are_equal(length, buckets, scale):
    scores = torch.randn(2, 3, length, buckets, generator=torch.Generator().manual_seed(0)) + torch.arange(buckets)
    sizes = F.one_hot(balanced(scale * scores), buckets).sum(-2)
    assert sizes.min() >= length // buckets and sizes.max() <= -(-length // buckets)


def test_boundaries_move_and_order_stays():
    """Between two buckets the balanced assignment is the order by the difference of the scores, cut in the middle."""
    scores = torch.randn(2, 3, 64, 2, generator=torch.Generator().manual_seed(0)) + torch.tensor([3.0, 0.0])
    torch.testing.assert_close(balanced(scores), cut(scores[..., 1] - scores[..., 0], 2))


def planted(seed):
    """Queries and keys of 8 directions each. A query attends to one kind of key, which only the attention can show."""
    directions = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    answers = 4 * torch.linalg.pinv(directions).T
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(2, 1, 2, 64, 16, generator=generator)
    kinds = torch.randint(0, 8, (2, 64), generator=generator)
    q, k = 4 * directions[kinds[0]] + 0.1 * noise[0], 4 * answers[kinds[1]] + 0.02 * noise[1]
    (call,) = record_calls(build_model(small(("local",), layers=1), 0), random_tokens(1, 64), 0)
    return [dataclasses.replace(call, inputs=call.inputs._replace(q=q, k=k))]


def test_trained_hashes_find_planted_buckets_and_do_not_collapse():
    (mechanism,), history = train_hashes(map(planted, range(80)), buckets=4, seed=0)
    assert history[-1] < 0.3 * history[0]
    (call,) = planted(1000)
    codes = [scores.argmax(-1) for scores in hash_scores(mechanism, call)]
    assert attention_utility(study_attention.full_weights(call), same_bucket(*codes)).min() > 0.8
    assert all(F.one_hot(side, 4).sum(-2).max() <= 40 for side in codes), "most tokens fell into one bucket"


def test_coverage_of_windows_and_best_keys_is_as_defined(monkeypatch):
    monkeypatch.setattr(study_attention, "WINDOWS", (4, 8))
    monkeypatch.setattr(study_attention, "BEST", (3,))
    tokens = random_tokens(1, 64, vocabulary=4)
    (call,) = record_calls(build_model(small(("full",), layers=1), 0), tokens, 0)
    sums, limits = coverage_sums(call, tokens, attention("lsh"), BOUNDS[1:], 63), BOUNDS[1:]
    held = {name: torch.zeros(3, dtype=torch.float64) for name in ("mass", "held/window 4", "held/best 3")}
    for head, i in itertools.product(range(call.inputs.q.shape[1]), range(1, 64)):
        q, k = (x[0, head].double() for x in call.inputs[:2])
        logits = (k[:i] @ q[i]) * call.scale
        best = sorted(range(max(0, i - 4)), key=lambda j: -float(logits[j]))[:3]
        for j, weight in enumerate(logits.softmax(0)):
            band = next(number for number, limit in enumerate(limits) if i - j <= limit)
            held["mass"][band] += weight
            held["held/window 4"][band] += weight * (i - j <= 4)
            held["held/best 3"][band] += weight * (j in best)
    assert sums["queries"] == 63 * call.inputs.q.shape[1]
    for name, value in held.items():
        torch.testing.assert_close(sums[name], value, rtol=1e-5, atol=1e-6)
    assert all((sums[f"held/{name}"] <= sums["mass"] + 1e-9).all() for name in ("lsh, 1 rounds", "n-gram 4"))


@pytest.mark.parametrize("bits", [None, 3])
def test_a_sampling_error_is_the_distance_of_collisions_to_their_expectation(bits):
    (call,) = record_calls(build_model(small(("full",), layers=1), 0), random_tokens(1, 64), 0)
    q, k, v = (x[:, :, :32].double() for x in call.inputs[:3])
    q, k = (F.normalize(x, dim=-1) for x in (q, k))
    generator = torch.Generator().manual_seed(0)
    planes = torch.randn(400, q.shape[-1], bits or 5, generator=generator).double()  # 5 = log2 of 32 tokens
    of_queries, of_keys = (torch.einsum("bhld,mdt->mbhlt", x, planes) > 0 for x in (q, k))
    collisions = (of_queries.unsqueeze(-2) == of_keys.unsqueeze(-3)).all(-1).double()
    expected = F.normalize((1 - torch.acos((q @ k.mT).clamp(-1, 1)) / math.pi) ** (bits or 5) @ v, dim=-1)
    for hashes in (4, 400):
        sampled = F.normalize(collisions[:hashes].mean(0) @ v, dim=-1)
        error = float((sampled - expected).norm(dim=-1).mean())
        assert study_attention.sampling_error(call, 32, hashes, bits) == pytest.approx(error, rel=0.3)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_repetitions_are_counted_at_the_latest_earlier_place(n):
    sequence = random_tokens(1, 200, vocabulary=3)[0]
    tokens, counts = sequence.tolist(), torch.zeros(3, 2, dtype=torch.long)
    for i in range(n, len(tokens)):
        backs = (back for back in range(1, i - n + 1) if tokens[i - n : i] == tokens[i - back - n : i - back])
        if (back := next(backs, None)) is not None:
            for row, (low, high) in enumerate(itertools.pairwise(BOUNDS)):
                counts[row] += torch.tensor([1, tokens[i] == tokens[i - back]]) * (low < back <= high)
    assert torch.equal(repetitions(sequence, n, BOUNDS), counts) and counts.sum() > 0
    assert repetitions(torch.tensor([1, 2]), 2, BOUNDS).sum() == 0


def test_the_script_measures_and_writes(tmp_path, capsys):
    data = prepared(tmp_path)
    trained(data, tmp_path / "run", ["full", "lsh"], 2)
    trained(data, tmp_path / "bird", ["smart_bird"], 2)
    checkpoint, size = ["--checkpoint", str(tmp_path / "run")], ["--windows", "3", "--length", "32"]
    options = {"hashes": [*checkpoint, *size, "--hash-steps", "3", "--top", "4"], "coverage": [*checkpoint, *size]}
    options["repetitions"] = ["--data", str(data), *size, "--near", "4", "--ngrams", "2"]
    options["maps"] = [*checkpoint, "--other", checkpoint[1]]
    options |= {"sampling": [*checkpoint, "--length", "256"], "scores": ["--checkpoint", str(tmp_path / "bird")]}
    results = {}
    for study, words in options.items():
        study_attention.main([study, *words, "--json", str(tmp_path / f"{study}.json")])
        results[study] = json.loads((tmp_path / f"{study}.json").read_text())
    hashes = results["hashes"]
    assert [layer["name"] for layer in hashes["layers"]] == ["layer 0 full", "layer 1 lsh"]
    for row in [*hashes["layers"], hashes["all"]]:
        assert set(row["utility"]) == {"chunks", "random", "smyrf", "lsh", "lha", "bound", "floor"}
        assert all(x["mean"] <= row["utility"]["bound"]["mean"] + 1e-6 for x in row["utility"].values())
        errors = [row["output_error"]["yoso"][number]["mean"] for number in ("8", "128")]
        assert errors[0] > errors[1] > 0 and all(math.isfinite(x["half"]) for x in row["recall"].values())
    assert set(results["coverage"]["layers"]) == {"layer 0 full", "layer 1 lsh"}
    assert results["repetitions"]["repetitions"]["2"]
    assert results["maps"]["correlations"] == pytest.approx([1, 1])
    assert {row["tokens"] for row in results["sampling"]["rows"]} == {128, 256}
    (scores,) = results["scores"]["layers"].values()
    assert sum(scores["raw"]["counts"]) >= sum(scores["inverse_log"]["counts"]) > 0  # a weight of 1 has no finite score
    raw, inverse = (scores[name]["quantiles"] for name in ("raw", "inverse_log"))
    assert inverse == pytest.approx([-1 / math.log(alpha) for alpha in raw], rel=0.05)
    assert "lacks Smart Bird attention" in refused(capsys, study_attention, "scores", *checkpoint)
    assert "--buckets: 3" in refused(capsys, study_attention, "hashes", *checkpoint, "--buckets", 3)
    assert "--checkpoint: is missing" in refused(capsys, study_attention, "hashes")
