"""Passes of a deep model from those of two shallow ones: its layers repeat, and so do the phases of its passes."""

import re
from typing import NamedTuple

import numpy as np

from megasparse.config.schema import ModelConfig
from megasparse.planning.memory_curves import Phases

PERIODS = 3, 4
"""Periods of the pattern in the shallow models: a first, a last one, and one or two between them."""
_BLOCK = re.compile(r"(.*\bblocks)\.(\d+)\.(.*)")


class _Phase(NamedTuple):
    end: str
    made: float
    """Bytes of the gradient that ends it."""
    beside: float


def shallow(model: ModelConfig) -> list[ModelConfig]:
    """The two shallow models to measure in place of `model`; none where it is hardly deeper, or has two stacks."""
    period = len(model.attention.pattern)
    if model.layers < (max(PERIODS) + 1) * period or model.source is not None:
        return []
    rest = model.layers % period
    return [model.model_copy(update={"layers": periods * period + rest}) for periods in PERIODS]


def deeper(three: Phases, four: Phases, period: int, layers: int) -> Phases:
    """The phases of a model of so many layers, which repeat every `period`, from those of `shallow` models.

    Bytes of a phase grow by a line with the number of periods, and, of the periods between the first and the last, by
    another from one to the next.
    """
    rest, more = layers % period, layers // period - 4
    depth = 4 * period + rest
    now, before = _phases(four), {phase.end: phase for phase in _phases(three)}
    layer_of = [int(match[2]) if (match := _BLOCK.fullmatch(phase.end)) else None for phase in now]
    here = {phase.end: phase for phase in now}
    own = [number for number, layer in enumerate(layer_of) if layer is not None]

    def grown(phase: _Phase, was: str, end: str, slope: float = 0.0) -> _Phase:
        added = more * (phase.beside - before[was].beside)
        return _Phase(end, phase.made, max(0.0, phase.beside + added + slope))

    found = [grown(phase, phase.end, phase.end) for phase in now[: own[0]]]
    for layer in reversed(range(layers)):
        between = period <= layer < layers - period - rest
        like = layer if layer < period else period + layer % period if between else layer - layers + depth
        was = like if layer < period or between else like - period
        for number in own:
            if layer_of[number] == like:
                phase, slope = now[number], 0.0
                if between:
                    next_one = here[_renamed(phase.end, like + period)]
                    slope = (layer // period - 1) * (next_one.beside - phase.beside)
                found.append(grown(phase, _renamed(phase.end, was), _renamed(phase.end, layer), slope))
    found += [grown(phase, phase.end, phase.end) for phase in now[own[-1] + 1 :]]
    gradients = np.cumsum([0.0, *(phase.made for phase in found[:-1])])
    return Phases([phase.end for phase in found], gradients, np.array([phase.beside for phase in found]))


def _phases(one: Phases) -> list[_Phase]:
    made = np.append(np.diff(one.gradients), 0.0)
    return [_Phase(*each) for each in zip(one.ends, made.tolist(), one.beside.tolist(), strict=True)]


def _renamed(end: str, layer: int) -> str:
    return _BLOCK.sub(rf"\1.{layer}.\3", end)
