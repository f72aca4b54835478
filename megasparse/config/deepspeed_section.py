"""Every key of the `deepspeed` section, at every depth, checked before DeepSpeed sees it.

DeepSpeed ignores an unknown key at the top level in silence, and some known ones would fight with megasparse's own
settings. `check_keys` finds what can be found without DeepSpeed; `check_values` imports it, which takes a second or
two.
"""

import ast
import difflib
import importlib.util
import logging
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from megasparse.config.messages import as_config_error, dotted, known_keys, show
from megasparse.config.section import Positive, Section
from megasparse.errors import ConfigError, did_you_mean

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
    """How DeepSpeed reads and writes what is swapped to a disk."""

    block_size: Annotated[int, Field(ge=4096, multiple_of=4096)] = 1048576
    """Bytes a request: whole pages, for direct reads and writes."""
    queue_depth: Positive = 8
    intra_op_parallelism: Positive = 1
    single_submit: bool = False
    overlap_events: bool = True
    use_gds: Literal[False] = False


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


ADAM_BUFFERS = 4
"""Vectors of a sub-group that the optimizer's step needs in memory: weights, gradients, two moments."""

ZERO_SUPPORTED: dict[str, tuple[Any, ...]] = {
    "offload_optimizer.ratio": (1.0,),
    "offload_optimizer.super_offload": (False,),
    "round_robin_gradients": (False,),  # DeepSpeed's own map from weights to their pieces is wrong under it
    "mics_shard_size": (-1,),
    "zenflow": (None,),
}
"""Keys of `deepspeed.zero_optimization` that decide where the state lies, with the values that checkpoints can follow:
the first is DeepSpeed's default, or what to use instead."""


def overlaps_communication(zero: dict[str, Any], several_gpus: bool) -> bool:
    """Whether gradients are reduced while the backward goes on: as zero_optimization.overlap_comm says, and by default
    on several GPUs at stage 2, where each micro-batch reduces its own. At stage 3 DeepSpeed's own default is the same.
    """
    return bool(zero.get("overlap_comm", several_gpus and zero.get("stage") == 2))


def check_keys(section: dict[str, Any]) -> None:
    """Raise ConfigError for the first key that is ours, not used or unknown, at the top level and in zero_optimization,
    and for offloading that the stage cannot do."""
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
    zero, zero_keys = section.get("zero_optimization", {}), _zero_keys()
    for key, value in zero.items():
        if key not in zero_keys:
            problem = f"unknown key (its value is {show(value)})"
            raise ConfigError(dotted([key], "deepspeed.zero_optimization"), problem, did_you_mean(key, zero_keys))
    _check_stage(zero)
    _check_nvme(zero)


def check_values(section: dict[str, Any]) -> None:
    """Raise ConfigError for the first key or value that DeepSpeed's own models, or our checkpoints, refuse."""
    if not section:
        return
    for path, model in _models().items():
        values: Any = section
        for key in path.split("."):
            values = values.get(key, {})
        # strict: without it DeepSpeed drops every "auto", which only HuggingFace's trainer fills in
        _validate(model, values, f"deepspeed.{path}", strict=True)
    _check_supported(section.get("zero_optimization", {}))


def _validate(model: type[BaseModel], values: dict[str, Any], prefix: str, **options: bool) -> None:
    try:
        model(**values, **options)
    except ValidationError as error:
        raise as_config_error(error, model, values, prefix) from None
    except (TypeError, AttributeError, ValueError) as error:  # a validator of DeepSpeed's stumbled over a value
        raise ConfigError(prefix, f"DeepSpeed refuses it: {error}", "Compare with DeepSpeed's documentation") from None


def _models() -> dict[str, type[BaseModel]]:
    """DeepSpeed's own pydantic models, by the key whose values they check."""
    logging.disable(
        logging.WARNING
    )  # the import logs lines about accelerators, which is no business of a configuration
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


def _zero_keys() -> set[str]:
    """The fields of DeepSpeedZeroConfig and their aliases, read from its source."""
    package = importlib.util.find_spec("deepspeed")
    assert package is not None and package.origin is not None
    source = Path(package.origin).with_name("runtime") / "zero" / "config.py"
    model = next(
        node
        for node in ast.parse(source.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and node.name == "DeepSpeedZeroConfig"
    )
    fields = [node for node in model.body if isinstance(node, ast.AnnAssign)]
    calls = [field.value for field in fields if isinstance(field.value, ast.Call)]
    aliases = [ast.literal_eval(k.value) for call in calls for k in call.keywords if k.arg == "alias"]
    return {*(ast.unparse(field.target) for field in fields), *aliases}


def _check_stage(zero: dict[str, Any]) -> None:
    """Raise ConfigError for a stage that does not exist, and for offloading that needs another: DeepSpeed reports these
    only after the model is built, or never."""
    stage = zero.get("stage", 0)
    if type(stage) is not int or not 0 <= stage <= 3:  # DeepSpeed would take "3" too, and true
        hint = "It must be 0 or 1 or 2 or 3"
        raise ConfigError("deepspeed.zero_optimization.stage", f"{show(stage)} does not fit", hint)
    for key, least in (("offload_param", 3), ("offload_optimizer", 1)):
        offload = zero.get(key)
        device = offload.get("device") if isinstance(offload, dict) else None
        if device == "nvme":  # below stage 3 DeepSpeed would take it for "cpu" and say nothing
            least = 3
        if device in ("cpu", "nvme") and stage < least:
            raise ConfigError(
                f"deepspeed.zero_optimization.{key}.device",
                f"{show(device)} needs stage {least} or more, but stage = {stage}",
                f"Set deepspeed.zero_optimization.stage to {least}{' or more' if least < 3 else ''}, or remove {key}",
            )


def _check_nvme(zero: dict[str, Any]) -> None:
    """Raise ConfigError where offloading to a disk lacks a setting. The folder itself is checked on every node where
    the run starts."""
    for key in ("offload_optimizer", "offload_param"):
        offload, place = zero.get(key), f"deepspeed.zero_optimization.{key}"
        if not isinstance(offload, dict) or offload.get("device") != "nvme":
            continue
        path = offload.get("nvme_path")
        if not isinstance(path, str) or not path:
            hint = "Give a folder on a local disk of every node"
            raise ConfigError(f"{place}.nvme_path", f'{show(path)} does not fit device "nvme"', hint)
        pipelines = sum(offload.get(pipeline) is True for pipeline in ("pipeline_read", "pipeline_write"))
        least = ADAM_BUFFERS * (1 + pipelines)
        count = offload.get("buffer_count", ADAM_BUFFERS)
        if key == "offload_optimizer" and isinstance(count, int) and count < least:
            problem = (
                f"{show(count)} is too few for the weights, gradients and two moments of {1 + pipelines} sub-groups"
            )
            raise ConfigError(f"{place}.buffer_count", problem, f"Set it to {least} or more")

    swapped = zero.get("offload_param")
    prefetch = zero.get("stage3_prefetch_bucket_size", zero.get("prefetch_bucket_size"))
    if isinstance(swapped, dict) and swapped.get("device") == "nvme" and prefetch != 0:
        # __prefetch_nvme_param_partitions asks twice for a weight that is used twice in what lies ahead (0.19.8)
        problem = f'{show(prefetch)} with offload_param.device "nvme" ends in an assertion of DeepSpeed'
        raise ConfigError("deepspeed.zero_optimization.stage3_prefetch_bucket_size", problem, "Set it to 0")


def _check_supported(zero: dict[str, Any]) -> None:
    """Raise ConfigError for settings that put the optimizer's state where checkpoints do not look for it."""
    for key, supported in ZERO_SUPPORTED.items():
        *parts, last = key.split(".")
        section = zero
        for part in parts:
            section = section.get(part) or {}
        if section.get(last, supported[0]) not in supported:
            problem = f"{show(section[last])} puts the optimizer's state where checkpoints cannot find it"
            hint = f"Remove it, or set it to {show(supported[0])}"
            raise ConfigError(f"deepspeed.zero_optimization.{key}", problem, hint)
