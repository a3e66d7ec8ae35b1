"""Two deployments for all tests."""

import pytest
from compared_deployments import Place, make_place


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Do not write into its directories."""
    return make_place(tmp_path_factory.mktemp("compare"))
