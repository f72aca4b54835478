"""Downstream tasks, each a short file of readers/: how its official files become examples, and its metrics.

Adding a task is writing a subclass of tasks/task.py's Task, and naming it here.
"""

import importlib

from megasparse.config.finetuning import TaskConfig
from megasparse.errors import ConfigError, did_you_mean
from megasparse.tasks.task import Task

TASK_MODULES = {
    **dict.fromkeys(
        ("cola", "mnli", "mrpc", "qnli", "qqp", "rte", "sst2", "stsb", "sts_benchmark", "rte_challenge"),
        "sentence_pairs",
    ),
    **dict.fromkeys(
        ("imdb", "movie_reviews", "sentence_polarity", "amazon", "amazon_50k", "ag_news", "mind_topics", "mind"),
        "reviews_and_news",
    ),
    **dict.fromkeys(("listops", "byte_imdb", "aan", "grey_cifar10", "pathfinder"), "long_range_arena"),
    **dict.fromkeys(("parallel_text", "wmt14", "cnn_dm", "pubmed", "headlines", "text_table"), "texts"),
    "table": "rows",
    **dict.fromkeys(("series", "etth1", "ettm1"), "series"),
    "wikihop": "wikihop",
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
