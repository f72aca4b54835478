"""The command itself, in processes as a user starts it: exit codes, one line on stderr, no traceback."""

import ast
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import megasparse
from megasparse.cli.main import COMMANDS, command_of, main, parser_of
from megasparse.errors import report_user_errors
from megasparse.settings.load import load_config
from tests.helpers.cases import together

ROOT = Path(__file__).parents[2]
QUICKSTART = str(ROOT / "configs" / "quickstart.json")


def start(*words, program=("-m", "megasparse"), cwd=ROOT, stdout=subprocess.PIPE, text=None, **variables):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables}
    given = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True, "cwd": cwd, "env": environment, "input": text}
    return subprocess.run([sys.executable, *program, *words], **given, check=False)


def ended(capsys, *words):
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    return caught.value.code, out, err


def test_the_overview_has_every_subcommand_and_imports_nothing_slow():
    code = "import sys; from megasparse.cli.main import main; main(['--help']); "
    code += "print({'torch', 'pydantic'} & {*sys.modules})"
    shown = start(program=("-c", code)).stdout
    assert shown.endswith("set()\n")
    assert all(f"  {name} " in shown for name in COMMANDS)


MISTAKES = """
pretrain quickstrat
pretrain nope.json
pretrain quickstart --stes 5
pretrain quickstart --start runs/nope
pretrain quickstart --data nope
pretrain quickstart --resume runs/nope
pretrain quickstart --gpus 2
pretrain quickstart --set training.stepz=10
pretrain quickstart --set data.path=nope
pretrain quickstart --set data.tokenizer=nope.model
finetune finetune/revews
finetune glue/sts2
finetune glue/sst2 --source nope
finetune finetune/quick --set trainin.steps=10
finetune finetune/quick --set task.name=nope
finetune finetune/quick --set task.source=nope.csv
finetune finetune/quick --set task.label=nope
finetune finetune/quick --set task.validation=nope.csv
finetune finetune/quick --set task.tokenizer=nope.model
finetune finetune/quick --set start.checkpoint=runs/nope
finetune finetune/quick --set start.glove=nope.txt
finetune finetune/reviews --set start.checkpoint=runs/nope
finetune finetune/reviews --set start.checkpoint=null --set start.huggingface=nope
evaluate --checkpoint runs/nope
evaluate --checkpoint runs/nope --task rtee --source LICENSE
evaluate --checkpoint runs/nope --task rte --source nope
generate --checkpoint runs/nope
compress LICENSE --checkpoint runs/nope
compress nope --checkpoint runs/nope
decompress nope.msz --checkpoint runs/nope
predict --checkpoint runs/nope --text x
prepare-data txt
prepare-data text --source nope --output runs/nope
prepare-data text --source LICENSE --tokenizer nope.model --output runs/nope
prepare-data images --source configs --output runs/nope
prepare-data enwik8 --source LICENSE --output runs/nope
train-tokenizer words --source nope --output runs/nope/words.txt
plan quickstrat --gpus 8
plan quickstart --gpus 3 --gpus-per-node 2
plan quickstart --gpus 2
plan quickstart --gpus 8 --gpu A10
plan quickstart --gpus 8 --gpu-memory 80GG
plan quickstart --gpus 8 --set training.stepz=10
report runs/nope
convert to-hf --checkpoint runs/nope --output runs/nope
convert to-hf --checkpoint runs/nope --output runs/nope --to lama
convert from-hf --model nope/nope --output runs/nope
convert from-hf --model configs --output runs/nope
replace-attention --model nope --attention {} --output runs/nope
replace-attention --model configs --attention {} --output runs/nope
replace-attention --model configs --attention { --output runs/nope
teach --model nope --texts LICENSE --output runs/nope
teach --model configs --texts LICENSE --output runs/nope
check-model --model nope
check-model --model configs
compare comparisons/qickstart
compare comparisons/quickstart --arms nope
compare comparisons/duplication --set training.stepz=10 --output runs/nope
"""


def test_help_and_wrong_names_and_paths_do_not_import_torch(tmp_path):
    helps = [f"{name} --help" for name in [*COMMANDS, "prepare-data text", "train-tokenizer words"]]
    expected = [*((line, 0) for line in helps), *((line, 2) for line in MISTAKES.strip().splitlines())]
    code = """
import os, sys
sys.stdout = open(os.devnull, "w")
from megasparse.cli.main import main
for line in sys.stdin.read().splitlines():
    try:
        main(line.split())
    except SystemExit as end:
        print(line, end.code, "torch" in sys.modules, sep=";", file=sys.__stdout__)
"""
    for name in ("LICENSE", "configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    done = start(program=("-c", code), cwd=tmp_path, text="\n".join(line for line, _ in expected))
    assert done.stdout.splitlines() == [f"{line};{code};False" for line, code in expected], done.stderr


def test_help_and_wrong_paths_of_tools_do_not_import_torch():
    paths = [path for path in ROOT.glob("tools/**/*.py") if "ArgumentParser(" in path.read_text(encoding="utf-8")]
    lines = [f"{path} --help" for path in paths]
    lines += [f"{ROOT}/tools/retrieval.py --model nope --json nope.json"]
    lines += [f"{ROOT}/tools/study_attention.py hashes --checkpoint nope"]
    code = """
import os, runpy, sys
sys.stdout = open(os.devnull, "w")
for line in sys.stdin.read().splitlines():
    sys.argv = line.split()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        print(line, end.code, "torch" in sys.modules, sep=";", file=sys.__stdout__)
"""
    done = start(program=("-c", code), text="\n".join(lines))
    codes = [0] * len(paths) + [2, 2]
    assert done.stdout.splitlines() == [f"{line};{code};False" for line, code in zip(lines, codes, strict=True)]


def test_a_terminal_in_ascii_shows_every_help():
    code = "from megasparse.cli.main import parser_of; from megasparse.errors import report_user_errors; "
    code += f"report_user_errors(lambda: [parser_of(name).print_help() for name in {[*COMMANDS]}])()"
    shown = start(program=("-c", code), PYTHONIOENCODING="ascii", LC_ALL="C", PYTHONUTF8="0")
    assert (shown.returncode, shown.stderr) == (0, "") and shown.stdout.isascii()


def test_a_configuration_with_umlauts_is_printed_as_json_in_ascii():
    words = ("pretrain", "quickstart", "--set", "run.directory=rüns", "--print-config")
    printed = start(*words, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert printed.stdout.isascii() and json.loads(printed.stdout)["run"]["directory"] == "rüns"


@together("name", COMMANDS)
def test_the_help_of_a_subcommand_has_examples_that_it_accepts(name, capsys):
    code, shown, _ = ended(capsys, *name.split(), "--help")
    assert code == 0
    lines = command_of(name)[1].__doc__.replace("\\\n", " ").splitlines()
    lines = [line.strip() for line in lines if f"{line.strip()} ".startswith(f"megasparse {name} ")]
    for line in lines:
        words = shlex.split(re.split(r"  +[#(]| > ", line)[0])[1 + len(name.split()) :]
        if not {"...", "CORPUS"} & {*words}:
            parser_of(name).parse_args(words)
    assert lines and shlex.split(lines[0])[-1] in shown


def test_every_door_leads_to_a_subcommand_and_is_short():
    for path in [*ROOT.glob("launch/*.py"), *ROOT.glob("tools/*_*.py")]:
        text = path.read_text(encoding="utf-8")
        if path.stem in ("study_attention", "key_choice"):
            continue
        assert len(text.splitlines()) <= 15, path
        assert re.findall(r'door\("(.*)"\)', text)[0] in COMMANDS and ast.get_docstring(ast.parse(text))


def test_without_deepspeed_training_names_the_engine_that_does_not_need_it(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    code, _, error = ended(
        capsys, "pretrain", "quickstart_relu", "--dry-run", "--set", "deepspeed.zero_optimization.overlap_comm=false"
    )
    assert code == 2 and "deepspeed: " in error and "--set 'run.engine=\"torch\"'" in error


@pytest.mark.slow
def test_a_door_works_from_any_folder_and_under_deepspeed(tmp_path):
    words = ["--local_rank=0", "--config", "configs/quickstart.json", "--set", "run.seed=5", "--print-config"]
    found = start(*words, program=(str(ROOT / "launch/pretrain.py"),), cwd=tmp_path, PYTHONPATH="")
    assert json.loads(found.stdout) == json.loads(load_config(QUICKSTART, ["run.seed=5"]).model_dump_json())
    assert json.loads(found.stdout)["checkpoint"]["keep"] == 2  # a default that the file does not name
    module = start("--local_rank=0", "pretrain", "quickstart", "--set", "run.seed=5", "--print-config", cwd=tmp_path)
    assert module.stdout == found.stdout


@together(
    ("words", "message"),
    [
        (["pretrain", "quickstart", "--set", "training.steps=x"], "training.steps: "),
        (["pretrain", "quickstart", "--set", "training.stepz=1"], "training.stepz: "),
        (
            ["plan", "quickstart_relu", "--gpus", "1", "--set", "deepspeed.zero_optimization.stge=1"],
            "deepspeed.zero_optim",
        ),
        (["pretrain", "no/such.json"], "no/such.json: cannot be read"),
        (["pretrain", "quickstrat"], "quickstrat: cannot be read (no such file, and no such shipped configuration). D"),
        (["pretrain"], "--config: no configuration is given. Give one"),
        (["pretrain", "quickstart", "--config", QUICKSTART], "--config: quickstart is also given"),
        (["pretrian"], 'pretrian: unknown subcommand. Did you mean "pretrain"?'),
        (["evaluate", "--checkpoint", "a\nb\x1b[2J"], "a\\nb\\x1b[2J: "),
        (["pretrain", "caf\udce9.json"], "caf\\udce9.json: this argument is not UTF-8"),
        (["convert", "to-fh"], 'convert to-fh: unknown subcommand. Did you mean "convert to-hf"?'),
    ],
)
def test_a_mistake_is_exit_code_2_and_one_line(words, message, capsys):
    code, out, err = ended(capsys, *words)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"error: {message}")


def test_pretraining_reports_a_mistake_before_the_imports_that_take_seconds():
    code = """
import runpy, sys
try:
    runpy.run_path("launch/pretrain.py", run_name="__main__")
except SystemExit as end:
    print(end.code, "deepspeed" in sys.modules)
"""
    found = start("quickstart", "--set", "deepspeed.zero_optimization.stage=4", program=("-c", code))
    assert found.stdout == "2 False\n", found.stderr


def test_a_missing_package_is_one_line_with_the_install_command(tmp_path):
    code = "import sys; sys.modules['pydantic'] = None; from megasparse.cli.main import main; main()"
    ended = start("pretrain", "quickstart", program=("-c", code), cwd=tmp_path)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (2, "", 1), ended.stderr
    assert "pydantic: " in ended.stderr and "pip install" in ended.stderr


def test_unknown_options_are_rejected_and_groups_are_listed(capsys):
    assert ended(capsys, "pretrain", "quickstart", "--stes")[0] == 2
    assert ended(capsys, "pretrain", "quickstart", "--conf", "y")[0] == 2
    main(["convert"])
    shown = capsys.readouterr().out
    assert "convert to-hf" in shown and "convert from-hf" in shown and "pretrain " not in shown.split("examples")[0]


def test_the_version_is_printed(capsys):
    main(["--version"])
    assert capsys.readouterr().out == f"megasparse {megasparse.__version__}\n"


def test_configs_lists_what_can_be_run(capsys):
    main(["configs", "glue_r"])
    assert capsys.readouterr().out.split() == ["finetune/glue_rte", "fine-tuning", "on", "rte,", "128", "tokens"]
    main(["configs"])
    shown = capsys.readouterr().out
    assert "\nquickstart " in shown and "comparisons" not in shown


def test_an_interrupted_command_is_one_line_and_no_traceback(capsys):
    @report_user_errors
    def main():
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130 and capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize("unbuffered", ["", pytest.param("1", marks=pytest.mark.slow)])
def test_a_closed_output_pipe_is_not_an_error(unbuffered):
    """As in `megasparse configs | head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = start("configs", stdout=writing, PYTHONUNBUFFERED=unbuffered)
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, "")
