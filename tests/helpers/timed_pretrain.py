"""The script tests/helpers/faulty_pretrain.py, which writes down when it has come how far: one JSON line each in
`marks.txt` of the folder in MEGASPARSE_FAULTS, with rank, process, time and CPU seconds.

    begun      the program begins
    imported   everything but DeepSpeed is imported
    met        the ranks have met
    opened     the checkpoint is found and verified
    ready      DeepSpeed is imported, the model is built and filled
    stepped    the first step is done
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.helpers import faulty_pretrain

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))


BEGUN, BEGUN_CPU = time.time(), time.process_time()


def mark(what: str, when: float | None = None, cpu: float | None = None) -> None:
    folder = Path(json.loads(os.environ["MEGASPARSE_FAULTS"])["folder"])
    line = {
        "what": what,
        "rank": int(os.environ["RANK"]),
        "pid": os.getpid(),
        "time": time.time() if when is None else when,
        "cpu": time.process_time() if cpu is None else cpu,
    }
    with (folder / "marks.txt").open("a") as file:
        file.write(json.dumps(line) + "\n")


def marking(holder: Any, name: str, what: str) -> None:
    """Write the mark when the function `holder.name` has returned for the first time."""
    function, done = getattr(holder, name), []

    def instead(*args: Any, **keywords: Any) -> Any:
        result = function(*args, **keywords)
        if not done:
            done.append(True)
            mark(what)
        return result

    setattr(holder, name, instead)


def main(run: Callable[[], None] = faulty_pretrain.main) -> None:
    mark("begun", BEGUN, BEGUN_CPU)
    from megasparse.runs import pretraining
    from megasparse.training import run as wiring
    from megasparse.training.engines.contract import Engine

    mark("imported")
    marking(pretraining, "start_ranks", "met")
    marking(wiring, "find_start", "opened")
    marking(wiring, "build_engine", "ready")
    marking(Engine, "train_step", "stepped")
    run()


if __name__ == "__main__":
    main()
