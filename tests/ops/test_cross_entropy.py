"""The scores of tokens: torch's operators and the kernels, in the interpreter, against the definition in float64."""

import pytest
import torch
from torch import Tensor

from megasparse.ops.cross_entropy import adaptive_log_probabilities, adaptive_scores, token_scores
from tests.helpers.definitions import token_scores as defined
from tests.helpers.operators import DEVICE
from tests.helpers.peak_memory import PeakMemory

BARS = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def random_logits(count, width, dtype, size=3.0):
    generator = torch.Generator().manual_seed(count + width)
    whole = (size * torch.randn(count, width + 3, generator=generator)).to(DEVICE, dtype)
    targets = torch.randint(0, width, (count,), generator=generator).to(DEVICE)
    logits = whole[:, :width]  # rows further apart than they are long
    targets[::2] = logits[::2].argmax(-1)
    return logits, targets


def results(score, logits, targets, smoothing):
    leaf = logits.detach().requires_grad_()
    out = score(leaf, targets, smoothing)
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out)
    return out.detach(), *torch.autograd.grad(out, leaf, toward)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize(
    "count,width,dtype,smoothing",
    [
        (1, 2, torch.float32, 0.1),
        (5, 258, torch.bfloat16, 0.0),
        (3, 9000, torch.float16, 0.0),
        (3, 9000, torch.float32, 0.1),
    ],
)
def test_scores_and_gradient_equal_the_definition(count, width, dtype, smoothing):
    logits, targets = random_logits(count, width, dtype)
    out, slope = results(token_scores, logits, targets, smoothing)
    exact, exact_slope = results(defined, logits.double(), targets, smoothing)
    assert out.dtype == torch.float32 and slope.dtype == dtype and out.shape == (count, 3 if smoothing else 2)
    assert (out[:, 1] == exact[:, 1]).all() and (out[::2, 1] == 1).all()
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    assert (slope - exact_slope).norm() <= BARS[dtype] * exact_slope.norm()


@pytest.mark.usefixtures("implementation")
def test_ties_of_logits_go_to_the_first():
    scores = token_scores(torch.zeros(3, 5000, device=DEVICE), torch.tensor([0, 1, 4999], device=DEVICE))
    assert scores[:, 1].tolist() == [1.0, 0.0, 0.0]


def test_large_logits_and_logits_of_minus_infinity_stay_finite(monkeypatch):
    monkeypatch.setenv("MEGASPARSE_OPS", "triton")
    logits, targets = random_logits(4, 5000, torch.float32, size=1e6)
    logits[:, :4096] = -torch.inf
    targets = torch.full_like(targets, 4999)
    out, slope = results(token_scores, logits, targets, 0.0)
    assert torch.isfinite(out).all() and torch.isfinite(slope).all()
    torch.testing.assert_close(out.double(), results(defined, logits.double(), targets, 0.0)[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.usefixtures("implementation")
def test_a_token_without_a_target_has_scores_and_a_gradient_of_zero(smoothing):
    """The kernels read no logit for it: the row before the first one is NaN."""
    memory = torch.full((400,), torch.nan, device=DEVICE)
    logits = memory[200:].view(4, 50).copy_(torch.linspace(-1, 1, 200).view(4, 50))
    targets = torch.tensor([-100, 3, 49, -100], device=DEVICE)
    out, slope = results(token_scores, logits, targets, smoothing)
    assert (out[[0, 3]] == 0).all() and (slope[[0, 3]] == 0).all()
    torch.testing.assert_close(out[1:3], results(token_scores, logits[1:3], targets[1:3], smoothing)[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_target_outside_the_vocabulary_is_an_error_or_nan(implementation, smoothing):
    """Kernels read no logit for it: only that token gets NaN, though the logits around the rows are finite."""
    device = DEVICE if implementation == "triton" else "cpu"  # on a GPU the error ends the process
    logits = torch.linspace(-1, 1, 250, device=device)[:200].view(4, 50)
    targets = torch.tensor([3, 50, -1, -100], device=device)
    if implementation == "blockwise":
        with pytest.raises(IndexError, match="out of bounds"):
            token_scores(logits, targets, smoothing)
        return
    out, slope = results(token_scores, logits, targets, smoothing)
    assert out[1:3, 0].isnan().all() and out[1:3, 2:].isnan().all() and slope[1:3].isnan().all()
    exact, exact_slope = results(token_scores, logits[::3], targets[::3], smoothing)
    assert torch.equal(out[::3], exact) and exact.isfinite().all()
    assert slope[::3].isfinite().all() and (slope[3] == 0).all() and (exact_slope[1] == 0).all()


V, E = 90, 12


def random_inputs(cutoffs: list[int], count: int = 300, sharp: float = 1.0) -> list[Tensor]:
    """Return hidden, weight, clusters; and targets, of each part of the vocabulary."""
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(shape, generator=generator) for shape in ((count, E), (V, E), (len(cutoffs), E))]
    tensors[1] *= sharp
    tensors[2] *= 2.0
    return [x.requires_grad_() for x in tensors] + [torch.randint(0, V, (count,), generator=generator)]


def adaptive_definition(hidden: Tensor, weight: Tensor, clusters: Tensor, cutoffs: list[int]) -> Tensor:
    """Return ln p of every id, by the formula, position by position and id by id."""
    hidden, weight, clusters = hidden.double(), weight.double(), clusters.double()
    ends, first, rows = [*cutoffs, V], cutoffs[0], []
    for h in hidden:
        score, of_cluster = (weight @ h).exp(), (clusters @ h).exp()
        p = list(score[:first])
        for number, (start, end) in enumerate(zip(cutoffs, ends[1:], strict=True)):
            p += [of_cluster[number] * s / score[start:end].sum() for s in score[start:end]]
        rows.append(torch.stack(p) / (score[:first].sum() + of_cluster.sum()))
    return torch.stack(rows).log()


@pytest.mark.parametrize("cutoffs,sharp", [([10, 30, 60], 0.1), ([10, 30, 60], 1.0), ([89], 1.0), ([1], 0.1)])
def test_adaptive_scores_and_gradients_equal_the_definition(cutoffs, sharp):
    *leaves, targets = random_inputs(cutoffs, 60, sharp)
    every = adaptive_definition(*leaves, cutoffs)
    likeliest, second = every.topk(2).indices.T.contiguous()
    targets[::3], targets[1::3] = likeliest[::3], second[1::3]  # something to be right, and just wrong, about
    assert len(torch.bucketize(likeliest, torch.tensor(cutoffs), right=True).unique()) > 1
    torch.testing.assert_close(adaptive_log_probabilities(*leaves, cutoffs).double(), every, rtol=1e-5, atol=1e-5)
    exact = -every.gather(1, targets[:, None]).squeeze(1)
    nats, correct = adaptive_scores(leaves[0], targets, *leaves[1:], cutoffs)
    torch.testing.assert_close(nats.double(), exact, rtol=1e-5, atol=1e-5)
    assert torch.equal(correct, targets == likeliest) and not correct.all()
    mix = torch.linspace(0.2, 1.0, 60)
    found = torch.autograd.grad((nats * mix).sum(), leaves)
    for a, b in zip(found, torch.autograd.grad((exact * mix).sum(), leaves), strict=True):
        assert (a - b).norm() / b.norm() < 1e-4


def test_a_cluster_that_could_hold_the_likeliest_id_is_computed_and_may_not_hold_it():
    """One position, where cluster 0 is likelier than any frequent id, though none of its ids is."""
    weight, clusters = torch.zeros(9, 1), torch.tensor([[1.5]])
    weight[0] = 1.0
    hidden, target = torch.ones(1, 1), torch.tensor([0])
    assert adaptive_scores(hidden, target, weight, clusters, [3])[1].tolist() == [True]  # 1.5 shared among 6
    weight[7] = 9.0
    assert adaptive_scores(hidden, target, weight, clusters, [3])[1].tolist() == [False]
    assert adaptive_scores(hidden, target + 7, weight, clusters, [3])[1].tolist() == [True]
    assert adaptive_scores(hidden, target + 1, weight, clusters, [3])[1].tolist() == [False]


def test_only_the_clusters_that_are_needed_are_computed():
    hidden, weight, clusters, targets = random_inputs([10, 30], count=4000)
    with torch.no_grad():
        clusters *= 0.0
        clusters -= 10.0
        hidden.abs_()  # each cluster as a whole is less likely than the likeliest frequent id
        frequent = (hidden @ weight[:10].T).argmax(-1)
    with PeakMemory() as memory:
        nats, correct = adaptive_scores(hidden, frequent, weight, clusters, [10, 30])
        nats.sum().backward()
    assert correct.all()
    assert memory.largest <= 4000 * 12 * 4, "the head's scores, 10 ids and 2 clusters, are the largest"
    with PeakMemory() as memory:
        adaptive_scores(hidden, targets % 30, weight, clusters, [10, 30])[0].sum().backward()
    assert memory.largest < 4000 * V * 4 / 4


def test_bf16_weights_have_fp32_statistics():
    *leaves, targets = random_inputs([10, 30, 60])
    half = [x.detach().bfloat16().requires_grad_() for x in leaves]
    nats, _ = adaptive_scores(half[0], targets, *half[1:], [10, 30, 60])
    exact, _ = adaptive_scores(half[0].float(), targets, *(x.float() for x in half[1:]), [10, 30, 60])
    assert nats.dtype == torch.float32
    assert (nats - exact).norm() / exact.norm() < 1e-2
    for a, b in zip(torch.autograd.grad(nats.sum(), half), torch.autograd.grad(exact.sum(), half), strict=True):
        assert a.dtype == torch.bfloat16 and (a - b).float().norm() / b.float().norm() < 3e-2
