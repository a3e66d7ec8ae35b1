"""The model that plans are made for."""

import pytest
from planned_models import write_model

from loka_onnx.core.artifact import ModelArtifact


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelArtifact:
    return write_model(tmp_path_factory.mktemp("model"))
