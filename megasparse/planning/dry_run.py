"""One trial step of a configuration on synthetic tokens, in one process."""

import time
from dataclasses import dataclass

import torch
from torch import Tensor

from megasparse.config.schema import Config, ModelConfig
from megasparse.data.batches import Batch
from megasparse.model.adapters import add_adapters
from megasparse.model.build import build_model
from megasparse.model.encoder import Encoder
from megasparse.ops.random import RngContext
from megasparse.planning.flops import model_flops_per_token
from megasparse.planning.measure import peak, reset_peak
from megasparse.planning.planner import with_changes
from megasparse.training.engines import build_engine
from megasparse.training.engines.contract import Engine
from megasparse.training.ranks import Ranks, start_ranks


@dataclass(frozen=True)
class DryRun:
    """Measurements of the trial step."""

    parameters: int
    flops_per_step: float
    """Model FLOPs of a whole step of `training.global_batch` sequences."""
    peak_bytes: int
    """Peak of the step, gradients and optimizer state included: GPU memory, or growth of resident memory."""
    seconds: float
    """Duration of the micro-batch's step."""
    loss: float
    """Loss of the untrained model in nats a token."""
    device: str

    def lines(self, config: Config) -> str:
        """The report that --dry-run prints."""
        data, training = config.data, config.training
        step = f"{training.global_batch} sequences of {data.sequence_length:,} tokens"
        where = "GPU memory" if self.device.startswith("cuda") else "resident memory, beyond that of the empty process"
        return "\n".join(
            [
                f"parameters       {self.parameters:,}",
                f"FLOPs a step     {self.flops_per_step:.3g} ({step})",
                f"peak memory      {self.peak_bytes / 1e9:.2f} GB of {where}, in one process without ZeRO",
                f"time             {self.seconds:.1f} s for a micro-batch of {training.micro_batch} on {self.device}",
                f"loss             {self.loss:.3f} nats a token, untrained",
            ]
        )


def dry_run(config: Config) -> DryRun:
    """Build everything and take one optimizer step on one micro-batch of synthetic records, in this process on plain
    torch.

    Writes nothing and needs no data.
    """
    ranks = start_ranks(config.run.model_copy(update={"engine": "torch"}))
    before = reset_peak(ranks.device)
    engine, batch = trial_engine(config, ranks)
    parameters = sum(p.numel() for p in engine.module.parameters())
    started = time.perf_counter()
    result = engine.train_step([batch], 0, config.optimizer.learning_rate)
    seconds = time.perf_counter() - started
    tokens_per_step = config.training.global_batch * config.data.sequence_length
    flops = model_flops_per_token(config.model, config.data.sequence_length) * tokens_per_step
    peak_bytes = peak(ranks.device) - before
    engine.close()
    return DryRun(parameters, flops, peak_bytes, seconds, result.loss, str(ranks.device))


def trial_engine(config: Config, ranks: Ranks) -> tuple[Engine, Batch]:
    """A model to train on plain torch, and a micro-batch of synthetic records for it."""
    micro = config.training.micro_batch
    alone = with_changes(with_changes(config, "run", engine="torch"), "training", global_batch=micro)
    model = build_model(alone.model, alone.run.seed)
    if isinstance(model, Encoder) and alone.model.masking.whole_words:
        model.set_word_starts(torch.ones(alone.model.vocabulary, dtype=torch.bool))
    if alone.lora is not None:
        add_adapters(model, alone.lora, alone.run.seed)
    engine = build_engine(model, alone, lambda step, samples: RngContext(alone.run.seed, step, samples, True), ranks)
    tokens = dummy_records(alone.model, micro, config.data.sequence_length, config.run.seed)
    return engine, Batch(tokens, torch.arange(micro), micro)


def dummy_records(model: ModelConfig, batch: int, length: int, seed: int) -> Tensor:
    """(batch, length) random ids of the vocabulary, in the form of the model's records: with `sentence_order` two
    segments, each ended by the separator; with `padding_token` the last eighth is padding, as is that of the source.
    """
    separator = model.sentence_order.separator if model.sentence_order else None
    special = {model.padding_token, model.document_separator, separator}
    ids = torch.tensor([token for token in range(model.vocabulary) if token not in special])
    tokens = ids[torch.randint(len(ids), (batch, length), generator=torch.Generator().manual_seed(seed))]
    sides = [tokens] if model.source is None else tokens.split([model.source.length, length - model.source.length], 1)
    for side in sides:
        real = side.shape[1] if model.padding_token is None else side.shape[1] - side.shape[1] // 8
        if separator is not None:
            side[:, [real // 2, real - 1]] = separator
        if model.padding_token is not None:
            side[:, real:] = model.padding_token
    return tokens
