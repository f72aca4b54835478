"""Teach the hashes and sketches of a replaced model to select the keys that the model's full attention uses.

All other weights are frozen. The model runs with full attention, and each layer's mechanisms learn before the next
layer runs, so only one layer's queries and keys are in memory. B batch, L length.
"""

import hashlib
import json
import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from io import TextIOWrapper
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from megasparse.attention.contract import Attention, RecomputeCache
from megasparse.attention.heads import Padding
from megasparse.attention.observation import Call, each_call
from megasparse.errors import DataError, HubError
from megasparse.files import open_file, write_file
from megasparse.hub.replace import ENTRY, evaluating
from megasparse.hub.replaced_layer import NAME, Mechanisms
from megasparse.ops.operator import device_of
from megasparse.ops.random import RngContext

UPDATES = 8
"""Adam steps per layer in one pass of the model, each on newly drawn queries."""
COURSE = "course.safetensors"
_HELD_OUT = 1 << 30  # step of the draws of measurements


class Teacher:
    """Trainer of the mechanisms of a replaced model: they learn from its full attention which keys to select.

    Progress can be saved in a folder after every pass; an interrupted training resumes from it, bit-identical.
    """

    def __init__(self, model: PreTrainedModel, seed: int = 0):
        """seed: for the draws of queries."""
        self.model, self.seed, self.passes, self.dtype = model, seed, 0, model.dtype
        self.layers = {module.layer: module for module in model.modules() if isinstance(module, Mechanisms)}
        self.causal = all(layer.causal for layer in self.layers.values())
        self._cast(torch.promote_types(self.dtype, torch.float32))  # Adam's steps vanish or overflow in half precision
        self.optimizers = {
            (number, kind): torch.optim.Adam(
                [{"params": [x], "name": name} for name, x in mechanism.named_parameters()]
            )
            for number, layer in self.layers.items()
            for kind, mechanism in layer.items()
            if cast(Attention, mechanism).teaching_rate("") is not None
        }
        if not self.optimizers:
            hint = (
                'Replace its attention by {"kind": "smart_bird", "sketch": "heads", "objective": "attention"} or '
                '{"kind": "lha", "joint": false, "utility": "collisions"}'
            )
            raise HubError(type(model).__name__, "no part of its attention can be taught", hint)

    def teach(
        self, windows: list[list[int]], held_out: list[list[int]], passes: int, folder: Path | None = None
    ) -> tuple[float, float]:
        """Learn from up to `passes` windows in total, each epoch in another order.

        Args:
            windows, held_out: Token ids for training and evaluation, all of one length, without padding.
            passes: Passes of the model in total, with the passes of an interrupted training.
            folder: Saves progress after every pass, and resumes from it.

        Returns:
            The mean loss on the held-out windows before and after.
        Raises:
            HubError: The windows are not longer than the attention window; `folder` belongs to another training, or is
                damaged.
        """
        configs = [cast(Attention, self.layers[number][kind]).config for number, kind in self.optimizers]
        near = max((2 * config.chunk for config in configs if config.local), default=0)
        if len(windows[0]) <= near and self.causal:
            problem = f"{len(windows[0])} tokens contain no key beyond the window of {near}"
            raise HubError("length", problem, f"Teach with more than {near} tokens, or replace with a smaller chunk")
        self._cast(torch.promote_types(self.dtype, torch.float32))
        identity = self._identity(windows, held_out, passes)
        before = None if folder is None else self._resume(folder / COURSE, identity)
        if before is None:
            before = self._loss_on(held_out)
            self._keep(folder, before, identity)
        progress = tqdm(total=passes, initial=self.passes, unit="pass", disable=None)
        while self.passes < passes:
            epoch, position = divmod(self.passes, len(windows))
            order = random.Random(f"{self.seed}/{epoch}").sample(range(len(windows)), len(windows))
            loss = self.learn(torch.tensor([windows[order[position]]]), self.passes / passes)
            self._keep(folder, before, identity)
            progress.update()
            progress.set_postfix(loss=f"{loss:.4f}")
        progress.close()
        self._cast(self.dtype)
        return before, self._loss_on(held_out)

    def learn(self, tokens: Tensor, progress: float = 0.0) -> float:
        """Learn from texts (B, L) int64 without padding. Return the mean loss of mechanisms, before each update.
        progress: completed fraction of the passes.
        """
        for (number, kind), optimizer in self.optimizers.items():
            mechanism = cast(Attention, self.layers[number][kind])
            for group in optimizer.param_groups:
                group["lr"] = mechanism.teaching_rate(group["name"], progress)
        loss = self._run(tokens, self.passes * UPDATES, UPDATES)
        self.passes += 1
        if not math.isfinite(loss):
            raise HubError(type(self.model).__name__, f"its loss is {loss}", "Use finite weights in bf16 or fp32")
        return loss

    def measure(self, tokens: Tensor) -> float:
        return self._run(tokens, _HELD_OUT, 0)

    def _cast(self, dtype: torch.dtype) -> None:
        for layer in self.layers.values():
            layer.to(dtype)

    def _loss_on(self, windows: list[list[int]]) -> float:
        return sum(self.measure(torch.tensor([tokens])) for tokens in windows) / len(windows)

    def _run(self, tokens: Tensor, step: int, updates: int) -> float:
        losses: list[Tensor] = []
        base: Any = self.model.base_model
        options = {"use_cache": False} if self.causal else {}

        def listen(call: Call) -> None:
            losses.extend(self._learn_layer(call, step, updates))

        with torch.no_grad(), full_attention(self.model), each_call(self.model, listen):
            base(input_ids=tokens.to(device_of(self.model)), **options)
        return float(torch.stack(losses).mean())

    @torch.enable_grad()
    def _learn_layer(self, call: Call, step: int, updates: int) -> list[Tensor]:
        number, inputs, losses = call.context.layer, call.inputs, []
        layer = self.layers[number]
        parts = layer.split_heads_by_mechanism(inputs.q, inputs.k, inputs.v, Padding(), call.context)
        for kind, (mechanism, heads, context) in zip(layer.split, parts, strict=True):
            if (optimizer := self.optimizers.get((number, kind))) is None:
                continue
            for update in range(max(1, updates)):
                rng = RngContext(self.seed, step + update, torch.arange(len(call.x)), training=True)
                drawn = replace(context, rng=rng, recompute=RecomputeCache())
                loss = mechanism.learn(call.x, heads, drawn)[0] * (mechanism.spec.layers / mechanism.auxiliary_weight)
                if updates:
                    optimizer.zero_grad()
                    loss.backward()
                    optimizer.step()
                losses.append(loss.detach())
        return losses

    def _identity(self, windows: list[list[int]], held_out: list[list[int]], passes: int) -> str:
        settings = json.dumps([getattr(self.model.config, ENTRY), windows, held_out, passes, self.seed], sort_keys=True)
        digest = hashlib.sha256(settings.encode())
        for name, weight in self.model.state_dict().items():  # a few numbers per weight identify the model
            digest.update(f"{name} {weight.flatten()[:8].tolist()}".encode())
        return digest.hexdigest()

    @torch.no_grad()
    def _resume(self, path: Path, identity: str) -> float | None:
        """Restore the saved state, if any, and return the loss before the training."""
        if not path.exists():
            return None
        damages, again = (
            (SafetensorError, OSError, ValueError, LookupError, TypeError),
            f"Remove {path.parent} to start again",
        )
        with HubError.instead_of(damages, path, "is damaged ({})", again):
            open_file(path).close()  # reject a pipe, which would block
            with safe_open(path, framework="pt") as file:
                course = file.metadata()
            stored = load_file(path)
            saved, passes, before = course["identity"], int(course["passes"]), float(course["before"])
        if saved != identity:
            raise HubError(path, "belongs to another training", f"Use the same arguments, or remove {path.parent}")
        tensors = dict(self._state())
        if {name: x.shape for name, x in stored.items()} != {name: x.shape for name, x in tensors.items()}:
            raise HubError(path, "does not fit this model's mechanisms", again)
        for name, tensor in tensors.items():
            tensor.copy_(stored[name])
        self.passes = passes
        return before

    def _keep(self, folder: Path | None, before: float, identity: str) -> None:
        if folder is None:
            return
        course = {"identity": identity, "passes": str(self.passes), "before": str(before)}
        with HubError.instead_of(OSError, folder, "cannot be written ({})", "Free some space, or remove it"):
            folder.mkdir(parents=True, exist_ok=True)
            write_file(folder / COURSE, save({name: tensor.contiguous() for name, tensor in self._state()}, course))

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the learned weights and Adam's state, by name."""
        for (number, kind), optimizer in self.optimizers.items():
            for position, group in enumerate(optimizer.param_groups):
                (weight,) = group["params"]
                state = optimizer.state[weight]
                if not state:  # Adam's initial state
                    state["step"] = torch.zeros(())
                    state |= {"exp_avg": torch.zeros_like(weight), "exp_avg_sq": torch.zeros_like(weight)}
                name = f"{number}.{kind}.{position}"
                yield f"{name}.weight", weight.detach()
                yield from ((f"{name}.{key}", state[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


@contextmanager
def full_attention(model: PreTrainedModel) -> Iterator[None]:
    """Replace every mechanism by full attention, without dropout."""
    replaced = [(module, getattr(module, NAME)) for module in model.modules() if hasattr(module, NAME)]
    with evaluating(model):
        try:
            for module, mechanisms in replaced:
                setattr(module, NAME, mechanisms.with_full_attention())
            yield
        finally:
            for module, mechanisms in replaced:
                setattr(module, NAME, mechanisms)


def read_windows(tokenizer: Any, paths: list[Path], length: int) -> list[list[int]]:
    """Return the token ids of all windows, of at most `length` tokens, of text files and of text files in folders."""
    files = [file for path in paths for file in (sorted(path.rglob("*.txt")) if path.is_dir() else [path])]
    windows: list[list[int]] = []
    for file in files:
        damages, problem = (OSError, UnicodeDecodeError), "cannot be read as UTF-8 text ({})"
        with DataError.instead_of(damages, file, problem, "Use text files"), open_file(file) as stream:
            text = TextIOWrapper(stream, encoding="utf-8").read()
        if tokenizer.is_fast:
            windows += tokenizer(text, truncation=True, max_length=length, return_overflowing_tokens=True)["input_ids"]
        else:
            tokens = tokenizer(text)["input_ids"]
            windows += [tokens[first : first + length] for first in range(0, max(1, len(tokens)), length)]
    return windows
