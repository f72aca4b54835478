"""What a pretraining run will take, before it runs: memory, traffic, FLOPs, time, cost, and how to go further.

    python tools/plan_memory.py --config configs/reformer_64k.json --gpus 8 --gpu-memory 80GiB
    python tools/plan_memory.py --config configs/reformer_64k.json --set parallel.sequence=8 --gpus 64 \
        --gpu-memory 80GiB --price-per-gpu-hour 2 --json
    python tools/plan_memory.py --config configs/quickstart.json --gpus 1 --gpu-memory 4GiB --measure   # of this CPU

Needs no GPU and no memory of the model's size: the GPU kernels' allocations are counted, not made. docs/scaling.md has
the formulae.
"""

import argparse
import json
import math
from dataclasses import replace

from megasparse.config.command_line import config_from, config_parser
from megasparse.config.messages import show
from megasparse.config.schema import Config
from megasparse.errors import ConfigError, report_user_errors


def arguments() -> argparse.Namespace:
    parser = config_parser(__doc__)
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="of all nodes")
    parser.add_argument("--gpus-per-node", type=int, default=8, metavar="N")
    parser.add_argument("--gpu-memory", required=True, metavar="SIZE", help="of one GPU, such as 80GiB")
    parser.add_argument("--gpu", default="A100", metavar="NAME", help="A100, H100 or H200, or another with its peak")
    parser.add_argument("--peak-tflops", type=float, metavar="X", help="dense bf16 peak of one GPU")
    parser.add_argument("--mfu", type=float, default=0.3, metavar="X", help="model FLOPs utilisation to assume (0.3)")
    parser.add_argument("--network", metavar="SIZE", help="bytes/s of a node's network, such as 200GB (the default)")
    parser.add_argument("--price-per-gpu-hour", type=float, metavar="X", help="in any currency")
    parser.add_argument(
        "--measure", action="store_true", help="memory of the CPU's code, from short passes on this one"
    )
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, FLOPs")
    given = parser.parse_args()
    for option in ("gpus", "gpus_per_node", "mfu", "peak_tflops", "price_per_gpu_hour"):
        value = getattr(given, option)
        if value is not None and not (math.isfinite(value) and value > 0):
            name = option.replace("_", "-")
            raise ConfigError(f"--{name}", f"{show(value)} is not above 0", "Give a number above 0")
    if given.mfu > 1:
        raise ConfigError("--mfu", f"{given.mfu} is more than a GPU can", "Give a share, such as 0.3")
    return given


@report_user_errors
def main() -> None:
    given = arguments()
    config = config_from(given, Config)
    from megasparse.planning.further import longest_that_fits, pretraining_hints
    from megasparse.planning.hardware import hardware, parse_bytes
    from megasparse.planning.plan import Assumptions, Plan
    from megasparse.planning.report import as_json, assumption_lines, further_lines, lines

    gpu = hardware(given.gpu, given.peak_tflops)
    if given.network:
        gpu = replace(gpu, network=float(parse_bytes("--network", given.network)))
    on = Assumptions(
        gpu, given.gpus, given.gpus_per_node, parse_bytes("--gpu-memory", given.gpu_memory), given.mfu,
        given.price_per_gpu_hour, "measured" if given.measure else "counted",
    )  # fmt: skip
    plan = Plan(config, on)
    longest, changes = longest_that_fits(plan), pretraining_hints(plan)
    if given.json:
        print(json.dumps(as_json(plan, longest, changes), indent=2))
    else:
        print("\n".join([*lines(plan), *further_lines(plan, longest, changes), *assumption_lines(plan)]))


if __name__ == "__main__":
    main()
