"""Every row of the table of promises has its test: a row's id stands in the name of each test that shows it."""

import ast
from pathlib import Path

from tests.conftest import SLOW

ROWS = {
    "C1": "the whole job killed at random moments",
    "C2": "a rank killed at each point of a save",
    "C3": "a rank that writes late, and dies",
    "C4": "one rank's write fails",
    "C5": "a full disk, a quota, a vanished or read-only folder",
    "C6": "checkpoint files damaged, cut, gone, swapped, added",
    "C7": "entries beside checkpoints that are none, and a wrong `latest`",
    "C8": "a save while another is under way",
    "C9": "a complete checkpoint exists at all times",
    "C10": "ranks that save different steps",
    "C11": "another configuration, data or tokenizer",
    "C12": "a second run in the same folder",
    "R1": "a stop after any step",
    "R2": "an exact resume with every attention",
    "R3": "a resume on another number of ranks",
    "R4": "another read-ahead",
    "R6": "a resume late in a large epoch",
    "S1": "SIGTERM, SIGINT, SIGUSR1",
    "S2": "a rank killed",
    "S3": "a rank that hangs",
    "S4": "the reading thread fails",
    "S5": "a rank that raises",
    "S6": "a slow rank",
    "S7": "the same crash again and again",
    "S8": "a port that is taken",
    "D1": "shards of another size",
    "D2": "hostile members of shards",
    "D3": "damaged members",
    "D4": "a hostile index",
    "D5": "members that would be written elsewhere",
    "D6": "storage that does not answer",
    "D7": "slow storage",
    "D8": "each sequence once an epoch",
    "D9": "bytes that come back unchanged",
    "D10": "any bytes in place of an index",
    "N1": "losses and gradients that are not finite",
    "N2": "weights that are not finite are not saved",
    "N3": "spikes of the loss",
    "N4": "extreme values in every mechanism",
    "N5": "operators equal their definitions",
    "N6": "the same seed gives the same bits",
    "N7": "outputs of a prefix do not depend on what follows",
    "X1": "checkpoints that carry code",
    "X3": "configurations that carry code",
    "X4": "what our own source may not call",
    "X5": "modes of files, and planted links",
    "X6": "forged sizes",
    "X7": "mutants of every kind of file",
    "F1": "mutated configurations",
    "F2": "ranks started with different configurations",
    "E1": "a long run under random faults",
}
"""Id of each row of docs/reliability.md -> the fault that it injects, or what it promises. C is for checkpoints, R for
resuming, S for signals and dying ranks, D for data, N for numbers, X for security, F for fuzzing, E for endurance."""


def ids_in_names() -> set[str]:
    found = set()
    for path in Path(__file__).parent.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                found |= set(node.name.split("_"))
    return found


def test_every_row_has_a_test():
    found = ids_in_names()
    missing = [f"{row} ({what})" for row, what in ROWS.items() if row not in found]
    assert not missing, f"no test is named test_ROW_... for {', '.join(missing)}"


def test_every_pattern_of_slow_files_names_some():
    tests = Path(__file__).parent
    unused = [pattern for pattern in SLOW if not any(tests.glob(f"**/{pattern}"))]
    assert not unused, f"tests/conftest.py: no file is named {', '.join(unused)}"
