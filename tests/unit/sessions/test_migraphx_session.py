"""What a session makes of an engine's document and its programs; neither a GPU nor the library is needed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from loka_onnx.core import serde
from loka_onnx.engines.migraphx import session as migraphx_session
from loka_onnx.engines.migraphx.session import (
    MigraphxEngine,
    MigraphxSession,
    ProgramFile,
    ProgramInput,
    ProgramOutput,
    open_migraphx,
    read_engine,
    why_not_run,
)
from loka_onnx.errors import EngineError

DOCUMENT = MigraphxEngine(
    "gfx942",
    "2.15.0",
    (ProgramFile(4, "rows-4.mxr"), ProgramFile(16, "rows-16.mxr")),
    (ProgramInput("x", "float32", (2,)), ProgramInput("ids", "int64", ())),
    (ProgramOutput("sum", True), ProgramOutput("version", False)),
)


class FakeProgram:
    """Sums the rows of ``x`` and adds ``ids``; takes exactly the batch that it was compiled for."""

    def __init__(self, rows: int, calls: list[int], columns: int = 2, outputs: int = 2) -> None:
        self.rows, self.calls, self.columns, self.outputs = rows, calls, columns, outputs

    def is_compiled(self) -> bool:
        return True

    def get_parameter_shapes(self) -> dict[str, Any]:
        def shape(*lens: int) -> SimpleNamespace:
            return SimpleNamespace(type_string=lambda: "float_type", lens=lambda: list(lens))

        return {"x": shape(self.rows, self.columns), "ids": shape(self.rows)}

    def run(self, arguments: dict[str, np.ndarray[Any, Any]]) -> list[np.ndarray[Any, Any]]:
        x, ids = arguments["x"], arguments["ids"]
        assert (x.dtype, x.shape) == (np.float32, (self.rows, 2))
        assert (ids.dtype, ids.shape) == (np.int64, (self.rows,))
        self.calls.append(self.rows)
        return [(x.sum(axis=1) + ids).astype(np.float32), np.array([7.0])][: self.outputs]


def vendor(calls: list[int], version: str = "2.15.0", **others: Any) -> SimpleNamespace:
    def load(path: str) -> FakeProgram:
        return FakeProgram(int(Path(path).stem.removeprefix("rows-")), calls, **others)

    return SimpleNamespace(__version__=version, parse_onnx=None, load=load, argument=lambda array: array)


@pytest.fixture
def engine(tmp_path: Path) -> Path:
    serde.write(DOCUMENT, tmp_path / "engine.json")
    return tmp_path / "engine.json"


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host with an MI300X and the library."""
    monkeypatch.setattr(migraphx_session, "list_amd_architectures", lambda: ("gfx942",))
    monkeypatch.setattr(migraphx_session, "import_migraphx", lambda: vendor([]))


def request(rows: int) -> dict[str, np.ndarray[Any, Any]]:
    return {"x": np.arange(2.0 * rows).reshape(rows, 2), "ids": np.arange(rows, dtype=np.int32)}


@pytest.mark.parametrize(
    ("rows", "programs"), [(1, [4]), (4, [4]), (9, [16]), (20, [16, 4]), (40, [16, 16, 16])]
)
def test_a_batch_is_converted_and_served_by_programs(engine: Path, rows: int, programs: list[int]) -> None:
    calls: list[int] = []
    with MigraphxSession(vendor(calls), engine, DOCUMENT) as session:
        answer = session.run(request(rows))
    np.testing.assert_array_equal(answer["sum"], request(rows)["x"].sum(axis=1) + np.arange(rows))
    np.testing.assert_array_equal(answer["version"], [7.0])
    assert calls == programs


def test_a_request_of_another_form_is_refused(engine: Path) -> None:
    session = MigraphxSession(vendor([]), engine, DOCUMENT)
    with pytest.raises(EngineError, match=r"input 'ids' does not fit(?s:.*)it is missing"):
        session.run({"x": np.zeros((1, 2))})
    with pytest.raises(EngineError, match=r"'x'(?s:.*)shape \(1, 3\); a row has shape \(2,\)"):
        session.run({"x": np.zeros((1, 3)), "ids": np.zeros(1)})


def test_a_program_that_takes_something_else_is_not_run(engine: Path) -> None:
    """The library would read beyond the buffer."""
    with pytest.raises(EngineError, match=r"rows-4\.mxr: a program takes something else(?s:.*)\(4, 3\)"):
        MigraphxSession(vendor([], columns=3), engine, DOCUMENT)


def test_a_program_with_other_outputs_is_refused(engine: Path) -> None:
    session = MigraphxSession(vendor([], outputs=1), engine, DOCUMENT)
    with pytest.raises(EngineError, match=r"another number of outputs(?s:.*)1 results, outputs sum, version"):
        session.run(request(2))


def test_a_closed_session_has_freed_its_programs(engine: Path) -> None:
    session = MigraphxSession(vendor([]), engine, DOCUMENT)
    session.close()
    with pytest.raises(KeyError):
        session.run(request(2))


@pytest.mark.usefixtures("host")
class TestOpening:
    def test_the_right_engine_opens(self, engine: Path) -> None:
        for version in ("", "2.15.0"):
            with open_migraphx(engine, "gfx942", version) as session:
                assert session.run(request(3))["sum"].shape == (3,)

    def test_another_version_or_architecture_is_refused(
        self, engine: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(EngineError, match=r"built by 2\.16\.0, this host has 2\.15\.0"):
            open_migraphx(engine, "gfx942", "2.16.0")
        with pytest.raises(EngineError, match=r"asked for gfx950, the engine is for gfx942"):
            open_migraphx(engine, "gfx950")
        monkeypatch.setattr(migraphx_session, "import_migraphx", lambda: vendor([], version="2.16.0"))
        with pytest.raises(EngineError, match=r"built by 2\.15\.0, this host has 2\.16\.0"):
            open_migraphx(engine, "gfx942")

    def test_a_host_without_the_gpu_is_refused(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(migraphx_session, "list_amd_architectures", tuple)
        with pytest.raises(EngineError, match="is for gfx942 and this host has no AMD GPU"):
            open_migraphx(engine, "gfx942")
        monkeypatch.setattr(migraphx_session, "list_amd_architectures", lambda: ("gfx1100", "gfx942"))
        assert why_not_run("gfx942").endswith("gfx1100, gfx942, the first of which it would run on")
        assert why_not_run("gfx1100") == ""

    def test_the_reference_target_runs_anywhere(self, engine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(migraphx_session, "list_amd_architectures", tuple)
        serde.write(replace(DOCUMENT, architecture="cpu"), engine)
        open_migraphx(engine, "cpu").close()


def test_a_document_survives_its_file_and_something_else_is_refused(engine: Path) -> None:
    assert read_engine(engine) == DOCUMENT
    assert json.loads(engine.read_text())["schema"] == "loka-onnx/migraphx-engine/1"
    engine.write_text("{}")
    with pytest.raises(EngineError, match=r"no engine of MIGraphX(?s:.*)unknown schema"):
        read_engine(engine)


@pytest.mark.parametrize("file", ["../rows-4.mxr", "/rows-4.mxr", "", ".."])
def test_programs_outside_the_directory_are_refused(engine: Path, file: str) -> None:
    serde.write(replace(DOCUMENT, programs=(ProgramFile(4, file),)), engine)
    with pytest.raises(EngineError, match="a program outside its directory"):
        read_engine(engine)
