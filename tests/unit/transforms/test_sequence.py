"""The sequence runner: mods are held against data, and what fails is rolled back and reported."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from rewrite_models import artifact, evaluate, initializer, op_types, parse, random_rows

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.rewrite import Applied, Declined, RewriteLog
from loka_onnx.core.site import SiteKind
from loka_onnx.errors import TransformError
from loka_onnx.graph import storage
from loka_onnx.graph.model import GraphModel, Node, values_of
from loka_onnx.graph.sites import find_sites
from loka_onnx.graph.storage import model_digest
from loka_onnx.graph.weights import Exported
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.sequence import DEFAULT_MODS, STRICT, apply_mods
from loka_onnx.transforms.tidying.remove_no_ops import RemoveNoOps
from loka_onnx.transforms.tidying.share_duplicates import ShareDuplicates

ROWS = [{"x": random_rows(5, 8)}, {"x": random_rows(3, 8, seed=1)}]


class EditGain(Mod[Node]):
    """Test only: adds `step` to the factor that the node ``block/y`` multiplies with."""

    name = "edit-gain"

    def __init__(self, step: float = 0.0) -> None:
        self.step = step

    def _find(self, model: GraphModel) -> list[Node | Declined]:
        return [model.node("block/y"), Declined("block/other", "not this one")]

    def rewrite(self, model: GraphModel, match: Node) -> Applied:
        match.inputs[1] = model.constant("gain.edited", values_of(match.inputs[1]) + np.float32(self.step))
        return Applied(match.name, "gain edited")


BREAKS, ROUNDS = EditGain(0.01), EditGain(2.5e-6)
"""The second moves the output by less than the tolerance, by more than half of it."""


class WrongShape(EditGain):
    """The session refuses the batch: 7 factors for 8 columns."""

    name = "wrong-shape"

    def rewrite(self, model: GraphModel, match: Node) -> Applied:
        match.inputs[1] = model.constant("gain.short", np.ones(7, np.float32))
        return Applied(match.name, "gain cut")


class Unloadable(EditGain):
    name = "unloadable"

    def rewrite(self, model: GraphModel, match: Node) -> Applied:
        match.op = "NoSuchOperator"
        return Applied(match.name, "operator replaced")


def gained(folder: Path) -> ModelArtifact:
    """``h = x · W``, ``y = h · gain``; the outputs are y and the far larger z = 10⁶ h."""
    model = parse("[fc] h = MatMul(x, w) y = Mul(h, gain) z = Mul(h, huge)",
        {"w": np.eye(8), "gain": np.full(8, 0.5), "huge": np.full(8, 1e6)}, outputs="y, z")  # fmt: skip
    return artifact(model, folder / "before.onnx")


def run(folder: Path, *mods: Mod[Any]) -> tuple[ModelArtifact, RewriteLog]:
    result = apply_mods(gained(folder), ROWS, folder / "after.onnx", mods)
    return result.model, result.log


def gain(model: ModelArtifact) -> float:
    proto = onnx.load(model.path)
    name = next(n.input[1] for n in proto.graph.node if n.name == "block/y")
    return float(onnx.numpy_helper.to_array(initializer(proto, name))[0])


def test_a_mod_that_moves_an_output_is_rolled_back_and_reported(tmp_path):
    model, log = run(tmp_path, BREAKS)
    record = log.records[0]
    largest = max(float(np.abs(batch["x"]).max()) for batch in ROWS)
    assert record.rolled_back
    assert record.applied == ()
    assert record.max_abs == pytest.approx(0.01 * largest, rel=1e-3)
    # Relative to the output that moved: z, which is 10⁶ times larger, must not lend its tolerance.
    assert record.tolerance == pytest.approx(1e-5 * max(1.0, 0.5 * largest))
    assert record.declined == (
        Declined("block/other", "not this one"),
        Declined(
            "block/y",
            "rolled back on the check rows: moved output 'y' by "
            f"{record.max_abs:.3g}, tolerance {record.tolerance:.3g}",
        ),
    )
    assert gain(model) == 0.5


def test_rounding_is_accepted_and_each_mod_is_held_against_the_last_good_model(tmp_path):
    model, log = run(tmp_path, ROUNDS)
    record = log.records[0]
    assert not record.rolled_back
    assert record.applied == (Applied("block/y", "gain edited"),)
    assert record.max_abs is not None
    assert record.tolerance is not None
    assert 0 < record.max_abs <= record.tolerance
    assert gain(model) > 0.5
    # Three rounding steps together would exceed the tolerance of one.
    _, log = run(tmp_path, ROUNDS, ROUNDS, ROUNDS)
    assert [record.rolled_back for record in log.records] == [False, False, False]
    assert sum(record.max_abs or 0 for record in log.records) > (log.records[0].tolerance or 0)
    model, log = run(tmp_path, BREAKS, ROUNDS)
    assert [record.rolled_back for record in log.records] == [True, False]
    assert gain(model) == pytest.approx(0.5 + ROUNDS.step, abs=1e-7)


@pytest.fixture
def triplets(tmp_path) -> ModelArtifact:
    """Three Relus of x, one behind an Identity that hides it."""
    body = "[fc] k = Identity(x) a = Relu(k) b = Relu(x) c = Relu(x) y = Sum(a, b, c)"
    return artifact(parse(body), tmp_path / "triplets.onnx")


def test_a_later_mod_opens_a_match_for_a_second_round(triplets, tmp_path):
    result = apply_mods(triplets, ROWS, tmp_path / "after.onnx", [ShareDuplicates(), RemoveNoOps()])
    found = [(record.transform, len(record.applied)) for record in result.log.records]
    assert found == [("share-duplicates", 1), ("remove-no-ops", 1), ("share-duplicates", 1)]
    assert op_types(onnx.load(result.model.path)) == ["Relu", "Sum"]


def test_what_was_rolled_back_gets_no_second_round(triplets, tmp_path):
    fails = RemoveNoOps()
    fails.tolerance = -1.0
    log = apply_mods(triplets, ROWS, tmp_path / "after.onnx", [fails, ShareDuplicates()]).log
    assert [(record.rolled_back, len(record.applied)) for record in log.records] == [(True, 0), (False, 1)]


@pytest.mark.parametrize(("mod", "evidence"), [
    (EditGain(np.nan), "moved output 'y' by inf"),
    (WrongShape(), "ONNX Runtime"),
    (Unloadable(), "ONNX Runtime refuses"),
])  # fmt: skip
def test_a_mod_whose_model_does_not_run_is_rolled_back(mod, evidence, tmp_path):
    model, log = run(tmp_path, mod)
    assert log.records[0].rolled_back
    assert evidence in log.records[0].declined[-1].reason
    assert gain(model) == 0.5
    assert serde.loads(RewriteLog, serde.dumps(log)) == log


@pytest.mark.parametrize("rows", [[], [{"x": np.zeros((0, 8), np.float32)}]])
def test_no_rows_no_mods(rows, tmp_path):
    with pytest.raises(TransformError) as caught:
        apply_mods(gained(tmp_path), rows, tmp_path / "after.onnx")
    assert caught.value.code == "E0608"


def test_the_artifact_describes_the_model_after_the_mods(tmp_path):
    source = artifact(
        parse(
            "[fc] x1 = MatMul(x, w) s = Mul(x1, x1) v = ReduceMean(s, axes) e = Add(v, eps) r = Sqrt(e)"
            " q = Div(x1, r) [out] y = MatMul(q, w)",
            {"w": np.eye(8), "axes": np.array([-1]), "eps": 1e-3},
        ),
        tmp_path / "before.onnx",
    )
    done: list[tuple[str, int, int]] = []
    result = apply_mods(
        source, ROWS, tmp_path / "after.onnx", progress=lambda stage, n, of: done.append((stage, n, of))
    )
    assert [site.name for site in source.sites] == ["fc", "out"]
    assert [(s.name, s.kind, s.k) for s in result.model.sites] == [
        ("fc", SiteKind.LINEAR, 8),
        ("block", SiteKind.NORM, 8),
        ("out", SiteKind.LINEAR, 8),
    ]
    assert result.model.opset == 23
    assert result.model.digest != source.digest
    assert result.model.path == tmp_path / "after.onnx"
    assert done == [("mods", number + 1, len(DEFAULT_MODS)) for number in range(len(DEFAULT_MODS))]
    after = onnx.load(result.model.path)
    assert op_types(after) == ["MatMul", "RMSNormalization", "MatMul"]
    # Two FP32 evaluations of 8-term sums of numbers of size 3.
    np.testing.assert_allclose(
        evaluate(after, ROWS[0])["y"], evaluate(onnx.load(source.path), ROWS[0])["y"], rtol=0, atol=2e-6
    )


class EditTwice(EditGain):
    """Also gives the product a new weight, which is large."""

    name = "edit-twice"

    def rewrite(self, model: GraphModel, match: Node) -> Applied:
        product = model.node("fc")
        product.inputs[1] = model.constant("w.edited", values_of(product.inputs[1]).copy())
        return super().rewrite(model, match)


def large(folder: Path, table: bool) -> ModelArtifact:
    """A weight of the main graph and two of branches that are beyond what is held, and a table outside."""
    other = "other = Gather(table, rows)" if table else "other = Neg(h)"
    model = parse("[fc] h = MatMul(x, w) positive = ReduceMax<keepdims=0>(x) is_low = Greater(positive, zero)"
        f" g = If(is_low) <then_branch = t () => (p) {{ p = MatMul(h, low) }},"
        " else_branch = e () => (q) { q = MatMul(h, high) }>"
        f" y = Mul(h, gain) one = ArgMax<axis=1, keepdims=0>(g) rows = Mod(one, few) {other}", {
        "w": random_rows(8, 200), "low": random_rows(200, 300), "high": random_rows(200, 300, seed=2),
        "gain": np.full(200, 0.5), "zero": 0.0, "few": np.array(40), "table": random_rows(40, 50)},
        outputs="float[batch,200] y, float[batch,300] g, float[batch,m] other")  # fmt: skip
    for tensor in [tensor for tensor in model.graph.initializer if tensor.name == "table"]:
        (folder / "table.bin").write_bytes(tensor.raw_data)
        onnx.external_data_helper.set_external_data(tensor, "table.bin", 0, len(tensor.raw_data))
        tensor.ClearField("raw_data")
    path = folder / "before.onnx"
    path.write_bytes(model.SerializeToString())
    return ModelArtifact(path, model_digest(path), 21, (), (), find_sites(GraphModel.load(path)), "test")


@pytest.mark.parametrize("table", [True, False])
def test_mods_are_checked_without_a_file_and_as_on_files(table, tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "TABLE_LIMIT_BYTES", 0)
    model, written = large(tmp_path, table), []
    write = Exported.write
    monkeypatch.setattr(Exported, "write", lambda e, path: written.append(path) or write(e, path))
    mods = [EditTwice(ROUNDS.step), BREAKS, WrongShape(), Unloadable(), ROUNDS]
    got = apply_mods(model, ROWS, tmp_path / "memory/m.onnx", mods)
    assert written == [tmp_path / "memory/m.onnx"]
    assert got.model.digest == model_digest(tmp_path / "memory/m.onnx")
    monkeypatch.setattr(Exported, "in_memory", lambda exported: None)
    want = apply_mods(model, ROWS, tmp_path / "files/m.onnx", mods)
    assert len(written) == 1 + len(mods) + 1
    assert (got.model.digest, got.model.sites) == (want.model.digest, want.model.sites)
    assert [r.rolled_back for r in got.log.records] == [False, True, True, True, False]
    for one, other in zip(got.log.records, want.log.records, strict=True):
        # The bits of the outputs are those of the file: so are their differences.
        assert (one.applied, one.max_abs, one.tolerance) == (other.applied, other.max_abs, other.tolerance)
        assert [d.at for d in one.declined] == [d.at for d in other.declined]
    assert (tmp_path / "memory/table.bin").exists() == table


GONE = KeyError("gone")


class Fails(EditGain):
    """Raises at a stage of its work, after it has spoilt the graph."""

    name = "fails"

    def __init__(self, stage: str, error: BaseException = GONE) -> None:
        super().__init__()
        self.stage, self.error = stage, error

    def _find(self, model: GraphModel) -> list[Node | Declined]:
        self._fail_at("match", model)
        return super()._find(model)

    def rewrite(self, model: GraphModel, match: Node) -> Applied:
        applied = super().rewrite(model, match)
        self._fail_at("rewrite", model)
        # No type: the graph cannot be exported.
        match.attrs["broken"] = object()
        return applied

    def _fail_at(self, stage: str, model: GraphModel) -> None:
        if stage == self.stage:
            model.graph.nodes.clear()
            raise self.error


@pytest.mark.parametrize("stage", ["match", "rewrite", "export"])
def test_a_mod_that_fails_is_left_out_and_the_rest_goes_on(stage, tmp_path, monkeypatch):
    monkeypatch.delenv(STRICT)
    model = gained(tmp_path)
    alone = apply_mods(model, ROWS, tmp_path / "alone.onnx", [ROUNDS])
    for mods in ([Fails(stage), ROUNDS], [ROUNDS, Fails(stage)]):
        found = apply_mods(model, ROWS, tmp_path / "out.onnx", mods)
        assert found.model.digest == alone.model.digest
        record = next(record for record in found.log.records if record.transform == "fails")
        assert record.rolled_back and not record.applied
        (declined,) = record.declined
        assert ("Error" if stage == "export" else "KeyError: 'gone'") in declined.reason
        serde.write(found.log, tmp_path / "mods.json")
        assert serde.read(RewriteLog, tmp_path / "mods.json") == found.log


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), OSError(28, "full"), MemoryError()])
def test_what_is_no_fault_of_the_mod_ends_the_run(error, tmp_path, monkeypatch):
    monkeypatch.delenv(STRICT)
    with pytest.raises(type(error)):
        apply_mods(gained(tmp_path), ROWS, tmp_path / "out.onnx", [Fails("rewrite", error)])


def test_a_mod_that_fails_is_an_error_where_that_is_asked_for(tmp_path):
    with pytest.raises(KeyError, match="gone"):
        apply_mods(gained(tmp_path), ROWS, tmp_path / "out.onnx", [Fails("match")])
