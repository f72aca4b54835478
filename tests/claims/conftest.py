"""The fixture of claims."""

import pytest

from tests.claims.claim import OUTPUT, Trials


@pytest.fixture
def trials(request, tmp_path):
    case = request.param
    output = tmp_path if case.budget == "small" else OUTPUT
    return Trials(case, output / f"{case.name}-{case.budget}")
