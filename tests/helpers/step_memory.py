"""Predicted and measured memory of fine-tuning runs' first steps, in a process of their own."""

import gc
from typing import Any

import torch

from megasparse.config.finetuning import FinetuneConfig
from megasparse.config.load import build_settings
from megasparse.ops.random import Draws
from megasparse.planning.live_bytes import LiveBytes
from megasparse.planning.measure import peak, reset_peak
from megasparse.tasks.fitting import predict
from megasparse.tasks.run import open_run
from megasparse.tasks.scoring import tell
from megasparse.training.engine import build_engine
from megasparse.training.ranks import start_ranks


def all_predicted_and_measured(runs: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Of each run, one after the other."""
    torch.set_num_threads(1)
    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2)
    torch.optim.AdamW([weight], fused=True).step()  # imports what the first step of any optimizer does
    return [predicted_and_measured(values) for values in runs]


def predicted_and_measured(values: dict[str, Any], steps: int = 2) -> tuple[int, int, int]:
    """Bytes at the peak of `steps` steps and a validation batch: predicted, counted tensor by tensor, and resident,
    weights included and the process itself left out. What the C library keeps between tensors is resident too.
    """
    config = build_settings(values, [], FinetuneConfig)
    ranks = start_ranks(config.run)
    run = open_run(config, lambda line: None)
    held = sum(weight.nbytes for weight in run.model.parameters())
    found = predict(run, ranks)  # which has used every library before the measurement begins
    gc.collect()
    before = reset_peak(ranks.device) - held

    def draws(step: int, samples: Any) -> Draws:
        return Draws(config.run.seed, step, samples, training=True)

    with LiveBytes() as counted:
        engine = build_engine(run.model.train(), run.config, draws, ranks)
        batches = run.batches(ranks, 0)
        for step in range(1, steps + 1):
            engine.train_step(next(batches).micro_batches, step, 1e-3)
        run.model.eval()
        tell(engine.evaluate, run.validation[: config.evaluation.batch], run.config, ranks)
    resident = peak(ranks.device) - before
    engine.close()
    fp32 = config.training.precision == "fp32"  # the count knows no weights made before it, but their rounded copies
    return found.places[0].peak, counted.peak + (held if fp32 else 0), resident
