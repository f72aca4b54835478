"""The `deepspeed` section, checked before DeepSpeed sees it.

DeepSpeed silently ignores unknown top-level keys, and most known ones would conflict with megasparse's settings, so
only `zero_optimization` is passed on. `check_values` imports DeepSpeed, which takes a second or two.
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
"""Key of DeepSpeed -> megasparse's key that sets its value."""


class DeepSpeedSection(Section):
    """The top level; DeepSpeed's schema defines `zero_optimization`."""

    zero_optimization: dict[str, Any] = Field(default_factory=dict)


NO_DISKS = 'megasparse does not offload to disks: remove it, or offload to "cpu"'

ZERO_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "offload_optimizer.ratio": (1.0,),
    "offload_optimizer.super_offload": (False,),
    "mics_shard_size": (-1,),  # weights are partitioned over all ranks
    "round_robin_gradients": (False,),  # makes DeepSpeed's map from weights to their fragments wrong
    "zenflow": (None,),
}
"""Keys of `deepspeed.zero_optimization` that change the layout of the optimizer's state, with the values that
checkpoints support. The first value is DeepSpeed's default, or the one to use instead."""


def overlaps_communication(zero: dict[str, Any], several_gpus: bool) -> bool:
    """True if gradients are reduced during the backward: the value of zero_optimization.overlap_comm, by default true
    on several GPUs at stage 2, which reduces gradients per micro-batch.
    """
    return bool(zero.get("overlap_comm", several_gpus and zero.get("stage") == 2))


def check_keys(section: dict[str, Any]) -> None:
    """Raise ConfigError for the first key that megasparse sets or that is unknown, and for unsupported offloading."""
    for key, value in section.items():
        if key in HELD_BY_MEGASPARSE:
            problem = f"{show(value)} is set here, but megasparse sets this key of DeepSpeed"
            raise ConfigError(f"deepspeed.{key}", problem, f"Remove it and set {HELD_BY_MEGASPARSE[key]}")
    if "aio" in section:
        raise ConfigError("deepspeed.aio", "configures reads from disks", NO_DISKS)
    _validate(DeepSpeedSection, section, "deepspeed")
    # DeepSpeed reports an invalid stage, or one without this offloading, after the model is built, or never.
    zero = section.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:  # DeepSpeed would also accept "3" and true
        raise ConfigError("deepspeed.zero_optimization.stage", f"{show(stage)} does not fit", "It must be 0, 1, 2 or 3")
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
    """Raise ConfigError for the first key or value of `zero_optimization` that DeepSpeed or checkpoints reject."""
    zero = section.get("zero_optimization", {})
    if zero.keys() <= {"stage"}:  # checked above; commands that read a checkpoint must work without DeepSpeed
        return
    logging.disable(logging.WARNING)  # the import logs lines about accelerators
    try:
        import_deepspeed()
    finally:
        logging.disable(logging.NOTSET)
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    # strict: otherwise DeepSpeed drops every "auto", which only Hugging Face's trainer fills in
    _validate(DeepSpeedZeroConfig, zero, "deepspeed.zero_optimization", strict=True)
    for key, supported in ZERO_SUPPORTED.items():
        *parts, last = key.split(".")
        values = zero
        for part in parts:
            values = values.get(part) or {}
        if values.get(last, supported[0]) not in supported:
            problem = f"{show(values[last])} stores the optimizer's state in a layout that checkpoints do not support"
            hint = f"Remove it, or set it to {show(supported[0])}"
            raise ConfigError(f"deepspeed.zero_optimization.{key}", problem, hint)


def import_deepspeed() -> Any:
    """Import DeepSpeed, which takes seconds, and return it."""
    # It calls collectives by deprecated names, which users cannot change
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    unimported = "mlflow" not in sys.modules
    if unimported:  # DeepSpeed's autotuner, which megasparse does not use, imports it: two more seconds per process
        sys.modules["mlflow"] = None  # type: ignore[assignment]
    try:
        import deepspeed
    finally:
        if unimported:
            del sys.modules["mlflow"]
    from deepspeed.runtime import compiler

    # Import its Muon uncompiled: every start needs the class, and its decorator would load torch.compile's back end
    # (1.5 s per process) for an optimizer that megasparse does not use.
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
    except (TypeError, AttributeError, ValueError) as error:  # raised by a validator inside DeepSpeed
        raise ConfigError(prefix, f"DeepSpeed rejects it: {error}", "Compare with DeepSpeed's documentation") from None
