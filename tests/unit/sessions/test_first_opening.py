"""A plan that ends the process which opens it costs a child, and the next engine serves."""

import importlib
import logging
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from fake_cuda_driver import FakeDriver

from loka_onnx.engines.request import BuildLimits
from loka_onnx.engines.tensorrt import first_opening
from loka_onnx.engines.tensorrt.first_opening import check_opens
from loka_onnx.engines.tensorrt.session import open_engine
from loka_onnx.engines.tensorrt.spec import TENSORRT, TENSORRT_RTX, TensorRtSpec
from loka_onnx.errors import EngineError
from loka_onnx.sessions import cuda
from loka_onnx.sessions.cuda import CudaDevice

GPU = CudaDevice(0, "NVIDIA H100 80GB HBM3", "sm90")
LIBRARY = """
import os, signal
from dataclasses import replace
from pathlib import Path
from fake_cuda_driver import FakeDriver
from loka_onnx.sessions import cuda
cuda._load_library = lambda: FakeDriver()
__version__ = "11.4.0"
class Logger:
    WARNING = 2
    def __init__(self, severity): pass
class Runtime:
    def __init__(self, logger): pass
    def deserialize_cuda_engine(self, data):
        with Path(__file__).with_name("openings").open("a") as log:
            log.write("x")
        %s
"""
"""A vendor's library whose driver is a double, in the process that imports it."""


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOKA_ONNX_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(cuda, "_load_library", FakeDriver)
    (tmp_path / "engine.trt").write_bytes(b"plan")
    for module in ("some_trt", "tensorrt", "tensorrt_rtx"):
        # Imported anew, and taken back afterwards.
        monkeypatch.setitem(sys.modules, module, None)
        del sys.modules[module]
    return tmp_path


def library(place: Path, does: str, name: str = "some_trt") -> str:
    (place / f"{name}.py").write_text(LIBRARY % does)
    importlib.invalidate_caches()
    return name


def openings(place: Path) -> int:
    log = place / "openings"
    return len(log.read_text()) if log.is_file() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("does", "ending"),
    [("os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"), ("os._exit(1)", "exited with code 1")],
)
def test_a_library_that_ends_the_process_ends_a_child(place: Path, does: str, ending: str) -> None:
    module = library(place, does)
    for tried in (1, 2):
        with pytest.raises(EngineError, match=ending) as raised:
            check_opens(module, "11.4.0", place / "engine.trt", GPU)
        assert raised.value.where == str(place / "engine.trt")
        # It is not remembered as one that opens.
        assert openings(place) == tried


def test_one_that_takes_for_ever_is_ended(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_opening, "LIMITS", BuildLimits(seconds=6.0))
    with pytest.raises(EngineError, match="time limit of 6 s"):
        check_opens(library(place, "signal.pause()"), "11.4.0", place / "engine.trt", GPU)


@pytest.mark.slow
def test_a_refusal_is_left_to_who_opens_it(place: Path) -> None:
    """The library returns no engine: the session says so, with its own words."""
    module = library(place, "return None")
    check_opens(module, "11.4.0", place / "engine.trt", GPU)
    with pytest.raises(EngineError, match="does not load the engine"):
        open_engine(replace(TENSORRT, modules=(module,)), place / "engine.trt", "sm90", is_new=True)
    # Twice in a child, once here.
    assert openings(place) == 3


def test_what_has_opened_once_is_not_tried_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, engine = library(place, "pass"), place / "engine.trt"
    monkeypatch.setattr(first_opening, "__name__", "opens_well")
    (place / "opens_well.py").write_text(
        "from pathlib import Path\nPath(__file__).with_name('tried').touch()\n"
    )

    def is_tried(version: str = "11.4.0", device: CudaDevice = GPU) -> bool:
        check_opens(module, version, engine, device)
        tried = place / "tried"
        found = tried.is_file()
        tried.unlink(missing_ok=True)
        return found

    assert [is_tried(), is_tried()] == [True, False]
    # Another plan, library, driver or GPU has not.
    engine.write_bytes(b"another plan")
    assert [is_tried(), is_tried()] == [True, False]
    assert [is_tried("11.5.0"), is_tried("11.5.0")] == [True, False]
    assert [is_tried(device=CudaDevice(0, "RTX 4090", "sm89"))] == [True]
    monkeypatch.setattr(first_opening, "driver_version", lambda: "13.0")
    assert [is_tried(), is_tried()] == [True, False]


@pytest.mark.parametrize("executable", ["/no/such/python", "/bin/false"])
def test_a_host_that_starts_no_child_opens_it_as_before(place, monkeypatch, caplog, executable):
    monkeypatch.setattr(sys, "executable", executable)
    with caplog.at_level(logging.WARNING, "loka_onnx.sessions"):
        check_opens(library(place, "os.abort()"), "11.4.0", place / "engine.trt", GPU)
    assert "without a trial" in caplog.text
    assert openings(place) == 0


@pytest.mark.parametrize("spec", [TENSORRT, TENSORRT_RTX], ids=lambda spec: spec.name)
def test_engines_of_bundles_are_tried(place: Path, spec: TensorRtSpec) -> None:
    """By the functions that the runtime opens engines with; a crash here would end this test."""
    library(place, "os.abort()", "tensorrt")
    library(place, "os.abort()", "tensorrt_rtx")
    with pytest.raises(EngineError, match="SIGABRT"):
        spec.open(place / "engine.trt", "sm90", "11.4.0", None)
