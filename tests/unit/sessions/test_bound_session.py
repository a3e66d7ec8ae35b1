"""Sessions with bound buffers, of split models, and the form of a request."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loka_onnx.core import serde
from loka_onnx.core.rewrite import INDEX
from loka_onnx.engines.onnxruntime import io_binding_session as bound_session
from loka_onnx.engines.onnxruntime.io_binding_session import IoBindingSession, _Buffers, open_io_binding
from loka_onnx.engines.onnxruntime.io_binding_settings import PROGRAMS, SETTINGS_FILE, IoBindingSettings
from loka_onnx.engines.onnxruntime.providers import CPU, CUDA, PROVIDERS, placed_nodes, session_options
from loka_onnx.errors import EngineError, ModelError, UserError
from loka_onnx.sessions.runner import Arrays, Runner, SplitRunner, to_rows, to_users

ort = pytest.importorskip("onnxruntime")

HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
MODEL = (
    "g (float[b,3] x, int64[b] ids) => (float[b] y, int64[2] ran) {"
    " axes = Constant<value = int64[1] {1}>()  s = ReduceSum<keepdims=0>(x, axes)"
    " f = Cast<to=1>(ids)  y = Add(s, f)  ran = Shape(x) }"
)
"""y: sum of a row and its id. ran: rows that were run, which is how the tests see padding."""
SIZES = (4, 16)


def write(folder: Path, text: str = MODEL) -> Path:
    onnx.save(onnx.parser.parse_model(f"{HEADER} {text}"), folder / "engine.onnx")
    return folder / "engine.onnx"


def settings(**changes: object) -> IoBindingSettings:
    return replace(IoBindingSettings("cpu", str(ort.__version__), sizes=SIZES), **changes)


def batch(rows: int, seed: int = 0) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    return {"x": random.normal(size=(rows, 3)).astype(np.float32), "ids": np.arange(rows) + seed}


def expected(inputs: dict[str, np.ndarray]) -> np.ndarray:
    return inputs["x"].sum(axis=1, dtype=np.float32) + inputs["ids"].astype(np.float32)


def spied(session: IoBindingSession) -> list[_Buffers]:
    """What the session runs from now on."""
    ran: list[_Buffers] = []
    launch = session._launch

    def spy(bound: _Buffers) -> None:
        ran.append(bound)
        launch(bound)

    session._launch = spy  # type: ignore[method-assign]
    return ran


@pytest.fixture
def session(tmp_path: Path) -> Iterator[IoBindingSession]:
    with IoBindingSession(write(tmp_path), settings()) as made:
        yield made


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU provider served as one that compiles: every request in the sizes of the engine."""
    monkeypatch.setitem(PROVIDERS, "cpu", replace(CPU, compiles=True))  # type: ignore[arg-type]


def test_a_request_is_padded_at_most_twofold_and_its_answer_outlives_the_next(session):
    ran = {1: 1, 2: 4, 3: 4, 4: 4, 5: 5, 7: 7, 8: 16, 16: 16, 17: 17, 40: 40}
    answers = {rows: session.run(batch(rows, seed=rows)) for rows in ran}
    assert {rows: got["ran"].tolist() for rows, got in answers.items()} == {
        n: [size, 3] for n, size in ran.items()
    }
    for rows, got in answers.items():
        np.testing.assert_allclose(got["y"], expected(batch(rows, seed=rows)), rtol=1e-6)


@pytest.mark.parametrize(("rows", "last"), [(1, 4), (4, 4), (5, 16), (16, 16), (37, 16)])
@pytest.mark.usefixtures("compiling")
def test_a_provider_that_compiles_sees_no_other_size(rows: int, last: int, session: IoBindingSession) -> None:
    ran = spied(session)
    got = session.run(batch(rows))
    seen = [bound.inputs["x"].shape()[0] for bound in ran]
    np.testing.assert_allclose(got["y"], expected(batch(rows)), rtol=1e-6)
    assert set(seen) <= set(SIZES)
    assert seen[-1] == last


@pytest.mark.parametrize("rows", [3, 4, 5, 16, 40])
def test_a_resident_batch_stays_what_it_was(rows: int, session: IoBindingSession) -> None:
    mine = batch(rows)
    resident = session.resident(mine)
    mine["x"][:] = 0
    kept = spied(session)
    resident()
    (bound,) = kept
    got = bound.outputs["y"].numpy()[:rows]
    np.testing.assert_allclose(got, expected(batch(rows)), rtol=1e-6)


def test_without_sizes_a_request_runs_as_it_comes(tmp_path: Path) -> None:
    with IoBindingSession(write(tmp_path), settings(sizes=())) as session:
        assert session.served_sizes == ()
        for rows in (1, 3, 4, 15):
            assert session.run(batch(rows))["ran"].tolist() == [rows, 3]


def test_other_types_of_the_same_numbers_are_taken(session: IoBindingSession) -> None:
    given = batch(4)
    other = {"x": np.asfortranarray(given["x"], np.float64), "ids": given["ids"].astype(np.int32)}
    got = session.run(other)
    np.testing.assert_allclose(got["y"], expected(given), rtol=1e-6)


@pytest.mark.usefixtures("compiling")
def test_a_resident_batch_of_several_pieces_is_the_whole_request(session: IoBindingSession) -> None:
    ran = spied(session)
    session.resident(batch(37))()
    assert len(ran) == 3


@pytest.mark.parametrize(
    ("x", "said"),
    [(batch(2)["x"], "'x' 2, 'ids' 4"), (batch(4)["x"][:, :2], r"'x'(?s:.*)a row of \[2\], not \[3\]")],
)
def test_a_request_of_another_shape_is_refused(x: np.ndarray, said: str, session: IoBindingSession) -> None:
    with pytest.raises(EngineError, match=said):
        session.run({**batch(4), "x": x})
    np.testing.assert_allclose(session.run(batch(4))["y"], expected(batch(4)), rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("float[b,n] x) => (float[b,n] y) { y = Relu(x) }", r"'x' has no fixed shape(?s:.*)\['b', 'n'\]"),
        ("float[b,2] x, float c) => (float[b,2] y) { y = Add(x, c) }", r"'c' has no fixed shape"),
        ("bfloat16[b,2] x) => (float[b,2] y) { y = Cast<to=1>(x) }", r"'x' cannot be bound(?s:.*)bfloat16"),
        ("float[b,2] x) => (float[b,2] y) { y = Frobnicate(x) }", r"refuses '.*' on CPUEx(?s:.*)Frobnicate"),
    ],
)
def test_a_model_that_cannot_be_bound_says_why(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=said):
        IoBindingSession(write(tmp_path, f"g ({text}"), settings())


@pytest.mark.filterwarnings("ignore:Specified provider:UserWarning")
def test_the_cpu_does_not_stand_in_for_a_provider(tmp_path: Path) -> None:
    if CUDA.name in ort.get_available_providers():
        pytest.skip("needs a GPU-less ONNX Runtime")
    with pytest.raises(EngineError, match=r"does not start(?s:.*)run on CPUExecutionProvider"):
        IoBindingSession(write(tmp_path), replace(settings(), provider="cuda"))


def test_placement_names_each_node_and_its_provider(session: IoBindingSession) -> None:
    placed = session.placement()
    assert {node.provider for node in placed} == {"CPUExecutionProvider"}
    assert {node.op for node in placed} == {"ReduceSum", "Cast", "Add", "Shape"}


def test_an_onnxruntime_that_does_not_tell_is_named() -> None:
    with pytest.raises(EngineError, match=r"does not say which provider(?s:.*)it does from 1\.24 on"):
        placed_nodes(object())


def test_a_compiler_gets_the_graph_as_it_was_written(tmp_path: Path) -> None:
    levels, path = ort.GraphOptimizationLevel, write(tmp_path)
    assert session_options(path, CPU).graph_optimization_level == levels.ORT_ENABLE_ALL
    compiler = replace(CPU, compiles=True)
    assert session_options(path, compiler).graph_optimization_level == levels.ORT_DISABLE_ALL


PLUGIN = "trt_extra_plugin_lib_paths"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"provider": "abacus"}, r"no provider 'abacus'(?s:.*)known: cpu, cuda, tensorrt, migraphx"),
        ({"provider": "tensorrt", "options": {PLUGIN: "/tmp/evil.so"}}, f"cannot set option '{PLUGIN}'"),
        ({"options": {"device_id": "1"}}, "cannot set option 'device_id'(?s:.*)it may set none"),
        ({"sizes": (16, 4)}, r"out of order(?s:.*)\[16, 4\]"),
        ({"sizes": (0, 4)}, "out of order"),
    ],
)
def test_settings_that_no_engine_has(change: dict[str, object], said: str) -> None:
    with pytest.raises(EngineError, match=said):
        settings(**change)


class TestOpening:
    @pytest.fixture
    def engine(self, tmp_path: Path) -> Path:
        serde.write(settings(), tmp_path / SETTINGS_FILE)
        return write(tmp_path)

    @pytest.mark.parametrize("version", ["", "1.2.3"])
    def test_a_graph_runs_as_its_settings_say_on_any_version(self, engine: Path, version: str) -> None:
        if version:
            serde.write(settings(version=version), engine.with_name(SETTINGS_FILE))
        with open_io_binding(engine, "onnxruntime", "cpu", version) as session:
            assert session.served_sizes == SIZES
            assert session.run(batch(3))["ran"].tolist() == [4, 3]

    def test_without_settings(self, engine: Path) -> None:
        engine.with_name(SETTINGS_FILE).unlink()
        with pytest.raises(UserError, match=r"cannot read the loka-onnx/onnxruntime-engine/1"):
            open_io_binding(engine, "onnxruntime", "cpu")

    def test_settings_of_another_engine(self, engine: Path) -> None:
        with pytest.raises(EngineError, match=r"not its own(?s:.*)'cpu' of ONNX(?s:.*)sm90 is 'cuda'"):
            open_io_binding(engine, "onnxruntime", "sm90")
        with pytest.raises(EngineError, match=r"not its own(?s:.*)is 'cpu' of 0\.1"):
            open_io_binding(engine, "onnxruntime", "cpu", "0.1")

    def test_a_host_without_the_provider(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(bound_session, "host_blocker", lambda provider, architecture: "there is none")
        with pytest.raises(EngineError, match="cannot run here: there is none"):
            open_io_binding(engine, "onnxruntime", "cpu")

    @pytest.mark.usefixtures("compiling")
    def test_programs_of_another_version(self, engine: Path) -> None:
        serde.write(settings(version="1.2.3", programs=True), engine.with_name(SETTINGS_FILE))
        with pytest.raises(EngineError, match=r"another version(?s:.*)Runtime 1\.2\.3, this host"):
            open_io_binding(engine, "onnxruntime", "cpu", "1.2.3")

    @pytest.mark.parametrize("kept", [True, False])
    @pytest.mark.usefixtures("compiling")
    def test_a_provider_writes_into_a_copy_of_its_programs(self, engine, kept, monkeypatch):
        given: list[Path | None] = []
        chain = bound_session.provider_chain

        def spy(provider, options, device, programs, timing):
            given.append(programs)
            return chain(provider, options, device, programs, timing)

        monkeypatch.setattr(bound_session, "provider_chain", spy)
        programs = engine.parent / PROGRAMS
        if kept:
            programs.mkdir()
            (programs / "kernels.bin").write_bytes(b"machine code")
        serde.write(settings(programs=True), engine.with_name(SETTINGS_FILE))
        with open_io_binding(engine, "onnxruntime", "cpu"):
            (copy,) = given
            assert copy is not None and copy != programs
            assert [file.read_bytes() for file in copy.iterdir()] == [b"machine code"] * kept
        assert not copy.exists()
        assert programs.exists() == kept
        with IoBindingSession(engine, settings(programs=True), writes=True):
            assert given[-1] == programs


class Recorder(Runner):
    """Answers what it is told to, and keeps what it was asked."""

    def __init__(self, answer: Arrays, closing: Exception | None = None) -> None:
        self.answer, self.closing = answer, closing
        self.asked: list[Arrays] = []
        self.closed = 0

    def run(self, inputs):
        self.asked.append(dict(inputs))
        return self.answer

    def close(self):
        self.closed += 1
        if self.closing is not None:
            raise self.closing


ROWS = {"table": np.ones((2, 4), np.float32)}
ANSWER = {"ctr": np.zeros(2, np.float32)}
REQUEST = {"ids": np.array([1, 2]), "x": np.zeros((2, 3), np.float32)}


def test_the_engine_gets_what_was_looked_up_and_both_are_freed_even_where_one_fails():
    lookup, dense = Recorder(ROWS), Recorder(ANSWER, EngineError("the device is gone"))
    with pytest.raises(EngineError, match="the device is gone"), SplitRunner(lookup, dense) as runner:
        assert runner.run(REQUEST) is ANSWER
    assert lookup.asked[0].keys() == REQUEST.keys()
    assert dense.asked[0].keys() == {"ids", "x", "table"}
    assert dense.asked[0]["table"] is ROWS["table"]
    assert (lookup.closed, dense.closed) == (1, 1)


USERS = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1)), min_size=1, max_size=12)


@given(USERS)
def test_rows_are_what_they_were_and_neighbours_with_equal_values_are_one_user(users: list[tuple[int, int]]):
    age, history = np.array(users, np.int64)[:, 0], np.array(users, np.float32)
    rows = {"age": age, "history": history, "item": np.arange(len(users))}
    request = to_users(rows, ("age", "history"))
    changes = 1 + sum(one != other for one, other in pairwise(users))
    assert len(request["age"]) == len(request["history"]) == changes
    assert request[INDEX].dtype == np.int64
    back = to_rows(request, ("age", "history"))
    assert back.keys() == rows.keys()
    for name, values in rows.items():
        np.testing.assert_array_equal(back[name], values)
        assert back[name].dtype == values.dtype
