"""Linformer: the definition, with padding and documents."""

import pytest
import torch

from tests.helpers.comparing import assert_same_with_gradients
from tests.helpers.models import Single


def dense(single, q, k, v, mask, segments):
    """Token by token: every projected key is a sum over the real tokens of the query's document."""
    weights = single.mechanism.keys.weight, single.mechanism.values.weight
    rows = []
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            for i in range(q.shape[2]):
                own = [j for j in range(q.shape[2]) if mask[b, j] and segments[b, j] == segments[b, i]]
                first = own[0] if own and len(segments[b].unique()) > 1 else 0
                if not mask[b, i]:
                    rows.append(torch.zeros_like(q[b, h, i]))
                    continue
                key, value = (
                    sum(w[:, j - first, None] * x[b, h, j] for j in own) for w, x in zip(weights, (k, v), strict=True)
                )
                rows.append(torch.softmax(key @ q[b, h, i] / 4, dim=0) @ value)
    return torch.stack(rows).view(q.shape)


@pytest.mark.parametrize("case", ["plain", "padded", "packed"])
def test_forward_and_gradients_equal_the_definition(case):
    single = Single("linformer", False)
    single.mechanism.double()
    x, *heads = single.inputs(11, dtype=torch.float64)
    mask, segments = torch.ones(2, 11, dtype=torch.bool), torch.zeros(2, 11, dtype=torch.int64)
    if case != "plain":
        mask[0, 8:] = False
    if case == "packed":
        segments[:, 4:] = 1
    given = {"plain": {}, "padded": {"key_mask": mask}, "packed": {"key_mask": mask, "segments": segments}}[case]
    weights = list(single.mechanism.parameters())
    assert_same_with_gradients(
        lambda *h: single(x, *h, **given).out, lambda *h: dense(single, *h, mask, segments), heads, weights
    )
