"""The `deepspeed` section, checked before DeepSpeed sees it.

DeepSpeed ignores an unknown key at the top level in silence, and most known ones would fight with megasparse's own
settings, so no others are handed over. `check_keys` finds what can be found without DeepSpeed; `check_values` imports
it, which takes a second or two.
"""

import logging
import sys
import warnings
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from megasparse.config.messages import as_config_error, show
from megasparse.config.section import Section
from megasparse.errors import ConfigError

HELD_BY_MEGASPARSE = {
    "train_batch_size": "training.global_batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.global_batch and training.micro_batch",
    "gradient_clipping": "training.gradient_clipping",
    "bf16": "training.precision",
    "fp16": "training.precision",
    "optimizer": "optimizer",
    "scheduler": "optimizer.schedule",
    "activation_checkpointing": "model.activations",
    "tensorboard": "logging (scalars go to tensorboard/ in run.directory)",
}
"""DeepSpeed's keys whose value megasparse gives it, and the key of ours that decides it."""


class DeepSpeedSection(Section):
    """The top level; `zero_optimization` is DeepSpeed's own model."""

    zero_optimization: dict[str, Any] = Field(default_factory=dict)


NO_DISKS = 'megasparse no longer offloads to disks: remove it, or offload to "cpu"'

ZERO_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "offload_optimizer.ratio": (1.0,),
    "offload_optimizer.super_offload": (False,),
    "mics_shard_size": (-1,),  # weights are cut among all ranks
    "round_robin_gradients": (False,),  # DeepSpeed's own map from weights to their pieces is wrong under it
    "zenflow": (None,),
}
"""Keys of `deepspeed.zero_optimization` that decide where the state lies, with the values that checkpoints can follow:
the first is DeepSpeed's default, or what to use instead."""


def overlaps_communication(zero: dict[str, Any], several_gpus: bool) -> bool:
    """True if gradients are reduced while the backward runs: as zero_optimization.overlap_comm says, and by default
    on several GPUs at stage 2, where each micro-batch reduces its own. At stage 3 DeepSpeed's own default is the same.
    """
    return bool(zero.get("overlap_comm", several_gpus and zero.get("stage") == 2))


def check_keys(section: dict[str, Any]) -> None:
    """Raise ConfigError for the first key that is ours or unknown, and for offloading that the stage cannot do."""
    for key, value in section.items():
        if key in HELD_BY_MEGASPARSE:
            problem = f"{show(value)} is set here, but megasparse gives this to DeepSpeed itself"
            raise ConfigError(f"deepspeed.{key}", problem, f"Remove it and set {HELD_BY_MEGASPARSE[key]}")
    if "aio" in section:
        raise ConfigError("deepspeed.aio", "sets how a disk is read", NO_DISKS)
    _validate(DeepSpeedSection, section, "deepspeed")
    # A stage that does not exist, or lacks the offloading: DeepSpeed reports it after the model is built, or never.
    zero = section.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:  # DeepSpeed would take "3" too, and true
        hint = "It must be 0 or 1 or 2 or 3"
        raise ConfigError("deepspeed.zero_optimization.stage", f"{show(stage)} does not fit", hint)
    for key, least in (("offload_param", 3), ("offload_optimizer", 1)):
        offload = zero.get(key)
        device = offload.get("device") if isinstance(offload, dict) else None
        if device == "nvme":
            raise ConfigError(f"deepspeed.zero_optimization.{key}.device", '"nvme" is not supported', NO_DISKS)
        if device == "cpu" and stage < least:
            problem = f"{show(device)} needs stage {least} or more, but stage = {stage}"
            hint = f"Set deepspeed.zero_optimization.stage to {least}{' or more' if least < 3 else ''}, or remove {key}"
            raise ConfigError(f"deepspeed.zero_optimization.{key}.device", problem, hint)


def check_values(section: dict[str, Any]) -> None:
    """Raise ConfigError for the first key or value of `zero_optimization` that DeepSpeed or our checkpoints refuse."""
    zero = section.get("zero_optimization", {})
    if zero.keys() <= {"stage"}:  # checked above, and what reads a checkpoint needs no DeepSpeed
        return
    logging.disable(logging.WARNING)  # the import logs lines about accelerators, no business of a configuration
    try:
        import_deepspeed()
    finally:
        logging.disable(logging.NOTSET)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    # strict: without it DeepSpeed drops every "auto", which only HuggingFace's trainer fills in
    _validate(DeepSpeedZeroConfig, zero, "deepspeed.zero_optimization", strict=True)
    for key, supported in ZERO_SUPPORTED.items():
        *parts, last = key.split(".")
        values = zero
        for part in parts:
            values = values.get(part) or {}
        if values.get(last, supported[0]) not in supported:
            problem = f"{show(values[last])} puts the optimizer's state where checkpoints cannot find it"
            hint = f"Remove it, or set it to {show(supported[0])}"
            raise ConfigError(f"deepspeed.zero_optimization.{key}", problem, hint)


def import_deepspeed() -> Any:
    """Import DeepSpeed, which takes seconds, and return it."""
    # It calls collectives by names that torch will rename: nothing a user can act on
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    unimported = "mlflow" not in sys.modules
    if unimported:  # its autotuner, which nothing here runs, would import it: two more seconds in every process
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        import deepspeed
    finally:
        if unimported:
            del sys.modules["mlflow"]
    from deepspeed.runtime import compiler

    # Import its Muon, whose class every start asks for, uncompiled: its decorator would load torch.compile's back end,
    # one and a half seconds in every process, for an optimizer that nothing here runs.

    decorator, compiler.compile = compiler.compile, lambda: lambda function: function
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer
    finally:
        compiler.compile = decorator
    return deepspeed


def _validate(model: type[BaseModel], values: dict[str, Any], prefix: str, **options: bool) -> None:
    try:
        model(**values, **options)
    except ValidationError as error:
        raise as_config_error(error, model, values, prefix) from None
    except (TypeError, AttributeError, ValueError) as error:  # a validator of DeepSpeed's stumbled over a value
        raise ConfigError(prefix, f"DeepSpeed refuses it: {error}", "Compare with DeepSpeed's documentation") from None
