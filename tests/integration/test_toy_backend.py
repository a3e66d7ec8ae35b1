"""A backend is added by one folder: nothing of this package is changed for it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from synthetic_runs import finish, make_workplace, start

from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.core.manifest import Need, Requirement

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).with_name("toy_backend")
LOAD = """
import sys
import loka_onnx
engine = loka_onnx.load(sys.argv[1], trust=True)
print(engine.entry.backend, engine.entry.architecture, engine.health().ready)
"""


def with_package(folder: Path) -> dict[str, str]:
    """The environment of a child that finds a folder's package, and else what this process imports."""
    return os.environ | {"PYTHONPATH": os.pathsep.join([os.fspath(folder), *sys.path])}


def test_a_package_that_does_not_import_costs_doctor_nothing(tmp_path):
    place = tmp_path / "broken-1.0.dist-info"
    place.mkdir()
    (place / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (place / "entry_points.txt").write_text("[loka_onnx.backends]\nbroken = no_such_module:SPEC\n")
    done = finish(start("doctor", environment=with_package(tmp_path)))
    assert done.code == 0, done.err
    assert "no_such_module" in done.out and "inductor" in done.out


def test_a_run_builds_judges_ships_and_loads_engines_of_a_foreign_backend(tmp_path):
    place = make_workplace(tmp_path / "place")
    place.write_run_file(
        targets=[{"device": "toy-board", "backends": ["toy"]}], plan={"plans": ["fp32", "fp8-safe"]}
    )
    environment = with_package(FOLDER)
    done = finish(start("run", place.run_file, environment=environment))
    assert done.code == 0, done.err
    bundle = place.output / "bundle"
    (engine,) = (each for each in verify_bundle(bundle).engines if each.backend == "toy")
    assert (engine.plan, engine.version) == ("fp32", "1.0")
    assert engine.requires[0] == Requirement("Toy compiler", Need.EXACTLY, "1.0")
    loaded = subprocess.run(
        [sys.executable, "-c", LOAD, bundle], env=environment, capture_output=True, text=True, check=False
    )
    assert loaded.stdout.split() == ["toy", "toy1", "True"], loaded.stderr
    # Without the package, the name is refused in words, and the bundle falls back on its FP32 model.
    refused = finish(start("run", place.run_file))
    assert refused.code == 2 and "must be one of" in refused.err
    without = subprocess.run([sys.executable, "-c", LOAD, bundle], capture_output=True, text=True, check=True)
    assert without.stdout.split() == ["onnxruntime", "cpu", "True"]
