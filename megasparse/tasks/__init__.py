"""Downstream tasks, each a short file of readers/: how its official files become examples, and its metrics.

Adding a task is writing a subclass of tasks/task.py's Task, and naming it here.
"""

import importlib

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, did_you_mean
from megasparse.tasks.task import Task

TASK_MODULES = {
    **dict.fromkeys(("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb"), "glue"),
    "sts_benchmark": "sts_benchmark",
    "rte_challenge": "rte_challenge",
    "sentence_polarity": "sentence_polarity",
    "movie_reviews": "movie_reviews",
    "listops": "listops",
    "byte_imdb": "byte_imdb",
    "aan": "aan",
    "grey_cifar10": "grey_cifar10",
    "pathfinder": "pathfinder",
    "ag_news": "ag_news",
    **dict.fromkeys(("amazon", "amazon_50k"), "amazon"),
    "imdb": "imdb",
    "mind_topics": "mind_topics",
    "mind": "mind",
    "wikihop": "wikihop",
    "table": "table",
    **dict.fromkeys(("parallel_text", "wmt14"), "parallel_text"),
    "cnn_dm": "cnn_dm",
    "pubmed": "pubmed",
    "headlines": "headlines",
    "text_table": "text_table",
    **dict.fromkeys(("series", "etth1", "ettm1"), "series"),
}
"""Name of each task -> the module of readers/ that has a subclass of this `name`."""


def build_task(config: TaskConfig) -> Task:
    """The task that `task.name` names. Raises ConfigError naming that key, or a setting that does not fit the task."""
    if config.name not in TASK_MODULES:
        raise ConfigError("task.name", f'there is no task "{config.name}"', did_you_mean(config.name, TASK_MODULES))
    module = importlib.import_module(f"megasparse.tasks.readers.{TASK_MODULES[config.name]}")
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, Task) and vars(kind).get("name") == config.name:
            return kind(config)
    raise AssertionError(f"{module.__name__} has no task {config.name}")
