"""Passkey retrieval (Mohtashami & Jaggi 2023): a number hidden in a long text, asked for at its end."""

import random
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

KEY = "\nThe pass key is {number}. Remember it. {number} is the pass key.\n"
QUESTION = "\nWhat is the pass key? The pass key is "
"""The space is asked with: tokenizers that cut numbers into digits have it as a token, where a model may as well say
"a", which is no matter of finding."""
ANSWER = "{number}"


@dataclass(frozen=True)
class Trial:
    """A text with a number of five digits. tokens: (1, L) int64, whose last `answer` tokens are the number. depth: the
    share of the text before the place where it is hidden.
    """

    tokens: Tensor
    answer: int
    depth: float

    @staticmethod
    def draw(tokenizer: Any, filler: list[int], length: int, number: int) -> "Trial":
        """The trial of a number (0, 1, …): which digits and which depth are a function of it. filler: tokens of a text,
        `length` at least.
        """
        drawn = random.Random(f"pass key {number}")
        digits, depth = drawn.randrange(10_000, 100_000), drawn.random()
        parts = [
            tokenizer(text.format(number=digits), add_special_tokens=False)["input_ids"]
            for text in (KEY, QUESTION, ANSWER)
        ]
        room = length - sum(map(len, parts))
        first = round(depth * room)
        tokens = filler[:first] + parts[0] + filler[first:room] + parts[1] + parts[2]
        return Trial(torch.tensor([tokens]), len(parts[2]), depth)


@torch.no_grad()
def retrieved(model: PreTrainedModel, trial: Trial) -> bool:
    """Whether greedy decoding would give the number: each of its tokens is the likeliest after those before it."""
    base: Any = model.base_model
    head: Any = model.get_output_embeddings()
    hidden = base(input_ids=trial.tokens, use_cache=False).last_hidden_state
    likeliest = head(hidden[:, -trial.answer - 1 : -1]).argmax(-1)
    return torch.equal(likeliest, trial.tokens[:, -trial.answer :])
