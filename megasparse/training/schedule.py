"""The learning rate: a pure function of the step, so that it needs no state and resumes by itself."""

import math

from megasparse.config.schema import OptimizerConfig


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (1 is the first) of a run of `steps` steps.

    Linear from 0 at step 0 to the peak at `warmup_steps`; after that
    constant:      peak
    cosine:        peak·(f + (1 − f)·(1 + cos(π·t))/2), f = `final_fraction`, t from 0 after the warm-up to 1 at the end
    linear:        peak·(1 − (1 − f)·t), with the same f and t
    inverse_sqrt:  peak·√(warm-up/step), a warm-up of 0 counting as 1.
    """
    peak, warmup = config.learning_rate, config.warmup_steps
    if step < warmup:
        return peak * step / warmup
    if config.schedule == "constant":
        return peak
    if config.schedule == "inverse_sqrt":
        return peak * math.sqrt(max(1, warmup) / max(1, step))
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.final_fraction + (1 - config.final_fraction) * left)
