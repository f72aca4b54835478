import pytest

from megasparse.config.finetuning import TaskConfig
from megasparse.tasks import build_task


@pytest.fixture
def task(request):
    """The task that a file of tests is called after."""
    return build_task(TaskConfig(name=request.path.stem.removeprefix("test_")))
