"""What is settled before a server listens: its packages, its name, its address, and whom it trusts."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from loka_onnx.errors import ConfigError, EngineError
from loka_onnx.serving import server
from loka_onnx.serving.server import ServeOptions, serve

WITHOUT = """
import importlib.abc, sys
class Absent(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"starlette", "uvicorn", "prometheus_client"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
import importlib, pkgutil
import loka_onnx.cli.bundle, loka_onnx.serving
for module in pkgutil.iter_modules(loka_onnx.serving.__path__, "loka_onnx.serving."):
    importlib.import_module(module.name)
from pathlib import Path
from loka_onnx.errors import MissingPackage
from loka_onnx.serving.server import ServeOptions, serve
try:
    serve(Path("nowhere"), ServeOptions(), print)
except MissingPackage as error:
    print(error)
"""


def never(url: str, engine: str) -> None:
    raise AssertionError(f"it listens: {url}")


@pytest.mark.slow
def test_without_its_packages_everything_imports_and_the_remedy_is_told() -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("a package of the server is not installed\n")
    assert done.stdout.endswith("  remedy: pip install 'loka-onnx[serve]'\n")


@pytest.mark.parametrize("name", ["a/b", "/", ".", ".."])
def test_a_name_that_is_no_part_of_a_path_is_refused(bundle: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot be the name of a model"):
        serve(bundle, ServeOptions(name=name), never)


def test_an_address_that_is_taken_is_found_before_the_bundle_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"cannot listen on 127.0.0.1, port {port}\n  evidence: .*in use"
        ):
            serve(Path("nowhere"), ServeOptions(port=port), never)
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1, port 8000"):
        serve(Path("nowhere"), ServeOptions(host="192.0.2.1"), never)


def test_trust_and_keys_go_to_the_loader(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load(path: Path, **more: object) -> None:
        asked.append((path, more))
        raise EngineError("enough")

    monkeypatch.setattr(server, "load", load)
    with pytest.raises(EngineError, match="enough"):
        serve(bundle, ServeOptions(port=0, trust=True, keys=(Path("a.pub"),)), never)
    assert asked == [(bundle, {"trust": True, "keys": (Path("a.pub"),)})]
