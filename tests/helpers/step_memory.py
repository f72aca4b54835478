"""Predicted and measured memory of fine-tuning runs' first steps."""

from typing import Any

import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import build_settings
from megasparse.ops.random import RngContext
from megasparse.tasks.evaluate import predict_examples
from megasparse.tasks.memory_check import predict
from megasparse.tasks.run import open_run
from megasparse.training.engines import build_engine
from megasparse.training.ranks import start_ranks
from tests.helpers.peak_memory import allocated_peak


def predicted_and_measured(values: dict[str, Any], steps: int = 2) -> tuple[int, int]:
    """Bytes at the peak of `steps` steps and a validation batch, weights included: predicted, and allocated, as torch's
    profiler counts them with kernels' scratch memory.
    """
    config = build_settings(values, [], FinetuneConfig)
    ranks = start_ranks(config.run)
    run = open_run(config, lambda line: None)
    held = sum(weight.nbytes for weight in run.model.parameters())
    found = predict(run, ranks)

    def rng(step: int, samples: Any) -> RngContext:
        return RngContext(config.run.seed, step, samples, training=True)

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiled:
        engine = build_engine(run.model.train(), run.config, rng, ranks)
        batches = run.batches(ranks, 0)
        for step in range(1, steps + 1):
            engine.train_step(next(batches).micro_batches, step, 1e-3)
        run.model.eval()
        predict_examples(engine.evaluate, run.form, run.validation[: config.evaluation.batch], run.config, ranks)
    engine.close()
    fp32 = config.training.precision == "fp32"  # weights were there before the profiler, but not their rounded copies
    return found.pools[0].peak, allocated_peak(profiled) + (held if fp32 else 0)
