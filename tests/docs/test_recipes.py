"""The blocks of `recipes.md`, on small models of the libraries: the file computes what the model does."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs_site.code_blocks import blocks_of

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")
ROOT = Path(__file__).parents[2]
BLOCKS = [block.body for block in blocks_of(ROOT / "docs/how-to/recipes.md") if block.language == "python"]
SIZES, WIDTH, ROWS = {"user": 30, "item": 20, "country": 5}, 8, 6
Made = tuple[Any, dict[str, Any], Callable[[], Any], dict[str, Any]]
"""Model, columns, its own forward, and names that the recipe knows."""


def library(name: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    from benchmarks.public_rankers.catalog import Library
    from benchmarks.public_rankers.libraries import LIBRARIES_ENVIRONMENT, is_installed

    given = os.environ.get(LIBRARIES_ENVIRONMENT)
    beside = ROOT / ".venv" / name
    if given and is_installed(Library(name), Path(given)):
        beside = Path(given) / name
    if not beside.is_dir():
        pytest.skip(f"needs {name}: python -m benchmarks.public_rankers.libraries DIRECTORY")
    monkeypatch.syspath_prepend(os.fspath(beside))
    # This project's own torch and numpy come first.
    path = importlib.import_module("sys").path
    path.append(path.pop(0))
    return beside


def ids() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(0, size, (ROWS,), generator=generator) for name, size in SIZES.items()}


def numbers() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.rand(ROWS, generator=generator) for name in ("age", "price")}


def rechub(_: Path) -> Made:
    from torch_rechub.basic.features import DenseFeature, SparseFeature
    from torch_rechub.models.ranking import DCN

    features = [DenseFeature(n) for n in numbers()] + [SparseFeature(n, s, WIDTH) for n, s in SIZES.items()]
    model = DCN(features, n_cross_layers=2, mlp_params={"dims": [16]})
    columns = numbers() | ids()
    return model, columns, lambda: model(columns), {}


def deepctr(place: Path) -> Made:
    from benchmarks.peers.ctr_models import import_library

    import_library(place)
    inputs = importlib.import_module("deepctr_torch.inputs")
    multi = importlib.import_module("deepctr_torch.models.multitask")
    features = [inputs.SparseFeat(name, size, WIDTH) for name, size in SIZES.items()]
    features += [inputs.DenseFeat(name, 1) for name in numbers()]
    tasks = ["ctr", "cvr"]
    model = multi.MMOE(features, task_types=("binary",) * 2, task_names=tasks)
    columns = ids() | numbers()
    matrix = torch.stack([column.float() for column in columns.values()], dim=1)
    return model, columns, lambda: model(matrix), {"tasks": tasks}


def fuxictr(_: Path) -> Made:
    described = importlib.import_module("fuxictr.features").FeatureMap("small", "/tmp")
    for name, size in SIZES.items():
        described.features[name] = {"source": "", "type": "categorical", "vocab_size": size}
    for name in numbers():
        described.features[name] = {"source": "", "type": "numeric"}
    described.labels = ["clicked"]
    described.num_fields = described.get_num_fields()
    models, layers = map(importlib.import_module, ("fuxictr.pytorch.models", "fuxictr.pytorch.layers"))

    class Small(models.BaseModel):  # type: ignore[name-defined, misc]
        """As the models of the zoo are written; the package brings few of those."""

        def __init__(self) -> None:
            super().__init__(described, gpu=-1, verbose=0, model_root="/tmp", metrics=["logloss"])
            self.embedding_layer = layers.FeatureEmbedding(described, WIDTH)
            width = WIDTH * described.num_fields
            self.dnn = layers.MLP_Block(width, output_dim=1, hidden_units=[16], output_activation="sigmoid")

        def forward(self, inputs: Any) -> dict[str, Any]:
            embedded = self.embedding_layer(self.get_inputs(inputs), flatten_emb=True)
            return {"y_pred": self.dnn(embedded)}

    model = Small()
    columns = ids() | numbers()
    return model, columns, lambda: model(columns)["y_pred"], {}


def torchrec(_: Path) -> Made:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
    from torchrec.models.dlrm import DLRM

    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=WIDTH, num_embeddings=size, feature_names=[name])
        for name, size in SIZES.items()
    ]
    collection = EmbeddingBagCollection(tables=tables, device=torch.device("cpu"))
    model = DLRM(collection, 2, [16, WIDTH], [16, 1])
    columns = {
        "numbers": torch.stack(list(numbers().values()), 1),
        "ids": torch.stack(list(ids().values()), 1),
    }
    values = columns["ids"].t().reshape(-1)
    jagged = KeyedJaggedTensor(list(SIZES), values, lengths=torch.ones_like(values))
    return model, columns, lambda: model(columns["numbers"], jagged), {}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "make", "marker"),
    [
        ("torch-rechub", rechub, "model.features"),
        ("deepctr-torch", deepctr, "class ByTask"),
        ("fuxictr", fuxictr, "class ByName"),
        ("torchrec", torchrec, "class OneIdEach"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_the_file_of_a_recipe_computes_what_the_model_does(
    name: str, make: Callable[[Path], Made], marker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import onnxruntime

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model, columns, forward, known = make(library(name, monkeypatch))
    model.eval()
    first, recipe = BLOCKS[0], next(body for body in BLOCKS if marker in body)
    exec(first + recipe, {"model": model, "columns": columns, **known})
    session = onnxruntime.InferenceSession("model.onnx")
    names = [one.name for one in session.get_inputs()]
    given = (
        {"matrix": torch.stack([c.float() for c in columns.values()], 1)} if names == ["matrix"] else columns
    )
    for rows in (1, ROWS):
        feeds = {
            one: next(c for key, c in given.items() if one.endswith(key)).numpy()[:rows] for one in names
        }
        got = np.concatenate([each.reshape(rows, -1) for each in session.run(None, feeds)], axis=1)
        with torch.no_grad():
            wanted = forward().reshape(ROWS, -1).numpy()[:rows]
        np.testing.assert_allclose(got, wanted, rtol=1e-4, atol=1e-5)
