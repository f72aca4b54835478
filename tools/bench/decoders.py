r"""Compare attention mechanisms inside a pretrained decoder on your own texts: nats per token, keys per query, the
fraction of full attention on these keys, and seconds.

    python tools/bench/decoders.py --model MODEL --texts held_out/ --length 4096 --json decoder.json \
      --arm 'full={"kind": "full"}' --arm 'window, sinks={"kind": "local", "chunk": 128, "sinks": 4}' \
      --arm 'oracle={"best": 96, "window": 96, "sinks": 4}' --arm taught=TAUGHT

An arm is given by settings of `megasparse replace-attention` for MODEL, a replaced folder, or an oracle: the `best`
keys of each head, a window and the first tokens. FOLDER@P chooses pages of P keys, as servers do, instead of as many
keys; a page scores as the best of its keys beyond the window and the sinks. Arms with random draws are measured for
--seeds seeds; folders of several seeds may share a NAME. The first window of --length tokens of every text is used.
Then each arm answers the questions of tools/retrieval.py about --haystacks texts per task, parts of the first text with
hidden facts. Rows that exist in FILE are skipped, so the command can be stopped and repeated.

    OMP_NUM_THREADS=1 python tools/bench/decoders.py --model MODEL --layers 3 --speed 4096 8192 --json speed.json \
      --arm 'sketch={"kind": "smart_bird", "keys": 128, "sketch": "heads", "objective": "attention"}'

--speed measures seconds of these lengths instead, on random tokens: prefill, one decoded token, TURN more tokens on the
filled cache and alone, and bytes of the cache, each next to the model with transformers' SDPA, in turns.

Seconds are CPU seconds of all threads; for GPUs give --device cuda.

H heads, S queries, L length, D head dim.
"""

import argparse
import hashlib
import json
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megasparse.cli.arguments import require_model, require_paths
from megasparse.errors import ConfigError, DataError, report_user_errors


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of a pretrained decoder")
    parser.add_argument("--texts", type=Path, nargs="+", default=[], metavar="FILE", help="files, folders with *.txt")
    parser.add_argument("--speed", type=int, nargs="+", metavar="L", help="measure seconds of these lengths instead")
    parser.add_argument("--layers", type=int, metavar="N", help="of a decoder whose speed is measured (default: all)")
    parser.add_argument("--device", default="cpu", help="(default: cpu)")
    parser.add_argument("--repeats", type=int, default=3, help="measurements of speed (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens per text (default: %(default)s)")
    parser.add_argument("--arm", action="append", required=True, metavar="NAME=VALUE", help="may be repeated")
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="seeds of arms with draws (default: 1)")
    parser.add_argument("--haystacks", type=int, default=2, metavar="N", help="per task of retrieval (default: 2)")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE", help="file for the rows")
    args = parser.parse_args(words)
    require_model(args.model)
    require_paths(*args.texts)
    if not (args.texts or args.speed):
        raise ConfigError("--texts", "it is missing", "Give text files, or --speed")
    if args.length < 2:
        raise ConfigError("--length", f"{args.length} is too short", "Give 2 or more")
    return args


if __name__ == "__main__":  # help and mistakes end before the slow imports
    report_user_errors(arguments)()

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from megasparse.attention import taught_sketch
from megasparse.attention.contract import Attention, AttentionOutput
from megasparse.attention.observation import Call, each_call
from megasparse.config.files import parse_json
from megasparse.evaluation.outputs import write_json
from megasparse.hub.checker import load_tokenizer
from megasparse.hub.replace import ENTRY, load_plain, load_replaced, mechanisms, replace_attention, replacement_of
from megasparse.hub.teaching import read_windows
from megasparse.ops.sketch import KeyChoiceSpec, rounded_ranks
from megasparse.tasks.metrics import t_interval
from tools.bench.visible_keys import best_pairs, scored_pairs, seen_pairs, weights
from tools.retrieval import TASKS, Haystack, scores, shares

QUERIES = 128
"""Number of evenly spread queries per text whose keys are counted."""
_TILE = 128
_TOKENS = 512  # tokens whose logits are computed at a time


@dataclass(frozen=True)
class Best:
    """The oracle: the `count` best keys of each head, a window and sinks."""

    count: int
    window: int
    sinks: int

    def pairs(self, weight: Tensor, queries: Tensor) -> Tensor:
        return best_pairs(weight, queries, self.count, self.window, self.sinks)

    def attend(self, call: Call) -> Tensor:
        """Return softmax attention to the oracle's keys, computed in tiles of queries: (1, H, L, D)."""
        out = []
        for queries in torch.arange(call.inputs.q.shape[2], device=call.inputs.q.device).split(_TILE):
            k, v = (x[:, :, : int(queries[-1]) + 1] for x in (call.inputs.k, call.inputs.v))
            weight = weights(replace(call, inputs=call.inputs._replace(k=k, v=v)), queries)
            weight *= self.pairs(weight, queries)
            out.append((weight / weight.sum(-1, keepdim=True)).to(v.dtype) @ v[0])
        return torch.cat(out, dim=1)[None]


def chosen_pages(config: Any, page: int, q: Tensor, k: Tensor, spec: KeyChoiceSpec, *others: Any) -> Tensor:
    """Choose keys as `ops.sketch.chosen_keys` does, but K/P pages of P keys: (B, 1, Lq, K) int32. others: its other
    arguments, of which only `first_query` is used.
    """
    length, chosen = k.shape[1], []
    positions, ends = (torch.arange(0, length, step, device=q.device) for step in (1, page))
    for rows in positions[others[-1] :].split(_TILE):
        products = q[:, rows - others[-1]].double() @ k.double().mT
        near = (rows[:, None] // config.chunk - positions // config.chunk <= 1) & config.local
        hidden = near | (positions < config.sinks) | (positions > rows[:, None])
        ranks = rounded_ranks(products, q.shape[2], positions).masked_fill_(hidden, -torch.inf)
        of_pages = F.pad(ranks, (0, -length % page), value=-torch.inf).unflatten(-1, (-1, page)).amax(-1)
        first = of_pages.topk(min(spec.count // page, len(ends)), dim=-1).indices * page
        keys = (first.unsqueeze(-1) + torch.arange(page, device=q.device)).flatten(-2)
        chosen.append(keys.masked_fill(keys > rows[:, None], -1))
    return torch.cat(chosen, dim=1).unsqueeze(1).to(torch.int32)


@dataclass(frozen=True)
class Arm:
    """A named arm. attention: settings of `replace_attention`, {"best", "window", "sinks"}, or a folder. page: keys per
    page that the folder's sketches choose, or 1.
    """

    name: str
    attention: dict[str, Any] | Path
    page: int = 1

    @property
    def oracle(self) -> Best | None:
        settings = self.attention if isinstance(self.attention, dict) else {}
        return Best(settings["best"], settings["window"], settings["sinks"]) if "best" in settings else None

    def seeds(self, count: int) -> list[int]:
        """Return the seeds to measure: a folder's seed, the first `count` for arms with random draws, else 0."""
        if isinstance(self.attention, Path):
            entry = replacement_of(self.attention)
            require_pages(entry["attention"], self.page)
            return [entry["seed"]]
        return list(range(1 if self.oracle or self.attention.get("kind") in ("full", "local") else count))

    def model(self, plain: Path, length: int, seed: int, device: torch.device) -> PreTrainedModel:
        if isinstance(self.attention, Path):
            model = load_replaced(self.attention)
        else:
            settings = {"kind": "full"} if self.oracle else self.attention
            model = replace_attention(load_plain(plain), settings, max_length=length, seed=seed)
        nn.Module.to(model, device)
        return model.eval()


def require_pages(attention: dict[str, Any], page: int) -> None:
    """Raise ConfigError if P > 1 and sketches do not choose pages: `ranked` ranks the single keys of buckets."""
    if page > 1 and ("ranked" in attention or attention.get("smart_bird", {"keys": 0})["keys"] < page):
        raise ConfigError("--arm", f"pages of {page} keys need smart_bird with {page} keys or more", "Leave @P out")


def clock(device: torch.device) -> float:
    """Return CPU seconds of all threads, or for a GPU seconds after its work is done."""
    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize(device)
    return time.perf_counter()


@torch.no_grad()
def measure(model: PreTrainedModel, tokens: Tensor, oracle: Best | None, page: int = 1) -> dict[str, Any]:
    """Measure one text (1, L). page: see `Arm`.

    Returns:
        nats: mean over the tokens after the first. keys: visible keys per query, captured: fraction of the layer's full
        attention on them, and scored: see `scored_pairs`; means over QUERIES queries, heads and layers. seconds: of
        the pass without the counting, see `clock`. layers: captured per layer.
    """
    length, parts, device = tokens.shape[1], dict[int, list[tuple[float, float, float]]](), tokens.device
    queries = 1 + torch.arange(min(QUERIES, length - 1), device=device) * (length - 1) // min(QUERIES, length - 1)
    counting = 0.0

    def listen(call: Call) -> None:
        nonlocal counting
        start = clock(device)
        weight = weights(call, queries)
        masks = (oracle.pairs(weight, queries) if oracle else seen_pairs(call, queries)).expand_as(weight)
        scored = scored_pairs(call, queries)
        for head, mask in zip(weight, masks, strict=True):
            keys, share = mask.sum(-1).float().mean(), (head * mask).sum(-1).mean()
            parts.setdefault(call.context.layer, []).append((float(keys), float(share), scored))
        counting += clock(device) - start

    base: Any = model.base_model
    start = clock(device)
    with ExitStack() as stack:
        stack.enter_context(each_call(model, listen))
        stack.enter_context(attending(model, oracle, page))
        hidden = base(input_ids=tokens, use_cache=False).last_hidden_state[0]
    seconds = clock(device) - start - counting
    layers = [torch.tensor(parts[layer]).mean(0).tolist() for layer in sorted(parts)]
    return {
        "nats": nats(model, hidden, tokens[0]),
        "keys": sum(keys for keys, _, _ in layers) / len(layers),
        "captured": sum(share for _, share, _ in layers) / len(layers),
        "scored": sum(scored for _, _, scored in layers) / len(layers),
        "seconds": round(seconds, 1),
        "layers": [round(share, 4) for _, share, _ in layers],
    }


def nats(model: PreTrainedModel, hidden: Tensor, tokens: Tensor) -> float:
    """Return the mean nats of tokens (L,) after the first, from the last layer's states hidden (L, E)."""
    head: Any = model.get_output_embeddings()
    pairs = zip(hidden[:-1].split(_TOKENS), tokens[1:].split(_TOKENS), strict=True)
    return float(sum(F.cross_entropy(head(x).float(), y, reduction="sum") for x, y in pairs)) / (len(tokens) - 1)


@contextmanager
def attending(model: PreTrainedModel, oracle: Best | None, page: int = 1) -> Iterator[None]:
    """Restrict layers of full attention to the oracle's keys in the context, if there is an oracle, and let sketches
    choose pages.
    """

    def restrict(mechanism: nn.Module, given: Any, output: AttentionOutput) -> AttentionOutput:
        assert isinstance(mechanism, Attention) and oracle is not None
        return output._replace(out=oracle.attend(Call(mechanism, *given)))

    handles = [mechanism.register_forward_hook(restrict) for mechanism in mechanisms(model) if oracle]
    choice = taught_sketch.chosen_keys
    if page > 1:
        require_pages(vars(model.config)[ENTRY]["attention"], page)
        config = next(part.config for part in mechanisms(model) if isinstance(part, taught_sketch.TaughtSketch))
        taught_sketch.chosen_keys = partial(chosen_pages, config, page)
    try:
        yield
    finally:
        taught_sketch.chosen_keys = choice
        for handle in handles:
            handle.remove()


KEYS = ("arm", "attention", "seed", "text", "trial")
"""Keys that identify a row. trial: task and number of a haystack, None in rows of texts."""


def measured(
    plain: Path,
    arms: Sequence[Arm],
    texts: list[Path],
    length: int,
    seeds: int,
    trials: int,
    output: Path,
    device: torch.device,
) -> list[dict[str, Any]]:
    """Return the rows of every arm, seed and text, and of `trials` haystacks per task in the first text. Rows missing
    in the JSON file `output` are measured and written. Raises DataError for short texts or a file of another kind.
    """
    tokenizer = load_tokenizer(plain)
    same = {"length": length, "model": str(plain)}
    first, rows = _windows(tokenizer, texts, length), kept_rows(output, KEYS, **same)
    places: list[tuple[int, str | None]] = [(number, None) for number in range(len(first))]
    places += [(0, f"{task} {trial}") for trial in range(trials) for task in TASKS]
    planned = [(arm, seed, item) for arm in arms for seed in arm.seeds(seeds) for item in places]
    model, loaded = None, None
    for arm, seed, (number, trial) in tqdm(planned, unit="row", disable=None):
        name, tokens = first[number]
        text = hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]
        attention = arm.attention
        if isinstance(attention, Path):
            attention = {"folder": str(attention), "page": arm.page, **replacement_of(attention)["attention"]}
        row = {"arm": arm.name, "attention": attention, "seed": seed, "text": text, "file": name, "trial": trial}
        if any(all(old[key] == row[key] for key in KEYS) for old in rows):
            continue
        if loaded != (arm, seed):
            model = None  # one at a time
            model, loaded = arm.model(plain, length, seed, device), (arm, seed)
        assert model is not None
        if trial is None:
            rows.append(row | measure(model, torch.tensor([tokens], device=device), arm.oracle, arm.page))
        else:
            task, _, haystack = trial.partition(" ")
            asked = Haystack.draw(task, tokenizer, length, int(haystack), str(tokenizer.decode(tokens)))
            with attending(model, arm.oracle, arm.page):
                rows.append(row | {"task": task, "scores": scores(model, tokenizer, asked, cached=not arm.oracle)})
        write_json(output, {**same, "threads": torch.get_num_threads(), "device": device.type, "rows": rows})
    return rows


def kept_rows(path: Path, keys: Sequence[str], **same: Any) -> list[dict[str, Any]]:
    """Return the `rows` of a JSON file to resume from; an empty list without a file. keys: keys of each row.
    same: expected values of other keys of the file. Raises DataError for a file of another kind.
    """
    if not path.exists():
        return []
    try:
        content = json.loads(path.read_bytes())
        rows = list(content["rows"])
        complete = all({*keys} <= row.keys() for row in rows)
        if not complete or any(content[name] != value for name, value in same.items()):
            raise ValueError
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        with_what = "".join(f" with {name} {value}" for name, value in same.items())
        problem = f"does not contain rows{with_what} of this command"
        raise DataError(path, problem, "Choose another file, or remove it") from None
    return rows


def _windows(tokenizer: Any, texts: list[Path], length: int) -> list[tuple[str, list[int]]]:
    """Return the name and the first window of every text."""
    texts_windows = []
    for path in [file for text in texts for file in (sorted(text.rglob("*.txt")) if text.is_dir() else [text])]:
        first = read_windows(tokenizer, [path], length)[0]
        if len(first) < length:
            raise DataError(path, f"{len(first)} tokens are fewer than --length {length}", "Give longer texts")
        texts_windows.append((path.name, first))
    if not texts_windows:
        raise DataError(texts[0], "contains no *.txt", "Give text files")
    return texts_windows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of means over texts and seeds per arm, the range over seeds, the 95 % interval over texts
    of the nats above the first arm's, and shares of answers.
    """
    arms: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        arms[row["arm"]].append(row)
    lines = [
        f"| attention | keys per query | captured | nats per token | above the first | CPU seconds"
        f" | {' | '.join(TASKS)} |",
        "|---|---|---|---|---|---|" + "---|" * len(TASKS),
    ]
    first: dict[str, float] = {}
    for name, all_rows in arms.items():
        texts = [row for row in all_rows if row["trial"] is None]
        answered = shares(row for row in all_rows if row["trial"] is not None)
        keys, captured, seconds = (
            sum(row[key] for row in texts) / max(1, len(texts)) for key in ("keys", "captured", "seconds")
        )
        of_seed: dict[int, list[float]] = defaultdict(list)
        of_text: dict[str, list[float]] = defaultdict(list)
        for row in texts:
            of_seed[row["seed"]].append(row["nats"])
            of_text[row["text"]].append(row["nats"])
        of_texts = {text: sum(values) / len(values) for text, values in of_text.items()}
        first = first or of_texts
        above = [nats - first[text] for text, nats in of_texts.items() if text in first]
        interval = "{:.4f} … {:.4f}".format(*t_interval(above)) if len(above) > 1 and any(above) else ""
        means = [sum(values) / len(values) for values in of_seed.values()]
        spread = f" ({min(means):.3f} … {max(means):.3f})" if len(means) > 1 else ""
        nats = sum(means) / max(1, len(means))
        hits = " | ".join(answered.get(task, "") for task in TASKS)
        lines.append(
            f"| {name} | {keys:.0f} | {captured:.3f} | {nats:.3f}{spread} | {interval} | {seconds:.0f} | {hits} |"
        )
    return "\n".join(lines)


STEPS, TURN = 24, 512
"""Decoded tokens, and tokens of a second turn, of a measurement of speed."""


@torch.no_grad()
def speed(
    plain: Path, arms: Sequence[Arm], length: int, layers: int | None, repeats: int, device: torch.device
) -> list[dict[str, Any]]:
    """Measure seconds of each arm and of transformers' SDPA, which come in turns; ratios are medians of pairs."""
    models = {"SDPA": first_layers(load_plain(plain), layers)}
    for arm in arms:
        if isinstance(arm.attention, Path):
            models[arm.name] = first_layers(load_replaced(arm.attention), layers)
            continue
        settings, longest = arm.attention, length + STEPS + TURN
        models[arm.name] = replace_attention(first_layers(load_plain(plain), layers), settings, max_length=longest)
    for model in models.values():
        nn.Module.to(model, device)
    numbers = torch.Generator().manual_seed(0)
    tokens = torch.randint(models["SDPA"].config.vocab_size, (1, length + STEPS + TURN), generator=numbers).to(device)
    seconds: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in models}
    caches: dict[str, Any] = {}

    def timed(name: str, part: str, first: int, end: int, cache: Any = None) -> None:
        start = clock(device)
        out = models[name](tokens[:, first:end], past_key_values=cache, use_cache=True, logits_to_keep=1)
        caches[name] = out.past_key_values
        seconds[name][part].append(clock(device) - start)

    for _ in range(repeats):
        for name in models:
            timed(name, "turn_alone", 0, TURN)
        for name in models:
            timed(name, "prefill", 0, length)
        for first in range(length, length + STEPS):
            for name in models:
                timed(name, "decode", first, first + 1, caches[name])
        for name in models:
            timed(name, "turn", length + STEPS, tokens.shape[1], caches[name])
    rows = []
    for name, parts in seconds.items():
        row: dict[str, Any] = {"arm": name, "length": length, "layers": models[name].config.num_hidden_layers}
        for part, values in parts.items():
            row[part] = median(values)
            row[f"{part}_ratio"] = median(x / y for x, y in zip(values, seconds["SDPA"][part], strict=True))
        row["turn_to_alone"] = median(x / y for x, y in zip(parts["turn"], parts["turn_alone"], strict=True))
        tensors = ("keys", "values", "index")
        held = (getattr(layer, key, None) for layer in caches[name].layers for key in tensors)
        rows.append(row | {"cache_bytes": sum(x.untyped_storage().nbytes() for x in held if x is not None)})
    return rows


def first_layers(model: PreTrainedModel, count: int | None) -> PreTrainedModel:
    """Keep the first layers of a decoder such as Llama; all of them without a count."""
    if count is not None:
        base: Any = model.base_model
        base.layers, model.config.num_hidden_layers = base.layers[:count], min(count, len(base.layers))
    return model.eval()


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    args = arguments(words)
    disable_progress_bar()
    arms, device = [arm_of(text) for text in args.arm], torch.device(args.device)
    if args.speed:
        kept_rows(args.json, ("arm", "prefill"), turn=TURN)  # do not overwrite rows of texts
        settings = (args.layers, args.repeats, device)
        rows = [row for length in args.speed for row in speed(args.model, arms, length, *settings)]
        write_json(args.json, {"turn": TURN, "threads": torch.get_num_threads(), "rows": rows})
        print(json.dumps(rows, indent=1))
        return
    trials = (args.seeds, args.haystacks, args.json, device)
    print(table(measured(args.model, arms, args.texts, args.length, *trials)))


def arm_of(text: str) -> Arm:
    """Read NAME=VALUE. Raises ConfigError for anything else."""
    name, equals, value = text.partition("=")
    hint = 'Write NAME={"kind": "full"}, NAME=FOLDER or NAME={"best": 96, "window": 96, "sinks": 4}'
    if not (name and equals and value):
        raise ConfigError("--arm", f"{text} is not an arm", hint)
    if not value.startswith("{"):
        folder, at, page = value.rpartition("@")
        return Arm(name, Path(folder), int(page)) if at and page.isdecimal() else Arm(name, Path(value))
    attention = parse_json(value, "--arm")
    oracle = isinstance(attention, dict) and "best" in attention
    counts = oracle and all(type(value) is int and value >= 0 for value in attention.values())
    if not isinstance(attention, dict) or (oracle and not (counts and attention.keys() == {"best", "window", "sinks"})):
        raise ConfigError("--arm", f"{value} is not an attention", hint)
    return Arm(name, attention)


if __name__ == "__main__":
    main()
