"""Every key of the `deepspeed` section is known to DeepSpeed, not ours, and of the right kind."""

import json
import subprocess
import sys
from pathlib import Path

from megasparse.config import deepspeed_section
from megasparse.config.deepspeed_section import overlaps_communication
from megasparse.errors import ConfigError
from megasparse.settings.load import build_config
from tests.helpers.cases import together
from tests.helpers.commands import refusal

ROOT = Path(__file__).parents[2]
NVME = {"device": "nvme", "nvme_path": "/nvme"}


def refused(**section: object) -> str:
    message = refusal(lambda: build_config({"deepspeed": section}), ConfigError)
    assert "Input should" not in message
    return message


@together("key", sorted(deepspeed_section.HELD_BY_MEGASPARSE))
def test_keys_that_megasparse_sets_are_rejected_with_the_megasparse_key(key):
    message = refused(**{key: 1})
    assert message.startswith(f"deepspeed.{key}: 1 is set here")
    assert message.endswith(f"set {deepspeed_section.HELD_BY_MEGASPARSE[key]}")


def test_our_keys_exist():
    for ours in deepspeed_section.HELD_BY_MEGASPARSE.values():
        for key in ours.split(" (")[0].split(" and "):
            value = build_config({})
            for part in key.split("."):
                value = getattr(value, part)


def nested(key: str, value: object) -> dict:
    for part in reversed(key.split(".")):
        value = {part: value}
    return value


@together(
    ("key", "near"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("wall_clock_breakdown", None),
        ("zero_optimization.stge", "stage"),
        ("zero_optimization.stage3_prefetch_buckt_size", "stage3_prefetch_bucket_size"),
        ("zero_optimization.offload_param.devic", "device"),
    ],
)
def test_an_unknown_key_is_one_line_with_the_nearest(key, near):
    message = refused(**nested(key, {}))
    assert message.startswith(f"deepspeed.{key}: unknown key (its value is {{}}). ")
    assert near is None or f'Did you mean "{near}"?' in message


@together(
    ("key", "value", "expected"),
    [
        ("zero_optimization", True, "an object {...}"),
        ("zero_optimization.stage", 4, "0, 1, 2 or 3"),
        ("zero_optimization.offload_param.device", "gpu", '"none", "cpu" or "nvme"'),
        ("zero_optimization.offload_param", "auto", "an object"),
        ("zero_optimization.reduce_bucket_size", -1, "greater than"),
        ("zero_optimization.overlap_comm", "maybe", "a valid boolean"),
    ],
)
def test_a_wrong_value_is_one_line_with_the_expected_type(key, value, expected):
    message = refused(**nested(key, value))
    assert message.startswith(f"deepspeed.{key}: {json.dumps(value)} does not fit. It must be {expected}")


@together(
    ("section", "message"),
    [
        (
            {"zero_optimization": {"stage3_prefetch_bucket_size": 1, "prefetch_bucket_size": 1}},
            "zero_optimization.prefetch_bucket_size: 1 is also given under the key's other name. Remove one",
        ),
        ({"zero_optimization": {"compute_grad_norm": False}}, "supported only with ZeRO Stage 1 or 2"),
        ({"zero_optimization": {"strict": True}}, "deepspeed.zero_optimization: DeepSpeed rejects it"),
        ({"zero_optimization": {"leaf_module": 3}}, "deepspeed.zero_optimization: DeepSpeed rejects it"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": NVME}},
            'offload_optimizer.device: "nvme" is not supported. megasparse does not offload to disks',
        ),
        ({"aio": {"block_size": 1048576}}, "deepspeed.aio: configures reads from disks"),
        (
            {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
            "offload_optimizer.ratio: 0.5 stores",
        ),
        ({"zero_optimization": {"round_robin_gradients": True}}, "round_robin_gradients: true stores"),
    ],
)
def test_keys_that_do_not_go_together_are_one_line(section, message):
    assert message in refused(**section)


def test_valid_settings_are_passed_on_unchanged():
    offload = {"offload_param": {"device": "cpu", "pin_memory": False}, "offload_optimizer": {"device": "cpu"}}
    sizes = {"stage3_param_persistence_threshold": 0, "prefetch_bucket_size": 0, "reduce_bucket_size": 5e8}
    section = {"zero_optimization": {"stage": 3, **offload, **sizes}}
    assert build_config({"deepspeed": section}).deepspeed == section


def printed(code: str) -> str:
    """Return the output of a separate process, which must succeed."""
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True).stdout


def test_settings_are_checked_without_importing_deepspeed():
    code = """
import sys
from megasparse.settings.load import build_config
from megasparse.errors import ConfigError
for override in (
    "model.layers=0", "model.heads=5", "deepspeed.gradient_clipping=1", "deepspeed.zero_optimisation={}",
    "deepspeed.zero_optimization.stage=4", "deepspeed.zero_optimization.offload_param.device=cpu",
):
    try:
        build_config({"deepspeed": {"zero_optimization": {"stage": 1}}}, [override])
    except ConfigError:
        continue
    print("loaded", override)
print({"deepspeed"} & {*sys.modules})
"""
    assert printed(code) == "set()\n"


def test_gradients_are_reduced_during_the_backward_on_several_gpus_at_stage_2():
    assert overlaps_communication({"stage": 2}, several_gpus=True)
    assert not any(overlaps_communication({"stage": stage}, several_gpus=True) for stage in (0, 1))
    assert not overlaps_communication({"stage": 2}, several_gpus=False)
    assert not overlaps_communication({"stage": 2, "overlap_comm": False}, several_gpus=True)
    assert overlaps_communication({"stage": 1, "overlap_comm": True}, several_gpus=False)


def test_deepspeed_is_imported_without_mlflow_which_then_still_can_be():
    code = """
import importlib.util, sys
from megasparse.config.deepspeed_section import import_deepspeed
deepspeed = import_deepspeed()
print(hasattr(deepspeed, "initialize"), "mlflow" in sys.modules, importlib.util.find_spec("mlflow") is not None)
"""
    assert printed(code).splitlines()[-1] == "True False True"


def test_shipped_configurations_load_on_the_torch_engine_without_deepspeed():
    code = """
import sys
sys.modules["deepspeed"] = None
from megasparse.config.files import shipped_configs
from megasparse.config.finetuning import FinetuneConfig
from megasparse.settings.load import load_settings
from megasparse.config.schema import Config
for name, path in shipped_configs().items():
    if not name.startswith("comparisons/"):
        finetune = name.startswith("finetune/")
        overrides = ["run.engine=torch"] + ([] if finetune else ["parallel.sequence=1"])
        load_settings(path, overrides, FinetuneConfig if finetune else Config)
print("loaded")
"""
    assert printed(code) == "loaded\n"
