"""Tasks whose examples are a text and the text that answers it: translation, summaries."""

from typing import ClassVar

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError
from megasparse.tasks.task import Task

ROUGE = ("rouge1", "rouge2", "rougeL", "rougeLsum")
"""Metrics of summaries, whose sentences stand on lines of their own."""


class TextTask(Task):
    """Examples have one input, a text; labels are texts, stripped of white space. The form refuses empty labels as it
    does empty inputs.
    """

    form: ClassVar[str] = "texts"


def names_of(config: TaskConfig) -> tuple[str, str]:
    """The names that `task.text` and `task.label` give to the two sides. Raises ConfigError unless it is one each."""
    if len(config.text) != 1:
        problem = f'{len(config.text)} names, and "{config.name}" reads one text'
        raise ConfigError("task.text", problem, 'Give one: task.text=["NAME"]')
    source, answer = config.text[0], config.label
    if source == answer:
        raise ConfigError("task.label", f'"{answer}" is task.text too', "Give each side its own name")
    return source, answer
