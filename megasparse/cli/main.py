"""The entry point of `megasparse` and of the scripts in launch/ and tools/ that run its subcommands."""

import argparse
import importlib
import inspect
import shlex
import sys
from collections.abc import Callable, Iterable, Sequence

from megasparse import __version__
from megasparse.errors import UserError, did_you_mean, report_user_errors, without_secrets

COMMANDS = {
    "quickstart": ("train", "prepare real text, train a small model on it and evaluate it: 8 minutes on two cores"),
    "pretrain": ("train", "pretrain a decoder, an encoder or an encoder-decoder"),
    "finetune": ("train", "fine-tune a pretrained model on a downstream task or a table of your own"),
    "evaluate": ("evaluation", "held-out bits/dim of a pretrained model, the metrics of a fine-tuned one"),
    "generate": ("evaluation", "generate text or images"),
    "compress": ("evaluation", "compress a file with a decoder's predictions"),
    "decompress": ("evaluation", "restore a compressed file, byte for byte"),
    "predict": ("evaluation", "predictions of a fine-tuned model for new examples"),
    "configs": ("train", "list the shipped configurations"),
    "prepare-data": ("data", "turn a corpus into shards"),
    "train-tokenizer": ("data", "train a tokenizer on text"),
    "plan": ("train", "predict memory, traffic, time and cost of a pretraining run"),
    "report": ("train", "write an HTML page about one or several runs"),
    "convert to-hf": ("hub", "write a checkpoint as a Hugging Face model"),
    "convert from-hf": ("hub", "turn a Hugging Face model into a checkpoint"),
    "replace-attention": ("hub", "replace the attention of a Hugging Face encoder or decoder"),
    "teach": ("hub", "teach a replaced model's hashes or sketches its own attention"),
    "check-model": ("hub", "check a Hugging Face decoder for leaks of later tokens, padding and other documents"),
    "compare": ("train", "train and evaluate several attention mechanisms alike"),
}
"""Subcommand -> (module in megasparse.cli, purpose), in the order of `megasparse --help`. `convert to-hf` runs
`convert_to_hf`, whose docstring is the help text, and `add_convert_to_hf(parser)` declares the options.
"""
EXTRAS = {
    "transformers": "hf",
    "constriction": "compress",
    **dict.fromkeys(("fsspec", "s3fs"), "remote"),
    **dict.fromkeys(("sklearn", "scipy", "peft", "accelerate", "sacrebleu", "rouge_score", "datasets"), "tasks"),
}
"""Package -> extra of megasparse that installs it."""


@report_user_errors
def main(words: Sequence[str] | None = None) -> None:
    """Run a subcommand. words: the subcommand and its arguments, by default from the command line."""
    # Drop the deepspeed launcher's --local_rank=N; the engine reads the environment instead.
    words = sys.argv[1:] if words is None else words
    words = [str(word) for word in words if not str(word).startswith(("--local_rank=", "--local-rank="))]
    for word in words:
        if word.encode(errors="ignore").decode() != word:
            raise UserError(f"{word}: this argument is not UTF-8. Rename the file, or give its folder")
    if not words or words[0] in ("-h", "--help"):
        print(overview(COMMANDS))
        return
    if words[0] == "--version":
        print(f"megasparse {__version__}")
        return
    name, rest = split(words)
    if name is None:
        print(overview([command for command in COMMANDS if command.startswith(f"{words[0]} ")]))
        return
    try:
        args = parser_of(name).parse_args(rest)
        args.command = shlex.join(["megasparse", *map(without_secrets, words)])
        command_of(name)[1](args)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package == "megasparse":
            raise
        extra = f"[{EXTRAS[package]}]" if package in EXTRAS else ""
        hint = f"Install it: pip install -e '.{extra}', or activate its environment: source .venv/bin/activate"
        hint += ". One process also trains without it: --set 'run.engine=\"torch\"'" if package == "deepspeed" else ""
        raise UserError(f"{package}: megasparse {name} needs this package, which is not installed. {hint}") from None


def door(command: str) -> Callable[..., None]:
    """Return the entry point of a script that runs one subcommand with the arguments of the script."""

    def run(words: Sequence[str] | None = None) -> None:
        main([*command.split(), *(sys.argv[1:] if words is None else words)])

    return run


def split(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """Return the subcommand and its arguments; None as subcommand for only a group's name, with or without --help."""
    for count in (1, 2):
        if (name := " ".join(words[:count])) in COMMANDS:
            return name, words[count:]
    group = [command for command in COMMANDS if command.startswith(f"{words[0]} ")]
    if group and (len(words) == 1 or words[1] in ("-h", "--help")):
        return None, []
    name = " ".join(words[:2]) if group else words[0]
    raise UserError(f"{name}: unknown subcommand. {did_you_mean(name, group or COMMANDS)}")


def command_of(name: str) -> tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], None]]:
    """Return the functions of a subcommand that declare its options and run it."""
    module = importlib.import_module(f"megasparse.cli.{COMMANDS[name][0]}")
    identifier = name.replace("-", "_").replace(" ", "_")
    return getattr(module, f"add_{identifier}"), getattr(module, identifier)


def parser_of(name: str) -> argparse.ArgumentParser:
    add_arguments, run = command_of(name)
    parser = argparse.ArgumentParser(
        prog=f"megasparse {name}",
        description=inspect.getdoc(run),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_arguments(parser)
    return parser


def overview(names: Iterable[str]) -> str:
    lines = [f"  {name:18} {COMMANDS[name][1]}" for name in names]
    examples = [
        "  megasparse pretrain quickstart --dry-run",
        "  megasparse prepare-data text --source my_books/ --output data/books",
        "  megasparse SUBCOMMAND --help",
    ]
    return "\n".join(["usage: megasparse SUBCOMMAND ...", "", *lines, "", "examples:", *examples])
