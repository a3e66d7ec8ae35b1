"""torch → ONNX: parity is measured, and what cannot be exported is refused in words."""

import re
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from onnx_text import with_constants

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import ExportError, InternalError, ModelError
from loka_onnx.export.onnx_model import import_onnx
from loka_onnx.export.torch_module import PARITY_TOLERANCE, export_torch, load_builder, measure_parity
from loka_onnx.graph import entry, storage
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
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.fc, self.head = nn.Embedding(9, 4), nn.Linear(14, 32), nn.Linear(32, 2)

    def forward(self, dense, ids):
        x = torch.cat([dense, self.table(ids).flatten(1)], dim=1)
        both = self.head(torch.relu(self.fc(x)))
        return both[:, 0], both[:, 1]


@pytest.mark.slow
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
    # A module that is off by 1e-5 on one row of one output; FP32 resolves 3e-8 at outputs of order 0.5.
    with torch.no_grad():
        shifted = dict(zip(("click", "buy"), module(*map(torch.from_numpy, ROWS.values())), strict=True))
    shifted["buy"][3] += 1e-5
    parity = measure_parity(artifact.path, ROWS, shifted)
    assert parity.max_abs == pytest.approx(1e-5, rel=0.02)
    assert parity.rms == pytest.approx(1e-5 / np.sqrt(80), rel=0.02)


class Linear(nn.Module):
    """A logit of `dense`, and what is made of it."""

    def __init__(self, made) -> None:
        super().__init__()
        self.fc, self.made = nn.Linear(6, 1), made

    def forward(self, dense):
        return self.made(self.fc(dense).squeeze(-1))


DENSE = {"dense": ROWS["dense"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "names", "code", "evidence"),
    [
        (lambda y: y + torch.rand_like(y), ("logit",), "E0418", "largest difference"),
        (lambda y: torch.log(y * 0 - 1), ("logit",), "E0419", "40 of 40 values, the first in row 0"),
        (lambda y: {"logit": y}, ("logit",), "E0415", ""),
        (lambda y: y if float(y.sum()) > 0 else -y, ("logit",), "E0417", ""),
        (lambda y: [y], ("a", "b"), "E0416", ""),
    ],
)
def test_modules_that_cannot_be_exported_are_refused(made, names, code, evidence, tmp_path):
    target = tmp_path / "model.onnx"
    with pytest.raises(ExportError) as caught:
        export_torch(Linear(made), DENSE, target, outputs(*names))
    assert caught.value.code == code and evidence in caught.value.evidence
    assert not target.exists()


@pytest.mark.slow
def test_the_canonical_form_is_held_against_the_module(tmp_path, monkeypatch):
    """graphsurgeon's own folding, which computes the buckets in integers, is found out."""

    class Buckets(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(9, 4), nn.Linear(4, 1)

        def forward(self, ids):
            return self.fc(self.table((ids.float() * 0.5).long()))[:, 0]

    monkeypatch.setattr(entry, "_fold", lambda graph: graph.fold_constants())
    with pytest.raises(ExportError) as caught:
        export_torch(Buckets(), {"ids": np.arange(9)}, tmp_path / "model.onnx", outputs("logit"))
    assert caught.value.code == "E0418"
    assert [*tmp_path.iterdir()] == []


@pytest.mark.slow
def test_the_guard_of_an_empty_history_survives_the_export(tmp_path):
    """onnxscript's optimizer takes 1e-9 for 0, and an empty history's mean is 0/0 then."""

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(9, 4), nn.Linear(4, 16)
            self.attention = nn.MultiheadAttention(4, 2, kdim=8, vdim=4, batch_first=True)
            self.keys = nn.Embedding(9, 8)

        def forward(self, ids):
            mask, x = (ids > 0).float()[:, :, None], self.table(ids)
            # Its projections are a sequence of Splits in an export that nothing optimizes.
            x = x + self.attention(x, self.keys(ids), x)[0]
            return self.fc((x * mask).sum(1) / (mask.sum(1) + 1e-9)).sum(1)

    filled = {"ids": np.arange(1, 9).reshape(4, 2)}  # their parity shows nothing
    artifact = export_torch(Mean(), filled, tmp_path / "model.onnx", outputs("logit"))
    assert len(artifact.sites) == 7  # projections to q, k, v and of the heads, two products, fc
    assert not {"SplitToSequence", "SequenceAt"} & {n.op for n in GraphModel.load(artifact.path).nodes}
    assert np.isfinite(OnnxSession(artifact.path).run({"ids": np.zeros((3, 2), np.int64)})["logit"]).all()


def test_one_row_is_too_few(tmp_path):
    one = {"dense": ROWS["dense"][:1]}
    with pytest.raises(InternalError, match="needs at least 2 example rows"):
        export_torch(Linear(lambda y: y), one, tmp_path / "model.onnx", outputs("logit"))


# References to builders --------------------------------------------------------------------------


@pytest.fixture
def on_path(tmp_path, monkeypatch):
    (tmp_path / "my_models.py").write_text("def build():\n    return 7\nnumber = 3\n")
    (tmp_path / "my_broken.py").write_text("raise RuntimeError('no licence')\n")
    monkeypatch.syspath_prepend(str(tmp_path))


def test_a_builder_is_found(on_path):
    assert load_builder("my_models:build")() == 7


@pytest.mark.parametrize(
    ("reference", "code", "evidence"),
    [
        *((reference, "E0411", "") for reference in ("my_models", ":build", "my_models:")),
        ("my_absent:build", "E0412", "No module named 'my_absent'"),
        ("my_models:make", "E0412", "has no attribute 'make'"),
        ("my_models:number", "E0413", "it is a int"),
        ("my_broken:build", "E0412", "RuntimeError: no licence"),
        (".my_models:build", "E0412", "relative import"),
    ],
)
def test_references_that_name_no_builder(reference, code, evidence, on_path):
    with pytest.raises(ModelError) as caught:
        load_builder(reference)
    assert caught.value.code == code and evidence in caught.value.evidence


# Foreign ONNX files ------------------------------------------------------------------------------


def foreign(tmp_path, text: str):
    model = onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 21]> {text}')
    onnx.save(with_constants(model, {"w": np.eye(4), "t": np.ones((50, 4))}), tmp_path / "foreign.onnx")
    return tmp_path / "foreign.onnx"


@pytest.mark.parametrize(
    ("graph", "evidence"),
    [
        ("g (float[8,4] x) => (float[8,4] y) { y = MatMul(x, w) }", "E0408 its shape is [8, 4]"),
        ("g (float x) => (float[4] y) { y = Mul(x, w) }", "E0408 its shape is []"),
        ("g (float[] x) => (float[] y) { y = MatMul(x, w) }", "E0408 it has no shape"),
        ("g (float[b,4] x) => (float[b,4] y) { y = Mul(x, w) }", "E0406 none of its 1 nodes"),
        ("g (float[b,4] x) => (float[b,4] z) { z = MatMul(x, w) }", "E0407 its outputs are z"),
        ("g (float[b,5] x) => (float[b,4] y) { y = MatMul(x, w) }", "E0310 .*Incompatible dimensions"),
        # Sound by ONNX's rules; ONNX Runtime has no kernel for a Relu of INT16.
        (
            "g (float[b,4] x) => (float[b,4] y) {"
            " i = Cast<to=5>(x)  r = Relu(i)  f = Cast<to=1>(r)  y = MatMul(f, w) }",
            ".*NOT_IMPLEMENTED.*Relu",
        ),
    ],
)
def test_foreign_models_that_are_refused(graph, evidence, tmp_path):
    with pytest.raises(ModelError) as caught:
        import_onnx(foreign(tmp_path, graph), tmp_path / "run/model.onnx", outputs("y"))
    said = f"{caught.value.code} {caught.value.evidence}"
    assert re.search(evidence.replace("[", r"\[").replace("]", r"\]"), said)


def test_the_users_table_file_is_copied_and_left_alone(tmp_path, monkeypatch):
    """A hard link would let the user's next training run write into this one, and onnx refuses such files."""
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    body = "{ e = Gather(t, i)  s = Add(x, e)  y = MatMul(s, w) }"
    source = foreign(tmp_path, f"g (float[b,4] x, int64[b] i) => (float[b,4] y) {body}")
    onnx.save(onnx.load(source), source, save_as_external_data=True, location="user.bin", size_threshold=200)
    artifact = import_onnx(source, tmp_path / "run/model.onnx", outputs("y"))
    copy, original = artifact.path.parent / "user.bin", tmp_path / "user.bin"
    assert copy.read_bytes() == original.read_bytes() and not copy.samefile(original)
    assert set(GraphModel.load(artifact.path).tables) == {"t"}
    assert onnx.load(source).graph.initializer


def test_ids_beyond_a_table_are_the_users_to_correct(tmp_path: Path) -> None:
    class Lookup(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.items, self.head = nn.Embedding(4, 16), nn.Linear(16, 16)

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.items(ids)).sum(-1)

    with pytest.raises(ModelError) as caught:
        export_torch(Lookup(), {"ids": np.array([0, 7, 1])}, tmp_path / "model.onnx", outputs("logit"))
    assert (caught.value.code, caught.value.evidence) == ("E0414", "index out of range in self")
    assert not (tmp_path / "model.onnx").exists()
