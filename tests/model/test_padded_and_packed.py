"""Whole models: padding and other documents do not change a token's output."""

import pytest
import torch

from megasparse.model.build import build_model
from megasparse.model.stack import padding_of
from megasparse.ops.random import RngContext
from tests.helpers.models import BERT, NGRAMS, attention, random_tokens, small, with_tables

PAD, SEPARATOR, VOCABULARY = 257, 258, 260
PLAIN = {"lha": {"hash": "random"}}
NONE, ROTARY, LEARNED = ({"kind": kind} for kind in ("none", "rotary", "learned"))
DRAWS = RngContext.evaluation(0, 1)


def model_of(name, positions=NONE, **changes):
    settings = dict(vocabulary=VOCABULARY, layers=2, positions=positions, attention=attention(name, **PLAIN))
    return with_tables(build_model(small(**{**settings, "ngrams": NGRAMS, **changes}), 0))


def outputs(model, tokens):
    """The final streams of every position, which the head reads each for itself."""
    read = tokens[:, :-1] if model.config.kind == "decoder" else tokens
    return torch.cat(model.streams(read, DRAWS, padding_of(tokens, model.config))[0], dim=-1)


RELATIVE = ("full", "local", "longformer")
"""Mechanisms that see rotary positions only in products of queries and keys; hashes read rotated vectors."""
PADDED = [
    *((name, NONE, {}) for name in ("full", "lsh", "yoso", "lha", "performer", "smyrf")),
    *((name, LEARNED, {}) for name in ("full", "lsh")),
    *((name, ROTARY, {}) for name in RELATIVE),
    *((name, positions, BERT) for name in ("full", "yoso") for positions in (NONE, LEARNED)),
]


@pytest.mark.parametrize(("name", "positions", "style"), PADDED)
def test_an_encoder_is_equivariant_to_padding(name, positions, style):
    """On the left too, where positions are none or relative."""
    model = model_of(name, positions, kind="encoder", padding_token=PAD, **style)
    tokens = random_tokens(1, 40)
    alone = outputs(model, tokens)
    for left, right in [(0, 1), (0, 23)] if positions is LEARNED else [(0, 23), (1, 0), (8, 0), (11, 7)]:
        padded = torch.nn.functional.pad(tokens, (left, right), value=PAD)
        found = outputs(model, padded)[:, left : left + 40]
        torch.testing.assert_close(found, alone, rtol=1e-3, atol=1e-4)


CASES = [(kind, name) for kind in ("decoder", "encoder") for name in ("full", "local", "lsh", "lha", "yoso")]
PACKED = [*((*case, NONE) for case in CASES), *((kind, "full", ROTARY) for kind in ("decoder", "encoder"))]


@pytest.mark.parametrize(("kind", "name", "positions"), PACKED)
def test_packed_documents_equal_separate_documents(kind, name, positions):
    """A decoder reads each token behind the one before it: a document's first behind the separator of the document
    before, alone behind the start, which here has the separator's embedding."""
    model = model_of(name, positions, kind=kind, document_separator=SEPARATOR)
    if kind == "decoder":
        with torch.no_grad():
            model.embedding.start[0] = model.embedding.weight[SEPARATOR]
    first, second = random_tokens(1, 24, seed=1), random_tokens(1, 36, seed=2)
    first[:, -1] = second[:, -1] = SEPARATOR
    packed = outputs(model, torch.cat([first, second], dim=1))
    torch.testing.assert_close(packed[:, :24], outputs(model, first), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(packed[:, 24:], outputs(model, second), rtol=1e-3, atol=1e-4)
