"""The versions of transformers that megasparse was tested with."""

import functools
import importlib.util
import os

from megasparse.errors import HubError, report_line

TESTED_TRANSFORMERS = "5.23.0", "5.24.0"
"""Versions of transformers with which replaced and exported models were tested."""


def require_transformers() -> None:
    """Raise HubError if transformers is missing, or lacks the caches of the required version. Print one line if it is a
    version that was not tested.
    """
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, imported by transformers, prints a warning
    requirement = f"transformers>={TESTED_TRANSFORMERS[0]},<={TESTED_TRANSFORMERS[-1]}"
    try:
        import transformers
    except ImportError:
        problem = "is not installed" if importlib.util.find_spec("transformers") is None else "has another version"
        raise HubError("transformers", problem, f'Install it: pip install "{requirement}"') from None
    _report_untested(transformers.__version__, requirement)


@functools.cache  # so that the line is printed once
def _report_untested(version: str, requirement: str) -> None:
    if version not in TESTED_TRANSFORMERS:
        report_line("transformers", f"{version} is not tested with megasparse. Tested: {requirement}")
