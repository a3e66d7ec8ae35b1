"""The public library's models behind the inputs and the output of the zoo's."""

import os
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
import torch
from torch import Tensor, nn

from benchmarks.peers.ctr_models import (
    CTR_MODELS,
    DEEPCTR_ENVIRONMENT,
    Columns,
    CtrModel,
    build_ctr,
    import_library,
)
from loka_zoo.prepared import PreparedData

IDS = torch.tensor([[6039, 1], [257, 0], [2049, 1]])
DENSE = torch.tensor([[0.5, -1.0], [1.5, 2.0], [0.25, 0.0]])
DATA = PreparedData("few", Path(), {}, (("user", 6040), ("gender", 2)), ("a", "b"), "label", "")


def test_columns_are_those_of_one_matrix_and_ids_stay_integers() -> None:
    matrix = torch.cat([IDS.to(torch.float32), DENSE], dim=1)
    columns = Columns(IDS, DENSE)
    assert columns.shape == tuple(matrix.shape)
    for first, last in ((0, 1), (1, 2), (2, 3), (3, 4), (2, 4)):
        found = columns[:, first:last]
        assert torch.equal(found.to(torch.float32), matrix[:, first:last])
        assert found.dtype == (torch.int64 if last <= 2 else torch.float32)
    assert columns.new_zeros((3, 1)).dtype == torch.float32


class Ranker(nn.Module):
    """As the library's: a column at a time, a sigmoid at the end unless the task is a regression."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Module()
        self.out.task = "binary"
        self.table = nn.Embedding(6040, 1)

    def forward(self, x: Any) -> Tensor:
        value: Tensor = self.table(x[:, 0:1].long())[:, :, 0] + x[:, 2:3]
        return value if self.out.task == "regression" else torch.sigmoid(value)


def test_the_output_is_the_logit_of_each_row() -> None:
    ranker = Ranker()
    with torch.no_grad():
        matrix = torch.cat([IDS.to(torch.float32), DENSE], dim=1)
        probabilities = ranker(matrix)[:, 0]
        logits = CtrModel(ranker)(DENSE, IDS)
    assert logits.shape == (3,)
    assert torch.allclose(torch.sigmoid(logits), probabilities)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of the library and of what it imports
@pytest.mark.parametrize("name", CTR_MODELS)
def test_the_librarys_models_answer_as_on_their_own_matrix(name: str) -> None:
    directory = os.environ.get(DEEPCTR_ENVIRONMENT)
    if not directory or not Path(directory).is_dir():
        pytest.skip(f"needs {DEEPCTR_ENVIRONMENT}: a directory with DeepCTR-Torch, as .ci/run makes one")
    model = build_ctr(name, DATA, import_library(Path(directory))).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
        logits = model(DENSE, IDS)
        model.ranker.out.task = "binary"
        probabilities = model.ranker(torch.cat([IDS.to(torch.float32), DENSE], dim=1))
    assert torch.allclose(torch.sigmoid(logits), probabilities[:, 0], atol=1e-6)
