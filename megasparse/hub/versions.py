"""The versions of transformers that megasparse works and was tested with."""

import functools
import importlib.util
import os

from megasparse.errors import HubError, report_line

OLDEST_TRANSFORMERS = "5.5.4"
"""Earlier GPT-2 models do not pass the scale of their scores to transformers' attention interface."""
TESTED_TRANSFORMERS = "5.23.0", "5.24.0"
"""Versions with which replaced and exported models were tested in full."""
USE_TESTED = f"Use a tested version: {', '.join(TESTED_TRANSFORMERS)}"


def require_transformers() -> None:
    """Raise HubError if transformers is missing or too old; report a version that was not tested."""
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else deepspeed, imported by transformers, prints a warning
    requirement = f"transformers>={OLDEST_TRANSFORMERS},<6"
    try:
        import transformers
        from packaging.version import Version
    except ImportError:
        problem = "is not installed" if importlib.util.find_spec("transformers") is None else "cannot be imported"
    else:
        if Version(transformers.__version__) >= Version(OLDEST_TRANSFORMERS):
            _report_untested(transformers.__version__)
            return
        problem = f"{transformers.__version__} is too old"
    raise HubError("transformers", problem, f'Install it: pip install "{requirement}"')


@functools.cache  # so that the line is printed once
def _report_untested(version: str) -> None:
    if version not in TESTED_TRANSFORMERS:
        line = f"{version} is not tested with megasparse. Tested: {', '.join(TESTED_TRANSFORMERS)}"
        report_line("transformers", line)
