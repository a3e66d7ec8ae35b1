"""A resumed run builds again where the library of a backend changed, under whatever name it came."""

from collections.abc import Callable
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from small_configs import config_of

from loka_onnx.core import installation
from loka_onnx.core.backends import backend_names
from loka_onnx.core.correction import CorrectionSet
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.installation import versions_of
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.rewrite import RewriteLogs
from loka_onnx.engines.migraphx import api as migraphx_api
from loka_onnx.engines.registry import get_backend
from loka_onnx.pipeline import candidates
from loka_onnx.pipeline.candidates import Built, EngineBuilder, build_engines
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.splitting import Source

pytestmark = pytest.mark.slow

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution that provides a module on Python's path, in the place of one of its name."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(site)
    monkeypatch.setattr(installation, "_providers", packages_distributions)

    def put(distribution: str, version: str, module: str) -> None:
        metadata = site / f"{distribution.replace('-', '_')}.dist-info"
        metadata.mkdir(exist_ok=True)
        (metadata / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
        )
        (metadata / "top_level.txt").write_text(f"{module}\n")

    return put


@pytest.mark.parametrize("name", ["tensorrt", "tensorrt-cu12", "tensorrt-cu13", "TensorRT_CU14"])
def test_a_distribution_is_found_by_the_module_that_it_provides(install, name):
    assert versions_of(["tensorrt"]) == {}
    install(name, "10.16.1", "tensorrt")
    assert versions_of(["tensorrt"]) == {name.lower().replace("_", "-"): "10.16.1"}


@pytest.mark.parametrize("name", backend_names())
def test_every_backend_notices_its_library_under_any_name(install, name):
    backend = get_backend(name)
    assert backend.spec.modules
    for module in backend.spec.modules:
        before = backend.versions()
        install(f"no-such-{module}-cu99", "1.0", module)
        installed = backend.versions()
        install(f"no-such-{module}-cu99", "1.1", module)
        assert len({str(sorted(found.items())) for found in (before, installed, backend.versions())}) == 3


def test_builds_of_migraphx_that_tell_no_version_differ_by_their_library(tmp_path, monkeypatch):
    library, module = tmp_path / "libmigraphx.so.2016000.0", SimpleNamespace(__version__="dev")
    maps = tmp_path / "maps"
    monkeypatch.setattr(migraphx_api, "MAPS", maps)
    assert migraphx_api.version_of(module) == "dev"
    maps.write_text(f"7f-8f rw-p 00000000 00:00 0 \n8f-9f r-xp 00000000 fe:00 2642 {library}\n")
    told = set()
    for content in (b"one", b"another"):
        library.write_bytes(content)
        told.add(migraphx_api.version_of(module))
    assert len(told) == 2
    assert all(version.startswith("dev+") for version in told)
    maps.unlink()
    module.__file__ = str(library)
    assert migraphx_api.version_of(module) in told
    module.__version__ = "2.16.0"
    assert migraphx_api.version_of(module) == "2.16.0"


def test_a_resumed_run_builds_again_with_another_library(install, tmp_path, monkeypatch):
    targets = [{"device": "nvidia-h100", "backends": ["tensorrt"]}]
    config, builds, model = (
        config_of(tmp_path, targets=targets),
        [],
        cast(Any, SimpleNamespace(digest="model")),
    )

    def build(self: EngineBuilder, source: Source) -> Built:
        builds.append(source)
        return Built(EngineSet(()), RewriteLogs({}))

    monkeypatch.setattr(EngineBuilder, "build", build)
    monkeypatch.setattr(candidates, "write_build_sample", lambda judging: None)

    def resume() -> int:
        with RunDirectory.create(tmp_path / "out", {}, {}, force=False, resume=True) as directory:
            context = Context(config, directory, exported=model)
            judging = SimpleNamespace(context=context, split=None, shared=(), job_rows=tuple)
            build_engines(cast(Any, judging), model, PlanSet(()), CorrectionSet())
        return len(builds)

    assert (resume(), resume()) == (1, 1)
    install("tensorrt-cu12", "10.16.1", "tensorrt")
    assert (resume(), resume()) == (2, 2)
    install("tensorrt-cu12", "11.4.0", "tensorrt")
    assert (resume(), resume()) == (3, 3)
    # One that it does not build with changes nothing.
    install("tensorrt-rtx-cu12", "1.7.1", "tensorrt_rtx")
    assert resume() == 3
