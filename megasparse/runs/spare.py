"""A rank in reserve: a process that has imported everything, and waits to take the place of one that has died.

    python -m megasparse.runs.spare -m megasparse pretrain --config ...
    python -m megasparse.runs.spare script.py --config ...

It reads one line from standard input, the environment of the rank as a JSON object, and becomes that rank. Where the
supervisor ends without a word, it ends too.
"""

import json
import os
import runpy
import sys
from pathlib import Path


def main() -> None:
    """Import, wait, run."""
    _import_all()
    line = sys.stdin.readline()
    if not line:
        return
    os.environ.clear()
    os.environ.update(json.loads(line))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    program = sys.argv[1:]
    if program[0] == "-m":
        sys.argv = program[1:]
        runpy.run_module(program[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = program
        sys.path[0] = str(Path(program[0]).resolve().parent)
        runpy.run_path(program[0], run_name="__main__")


def _import_all() -> None:
    """What a run imports, which takes seconds. Nothing here touches a device: its rank is not known yet."""
    # torch asks NVML whether there is a GPU: asking CUDA would settle which ones this process sees
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    import torch

    if not torch.cuda.is_available():
        os.environ["DS_ACCELERATOR"] = "cpu"

    import torch._dynamo  # as the first optimizer does

    import megasparse.runs.pretraining  # noqa: F401
    from megasparse.config.deepspeed_section import import_deepspeed

    import_deepspeed()


if __name__ == "__main__":
    main()
