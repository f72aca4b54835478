"""Text from a model, token by token, by cached decoding.

B batch (1 here), V vocabulary.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from megasparse.errors import ConfigError


def check_request(prompt: int, tokens: int, max_length: int, temperature: float, top_p: float) -> None:
    """Raise ConfigError unless `tokens` tokens fit behind a prompt of `prompt` tokens, and the sampling is possible."""
    if tokens < 0:
        raise ConfigError("--tokens", f"{tokens} is negative", "Ask for 1 or more")
    if prompt + tokens > max_length:
        mend = f"Ask for {max(0, max_length - prompt)} or fewer, or shorten the prompt"
        problem = f"{prompt} tokens of prompt and {tokens} more do not fit model.max_length = {max_length}"
        raise ConfigError("--tokens", problem, mend)
    if not 0.0 <= temperature < float("inf"):
        raise ConfigError(
            "--temperature", f"{temperature} is not a number >= 0", "0 takes the likeliest token, 1 samples"
        )
    if not 0.0 < top_p <= 1.0:
        raise ConfigError("--top-p", f"{top_p} is not in (0, 1]", "1 samples from all tokens")


@torch.no_grad()
def generate(
    model: Any,
    prompt: Tensor,
    tokens: int,
    *,
    hash_seed: int,
    seed: int = 0,
    temperature: float = 1.0,
    top_p: float = 1.0,
    vocabulary: int | None = None,
) -> Iterator[int]:
    """Yield `tokens` token ids that continue `prompt` (n,) int64, which stands on the model's device.

    model: has new_cache(batch, seed), and prefill((B, n) tokens, cache) and decode((B,) tokens, cache), which return
    the next token's logits (B, V). hash_seed: of the rotations, the run's seed. seed: of the sampling. vocabulary: ids
    from here on are never taken (a softmax wider than the tokenizer); None takes all.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(1, hash_seed)
    logits = model.prefill(prompt.unsqueeze(0), cache) if tokens else None
    for count in range(tokens):
        assert logits is not None
        token = sample(logits[0, :vocabulary].float().cpu(), temperature, top_p, generator)
        yield token
        if count + 1 < tokens:
            logits = model.decode(torch.tensor([token], device=prompt.device), cache)


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id from logits (V,): the likeliest at temperature 0, else drawn from the nucleus, the fewest likeliest
    tokens whose probabilities at this temperature sum to `top_p` or more."""
    if temperature == 0.0:
        return int(logits.argmax())
    scaled = (logits.double() - logits.double().max()) / temperature
    probabilities, order = torch.softmax(scaled, dim=0).sort(descending=True, stable=True)
    before = probabilities.cumsum(0) - probabilities  # of the likelier tokens
    nucleus = probabilities * (before < top_p)
    return int(order[torch.multinomial(nucleus, 1, generator=generator)])
