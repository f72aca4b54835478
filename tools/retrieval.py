r"""Ask decoders for facts in long texts, in the manner of RULER (Hsieh et al. 2024).

    python tools/retrieval.py --model MODEL_DIR --model export/taught --length 2048 --json retrieval.json

A model is the folder of any decoder of transformers; its attention may be replaced. It reads each haystack, a text of
--length tokens in which facts are hidden, once, with its own attention, and continues each question from the cache of
the text, greedily. The answer is the first word. The tasks, which SmolLM2-135M solves with full attention:

    single   facts of unlike wording
    keys     facts of one wording, each stated twice: "Remember the pair KEY WORD."
    hops     the same, but the word is the key of another pair, which is asked for with the model's own first answer
    common   five pairs of each key, three of them with the same word, the answer

The haystacks depend only on the tokenizer, the length, the text around the facts and their number. Rows that exist in
FILE, of the same DIR, length and text, are skipped, so the command can be stopped and repeated.
"""

import argparse
import hashlib
import json
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megasparse.cli.arguments import require_model, require_paths
from megasparse.errors import DataError, report_user_errors

TASK_NAMES = ("single", "keys", "hops", "common")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", required=True, metavar="DIR", help="decoder; may be repeated")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--haystacks", type=int, default=2, metavar="N", help="texts per task (default: %(default)s)")
    parser.add_argument("--task", action="append", choices=TASK_NAMES, help="may be repeated (default: all)")
    parser.add_argument("--text", type=Path, metavar="FILE", help="text around the facts (default: five sentences)")
    parser.add_argument("--device", default="cpu", help="(default: %(default)s)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="file for the rows")
    args = parser.parse_args(words)
    for folder in args.model:
        require_model(folder)
    require_paths(args.text)
    return args


if __name__ == "__main__":  # help and mistakes end before the slow imports
    report_user_errors(arguments)()

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from megasparse.evaluation.outputs import write_json
from megasparse.hub.checker import load_tokenizer
from megasparse.hub.replace import load_whole

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again. "
SINGLE = (
    "The ship that left at noon was named",
    "The horse that won the race was called",
    "The password of the old tower was",
    "The painting in the great hall shows a",
    "The first word of the letter was",
    "The island north of the harbour is called",
)
PAIR = "Remember the pair"
NAMES = "Adam Alice Anna Bella Carl Clara David Diana Edward Emma Frank Grace Henry Julia Laura Martin Nora Oscar"
WORDS = """amber anchor apple arrow basket beacon bottle bridge butter button candle carpet castle cherry circle clover
cobalt copper cotton crystal diamond dragon eagle feather fiddle forest garden ginger hammer harbor hazel honey island
ivory jacket kettle ladder lemon lilac marble meadow mirror needle olive orange paper pepper pigeon pillow planet
pocket rabbit ribbon river saddle salmon shadow silver spider sugar thunder tiger tunnel velvet violet walnut window
winter zebra"""
NEW = 5
"""Tokens of a continuation, enough for the first word."""


@dataclass(frozen=True)
class Question:
    """prompts: read one after the other; `{}` is the model's answer to the one before. answer: to the last one."""

    prompts: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Haystack:
    """tokens: the text, without the questions."""

    tokens: list[int]
    questions: list[Question]

    @staticmethod
    def draw(task: str, tokenizer: Any, length: int, number: int, text: str = NOISE) -> "Haystack":
        """Hide the facts of a task behind random sentences of a text, so that it has `length` tokens with the longest
        question and its continuation. number: 0, 1, ..., the seed. text: repeated if it is too short.
        """
        draw = random.Random(f"{task} {number}")
        facts, questions = TASKS[task](draw)

        def encoded(part: str) -> list[int]:
            return list(tokenizer(part, add_special_tokens=False)["input_ids"])

        prompts = [prompt for question in questions for prompt in question.prompts]
        longest = max(len(encoded(f"\n{prompt}")) + NEW * ("{}" in prompt) for prompt in prompts)
        pieces = [encoded(f" {fact}") for fact in facts]
        first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        room = length - NEW - longest - sum(map(len, pieces)) - len(first)
        if room < length // 2:
            raise DataError("--length", f"{length} tokens are too few for the facts of {task}", "Use longer texts")
        filler = encoded(text)
        filler = filler * (room // len(filler) + 2)
        start = draw.randrange(len(filler) - room)
        filler = filler[start : start + room]
        ends = [i for i, token in enumerate(filler, 1) if tokenizer.decode([token]).rstrip().endswith(".")] or [room]
        draw.shuffle(pieces)
        tokens, last = first, 0
        for end, piece in zip(sorted(draw.choices(ends, k=len(pieces))), pieces, strict=True):
            tokens, last = tokens + filler[last:end] + piece, end
        return Haystack(tokens + filler[last:], questions)


Facts = tuple[list[str], list[Question]]
"""Facts of a haystack, and the questions about them."""


def single(draw: random.Random) -> Facts:
    facts = list(zip(SINGLE, draw.sample(WORDS.split(), len(SINGLE)), strict=True))
    return [f"{frame} {word}." for frame, word in facts], [Question((frame,), word) for frame, word in facts]


def keys(draw: random.Random) -> Facts:
    pairs = list(zip(draw.sample(NAMES.split(), 8), draw.sample(WORDS.split(), 8), strict=True))
    facts = [f"{PAIR} {key} {word}." for key, word in pairs]
    return facts * 2, [Question((f"{PAIR} {key}",), word) for key, word in pairs[:6]]


def hops(draw: random.Random) -> Facts:
    names = draw.sample(NAMES.split(), 12)
    chains = list(zip(names[:6], names[6:], draw.sample(WORDS.split(), 6), strict=True))
    facts = [f"{PAIR} {key} {word}." for chain in chains for key, word in (chain[:2], chain[1:])]
    return facts * 2, [Question((f"{PAIR} {first}", f"{PAIR} {{}}"), word) for first, _, word in chains]


def common(draw: random.Random) -> Facts:
    words = draw.sample(WORDS.split(), 15)
    groups = [(key, *words[i::5]) for i, key in enumerate(draw.sample(NAMES.split(), 5))]
    facts = [f"{PAIR} {key} {word}." for key, often, *others in groups for word in (often, often, often, *others)]
    return facts, [Question((f"{PAIR} {key}",), often) for key, often, *_ in groups]


TASKS = dict(zip(TASK_NAMES, (single, keys, hops, common), strict=True))


@torch.no_grad()
def scores(model: PreTrainedModel, tokenizer: Any, haystack: Haystack, cached: bool = True) -> list[int]:
    """Return 1 for every question that greedy decoding answers, else 0. cached: read the text once, with a cache."""
    whole: Any = model
    text, results = torch.tensor([haystack.tokens], device=model.device), []
    cache = DynamicCache(config=model.config) if cached else None
    if cache is not None:
        whole(input_ids=text, past_key_values=cache, logits_to_keep=1)
    for question in haystack.questions:
        answer = ""
        for prompt in question.prompts:
            asked = tokenizer(f"\n{prompt.format(answer)}", add_special_tokens=False, return_tensors="pt")["input_ids"]
            tokens = torch.cat([text, asked.to(text.device)], dim=1)
            options: dict[str, Any] = {"past_key_values": cache} if cached else {"use_cache": False}
            options |= {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
            written = whole.generate(tokens, attention_mask=torch.ones_like(tokens), **options)
            answer = (re.findall(r"\w+", tokenizer.decode(written[0, tokens.shape[1] :])) or [""])[0]
            if cache is not None:
                cache.crop(text.shape[1] - cache.get_seq_length())  # a negative number of tokens to remove
        results.append(int(answer == question.answer))
    return results


def shares(rows: Iterable[dict[str, Any]]) -> dict[str, str]:
    """Return for each task the share of answered questions, its standard error and their number, as text."""
    by_task: dict[str, list[int]] = defaultdict(list)
    for row in rows:
        by_task[row["task"]] += row["scores"]
    texts = {}
    for task, values in by_task.items():
        share = sum(values) / len(values)
        texts[task] = f"{share:.2f} ± {(share * (1 - share) / len(values)) ** 0.5:.2f} of {len(values)}"
    return texts


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    disable_progress_bar()
    tasks, path = args.task or [*TASKS], args.text
    try:
        text = NOISE if path is None else path.read_text(encoding="utf-8")
        path = args.json
        rows = list(json.loads(path.read_bytes())["rows"]) if path.exists() else []
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise DataError(path, f"cannot be read ({error})", "Choose another file") from None
    if not text.strip():
        raise DataError(args.text, "contains no text", "Choose another file")
    for folder in args.model:
        model = load_whole(AutoModelForCausalLM, folder).eval().to(args.device)
        tokenizer = load_tokenizer(folder)
        same = {"model": folder, "length": args.length, "text": hashlib.sha256(text.encode()).hexdigest()[:16]}
        for task, number in ((task, number) for number in range(args.haystacks) for task in tasks):
            row = {**same, "task": task, "haystack": number}
            if not any(row.items() <= old.items() for old in rows):
                haystack = Haystack.draw(task, tokenizer, args.length, number, text)
                rows.append(row | {"scores": scores(model, tokenizer, haystack)})
                write_json(args.json, {"rows": rows})
        print(folder, shares(row for row in rows if same.items() <= row.items()), flush=True)


if __name__ == "__main__":
    main()
