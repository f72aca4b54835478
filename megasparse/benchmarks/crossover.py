"""The length from which on a configuration's hashed attention is faster than full attention on this machine."""

import math
import sys
from pathlib import Path

from tqdm import tqdm

from megasparse.benchmarks.attention import Case, crossover
from megasparse.benchmarks.attention_table import SEED, Settings, figures
from megasparse.config.attention import AttentionConfig, kinds, replaceable_kinds
from megasparse.config.load import load_config
from megasparse.config.parts import decoder_part
from megasparse.config.rewrite import with_value
from megasparse.config.schema import Config, ModelConfig
from megasparse.errors import ConfigError
from megasparse.evaluation.outputs import whole_file


def write_crossover(path: Path, settings: Settings) -> int:
    """Measure where a configuration's hashed mechanism overtakes full attention, write that length into its file, and
    return it. Of `settings`, device, lengths and repeat count.

    Raises ConfigError where nothing is hashed, or full attention is faster at every length.
    """
    config = load_config(path)
    model = config.model if config.model.source is None else decoder_part(config.model)
    hashed = [kind for kind in replaceable_kinds(model) if kind in kinds(model)]
    if not hashed:
        hint = f"Full attention can take the place of {' and '.join(replaceable_kinds(model))}"
        raise ConfigError(str(path), f"model.attention.pattern has {', '.join(kinds(model))}", hint)
    found = [crossover_with_full(kind, config, model, settings) for kind in hashed]
    above = [length for length in found if length is not None]
    if len(above) < len(found):
        problem = f"full attention is faster up to {settings.lengths[-1]:,} tokens here"
        raise ConfigError(str(path), problem, "Nothing is written")
    text = with_value(path.read_text(encoding="utf-8"), ["model", "attention", "full_below"], max(above))
    load_config(path, [f"model.attention.full_below={max(above)}"])
    with whole_file(path) as file:
        file.write(text.encode())
    return max(above)


def crossover_with_full(kind: str, config: Config, model: ModelConfig, settings: Settings) -> int | None:
    """The length from which on the mechanism is faster than full attention; measured until it is, twice in a row."""
    times: dict[str, dict[int, float]] = {kind: {}, "full": {}}
    with tqdm(settings.lengths, desc=kind, unit="length", disable=None) as lengths:
        for length in lengths:
            for name, case in cases(kind, model, length, config, settings).items():
                row = figures(case)
                times[name][length] = math.inf if "error" in row else row["forward_backward"]["median"]
            shown = ", ".join(f"{name} {1000 * by_length[length]:.4g} ms" for name, by_length in times.items())
            lengths.write(f"{length:,} tokens: {shown}", file=sys.stdout)
            last = list(times[kind])[-2:]
            if len(last) == 2 and all(times[kind][n] < times["full"][n] for n in last):
                break
    return crossover(times[kind], times["full"])


def cases(kind: str, model: ModelConfig, length: int, config: Config, settings: Settings) -> dict[str, Case]:
    """The mechanism as configured, in a model whose longest length this is, and full attention in its place."""
    own = getattr(model.attention, kind)
    fitted = {"chunk": min(own.chunk, length)} | ({"buckets": None} if kind == "lsh" else {})
    shared = model.attention.full.model_copy(update={"shared_qk": kind == "lsh" and own.shared_qk})
    made = {}
    for name in (kind, "full"):
        sections = {kind: own.model_copy(update=fitted), "full": shared}
        attention = AttentionConfig(pattern=[name]).model_copy(update=sections)  # type: ignore[list-item]
        placed = model.model_copy(update={"max_length": length, "attention": attention})
        batch, dtype = config.training.micro_batch, config.training.precision
        made[name] = Case(name, placed, batch, dtype, settings.device, settings.repeat, SEED)
    return made
