"""Print a completion script: Tab completes subcommands, options and configurations.

source <(megasparse completion bash)                                             # in ~/.bashrc
source <(megasparse completion zsh)                                              # in ~/.zshrc
megasparse completion fish > ~/.config/fish/completions/megasparse.fish
"""

import argparse

from megasparse.cli.configs import runnable
from megasparse.cli.main import COMMANDS, module_of, parser_of

CONFIGURED = ("pretrain", "finetune", "plan", "bench training", "bench offload")
"""Subcommands whose first word is a configuration."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=["bash", "zsh", "fish"])


def run(args: argparse.Namespace) -> None:
    print("\n".join(fish(words_after()) if args.shell == "fish" else bash(words_after(), args.shell == "zsh")))


def words_after() -> dict[str, list[str]]:
    """The words that may follow "megasparse" and what was typed after it, such as "" or "bench" or "pretrain"."""
    from megasparse.config.shipped import shipped_configs

    found: dict[str, list[str]] = {"": []}
    for name in COMMANDS:
        *group, last = name.split()
        found.setdefault(" ".join(group), []).append(last)
        if group and group[0] not in found[""]:
            found[""].append(group[0])
        found[name] = options(parser_of(name, module_of(name)))
        if name in CONFIGURED:
            finetuning = name == "finetune"
            found[name] += [each for each in runnable(shipped_configs()) if each.startswith("finetune/") == finetuning]
    return found


def options(parser: argparse.ArgumentParser) -> list[str]:
    """The long options of a parser and the words that it chooses among."""
    found = []
    for action in parser._actions:
        found += [option for option in action.option_strings if option.startswith("--")]
        if not action.option_strings and action.choices is not None:
            found += list(action.choices)
    return found


def bash(words: dict[str, list[str]], zsh: bool) -> list[str]:
    """The script for bash, which zsh can run, too. Where no word fits, files are completed."""
    cases = [f'        "{before}") words="{" ".join(after)}" ;;' for before, after in words.items()]
    return [
        *(["autoload -U +X compinit && compinit -u", "autoload -U +X bashcompinit && bashcompinit"] if zsh else []),
        "_megasparse() {",
        '    local before="" words="" current="${COMP_WORDS[COMP_CWORD]}"',
        '    if [ "$COMP_CWORD" -gt 1 ]; then before="${COMP_WORDS[1]}"; fi',
        f'    case "$before" in {"|".join(group for group in words if group and words_of_group(words, group))})',
        '        if [ "$COMP_CWORD" -gt 2 ]; then before="$before ${COMP_WORDS[2]}"; fi ;;',
        "    esac",
        '    case "$before" in',
        *cases,
        "    esac",
        '    COMPREPLY=($(compgen -W "$words" -- "$current"))',
        "}",
        "complete -o default -F _megasparse megasparse",
    ]


def words_of_group(words: dict[str, list[str]], name: str) -> bool:
    """Whether a name is a group such as "bench", whose next word belongs to the subcommand's name."""
    return any(other.startswith(f"{name} ") for other in words)


def fish(words: dict[str, list[str]]) -> list[str]:
    """The script for fish."""
    lines = []
    for before, after in words.items():
        seen = [f"__fish_seen_subcommand_from {word}" for word in before.split()]
        if not before:
            seen = ["__fish_use_subcommand"]
        elif words_of_group(words, before):
            seen.append(f"not __fish_seen_subcommand_from {' '.join(after)}")
        lines.append(f"complete -c megasparse -n '{'; and '.join(seen)}' -a '{' '.join(after)}'")
    return lines
