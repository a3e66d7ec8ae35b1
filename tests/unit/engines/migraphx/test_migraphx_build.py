"""The MIGraphX backend's builds, and the vendor calls that it makes."""

import ast
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import onnx
import pytest
from onnx import TensorProto as T
from planned import plan_of_one
from planned_graphs import Planned
from vendor_names import attributes

from loka_onnx.core.formats import E4M3FNUZ, E5M2, Precision
from loka_onnx.core.job import BatchSizes
from loka_onnx.core.recipe import PER_TENSOR, Recipe
from loka_onnx.engines.migraphx import api, backend
from loka_onnx.engines.migraphx import session as migraphx_session
from loka_onnx.engines.migraphx.backend import MigraphxBackend, inputs_of, save_dialect
from loka_onnx.engines.migraphx.session import ProgramInput, ProgramOutput, read_engine
from loka_onnx.engines.request import BuildRequest
from loka_onnx.errors import ModelError
from loka_onnx.sessions.model_files import batched_outputs, data_locations


@dataclass
class FakeMigraphx:
    """Keeps what it parsed and compiled; a program is what it was asked for."""

    parsed: list[tuple[onnx.ModelProto, dict[str, list[int]]]] = field(default_factory=list)
    compiled: list[dict[str, Any]] = field(default_factory=list)
    cache: list[str | None] = field(default_factory=list)
    __version__: str = "2.15.0"

    def parse_onnx(self, filename: str, *, map_input_dims: dict[str, list[int]]) -> SimpleNamespace:
        self.parsed.append((onnx.load(filename), map_input_dims))

        def compile(target: str, **options: Any) -> None:
            self.compiled.append({"target": target, **options})
            self.cache.append(os.environ.get("MIGRAPHX_PROBLEM_CACHE"))

        return SimpleNamespace(compile=compile)

    def get_target(self, name: str) -> str:
        return name

    def save(self, program: Any, path: str) -> None:
        Path(path).write_bytes(b"program")


def model(folder: Path, external: bool = False) -> Path:
    p = Planned()
    product = p.op("MatMul", [p.pair("x", "fc/in0", 0.25), p.weight("fc/weight", p.normal(8, 4))], "fc")
    proto = p.model(product)
    proto.graph.output[0].CopyFrom(onnx.helper.make_tensor_value_info("y", T.FLOAT, ["batch", 4]))
    path = folder / "model.onnx"
    onnx.save(proto, path, save_as_external_data=external, location="model.onnx.data", size_threshold=0)
    return path


@pytest.fixture
def vendor(monkeypatch: pytest.MonkeyPatch) -> FakeMigraphx:
    made = FakeMigraphx()
    monkeypatch.setattr(backend, "import_migraphx", lambda: made)
    return made


def compiled(path: Path, architecture: str, recipe: Recipe | None = PER_TENSOR, **options: int) -> Path:
    """The engine's manifest, in an empty folder."""
    batch, into = BatchSizes(1, 8, 32, (2, 8)), path.parent / "engine"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    where = {"target": "", "architecture": architecture, "output": into, "sample": path}
    request = BuildRequest(
        model=path, plan=plan_of_one(recipe=recipe), sites=(), batch=batch, options=options, **where
    )
    return MigraphxBackend().compile(request, into)


@pytest.mark.parametrize("external", [False, True])
def test_a_program_for_each_size_and_a_document(vendor, tmp_path, external):
    engine = compiled(model(tmp_path, external), "gfx942")
    into = engine.parent
    assert sorted(path.name for path in into.iterdir()) == ["engine.json", "rows-2.mxr", "rows-8.mxr"]
    document = read_engine(engine)
    assert (document.architecture, document.version, document.sizes) == ("gfx942", "2.15.0", (2, 8))
    assert document.inputs == (ProgramInput("x", "float32", (8,)),)
    assert document.outputs == (ProgramOutput("y", True),)
    assert [dims for _, dims in vendor.parsed] == [{"x": [2, 8]}, {"x": [8, 8]}]
    for proto, _ in vendor.parsed:
        kinds = {tensor.data_type for tensor in proto.graph.initializer}
        assert T.FLOAT8E4M3FNUZ in kinds
        assert T.FLOAT8E4M3FN not in kinds
    assert {each["target"] for each in vendor.compiled} == {"gpu"}
    assert not any(each["exhaustive_tune"] for each in vendor.compiled)


@pytest.mark.parametrize(("architecture", "target", "reread"), [("cpu", "ref", 0), ("gfx950", "gpu", 2)])
def test_the_device_decides_the_form(vendor, tmp_path, monkeypatch, architecture, target, reread):
    calls: list[Any] = []
    monkeypatch.setattr(api, "reread_float8", lambda module, program: calls.append(module) or program)
    compiled(model(tmp_path), architecture)
    assert {each["target"] for each in vendor.compiled} == {target}
    assert calls == [vendor] * reread
    # Without FP8 there is nothing to read again.
    compiled(model(tmp_path), architecture, None)
    assert len(calls) == reread


def test_tuning_keeps_what_it_found_by_device_and_version(vendor, tmp_path, monkeypatch):
    monkeypatch.setenv("MIGRAPHX_PROBLEM_CACHE", "")
    monkeypatch.delenv("MIGRAPHX_PROBLEM_CACHE")
    monkeypatch.setenv("LOKA_ONNX_CACHE", str(tmp_path))
    cache = tmp_path / "timing" / "migraphx-2.15.0" / "gfx942.json"
    for tune in (0, 1):
        vendor.compiled, vendor.cache = [], []
        compiled(model(tmp_path), "gfx942", exhaustive_tune=tune, fast_math=0)
        assert {each["exhaustive_tune"] for each in vendor.compiled} == {bool(tune)}
        assert not any(each["fast_math"] for each in vendor.compiled)
        assert set(vendor.cache) == {str(cache) if tune else None}
    assert cache.parent.is_dir()


def test_dynamic_axes_and_fixed_outputs(tmp_path):
    proto = onnx.load(model(tmp_path))
    proto.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "length"
    with pytest.raises(ModelError, match=r"dynamic axis(?s:.*)\(None, None\)"):
        inputs_of(proto)
    proto = onnx.load(model(tmp_path))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("fixed", T.FLOAT, [3]))
    proto.graph.output.append(onnx.helper.make_tensor_value_info("scalar", T.FLOAT, []))
    assert batched_outputs(proto) == {"y"}


def test_tables_that_no_rule_touches_are_linked(tmp_path):
    path = model(tmp_path, external=True)
    (tmp_path / "dialect").mkdir()
    proto = onnx.load(path, load_external_data=False)
    target = save_dialect(proto, path.parent, tmp_path / "dialect")
    data = target.parent / "model.onnx.data"
    assert data.stat().st_ino == (tmp_path / "model.onnx.data").stat().st_ino
    assert data_locations(onnx.load(target, load_external_data=False)) == (data.name,)


WIDE = (Precision.BF16, Precision.FP16)
FP8 = plan_of_one(recipe=PER_TENSOR)


class TestBackend:
    @pytest.mark.parametrize(
        ("planned", "architecture", "said"),
        [
            (
                plan_of_one(recipe=Recipe.of(E5M2)),
                "gfx942",
                "site 'fc' asks for E5M2; migraphx takes E4M3FN, INT8 only",
            ),
            (plan_of_one(recipe=Recipe.of(E4M3FNUZ)), "gfx942", "site 'fc' asks for E4M3FNUZ"),
            (FP8, "gfx90a", "gfx90a has no FP8 products"),
            (plan_of_one(), "gfx90a", None),
            *((FP8, architecture, None) for architecture in ("gfx942", "gfx950", "gfx1201")),
            # The reference target truncates: its accuracy would be told as that of a plan that a GPU rounds.
            *(
                (plan_of_one(base, recipe), "cpu", "truncates")
                for recipe in (None, PER_TENSOR)
                for base in WIDE
            ),
            *((plan_of_one(base, recipe), "gfx942", None) for recipe in (None, PER_TENSOR) for base in WIDE),
            *((plan_of_one(Precision.FP32, recipe), "cpu", None) for recipe in (None, PER_TENSOR)),
        ],
    )
    def test_what_it_declines(self, planned, architecture, said):
        assert str(said) in str(MigraphxBackend().decline(planned, architecture))

    @pytest.mark.usefixtures("vendor")
    def test_another_device_is_no_reason_to_decline_but_to_build_elsewhere(self, monkeypatch):
        backend = MigraphxBackend()
        monkeypatch.setattr(migraphx_session, "list_amd_architectures", lambda: ("gfx950",))
        assert backend.build_blocker("gfx950") == ""
        assert backend.build_blocker("cpu") == ""
        assert backend.build_blocker("gfx942") == (
            "MIGraphX compiles on the GPU that it compiles for: "
            "the engine is for gfx942 and this host has gfx950"
        )
        assert backend.why_not_run("gfx942").endswith("latency and accuracy not measured")

    @pytest.mark.usefixtures("vendor")
    def test_an_engine_is_its_document_and_its_programs(self, tmp_path):
        engine = compiled(model(tmp_path), "cpu")
        files = MigraphxBackend().files(engine)
        assert [file.name for file in files] == ["engine.json", "rows-2.mxr", "rows-8.mxr"]
        engine.write_text("{}")
        assert MigraphxBackend().files(engine) == (engine,)


NAMES = Path(__file__).parent / "migraphx-names.txt"
VENDOR_VALUES = {
    *("migraphx", "program", "result", "source", "main", "instruction", "each", "shape", "value"),
    *("loaded", "module", "_migraphx"),
}


def test_names_exist():
    lines = NAMES.read_text(encoding="utf-8").splitlines()
    tree = ast.parse(Path(api.__file__).read_text(encoding="utf-8"))
    assert attributes(tree, VENDOR_VALUES) == {line for line in lines if line and not line.startswith("#")}


@pytest.mark.parametrize("module", [backend, migraphx_session], ids=lambda m: m.__name__)
def test_others_hand_the_module_on_and_call_nothing(module):
    tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
    values = [node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    names = {getattr(value, "id", getattr(value, "attr", "")) for value in values}
    assert not names & {"migraphx", "_migraphx"}
