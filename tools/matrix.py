"""Run a short tier of the tests under the oldest, middle and newest versions of the libraries.

    make matrix
    python tools/matrix.py --only newest

For each row, uv builds an environment in .cache/matrix, the tier runs in it, and the environment is deleted. The oldest
versions are the lower bounds of pyproject.toml. UV_TORCH_BACKEND=cpu selects PyTorch's CPU builds. Prints a Markdown
table (docs/lab/dependencies.md); exits with 1 if an environment cannot be built or a test fails. The column bits
identifies the losses and gradient norms of five training steps: rows with the same one computed the same bits.
"""

import argparse
import contextlib
import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / ".cache" / "matrix"
PACKAGES = ("torch", "triton", "deepspeed", "transformers", "webdataset", "pydantic", "numpy")
TIER = (
    # operators against their definitions
    "tests/ops/test_bucketed_attention.py::test_bands_of_any_width_equal_the_definition",
    "tests/ops/test_cluster_attention.py::test_forward_and_gradients_equal_the_definition",
    "tests/ops/test_gathered_attention.py::test_blocks_are_the_definition",
    "tests/ops/test_hash_table_attention.py::test_blocks_are_the_definition",
    "tests/ops/test_linear_attention.py::test_forward_and_gradients_equal_the_definition",
    "tests/ops/test_local_attention.py::test_blocks_are_the_definition",
    # draws, which must be the same bits under every version
    "tests/ops/test_random.py",
    # training steps on plain torch and under DeepSpeed, on two ranks with ZeRO; runs killed and resumed
    "tests/training/engines/test_plain.py::test_a_step_against_its_definition",
    "tests/optimizers/test_muon.py::test_rows_of_tables_in_use_are_updated_without_momentum",
    "tests/distributed/test_engine.py",
    "tests/distributed/test_sequence_parallel.py::test_packed_conversations_in_tiles_are_those_of_one_rank",
    "tests/training/checkpoints/test_exact_resume.py::test_killed_in_the_middle_of_an_accumulation",
    # export, replaced attention, teaching
    "tests/hub/test_export.py::test_an_exported_model_is_imported_bit_identically",
    "tests/hub/test_modelling.py::test_cached_greedy_text_is_the_uncached_and_our_own",
    "tests/hub/test_replace_decoders.py::test_full_attention_is_huggingfaces",
    "tests/hub/test_replace_decoders.py::test_tokens_that_join_a_cache_are_as_in_one_pass",
    "tests/hub/test_replace_decoders.py::test_generation_from_a_cache_equals_whole_sequences",
    "tests/hub/test_teaching.py::test_a_stopped_teaching_resumes_bit_identically",
    # one layer in a model of a user: the examples of its page, compiled ones included
    "tests/test_layer.py::test_an_example_of_the_page_runs",
    "tests/test_layer.py::test_two_ranks_train_as_one_process",
    "tests/test_layer.py::test_a_compiled_block_is_one_graph_with_the_same_bits",
    "tests/test_layer.py::test_compiled_functions_are_one_graph_with_the_same_bits",
    "tests/test_layer.py::test_functions_equal_their_definitions_with_gradients_in_float64",
    "tests/test_layer.py::test_packed_documents_are_attended_to_as_separate_sequences",
    # cached decoding, evaluation
    "tests/attention/test_decoding.py::test_cached_decoding_is_the_whole_sequence_bit_by_bit",
    "tests/evaluation/test_launchers.py::test_evaluate_writes_the_number_with_its_protocol",
)

STEPS = """
from megasparse.training.ranks import Ranks
from tests.helpers.models import small
from tests.helpers.tiny import dummy_steps, tiny_config
model = small(ngrams={"lengths": [2, 3], "rows": 64}).model_dump(mode="json")
for step in dummy_steps(tiny_config("unused", model=model, optimizer={"name": "muon"}), Ranks(), 5):
    print("loss and gradient norm", step.loss.hex(), step.grad_norm.hex())
"""


class Row(NamedTuple):
    """An environment: its Python, and uv's arguments that choose the versions."""

    python: str
    versions: tuple[str, ...]


ROWS = {
    "oldest": Row("3.10", ("--resolution", "lowest-direct")),
    "middle": Row("3.12", ("torch==2.10.0", "transformers==5.12.1")),
    "newest": Row("3.13", ()),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=ROWS, nargs="+", default=list(ROWS), help="rows to run")
    parser.add_argument("--python", help="version of Python of all rows")
    args = parser.parse_args()
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv"), "versions").expanduser()
    if pyenv.is_dir():  # uv finds only the versions that pyenv has selected
        os.environ.setdefault("PYENV_VERSION", ":".join(folder.name for folder in pyenv.iterdir()))
    titles = ["environment", "Python", *PACKAGES, "result", "bits", "CPU seconds"]
    lines = [titles, ["---"] * len(titles)]
    passed = True
    for name in args.only:
        try:
            cells, success = run_row(name, ROWS[name], args.python)
        except subprocess.CalledProcessError as error:
            cells, success = [name, *[""] * (len(titles) - 4), f"uv {error.cmd[1]} failed", "", ""], False
        lines.append(cells)
        passed = passed and success
    print("\n".join(f"| {' | '.join(line)} |" for line in lines))
    sys.exit(not passed)


def run_row(name: str, row: Row, version: str | None) -> tuple[list[str], bool]:
    """Build an environment and run the tier in it. Return the cells of its line, and True if all tests passed."""
    folder = FOLDER / name
    python = str(folder / "bin" / "python")
    uv = shutil.which("uv") or str(Path(sys.executable).with_name("uv"))
    try:
        subprocess.run([uv, "venv", "--quiet", "--clear", "--python", version or row.python, str(folder)], check=True)
        requirements = ["--editable", f"{ROOT}[tasks,compress]", "pytest>=8.4", "pytest-xdist>=3.8", *row.versions]
        subprocess.run([uv, "pip", "install", "--quiet", "--python", python, *requirements], check=True)
        show = "import platform, importlib.metadata as m; print(platform.python_version(), *map(m.version, {!r}))"
        versions = subprocess.check_output([python, "-c", show.format(PACKAGES)], text=True).split()
        environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_CORETYPE": "SandyBridge", "HF_HUB_OFFLINE": "1"} | os.environ
        run = partial(subprocess.run, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: adopt processes whose parent ends before them
        before = cpu_seconds()
        outcome = run([python, "-m", "pytest", "-q", "-m", "not slow and not kernels", *TIER])
        seconds = cpu_seconds() - before
        sys.stderr.write(outcome.stdout)
        steps = run([python, "-c", STEPS])
        sys.stderr.write(steps.stdout)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", outcome.stdout.splitlines()[-1])
    bits = "failed" if steps.returncode else hashlib.sha256(steps.stdout.encode()).hexdigest()[:8]
    cells = [name, *versions, ", ".join(counts), bits, f"{seconds:.0f}"]
    return cells, outcome.returncode == steps.returncode == 0


def cpu_seconds() -> float:
    """Return the CPU seconds of descendant processes that have ended."""
    time.sleep(1.0)  # the server that forks ranks ends after the tests
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    times = os.times()
    return times.children_user + times.children_system


if __name__ == "__main__":
    main()
