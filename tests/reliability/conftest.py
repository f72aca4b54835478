"""The data of the runs that are harmed here, and the run that nothing happens to."""

import pytest

from tests.helpers.faults import Run, running
from tests.helpers.trained import prepared


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    return prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def clean(tmp_path_factory, data):
    """Twenty steps on two ranks, undisturbed."""
    run = Run(tmp_path_factory.mktemp("clean"), data)
    with running(run):
        run.start()
        ended = run.wait()
    assert ended.code == 0, ended.said
    assert sorted(run.losses()) == list(range(1, 21))
    return run
