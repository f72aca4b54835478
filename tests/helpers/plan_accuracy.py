"""Predicted and measured memory of a pretraining run's steps on plain torch."""

from typing import Any

import torch

from megasparse.config.load import build_config
from megasparse.planning.dry_run import trial_engine
from megasparse.planning.hardware import GPUS
from megasparse.planning.plan import Assumptions, Plan
from megasparse.training.ranks import start_ranks
from tests.helpers.step_memory import allocated_peak

STEPS = 2
"""The optimizer's state is made at the end of the first."""


def predicted_and_measured(values: dict[str, Any]) -> tuple[int, int, int]:
    """Bytes at the peak of two steps of micro-batches that are accumulated, weights, gradients and optimizer state
    included: predicted, and allocated as torch's profiler counts it, kernels' scratch memory included. And the longest
    pass that the prediction took.
    """
    config = build_config(values)
    plan = Plan(config, Assumptions(GPUS["A100"], path="measured"))
    predicted, longest = plan.peak, max(plan.passes.lengths)
    del plan
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine, batch = trial_engine(config, start_ranks(config.run))
        for step in range(STEPS):
            engine.train_step([batch] * (config.training.global_batch // config.training.micro_batch), step, 1e-3)
    engine.close()
    return predicted, allocated_peak(profiled), longest
