"""Measure strict causality of every causal mechanism in fp32, bf16 and fp16: the change of nats before a position when
its token and all later ones are replaced, and the difference between cached decoding and a forward pass.

    python tools/bench/causality.py --output causality.json

Runs in one process on a CPU with random weights. Writes the file after every case and prints a Markdown table.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch

from megasparse.config.attention import MECHANISMS, AttentionConfig
from megasparse.config.schema import ModelConfig, PositionsConfig
from megasparse.model.build import build_model
from megasparse.ops.random import RngContext

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
DECODED = 64
"""Number of tokens decoded after the prompt."""


def random_tokens(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (1, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def measure(kind: str, dtype: str, length: int, layers: int, decode: bool) -> dict[str, object]:
    """Return the largest change of nats before a position, the number of changed nats, and the same for decoding."""
    positions = PositionsConfig(kind="rotary")
    config = ModelConfig(
        max_length=length, layers=layers, d_model=64, d_ff=128, heads=2, positions=positions,
        attention=AttentionConfig.model_validate({"pattern": [kind]}),
    )  # fmt: skip
    model: Any = build_model(config, seed=0).to(DTYPES[dtype]).eval()
    rng = RngContext.evaluation(0, 1)
    started, tokens = time.monotonic(), random_tokens(length, 0)
    nats = model.token_scores(tokens, rng).nats
    first = length // 3 + 5
    other = tokens.clone()
    other[:, first:] = (tokens[:, first:] + 1 + random_tokens(length - first, 1) % 255) % 256
    moved = (model.token_scores(other, rng).nats - nats)[:, :first].abs()
    case: dict[str, object] = {
        "mechanism": kind, "dtype": dtype, "length": length, "first_replaced": first,
        "moved_nats": moved.max().item(), "moved_tokens": int((moved > 0).sum()), "strict": not model.leaks,
    }  # fmt: skip
    if decode:
        cache, prompt = model.new_cache(1, 0), length - DECODED
        logits = [model.prefill(tokens[:, :prompt], cache)]
        logits += [model.decode(tokens[:, t], cache) for t in range(prompt, length - 1)]
        decoded = -torch.log_softmax(torch.stack(logits, 1), -1).gather(-1, tokens[:, prompt:, None]).squeeze(-1)
        error = (decoded - nats[:, prompt:]).abs()
        case |= {"decoded_nats": error.max().item(), "decoded_tokens": int((error > 0).sum())}
    return case | {"seconds": round(time.monotonic() - started, 1)}


def table(cases: list[dict[str, object]]) -> str:
    lines = [
        "| mechanism | dtype | tokens | moved nats | tokens moved | cached decoding |",
        "|---|---|---|---|---|---|",
    ]
    for case in cases:
        decoded = f"{case['decoded_nats']:.1e}" if "decoded_nats" in case else "–"
        row = [case["mechanism"], case["dtype"], f"{case['length']:,}", f"{case['moved_nats']:.1e}"]
        lines.append("| " + " | ".join(map(str, [*row, case["moved_tokens"], decoded])) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--decode-at", type=int, default=4096, help="length at which decoding is measured")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--mechanisms", nargs="+", default=list(MECHANISMS))
    args = parser.parse_args()
    cases: list[dict[str, object]] = []
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "layers": args.layers, "d_model": 64}
    for length in args.lengths:
        for kind in args.mechanisms:
            section = getattr(AttentionConfig(), kind)
            if section.bidirectional_only is not None:
                continue
            for dtype in DTYPES:
                cases.append(measure(kind, dtype, length, args.layers, length == args.decode_at))
                args.output.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")
    print(table(cases))


if __name__ == "__main__":
    main()
