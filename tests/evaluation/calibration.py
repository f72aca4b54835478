"""What a calibration of a decoder's predictions would save: mixtures with a floor, and temperatures.

    python -m tests.evaluation.calibration --checkpoint runs/quickstart --data data/quickstart \\
      --json docs/measured/calibration.json

p becomes (1 − ε)·p + ε·q with q uniform or the training split's frequencies, or p^(1/T) normalised. ε and T are chosen
on the validation split and judged on the test split; all whole windows of both are scored.
"""

import argparse
import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import megasparse
from megasparse.data.index import Index
from megasparse.data.reader import EvaluationStream
from megasparse.evaluation.bits_per_dim import windows
from megasparse.ops.random import RngContext
from tools.bench.measuring import machine

SHARES = [10 ** (-k / 4) for k in range(4, 29)]
TEMPERATURES = [0.9, 0.95, 0.98, 1.0, 1.02, 1.05, 1.1]
DEAR = 16
"""Bits of a token from which on it counts as dear."""


@torch.no_grad()
def predictions(model: Any, index: Index, split: str, batch: int = 16) -> tuple[Tensor, Tensor]:
    """Of the whole windows of a split: ln p (N, V) fp32, and the tokens (N,)."""
    stream, length = EvaluationStream(index, split), model.config.max_length
    starts = [each.start for each in windows(stream.tokens, length) if each.stop - each.start == length]
    scores, tokens = [], []
    for first in range(0, len(starts), batch):
        group = starts[first : first + batch]
        read = torch.stack([stream.read(start, start + length) for start in group]).long()
        draws = dataclasses.replace(RngContext.evaluation(0, len(group)), samples=torch.tensor(group))
        scores.append(F.log_softmax(model.window_logits(read, draws).float(), -1).flatten(0, 1))
        tokens.append(read.flatten())
    return torch.cat(scores), torch.cat(tokens)


def bits(scores: Tensor, tokens: Tensor) -> Tensor:
    return -scores.gather(1, tokens[:, None])[:, 0].double() / math.log(2)


def mixed(scores: Tensor, tokens: Tensor, share: float, floor: Tensor) -> float:
    """Mean bits of the mixture, whose floor is (V,) fp64."""
    own = scores.gather(1, tokens[:, None])[:, 0].double().exp()
    return float(-((1 - share) * own + share * floor[tokens]).log2().mean())


def measure(checkpoint: Path, data: Path) -> dict[str, Any]:
    model, index = megasparse.load_checkpoint(checkpoint).model.eval(), Index.load(data)
    validation, test = predictions(model, index, "validation"), predictions(model, index, "test")
    train = EvaluationStream(index, "train")
    counts = torch.bincount(train.read(0, train.tokens).long(), minlength=model.config.vocabulary).double() + 1
    rows = []
    for name, floor in (("uniform", torch.ones_like(counts)), ("frequencies", counts)):
        chosen = min(SHARES, key=lambda share: mixed(*validation, share, floor / floor.sum()))
        found = [mixed(*split, chosen, floor / floor.sum()) for split in (validation, test)]
        rows.append({"mixture": name, "share": chosen, "validation": found[0], "test": found[1]})

    def heated(split: tuple[Tensor, Tensor], temperature: float) -> float:
        return float(bits(F.log_softmax(split[0] / temperature, -1), split[1]).mean())

    best = min(TEMPERATURES, key=lambda temperature: heated(validation, temperature))
    rows.append({"temperature": best, "validation": heated(validation, best), "test": heated(test, best)})
    dear = {name: bits(*split) for name, split in (("validation", validation), ("test", test))}
    return {
        "plain": {name: float(each.mean()) for name, each in dear.items()},
        "dear_tokens": {name: int((each > DEAR).sum()) for name, each in dear.items()},
        "dear_bits_per_dim": {name: float(each[each > DEAR].sum() / len(each)) for name, each in dear.items()},
        "calibrated": rows,
        "seed": 0,
        "machine": machine(torch.device("cpu")),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option in ("--checkpoint", "--data", "--json"):
        parser.add_argument(option, type=Path, required=True)
    args = parser.parse_args()
    args.json.write_text(json.dumps(measure(args.checkpoint, args.data), indent=1) + "\n")
