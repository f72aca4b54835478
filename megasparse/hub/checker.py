"""Check a causal language model of transformers, or of a run, for leaks of later tokens, padding and other documents.

Every check compares the logits of two ways to compute them that must agree, in a run the nats of the tokens. A
difference is relative to their standard deviation. Rounding gives about 1e-6 in fp32, a leak usually more than 1e-2; 0
means the same bits. L tokens of a row.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from megasparse.errors import HubError
from megasparse.files import UNSCORED
from megasparse.hub.architectures import hf_class
from megasparse.hub.importing import read_config
from megasparse.hub.replace import load_whole
from megasparse.hub.replaced_layer import cache_name
from megasparse.model.stack import padding_of
from megasparse.ops.random import RngContext

TOLERANCE = {torch.float64: 1e-4, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""Largest relative difference of a passed check, by the dtype of the weights."""


BATCH_CHECKS = ("later tokens", "packed documents")


class CheckResult(NamedTuple):
    """passed: None if the model rejects the inputs of the check. difference: the largest; ∞ if the model crashes.
    position: the first token whose logits differ by more than the tolerance. note: the model's error.
    """

    name: str
    passed: bool | None
    difference: float
    position: int | None
    note: str = ""


@torch.no_grad()
def check_model(model: Any, length: int = 64, seed: int = 0) -> list[CheckResult]:
    """Check a causal language model of transformers with random tokens. Raises HubError if it cannot process them.

    Args:
        model: An `AutoModelForCausalLM`, which is set to evaluation mode.
        length: Tokens of a row. Attention windows and chunks should be shorter.
        seed: Seed of the tokens.

    Returns:
        A result per check, in the order of `CHECKS`.

    Examples:
        >>> assert all(result.passed is not False for result in check_model(model))
    """
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.config.get_text_config().vocab_size, (4, length), generator=generator)
    problem = f"cannot process {length} tokens ({{}})"
    with HubError.instead_of(Exception, type(model).__name__, problem, "Use fewer"):  # models raise errors of any type
        whole = _logits(model, tokens[:1])
    scale, tolerance = float(whole.std()), TOLERANCE[next(model.parameters()).dtype]
    results = []
    for name, check in CHECKS.items():
        try:
            pairs = list(check(model, tokens, whole))
        except Exception as error:
            note = " ".join(str(error).split())[:120] or type(error).__name__
            rejected = isinstance(error, TypeError | ValueError | AttributeError | NotImplementedError | HubError)
            results.append(CheckResult(name, None if rejected else False, 0.0 if rejected else torch.inf, None, note))
        else:
            results.append(_compared(name, pairs, scale, tolerance))
    return results


def _compared(name: str, pairs: Iterable[tuple[int, Tensor, Tensor]], scale: float, tolerance: float) -> CheckResult:
    difference, position = 0.0, None
    for first, a, b in pairs:  # logits (L, V) of the tokens from position `first` on
        moved = ((a - b).abs() / scale).amax(-1).nan_to_num(nan=torch.inf)
        difference = max(difference, float(moved.max()))
        wrong = (moved > tolerance).nonzero()
        if len(wrong) and (position is None or first + int(wrong[0]) < position):
            position = first + int(wrong[0])
    return CheckResult(name, position is None, difference, position)


@torch.no_grad()
def check_batch(model: Any, tokens: Tensor, seed: int = 0) -> list[CheckResult]:
    """Check a megasparse decoder on a batch (B, L) as it is trained on, with the marks of its shards: no token's nats
    may depend on later tokens, nor on other documents, which are replaced by the bits of their numbers, so that each
    pair is apart in some pass.
    """
    config, length = model.config, tokens.shape[1]
    special = {config.separator_id, config.padding_token}
    ids = torch.tensor([token for token in range(config.vocabulary) if token not in special], device=tokens.device)
    draws = torch.randint(len(ids), tokens.shape, generator=torch.Generator().manual_seed(seed)).to(tokens.device)
    fixed = (tokens == config.document_separator) | (tokens == config.padding_token)
    others = torch.where(fixed, tokens, ids[draws] + tokens - tokens % UNSCORED)

    def nats(read: Tensor) -> Tensor:
        scores: Tensor = model.token_scores(read, RngContext.evaluation(seed, len(read))).nats
        return scores.double()

    whole, places = nats(tokens), torch.arange(length, device=tokens.device)

    def without(replaced: Tensor, kept: Tensor) -> tuple[int, Tensor, Tensor]:
        """Compare the tokens `kept` if the others are `replaced`."""
        moved = torch.where(kept, nats(torch.where(replaced, others, tokens)), whole)
        return 0, moved.T, whole.T  # (L, B)

    later = (
        without((places >= t).expand_as(tokens), places < t) for t in (1, length // 4, length // 2 + 1, length - 1)
    )
    segments = padding_of(tokens, config).segments
    numbers = torch.zeros_like(tokens) if segments is None else segments
    bits = range(int(numbers.max()).bit_length())
    apart = (without(chosen, ~chosen) for k in bits for one in (numbers >> k & 1 == 1,) for chosen in (one, ~one))
    scale, tolerance = float(whole.std()), TOLERANCE[next(model.parameters()).dtype]
    results = [
        _compared(name, pairs, scale, tolerance) for name, pairs in zip(BATCH_CHECKS, (later, apart), strict=True)
    ]
    return results if bits else [results[0], CheckResult(BATCH_CHECKS[1], None, 0.0, None, "rows of one document")]


def _logits(model: Any, tokens: Tensor, **inputs: Any) -> Tensor:
    return model(input_ids=tokens, use_cache=False, **inputs).logits.float()


Pairs = Iterator[tuple[int, Tensor, Tensor]]


def _causality(model: Any, tokens: Tensor, whole: Tensor) -> Pairs:
    """Replace all tokens from t on: logits before t must not move."""
    length = tokens.shape[1]
    for t in (1, length // 4, length // 2 + 1, length - 1):
        changed = torch.cat([tokens[:1, :t], tokens[1:2, t:]], dim=1)
        yield 0, _logits(model, changed)[0, :t], whole[0, :t]


def _padding(model: Any, tokens: Tensor, whole: Tensor, left: bool = False) -> Pairs:
    """Pad a short row, next to a long one; on the left with positions that count real tokens, as `generate` does."""
    row = tokens[1:2, : tokens.shape[1] // 2 + 3]
    missing = tokens.shape[1] - row.shape[1]
    sides, real = ((missing, 0), slice(missing, None)) if left else ((0, missing), slice(row.shape[1]))
    padded = torch.cat([tokens[:1], F.pad(row, sides)])
    mask = torch.cat([torch.ones_like(tokens[:1]), F.pad(torch.ones_like(row), sides)])
    inputs = {"position_ids": (mask.cumsum(1) - 1).clamp_min(0)} if left else {}
    yield 0, _logits(model, padded, attention_mask=mask, **inputs)[1, real], _logits(model, row)[0]


def _batch(model: Any, tokens: Tensor, whole: Tensor) -> Pairs:
    yield 0, _logits(model, tokens)[0], whole[0]


def _cache(model: Any, tokens: Tensor, whole: Tensor) -> Pairs:
    """Read half of the row, then one token at a time with the cache."""
    first, name = tokens.shape[1] // 2, cache_name(model)
    out = model(input_ids=tokens[:1, :first], use_cache=True)
    yield 0, out.logits[0].float(), whole[0, :first]
    for position in range(first, tokens.shape[1]):
        cache = {name: getattr(out, name)}
        out = model(input_ids=tokens[:1, position : position + 1], use_cache=True, **cache)
        yield position, out.logits[0].float(), whole[0, position : position + 1]


def _packing(model: Any, tokens: Tensor, whole: Tensor) -> Pairs:
    """Pack three documents into one row, marked by positions that restart, and replace the others of each document. In
    a row of its own, chunks would be aligned otherwise.
    """
    ends = [0, tokens.shape[1] // 4, tokens.shape[1] // 2 + 3, tokens.shape[1]]
    spans = list(pairwise(ends))
    positions = torch.cat([torch.arange(end - start) for start, end in spans])[None]
    packed = _logits(model, tokens[:1], position_ids=positions)
    for start, end in spans:
        others = tokens[1:2].clone()
        others[:, start:end] = tokens[:1, start:end]
        yield start, packed[0, start:end], _logits(model, others, position_ids=positions)[0, start:end]


CHECKS: dict[str, Callable[[Any, Tensor, Tensor], Pairs]] = {
    "later tokens": _causality,
    "padding on the right": _padding,
    "padding on the left": partial(_padding, left=True),
    "other rows of a batch": _batch,
    "decoding from a cache": _cache,
    "packed documents": _packing,
}
"""Name -> check, which yields a first position and two logits (n, V) that must be equal."""


def load_model(folder: Path) -> Any:
    """Load a model of transformers, or one that megasparse exported or replaced, in fp32: rounding in bf16 can exceed
    the tolerance. Raises HubError if it is not a causal language model, or not whole.
    """
    names = read_config(folder).get("architectures")
    if not names or not names[0].endswith(("ForCausalLM", "LMHeadModel", "ModelWithLMHead")):
        raise HubError(folder, f"is of the architecture {names and names[0]}", "Give a causal language model")
    problem = f"transformers lacks its architecture {names[0]}"
    with HubError.instead_of(AttributeError, folder, problem, "Give another model"):
        loader = hf_class(names[0])
    return load_whole(loader, folder, dtype=torch.float32)


def load_tokenizer(folder: str | Path) -> Any:
    damages = (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError)
    with HubError.instead_of(damages, folder, "its tokenizer cannot be loaded ({})", "Save it there"):
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def table(results: list[CheckResult]) -> str:
    lines = [f"{'check':24}{'':6}{'difference':>12}  first token"]
    for result in results:
        verdict = {True: "PASS", False: "FAIL", None: "n/a"}[result.passed]
        figures = result.note or f"{result.difference:12.1e}"
        position = "" if result.position is None else f"  {result.position}"
        lines.append(f"{result.name:24}{verdict:6}{figures}{position}".rstrip())
    return "\n".join(lines)
