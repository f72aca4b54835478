import torch

from megasparse.hub.compare import TOLERANCE, difference, our_logits
from megasparse.ops.random import RngContext
from tests.helpers.hub import SEED, decoder, made
from tests.helpers.models import random_tokens


def test_a_decoders_logits_predict_the_token_at_their_position():
    model, tokens = made(decoder("full")), random_tokens(2, 9)
    nats = model.token_scores(tokens, RngContext.evaluation(SEED, 2)).nats
    logits = our_logits(model, tokens, SEED).transpose(1, 2)
    predicted = torch.nn.functional.cross_entropy(logits, tokens, reduction="none")
    torch.testing.assert_close(predicted, nats, atol=1e-5, rtol=0)


def test_the_draws_are_those_of_the_seed():
    model, tokens = made(decoder("lsh")), random_tokens(2, 40)
    logits = our_logits(model, tokens, SEED)
    assert difference(logits, our_logits(model, tokens, SEED)) == 0.0
    assert difference(logits, our_logits(model, tokens, SEED + 1)) > TOLERANCE


def test_what_is_not_a_number_differs():
    one = torch.zeros(2, 3)
    assert difference(one, one + 0.5) == 0.5 and difference(one, one * torch.nan) == torch.inf
