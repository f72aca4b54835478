"""Every key of the `deepspeed` section, at every depth, checked before DeepSpeed sees it.

DeepSpeed ignores an unknown key at the top level in silence, and some known ones would fight with megasparse's own
settings. Its classes are imported only when there is something to check: the import takes seconds.
"""

import difflib
import logging
from typing import Any, Literal

from pydantic import BaseModel, Field, ValidationError

from megasparse.config.messages import as_config_error, dotted, known_keys, show
from megasparse.config.section import Positive, Section
from megasparse.errors import ConfigError

HELD_BY_MEGASPARSE = {
    "train_batch_size": "training.global_batch",
    "train_micro_batch_size_per_gpu": "training.micro_batch",
    "gradient_accumulation_steps": "training.global_batch and training.micro_batch",
    "managed_gradient_accumulation": "training.global_batch and training.micro_batch",
    "gradient_clipping": "training.gradient_clipping",
    "bf16": "training.precision",
    "bfloat16": "training.precision",
    "fp16": "training.precision",
    "torch_autocast": "training.precision",
    "data_types": "training.precision",
    "optimizer": "optimizer",
    "zero_allow_untested_optimizer": "optimizer.name",
    "zero_force_ds_cpu_optimizer": "optimizer.name",
    "scheduler": "optimizer.schedule",
    "gradient_allreduce_op": "training.global_batch",
    "activation_checkpointing": "model.activations",
    "checkpoint": "checkpoint",
    "dataloader_drop_last": "data",
    "vocabulary_size": "model.vocabulary",
    "sequence_parallel_size": "parallel.sequence",
    "tensorboard": "logging (scalars go to tensorboard/ in run.directory)",
}
"""DeepSpeed's keys whose value megasparse gives it, and the key of ours that decides it."""

NOT_USED = {
    "amp",
    "autotuning",
    "compile",
    "compression_training",
    "curriculum_learning",
    "data_efficiency",
    "datastates",
    "eigenvalue",
    "elasticity",
    "expert_parallel",
    "graph_harvesting",
    "hybrid_engine",
    "nebula",
    "pipeline",
    "progressive_layer_drop",
    "quantize_training",
    "sparse_attention",
    "sparse_gradients",
    "tensor_parallel",
    "use_data_before_expert_parallelism",
    "weight_quantization",
}
"""DeepSpeed's features that megasparse does not run on; some are gone from DeepSpeed too."""


class FlopsProfiler(Section):
    enabled: bool = False
    recompute_fwd_factor: float = 0.0
    profile_step: Positive = 1
    module_depth: int = -1
    top_modules: Positive = 1
    detailed: bool = True
    output_file: str | None = None


class Aio(Section):
    block_size: Positive = 1048576
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: bool = False


class Timers(Section):
    throughput: dict[str, Any] = Field(default_factory=dict)


class DeepSpeedSection(Section):
    """The top level, and the parts for which DeepSpeed reads plain dictionaries; the others are its own models."""

    zero_optimization: dict[str, Any] = Field(default_factory=dict)
    comms_logger: dict[str, Any] = Field(default_factory=dict)
    wandb: dict[str, Any] = Field(default_factory=dict)
    csv_monitor: dict[str, Any] = Field(default_factory=dict)
    comet: dict[str, Any] = Field(default_factory=dict)
    timers: Timers = Timers()
    flops_profiler: FlopsProfiler = FlopsProfiler()
    aio: Aio = Aio()
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = None
    prescale_gradients: bool = False
    gradient_predivide_factor: float = 1.0
    disable_allgather: bool = False
    disable_python_gc: bool = False
    dump_state: bool = False
    log_level: Literal["debug", "info", "warning", "error", "critical"] | None = None
    memory_breakdown: bool = False
    steps_per_print: Positive | None = None
    wall_clock_breakdown: bool = False


def check(section: dict[str, Any]) -> None:
    """Raise ConfigError for the first key of the section that is unknown, ours, or has a value of the wrong kind."""
    if not section:
        return
    known = known_keys(DeepSpeedSection)
    for key, value in section.items():
        if key in HELD_BY_MEGASPARSE:
            problem = f"{show(value)} is set here, but megasparse gives this to DeepSpeed itself"
            raise ConfigError(f"deepspeed.{key}", problem, f"Remove it and set {HELD_BY_MEGASPARSE[key]}")
        if key in NOT_USED:
            problem = f"{show(value)} asks for a feature that megasparse does not run on"
            raise ConfigError(f"deepspeed.{key}", problem, "Remove it")
        near = difflib.get_close_matches(key, [*known, *HELD_BY_MEGASPARSE], n=1, cutoff=0.6)
        if key not in known and near and near[0] in HELD_BY_MEGASPARSE:
            problem = f"unknown key (its value is {show(value)}), near DeepSpeed's {near[0]}"
            raise ConfigError(dotted([key], "deepspeed"), problem, f"Set {HELD_BY_MEGASPARSE[near[0]]} instead")
    _validate(DeepSpeedSection, section, "deepspeed")
    for path, model in _models().items():
        values: Any = section
        for key in path.split("."):
            values = values.get(key, {})
        # strict: without it DeepSpeed drops every "auto", which only HuggingFace's trainer fills in
        _validate(model, values, f"deepspeed.{path}", strict=True)
    _check_zero(section.get("zero_optimization", {}))


def _validate(model: type[BaseModel], values: dict[str, Any], prefix: str, **options: bool) -> None:
    try:
        model(**values, **options)
    except ValidationError as error:
        raise as_config_error(error, model, values, prefix) from None
    except (TypeError, AttributeError, ValueError) as error:  # a validator of DeepSpeed's stumbled over a value
        raise ConfigError(prefix, f"DeepSpeed refuses it: {error}", "Compare with DeepSpeed's documentation") from None


def _models() -> dict[str, type[BaseModel]]:
    """DeepSpeed's own pydantic models, by the key whose values they check."""
    logging.disable(logging.WARNING)  # the import talks of accelerators, which is no business of a configuration
    try:
        from deepspeed.comm.config import CommsLoggerConfig
        from deepspeed.monitor.config import CometConfig, CSVConfig, WandbConfig
        from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
        from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
    finally:
        logging.disable(logging.NOTSET)
    return {
        "zero_optimization": DeepSpeedZeroConfig,
        "comms_logger": CommsLoggerConfig,
        "wandb": WandbConfig,
        "csv_monitor": CSVConfig,
        "comet": CometConfig,
        "timers.throughput": DeepSpeedThroughputTimerConfig,
    }


def _check_zero(zero: dict[str, Any]) -> None:
    """Offloading that the stage cannot do; DeepSpeed itself would say so only after the model is built, or never."""
    stage = zero.get("stage", 0)
    for key, least in (("offload_param", 3), ("offload_optimizer", 1)):
        device = (zero.get(key) or {}).get("device", "none")
        if device != "none" and stage < least:
            raise ConfigError(
                f"deepspeed.zero_optimization.{key}.device",
                f"{show(device)} needs stage {least} or more, but stage = {stage}",
                f"Set deepspeed.zero_optimization.stage to {least}{' or more' if least < 3 else ''}, or remove {key}",
            )
