"""Packages of Inductor engines: contents, refusals, and hosts that they do not fit."""

import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from inductor_programs import DYNAMIC, STATIC, Recording, StandInGpu, calls_of, expected, request, torch

from loka_onnx.core import serde
from loka_onnx.engines.inductor import session as inductor_session
from loka_onnx.engines.inductor.package import (
    InductorEngine,
    check_host,
    read_engine,
    read_sources,
    vector_instructions,
)
from loka_onnx.engines.inductor.session import open_inductor
from loka_onnx.errors import EngineError
from loka_onnx.sessions.cuda import CudaDevice


def test_another_release_of_pytorch_or_processor_is_refused() -> None:
    check_host(DYNAMIC, "2.13.1+cu130", ("avx2", "sse2"), Path("e.pt2"))
    with pytest.raises(EngineError, match=r"e\.pt2: (?s:.*)2\.13\.0\+cpu, this host has 2\.11\.0"):
        check_host(DYNAMIC, "2.11.0", ("avx2",), Path("e.pt2"))
    engine = replace(DYNAMIC, instruction_sets=("avx2", "avx512f"))
    with pytest.raises(EngineError, match=r"another processor(?s:.*)this host lacks avx512f"):
        check_host(engine, "2.13.0", ("avx2", "sse2"), Path("e.pt2"))


def test_instruction_sets_are_read_from_the_kernel(tmp_path: Path) -> None:
    text = "processor : 0\nflags\t\t: fpu sse2 avx2 ibrs fma\n\nprocessor : 1\nflags : sse2\n"
    (tmp_path / "cpuinfo").write_text(text)
    assert vector_instructions(tmp_path / "cpuinfo") == ("avx2", "fma", "sse2")
    assert vector_instructions(tmp_path / "absent") == ()


def package(path: Path, engine: InductorEngine) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("engine/extra/engine.json", serde.dumps(engine))
        archive.writestr("engine/data/aotinductor/rows4/a.wrapper.cpp", "first")
        archive.writestr("engine/data/aotinductor/rows4/a.so", "not text")
        archive.writestr("engine/data/aotinductor/rows40/b.cpp", "other")
    return path


def test_a_package_says_what_it_is(tmp_path: Path) -> None:
    path = package(tmp_path / "e.pt2", STATIC)
    assert read_engine(path) == STATIC
    assert read_sources(path, "rows4") == ("first",)
    assert read_sources(path, "rows40") == ("other",)


def test_what_is_no_package_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.pt2").write_bytes(b"text")
    with zipfile.ZipFile(tmp_path / "other.pt2", "w") as archive:
        archive.writestr("archive/data.pkl", "x")
    old = serde.dumps(DYNAMIC).replace("inductor-engine/1", "inductor-engine/0")
    with zipfile.ZipFile(tmp_path / "old.pt2", "w") as archive:
        archive.writestr("extra/engine.json", old)
    for name, said in (
        ("text", "not a zip file"),
        ("other", "no 'engine.json' among its extra files"),
        ("old", "inductor-engine/0"),
        ("absent", "No such file"),
    ):
        with pytest.raises(EngineError, match=rf"{name}\.pt2: not an engine(?s:.*){said}"):
            read_engine(tmp_path / f"{name}.pt2")


def test_nothing_is_loaded_where_the_host_does_not_fit(tmp_path, monkeypatch):
    def load(*arguments: Any) -> Any:
        raise AssertionError("loaded")

    monkeypatch.setattr(inductor_session, "_load", load)
    path = package(tmp_path / "e.pt2", DYNAMIC)
    with pytest.raises(EngineError, match=r"another architecture(?s:.*)asked for sm90, it is for cpu"):
        open_inductor(path, "sm90")
    monkeypatch.setattr(inductor_session, "import_torch", lambda: SimpleNamespace(__version__="2.11.0"))
    with pytest.raises(EngineError, match="another version of PyTorch"):
        open_inductor(path, "cpu")
    here = replace(DYNAMIC, architecture="sm90", instruction_sets=())
    path = package(tmp_path / "gpu.pt2", here)
    no_cuda = SimpleNamespace(
        __version__="2.13.0+cpu",
        version=SimpleNamespace(cuda=None),
        cuda=SimpleNamespace(is_available=lambda: False),
    )
    monkeypatch.setattr(inductor_session, "import_torch", lambda: no_cuda)
    monkeypatch.setattr(inductor_session, "why_no_gpu", lambda architecture: f"no {architecture}")
    with pytest.raises(EngineError, match="cannot run here: no sm90"):
        open_inductor(path, "sm90")
    monkeypatch.setattr(inductor_session, "why_no_gpu", lambda architecture: "")
    with pytest.raises(EngineError, match=r"does not use the GPU(?s:.*)install PyTorch 2\.13\.0\+cpu"):
        open_inductor(path, "sm90")


def test_the_gpu_of_the_architecture_is_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []

    def load(torch: Any, package: Path, engine: InductorEngine, index: int) -> dict[str, Any]:
        chosen.append(index)
        return calls_of(DYNAMIC, Recording())

    def make(torch: Any, index: int) -> StandInGpu:
        chosen.append(index)
        return StandInGpu()

    devices = (CudaDevice(0, "L4", "sm89"), CudaDevice(1, "H100", "sm90"))
    monkeypatch.setattr(inductor_session, "list_cuda_devices", lambda: devices)
    monkeypatch.setattr(inductor_session, "why_no_gpu", lambda architecture: "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(inductor_session, "_load", load)
    monkeypatch.setattr(inductor_session, "Gpu", make)
    engine = replace(DYNAMIC, architecture="sm90", torch=str(torch.__version__), instruction_sets=())
    with open_inductor(package(tmp_path / "e.pt2", engine), "sm90") as session:
        np.testing.assert_array_equal(session.run(request(4))["out"], expected(request(4)))
    assert chosen == [1, 1]


def test_a_package_that_does_not_load_says_why(tmp_path: Path) -> None:
    engine = replace(DYNAMIC, torch=str(torch.__version__), instruction_sets=())
    with pytest.raises(EngineError, match=r"PyTorch does not load the engine(?s:.*)one PyTorch version"):
        open_inductor(package(tmp_path / "e.pt2", engine), "cpu")
