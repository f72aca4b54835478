"""A pretraining run, top to bottom: shards, model, engine, evaluation, loop."""

from functools import partial
from pathlib import Path
from typing import Any

import torch

from megasparse.config.schema import Config
from megasparse.evaluation.held_out import held_out
from megasparse.files import read_file, write_file
from megasparse.model.build import deferred_model, initial_weight
from megasparse.ops.random import RngContext
from megasparse.planning.flops import known_flops_per_token, warn_if_long
from megasparse.runs.data import from_data, open_data, training_batches, with_texts, with_tokenizer
from megasparse.training.checkpoints.manifest import RunIdentity
from megasparse.training.loop import train
from megasparse.training.ranks import Ranks, start_ranks
from megasparse.training.run import Recipe, RunResult, open_training
from megasparse.training.stopping.signals import StopSignals


def pretrain(
    config: Config,
    *,
    resume: str = "auto",
    start: str | None = None,
    texts: str | None = None,
    allow_changed_config: bool = False,
    stop_at: int | None = None,
    signals: StopSignals | None = None,
) -> RunResult:
    """Pretrain a model and write everything to `config.run.directory`. Call it on every rank.

    Args:
        config: The run's configuration.
        resume: "auto" resumes from the newest checkpoint of the folder, "never" starts from scratch and raises an error
            if the folder contains checkpoints, a path resumes from that checkpoint.
        start: Folder of weights to initialise from before the first checkpoint exists, see `hub.importing`. Needs
            resume="auto".
        texts: Your own texts instead of `data.path`, see `runs.data.with_texts`.
        allow_changed_config: Resume although the configuration describes another run.
        stop_at: Step after which to save and stop.
        signals: Signals that stop the run. None (as in a notebook) leaves the process's handlers unchanged.

    Returns:
        The run's folder, its last step and whether it is complete.

    Raises:
        UserError: The configuration, data or a checkpoint is invalid; the message names the key or file.

    Examples:
        >>> config = megasparse.load_config("quickstart", ["run.directory=runs/again"])
        >>> megasparse.pretrain(config, stop_at=1).directory
        PosixPath('runs/again')
    """
    config = with_tokenizer(config)
    if start is not None or config.lora is not None:
        from megasparse.hub import importing  # needs transformers
    if start is None and config.lora is not None:
        importing.require_base(config)
    if texts is None:  # open the data before starting the ranks
        config = from_data(config)
        data = open_data(config)
    ranks = start_ranks(config.run, config.parallel.sequence)
    if texts is not None:
        config = from_data(with_texts(config, texts, ranks))
        data = open_data(config)
    if start is not None:
        require_room(config, ranks)
        resume = importing.resumed_from(config, start, ranks)
    base = None if config.lora is None else importing.base_digest(config)

    def model() -> Any:
        if config.lora is not None:
            device = torch.device("cpu") if config.zero.get("stage") == 3 else ranks.device
            built: Any = importing.adapted(config, device)
        else:
            built = deferred_model(config.model, config.run.seed)
        if config.model.masking.whole_words:
            built.set_word_starts(data.tokenizer.word_starts())
        return built

    length, training = config.data.sequence_length, config.training
    if flops := known_flops_per_token(config.model, length):
        work = flops[1] * training.steps * training.global_batch * length
        warn_if_long(work, training.precision, ["fewer training.steps", "a shorter data.sequence_length"], ranks)
    recipe = Recipe(
        RunIdentity(config, data.fingerprint, data.evaluation.file.tokenizer.model_dump(), base),
        make_rng=partial(RngContext, config.run.seed, training=True),
        build_model=model,
        initial=partial(initial_weight, config.model, config.run.seed),
        open_data=lambda position, hooks: training_batches(config, data, ranks, position, hooks),
        build_evaluation=lambda engine, hooks: held_out(engine, data.evaluation, config, hooks),
        flops_per_token=flops,
    )
    with open_training(recipe, ranks, resume, allow_changed_config, stop_at, signals) as run:
        if start is not None:
            importing.require_start(config, Path(start), ranks)
        if ranks.rank == 0 and (file := data.tokenizer.file) is not None:
            files: dict[str, str | bytes] = {f"tokenizer{file.suffix}": read_file(file)}
            if config.model.kind == "decoder" and file.name == "tokenizer.json":
                from megasparse.hub.tokenizer_files import companion_files

                files |= companion_files(file.parent)  # chat template and end tokens, for generation and export
            for name, content in files.items():
                write_file(Path(config.run.directory) / name, content)
        result = train(run)
    ranks.stop()
    return result


def require_room(config: Config, ranks: Ranks) -> None:
    """Raise UserError on all ranks if a step does not fit some GPU, before any weight is allocated."""
    if ranks.device.type != "cuda":
        return
    from megasparse.planning.plan import pretraining_pools
    from megasparse.planning.states import require_fit

    hint = 'Use shorter sequences, adapters (lora), model.activations="checkpoint" or a higher ZeRO stage'
    require_fit(pretraining_pools(config, ranks), ranks, hint)
