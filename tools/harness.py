"""Run EleutherAI's lm-evaluation-harness on checkpoints. It lacks plugins, so this file registers `megasparse`.

    pip install '.[harness]'
    python tools/harness.py --model megasparse --model_args checkpoint=runs/quickstart --tasks wikitext

`lm_eval` documents the options; `--model_args checkpoint=RUN,stride=512` sets the new tokens per window. Texts are
scored like the splits of `megasparse evaluate`: in windows of the model's length, the first token of each from the
learned start vector. A byte model's `bits_per_byte` is therefore its bits/dim.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

try:
    from lm_eval.__main__ import cli_evaluate
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError:
    sys.exit("lm_eval is not installed. Install it: pip install -e '.[harness]'")
import torch
from torch import Tensor
from tqdm import tqdm

from megasparse.errors import ConfigError, report_user_errors
from megasparse.evaluation.bits_per_dim import Windows, of_model, refuse_leaks, score
from megasparse.evaluation.generate import end_tokens, generate
from megasparse.model.decoder import Causal
from megasparse.ops.random import RngContext
from megasparse.runs.api import load_checkpoint


class Text:
    """The tokens of a text (n,) as a `Stream`."""

    def __init__(self, values: Tensor):
        self.values, self.tokens = values, len(values)

    def read(self, start: int, stop: int) -> Tensor:
        return self.values[start:stop]


@register_model("megasparse")
class MegasparseLM(LM):
    """A pretrained decoder.

    Args:
        checkpoint: A checkpoint's folder, or a run's folder (its newest checkpoint).
        stride: New tokens per window of a text that is longer than the model; by default the whole window.
        device: cpu or cuda; by default the checkpoint's `run.device`.
    """

    def __init__(self, checkpoint: str, stride: int | None = None, device: str | None = None, **_: Any):
        super().__init__()
        overrides = [] if device is None else [f"run.device={device}"]
        self.model, self.config, self.tokenizer, self._device = load_checkpoint(checkpoint, overrides)
        if not isinstance(self.model, Causal):
            raise ConfigError("checkpoint", f"{checkpoint} is not a decoder", "Give a pretrained decoder")
        refuse_leaks(self.model.leaks)
        self.stride = stride

    def encode(self, text: str) -> Tensor:
        """Return the tokens of a text, (n,) int64."""
        return self.tokenizer.encode(text).long().to(self._device)

    def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in nats."""
        seed, results = self.config.run.seed, []
        windows = Windows(self.config.evaluation_length, self.stride)
        for (text,) in tqdm([request.args for request in requests], disable=disable_tqdm):
            stream = Text(self.encode(text))
            results.append(-score(of_model(self.model), stream, windows, seed).nats)
        return results

    @torch.no_grad()
    def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Return the log-likelihood of each continuation after its context, in nats, and True if it is the greedy one.
        Both together keep only their last tokens if they are longer than the model.
        """
        results = []
        for context, continuation in tqdm([request.args for request in requests], disable=disable_tqdm):
            tokens = self.encode(context + continuation)
            count = min(len(tokens) - len(self.encode(context)), self.config.model.max_length)
            rng = RngContext.evaluation(self.config.run.seed, 1)
            nats, correct, _ = self.model.token_scores(tokens[None, -self.config.model.max_length :], rng)
            first = nats.shape[1] - count
            results.append((-float(nats[0, first:].double().sum()), bool(correct[0, first:].all())))
        return results

    def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each context, up to the first of its stop strings or the end of a text."""
        results, ends, longest = [], end_tokens(self.config, self.tokenizer), self.config.model.max_length
        for context, settings in tqdm([request.args for request in requests], disable=disable_tqdm):
            stops, count = settings.get("until") or [], min(int(settings.get("max_gen_toks", 256)), longest - 1)
            stops = [stops] if isinstance(stops, str) else stops
            temperature = float(settings.get("temperature", 0.0)) if settings.get("do_sample") else 0.0
            prompt = self.encode(context)[count - longest :]
            tokens = generate(
                self.model, prompt, count, hash_seed=self.config.run.seed, vocabulary=self.tokenizer.vocabulary,
                ends=ends, temperature=temperature,
            )  # fmt: skip
            text = ""
            for part in self.tokenizer.text(tokens):
                text += part
                if any(stop in text for stop in stops):
                    break
            results.append(min((text.partition(stop)[0] for stop in stops), key=len, default=text))
        return results


if __name__ == "__main__":
    report_user_errors(cli_evaluate)()
