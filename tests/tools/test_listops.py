import csv
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks.catalog import build_task
from tests.helpers.cases import together
from tests.helpers.commands import refused
from tools.listops import Sizes, main, tree

SMALL = ("--train", 40, "--validation", 5, "--test", 5, "--min-length", 20, "--max-length", 60)
NAMES = {"basic_train.tsv": 40, "basic_val.tsv": 5, "basic_test.tsv": 5}


def make(folder: Path, *options: object) -> Path:
    main([*map(str, options), "--output", str(folder)])
    return folder


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream, delimiter="\t"))


def parsed(tokens: Iterator[str]) -> Any:
    """A digit, (operator, arguments), or the end of the arguments."""
    token = next(tokens)
    if token[0] == "[":
        return token, list(iter(lambda: parsed(tokens), "]"))
    return token if token == "]" else int(token)


def binary(node: Any) -> str:
    if isinstance(node, int):
        return str(node)
    inside = node[0]
    for argument in node[1]:
        inside = f"( {inside} {binary(argument)} )"
    return f"( {inside} ] )"


def shape(source: str) -> Any:
    tree = parsed(token for token in source.split() if token not in "()")
    assert binary(tree) == source
    return tree


def worked(node: Any) -> int:
    if isinstance(node, int):
        return node
    operators = {"[MIN": np.min, "[MAX": np.max, "[MED": np.median, "[SM": np.sum}
    return int(operators[node[0]]([worked(argument) for argument in node[1]])) % 10


def operators(node: Any, depth: int = 1) -> list[tuple[str, int, int]]:
    if isinstance(node, int):
        return []
    name, arguments = node
    return [(name, len(arguments), depth), *(each for below in arguments for each in operators(below, depth + 1))]


def test_files_are_the_official_ones_and_targets_are_the_values(tmp_path, capsys):
    folder = make(tmp_path / "new" / "listops", *SMALL)
    assert sorted(path.name for path in folder.iterdir()) == sorted(NAMES)
    assert [path.name for path in folder.parent.iterdir()] == ["listops"]
    sources = []
    for name, count in NAMES.items():
        assert (folder / name).read_bytes().startswith(b"Source\tTarget\n(")
        found = rows(folder / name)
        assert len(found) == count
        for row in found:
            assert worked(shape(row["Source"])) == int(row["Target"])
            assert 20 < sum(token not in "()" for token in row["Source"].split()) < 60
        sources += [row["Source"] for row in found]
    assert len(set(sources)) == 50
    assert "40 training, 5 validation, 5 test examples" in capsys.readouterr().out
    read = list(build_task(TaskConfig(name="listops")).read(folder / "basic_val.tsv"))
    assert [example.label for example in read] == [int(row["Target"]) for row in rows(folder / "basic_val.tsv")]


def test_a_seed_makes_the_same_files(tmp_path):
    first, again, other = (make(tmp_path / name, *SMALL, "--seed", 3 + (name == "c")) for name in "abc")
    for name in NAMES:
        assert (first / name).read_bytes() == (again / name).read_bytes() != (other / name).read_bytes()


def test_trees_follow_the_distribution_of_the_paper():
    sizes = Sizes(min_length=0, max_length=10**9, max_depth=4, max_args=5)
    draw = random.Random(0)
    drawn = [example for example in (tree(draw, sizes) for _ in range(8_000)) if example is not None]
    assert len(drawn) == 8_000
    shapes = [shape(source) for source, _ in drawn]
    assert all(worked(tree) == target for tree, (_, target) in zip(shapes[:500], drawn, strict=False))
    assert abs(np.mean([not isinstance(tree, int) for tree in shapes]) - 0.25) < 0.02
    found = [each for tree in shapes for each in operators(tree)]
    assert max(depth for _, _, depth in found) == 3  # below is only room for digits
    for position, expected in ((0, {"[MIN", "[MAX", "[MED", "[SM"}), (1, {2, 3, 4, 5})):
        shares = Counter(each[position] for each in found)
        assert set(shares) == expected
        assert all(abs(share / len(found) - 0.25) < 0.02 for share in shares.values())
    arguments = [isinstance(each, tuple) for node in shapes if isinstance(node, tuple) for each in node[1]]
    assert abs(np.mean(arguments) - 0.25) < 0.02


@together(
    ("options", "said"),
    [
        (("--train", 0), "--train: 0 is too few. Give 1 or more"),
        (("--max-args", 1), "--max-args: 1 is too few. Give 2 or more"),
        (("--max-length", 500), "--max-length: 500 is too few. Give 502 or more"),
        (("--max-depth", 1, "--min-length", 0, "--max-length", 5), "allows too few trees: 10 were found"),
    ],
)
def test_impossible_requests_are_one_line_and_leave_no_file(tmp_path, capsys, options, said):
    assert said in refused(capsys, main, *options, "--output", tmp_path / "listops")
    assert "exists already" in refused(capsys, main, *SMALL, "--output", tmp_path)
    assert list(tmp_path.iterdir()) == []
