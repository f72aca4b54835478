"""Predicted memory of training steps, and what they allocate on the CPU, as torch's profiler counts it."""

from itertools import accumulate
from typing import Any

from torch.profiler import ProfilerActivity, profile

from megasparse.config.schema import Config
from megasparse.ops.positions import kept_sinusoids
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.hardware import GPUS
from megasparse.planning.plan import Assumptions, Plan
from megasparse.training.ranks import start_ranks

STEPS = 2
"""The optimizer's state is made at the end of the first."""


def predicted_and_allocated(config: Config) -> tuple[int, int, int]:
    """Bytes at the peak of two steps on plain torch, weights, gradients and optimizer state included: predicted, and
    allocated as torch's profiler counts it, kernels' scratch memory included. And the longest pass, in tokens, that the
    prediction took.
    """
    kept_sinusoids.cache_clear()  # tables of an earlier model would be missed here, and freed in the profile
    plan = Plan(config, Assumptions(GPUS["A100"], path="measured"))
    predicted, longest = plan.peak, max(plan.passes.lengths)
    del plan
    kept_sinusoids.cache_clear()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine, batch = trial_engine(config, start_ranks(config.run))
        for step in range(STEPS):
            engine.train_step([batch] * (config.training.global_batch // config.training.micro_batch), step, 1e-3)
    engine.close()
    return predicted, allocated_peak(profiled), longest


def allocated_peak(profiled: Any) -> int:
    """The largest number of bytes allocated at a time since the profiler began."""
    records = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = accumulate(event.nbytes() for event in sorted(records, key=lambda event: event.start_ns()))
    return max(live)
