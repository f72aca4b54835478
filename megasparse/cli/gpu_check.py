r"""Check a GPU in ten minutes: that every kernel is right on it, how fast attention and training are, and how both
compare with torch's flash attention, with the roofline, and with what was counted without a GPU.

    megasparse gpu-check                                  # all stages: ten minutes on an H100 or H200
    megasparse gpu-check --stages ceilings,correct        # some of them
    megasparse gpu-check --small                          # a CPU: every stage at a tiny size, no figures of use

Stages: ceilings (copy, product), warm (compiles the kernels), correct (each operator against its definition in
float64, twice, in memory that holds NaN; more than 2^31 numbers), tests (the kernels' quick tests; needs pytest and a
checkout), sanitizer (compute-sanitizer, where it is installed), bench (attention forward and backward), train
(reformer_64k, and the same with full attention). Each runs in a process of its own and is ended at its limit; what it
has found by then stays in OUTPUT/STAGE.json. OUTPUT/table.md has all results. A wrong one ends the command with 1.

It takes torch 2.11 or later, its triton (3.6 or later), numpy, tqdm, safetensors and pydantic, and no deepspeed,
fairscale or tensorboard. Where no registry is at hand, bring pydantic's wheels (Python 3.12 on Linux, for example):
    pip download --only-binary=:all: --no-deps --python-version 3.12 --platform manylinux_2_17_x86_64 -d wheels \
      pydantic==2.14.3 pydantic-core==2.50.4 annotated-types==0.8.0 typing-inspection==0.4.5
"""

import argparse
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from megasparse.errors import ConfigError, UserError, did_you_mean


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", type=Path, default=Path("gpu-check"), metavar="DIR", help="default: %(default)s")
    parser.add_argument("--stages", metavar="A,B", help="default: all")
    parser.add_argument("--small", action="store_true", help="on a CPU, in Triton's interpreter, at tiny sizes")


def run(args: argparse.Namespace) -> None:
    if args.small:  # before any kernel is defined, here and in the stages' processes
        os.environ["TRITON_INTERPRET"] = "1"
    import torch

    from megasparse.benchmarks.gpu_check.runner import SLOWER, check
    from megasparse.benchmarks.gpu_check.stages import STAGES

    names = list(STAGES) if args.stages is None else args.stages.split(",")
    for name in names:
        if name not in STAGES:
            raise ConfigError("--stages", f'there is no "{name}"', did_you_mean(name, STAGES))
    if not args.small and not torch.cuda.is_available():
        raise ConfigError("gpu-check", "torch sees no GPU here", "Write --small to run every stage at a tiny size")
    chosen: dict[str, tuple[float, Callable[..., None]]] = {
        name: (STAGES[name].seconds * (SLOWER if args.small else 1), partial(STAGES[name].run, small=args.small))
        for name in names
    }
    if not check(args.output, chosen, partial(print, flush=True)):
        raise UserError(f"{args.output / 'table.md'}: something is wrong. The stages' JSON files beside it say what")
