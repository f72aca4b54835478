"""Any length is accepted; longer batches, padding and other documents never change a real token's output."""

import pytest
import torch

from megasparse.attention.contract import AttentionContext, Heads
from megasparse.attention.heads import Padding, build_mechanism
from megasparse.model.decoder import build_decoder
from megasparse.ops.random import Draws
from tests.helpers.models import attention, random_tokens, small

CONFIGS = {
    "full": attention("full"),
    "full shared": attention("full", shared_qk=True),
    "local": attention("local"),
    "lsh": attention("lsh", lsh={"rounds": 3}),
}
EVERY = pytest.mark.parametrize("name", CONFIGS)


def run(name, heads, **masks):
    config = CONFIGS[name]
    mechanism = build_mechanism(config.pattern[0], config, max_length=128)
    context = AttentionContext(0, Draws.evaluation(0, heads[0].shape[0]))
    masks = {"key_mask": None, "segments": None, **masks}
    return mechanism(heads[0], Heads(*heads, causal=True, **masks), context).out


def random_heads(length):
    generator = torch.Generator().manual_seed(0)
    q, v = (torch.randn(2, 2, length, 8, generator=generator) for _ in range(2))
    return q, torch.nn.functional.normalize(q, dim=-1), v


@EVERY
def test_any_length_up_to_the_maximum_and_a_longer_batch_changes_nothing(name):
    model = build_decoder(small(attention=CONFIGS[name]), seed=0)
    tokens = random_tokens(2, 128)
    longest = model.token_scores(tokens, Draws.evaluation(0, 2)).nats
    for length in (1, 2, 7, 8, 9, 63, 127):
        nats = model.token_scores(tokens[:, :length], Draws.evaluation(0, 2)).nats
        torch.testing.assert_close(nats, longest[:, :length], rtol=1e-4, atol=1e-5)


@EVERY
@pytest.mark.parametrize("left", [0, 5, 8])
@pytest.mark.parametrize("right", [0, 3, 30])
def test_padding_on_either_side_changes_no_real_token(name, left, right):
    q, k, v = random_heads(left + 40 + right)
    mask = torch.zeros(2, left + 40 + right, dtype=torch.bool)
    mask[:, left : left + 40] = True
    padded = run(name, (q, k, v), key_mask=mask)
    alone = run(name, tuple(x[:, :, left : left + 40] for x in (q, k, v)))
    torch.testing.assert_close(padded[:, :, left : left + 40], alone, rtol=1e-4, atol=1e-5)
    assert (padded[:, :, :left] == 0).all() and (padded[:, :, left + 40 :] == 0).all()


@EVERY
def test_packed_documents_never_see_each_other(name):
    q, k, v = random_heads(60)
    segments = torch.tensor([0] * 24 + [1] * 36).expand(2, -1)
    packed = run(name, (q, k, v), segments=segments)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, :24] = x[:, :, :24].flip(2)
    torch.testing.assert_close(
        run(name, changed, segments=segments)[:, :, 24:], packed[:, :, 24:], rtol=1e-5, atol=1e-6
    )


def test_padding_is_not_scored():
    model = build_decoder(small(), seed=0)
    tokens = random_tokens(2, 50)
    mask = torch.ones(2, 50, dtype=torch.bool)
    mask[:, 40:] = False
    objective, statistics = model(tokens, Draws.evaluation(0, 2), Padding(mask))
    short, _ = model(tokens[:, :40], Draws.evaluation(0, 2))
    assert statistics["tokens"] == 80
    torch.testing.assert_close(objective, short)
