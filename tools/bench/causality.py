"""Measure strict causality of every causal mechanism in fp32, bf16 and fp16: the change of nats before a position when
its token and all later ones are replaced, and the difference between cached decoding and a forward pass.

    python tools/bench/causality.py --output causality.json
    python tools/bench/causality.py --windowed --output causality_windowed.json

With --windowed it measures mechanisms with a window, in models and in replaced decoders of transformers. Runs in one
process on a CPU with random weights. Without it, writes the file after every case and prints a Markdown table.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 16384])
    parser.add_argument("--decode-at", type=int, default=4096, help="length at which decoding is measured")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--mechanisms", nargs="+", metavar="NAME", help="(default: all)")
    parser.add_argument("--windowed", action="store_true", help="cached decoding with windows, in replaced models too")
    return parser.parse_args()


if __name__ == "__main__":  # help and mistakes end before the slow imports
    arguments()

import torch

from megasparse.attention.heads import Padding
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


WINDOW = {"local": True, "chunk": 16, "sinks": 2}
HEADS = {"sketch_heads": 2, "keys": 24}
WINDOWED: dict[str, dict[str, Any]] = {
    "full": {}, "local": {"chunk": 16, "sinks": 2}, "lsh": WINDOW, "lha": WINDOW, "ranked": {**WINDOW, **HEADS},
    "smart_bird": {**WINDOW, **HEADS, "sketch": "heads", "objective": "attention"},
}  # fmt: skip


@torch.no_grad()
def measure_windowed(kind: str, dtype: str, key_heads: int, step: int, replaced: bool) -> dict[str, object]:
    """Return the largest difference of logits between cached decoding and a whole pass, over two seeds. step: number of
    tokens that join the cache at once, 1 in models that were not replaced.
    """
    length, largest, scale = 300, 0.0, 0.0
    sizes: dict[str, Any] = {"d_model": 64, "d_ff": 128, "heads": 4, "key_heads": key_heads}
    prompt, section = length - DECODED, {"pattern": [kind], kind: WINDOWED[kind]}
    for seed in (0, 1):
        tokens = random_tokens(length, seed)
        if replaced:
            whole, decoded = _replaced_logits(section, dtype, key_heads, seed, tokens, prompt, step)
        else:
            positions = PositionsConfig(kind="rotary")
            config = ModelConfig(
                max_length=length,
                layers=3,
                positions=positions,
                attention=AttentionConfig.model_validate(section),
                **sizes,
            )
            model: Any = build_model(config, seed).to(DTYPES[dtype]).eval()
            streams = model.streams(tokens, RngContext.evaluation(seed, 1), Padding())[0]
            whole, cache = model.logits(streams)[:, prompt:length], model.new_cache(1, seed)
            logits = [model.prefill(tokens[:, :prompt], cache)]
            logits += [model.decode(tokens[:, t], cache) for t in range(prompt, length - 1)]
            decoded = torch.stack(logits, 1)
        largest, scale = max(largest, (decoded - whole).abs().max().item()), max(scale, whole.std().item())
    case = {"replaced": replaced, "mechanism": kind, "dtype": dtype, "key_heads": key_heads, "tokens_at_once": step}
    return {**case, "decoded_logits": largest, "deviation_of_logits": scale}


def _replaced_logits(
    section: dict[str, Any], dtype: str, key_heads: int, seed: int, tokens: torch.Tensor, prompt: int, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a replaced Llama with random weights after `prompt` tokens, of a pass and from a cache."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from megasparse.hub import replace_attention

    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=256, max_position_embeddings=512, num_key_value_heads=key_heads, **sizes)
    )
    for weight in model.parameters():
        weight.mul_(4.0 if weight.dim() > 1 else 1.0)  # new models hardly attend
    model = replace_attention(model.eval(), section, seed=seed).to(DTYPES[dtype])
    whole = model(tokens, use_cache=False).logits[:, prompt:]
    cache = model(tokens[:, :prompt], use_cache=True).past_key_values
    parts = tokens[:, prompt:].split(step, dim=1)
    decoded = torch.cat([model(part, past_key_values=cache, use_cache=True).logits for part in parts], 1)
    return whole.float(), decoded.float()


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
    args = arguments()
    cases: list[dict[str, object]] = []
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "layers": args.layers, "d_model": 64}
    if args.windowed:
        arms = product(WINDOWED, ("fp32", "bf16"), (4, 2), ((1, False), (1, True), (16, True)))
        for kind, dtype, key_heads, (step, replaced) in arms:
            cases.append(measure_windowed(kind, dtype, key_heads, step, replaced))
            print(cases[-1], flush=True)
        args.output.write_text(json.dumps({**facts, "layers": 3, "cases": cases}, indent=1) + "\n")
        return
    for length in args.lengths:
        for kind in args.mechanisms or MECHANISMS:
            section = getattr(AttentionConfig(), kind)
            if section.bidirectional_only is not None:
                continue
            for dtype in DTYPES:
                cases.append(measure(kind, dtype, length, args.layers, length == args.decode_at))
                args.output.write_text(json.dumps({**facts, "cases": cases}, indent=1) + "\n")
    print(table(cases))


if __name__ == "__main__":
    main()
