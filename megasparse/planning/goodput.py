"""The share of a run's time that trains: what saves and failures leave of it.

A job fails after MTBF/n hours on average, n GPUs. A failure costs half of the time between two checkpoints, and its
recovery: until the watchdog sees it, the start, and the reading of a rank's own part of the checkpoint. The time
between checkpoints is the best one, √(2·save·time between failures) (Young 1974).
"""

import math
from dataclasses import dataclass

from megasparse.planning.plan import Plan

MTBF_GPU_HOURS = 16384 * 54 * 24 / 419
"""Published: 419 unexpected interruptions in 54 days on 16,384 H100s (The Llama 3 Herd of Models, section 3.3.4)."""
SAVED, READ = 846e6 / 3.2, 200e6 / 0.46
"""Bytes/s of a rank, measured (docs/reliability.md): of saving, in the middle of what 846 MB took, and of hashing,
which reading a checkpoint takes."""
START = 60.0
"""Assumed seconds from the end of a job to its first step, without the reading of the checkpoint."""


@dataclass(frozen=True)
class Goodput:
    """share: of the time, that trains. Seconds of a save, between two of them, between failures, and of a recovery."""

    share: float
    save: float
    interval: float
    failure: float
    recovery: float


def goodput(plan: Plan) -> Goodput:
    ranks = plan.on.gpus if plan.zero.stage > 0 else 1
    states = plan.passes.states
    saved = (4 * states.trained + states.moments) / ranks  # weights, in fp32, and moments
    save, failure = saved / SAVED, MTBF_GPU_HOURS * 3600 / plan.on.gpus
    interval = math.sqrt(2 * save * failure)
    recovery = plan.config.run.hang_timeout + START + saved / READ
    return Goodput(1 - save / interval - (interval / 2 + recovery) / failure, save, interval, failure, recovery)
