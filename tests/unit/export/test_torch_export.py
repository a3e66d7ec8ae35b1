"""torch → ONNX: parity is measured, and what cannot be exported is refused in words."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import ExportError, InternalError, ModelError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.torch_module import PARITY_TOLERANCE, export_torch, load_builder
from loka_onnx.graph.model import GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession

torch = pytest.importorskip("torch", reason="needs torch")
nn = torch.nn

ROWS = {
    "dense": np.random.default_rng(0).standard_normal((40, 6)).astype(np.float32),
    "ids": np.random.default_rng(1).integers(0, 9, (40, 2)),
}


def outputs(*names: str) -> tuple[OutputSpec, ...]:
    return tuple(OutputSpec(name, OutputKind.LOGIT, "label") for name in names)


class Ranker(nn.Module):
    """Two outputs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc, self.head = nn.Embedding(9, 4), nn.Linear(14, 32), nn.Linear(32, 2)

    def forward(self, dense, ids):
        x = torch.cat([dense, self.table(ids).flatten(1)], dim=1)
        both = self.head(torch.relu(self.fc(x)))
        return both[:, 0], both[:, 1]


def says(*parts: str) -> str:
    return "(?s:.*)".join(map(re.escape, parts))


def test_parity_is_measured_and_the_batch_is_dynamic(tmp_path):
    module = Ranker()
    artifact = export_torch(module, ROWS, tmp_path / "model.onnx", outputs("click", "buy"))
    assert [(i.name, i.dtype, i.shape) for i in artifact.inputs] == [
        ("dense", "float32", (None, 6)),
        ("ids", "int64", (None, 2)),
    ]
    assert [(o.name, o.shape) for o in artifact.outputs] == [("click", (None,)), ("buy", (None,))]
    assert [site.name for site in artifact.sites] == ["fc", "head"]
    assert artifact.opset == 21 and artifact.producer.startswith("pytorch")
    assert artifact.fp8_able_flops == 0
    parity = artifact.parity
    assert parity is not None and parity.rows == 40 and parity.tolerance == PARITY_TOLERANCE
    assert 0 <= parity.rms <= parity.max_abs < 1e-6
    session = OnnxSession(artifact.path)
    for rows in (1, 2, 4096):
        inputs = {name: np.resize(array, (rows, *array.shape[1:])) for name, array in ROWS.items()}
        got = session.run(inputs)
        with torch.no_grad():
            want = module(*(torch.from_numpy(array) for array in inputs.values()))
        for name, tensor in zip(("click", "buy"), want, strict=True):
            assert got[name].shape == (rows,)
            # FP32 sums of 32 terms of order 1, in another order.
            np.testing.assert_allclose(got[name], tensor.numpy(), rtol=1e-5, atol=1e-6)


def test_parity_is_the_difference_to_the_module(tmp_path, monkeypatch):
    """A session that is off by 1e-5 on one row of one output."""
    module = Ranker()
    run = OnnxSession.run

    def shifted(self, inputs, names=None):
        values = run(self, inputs, names)
        values["buy"] = values["buy"].copy()
        values["buy"][3] += 1e-5
        return values

    monkeypatch.setattr(OnnxSession, "run", shifted)
    parity = export_torch(module, ROWS, tmp_path / "model.onnx", outputs("click", "buy")).parity
    assert parity is not None
    # FP32 resolves 3e-8 at outputs of order 0.5.
    assert parity.max_abs == pytest.approx(1e-5, rel=0.02)
    assert parity.rms == pytest.approx(1e-5 / np.sqrt(80), rel=0.02)


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 1)

    def forward(self, dense):
        return (self.fc(dense) + torch.rand_like(dense[:, :1])).squeeze(-1)


class Undefined(Noisy):
    def forward(self, dense):
        return torch.log(self.fc(dense).squeeze(-1) * 0 - 1)


class AsList(Noisy):
    def forward(self, dense):
        return [self.fc(dense).squeeze(-1)]


class AsDict(Noisy):
    def forward(self, dense):
        return {"logit": self.fc(dense).squeeze(-1)}


class Branching(Noisy):
    def forward(self, dense):
        value = self.fc(dense).squeeze(-1)
        return value if float(value.sum()) > 0 else -value


DENSE = {"dense": ROWS["dense"]}


@pytest.mark.parametrize(
    ("module", "names", "message"),
    [
        (
            Noisy,
            ("logit",),
            says(
                "exported graph does not agree with the module", "largest difference", "look for randomness"
            ),
        ),
        (
            Undefined,
            ("logit",),
            says("the module's output 'logit' is not finite", "40 of 40 values, the first in row 0"),
        ),
        (AsDict, ("logit",), says("AsDict returns a dict, not a tensor", "wrap it in a module")),
        (Branching, ("logit",), says("PyTorch cannot export Branching to ONNX")),
        (
            AsList,
            ("a", "b"),
            says("returns 1 tensors, the configuration declares 2 outputs", "declare every output"),
        ),
    ],
)
def test_modules_that_cannot_be_exported_are_refused(module, names, message, tmp_path):
    target = tmp_path / "model.onnx"
    with pytest.raises(ExportError, match=message):
        export_torch(module(), DENSE, target, outputs(*names))
    assert not target.exists()


def test_one_row_is_too_few(tmp_path):
    one = {"dense": ROWS["dense"][:1]}
    with pytest.raises(InternalError, match="needs at least 2 example rows"):
        export_torch(AsList(), one, tmp_path / "model.onnx", outputs("logit"))


def test_a_module_without_products_has_no_sites(tmp_path):
    class Sums(nn.Module):
        def forward(self, dense):
            return dense.sum(dim=1)

    with pytest.raises(ModelError, match=says("has no sites", "is a MatMul or Gemm", "nothing to offer")):
        export_torch(Sums(), DENSE, tmp_path / "model.onnx", outputs("logit"))


# References to builders --------------------------------------------------------------------------


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text("def build():\n    return 7\nnumber = 3\n")
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_builder_is_found(on_path):
    assert load_builder("my_models:build")() == 7


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        ("my_models", says("'my_models' is not of the form module:function", "for example")),
        (":build", says("is not of the form module:function")),
        ("my_models:", says("is not of the form module:function")),
        (
            "my_absent:build",
            says("cannot import the model builder", "No module named 'my_absent'", "PYTHONPATH"),
        ),
        ("my_models:make", says("cannot import the model builder", "has no attribute 'make'")),
        ("my_models:number", says("'my_models:number' is not callable", "it is a int")),
        ("my_broken:build", says("cannot import the model builder", "RuntimeError: no licence")),
        (".my_models:build", says("cannot import the model builder", "relative import")),
    ],
)
def test_references_that_name_no_builder(reference, message, on_path):
    with pytest.raises(ModelError, match=message):
        load_builder(reference)


# Foreign ONNX files ------------------------------------------------------------------------------


def foreign(tmp_path, text: str):
    import onnx
    import onnx.parser

    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(4, dtype=np.float32), "w"))
    path = tmp_path / "foreign.onnx"
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "g (float[8,4] x) => (float[8,4] y) { y = MatMul(x, w) }",
            says("input 'x' of", "has no dynamic batch", "its shape is [8, 4]", "a dynamic first dimension"),
        ),
        ("g (float x) => (float[4] y) { y = Mul(x, w) }", says("input 'x'", "has no dynamic batch", "[]")),
        ("g (float[b,4] x) => (float[b,4] y) { y = Mul(x, w) }", says("has no sites", "none of its 1 nodes")),
        (
            "g (float[b,4] x) => (float[b,4] z) { z = MatMul(x, w) }",
            says("has no output named 'y'", "its outputs are z", "name one of them under `outputs`"),
        ),
    ],
)
def test_foreign_models_that_are_refused(text, message, tmp_path):
    with pytest.raises(ModelError, match=message):
        import_onnx(foreign(tmp_path, text), tmp_path / "run/model.onnx", outputs("y"))


def test_a_model_that_onnx_runtime_refuses(tmp_path):
    """Sound by ONNX's rules; ONNX Runtime has no kernel for a Relu of INT16."""
    body = "i = Cast<to=5>(x)  r = Relu(i)  f = Cast<to=1>(r)  y = MatMul(f, w)"
    path = foreign(tmp_path, f"g (float[b,4] x) => (float[b,4] y) {{ {body} }}")
    with pytest.raises(ModelError) as caught:
        import_onnx(path, tmp_path / "run/model.onnx", outputs("y"))
    assert caught.value.what == f"ONNX Runtime refuses '{tmp_path / 'run/model.onnx'}'"
    assert "NOT_IMPLEMENTED" in caught.value.evidence and "Relu" in caught.value.evidence


def test_a_product_of_other_lengths_is_no_sound_model(tmp_path):
    path = foreign(tmp_path, "g (float[b,5] x) => (float[b,4] y) { y = MatMul(x, w) }")
    with pytest.raises(ModelError) as caught:
        import_onnx(path, tmp_path / "run/model.onnx", outputs("y"))
    assert caught.value.what == f"'{path}' is not a sound ONNX model"
    assert "Incompatible dimensions for matrix multiplication" in caught.value.evidence


def test_the_users_table_file_is_copied_and_left_alone(tmp_path, monkeypatch):
    """A hard link would let the user's next training run write into this one, and onnx refuses such files."""
    import onnx

    from loka_onnx.graph import storage

    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    source = foreign(
        tmp_path,
        "g (float[b,4] x, int64[b] i) => (float[b,4] y) {"
        " e = Gather(t, i)  s = Add(x, e)  y = MatMul(s, w) }",
    )
    proto = onnx.load(source)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones((50, 4), np.float32), "t"))
    onnx.save(proto, source, save_as_external_data=True, location="user.bin", size_threshold=200)
    artifact = import_onnx(source, tmp_path / "run/model.onnx", outputs("y"))
    copy, original = artifact.path.parent / "user.bin", tmp_path / "user.bin"
    assert copy.read_bytes() == original.read_bytes() and not copy.samefile(original)
    assert set(GraphModel.load(artifact.path).tables) == {"t"}
    assert onnx.load(source).graph.initializer


def test_ids_beyond_a_table_are_the_users_to_correct(tmp_path: Path) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items = nn.Embedding(4, 16)
            self.head = nn.Linear(16, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.items(ids)).sum(-1)

    spec = OutputSpec("logit", OutputKind.LOGIT, "label")
    with pytest.raises(ModelError) as caught:
        export_torch(Lookup(), {"ids": np.array([0, 7, 1])}, tmp_path / "model.onnx", (spec,))
    assert str(caught.value) == (
        "Lookup fails on the first 3 rows of the data\n"
        "  evidence: index out of range in self\n"
        "  remedy: compare the ids with the sizes of the embedding tables, and the columns with the inputs "
        "that the model was trained with"
    )
    assert not (tmp_path / "model.onnx").exists()
