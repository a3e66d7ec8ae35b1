"""What a bundle holds is never executed or unpickled by reading it, whoever made it."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from altered import put
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle, verify_path
from loka_onnx.bundle.format.files import read_sample
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.errors import BundleInvalid


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


@pytest.fixture
def attack(sample: SampleRun, tmp_path: Path) -> Path:
    """A bundle, sealed as its maker could, whose sample is a pickle that creates `tmp_path/executed`."""
    place = write_bundle(sample.contents, tmp_path / "bundle")
    evil = np.array([Evil(tmp_path / "executed")], dtype=object)
    (engine, *_) = (e.artifact.id for e in sample.contents.engines)
    arrays = {"input/dense": evil, f"expected/{engine}/ctr": evil, "expected/fallback-fp32/ctr": evil}
    np.savez(tmp_path / "evil.npz", allow_pickle=True, **arrays)
    put(place, "sample.npz", (tmp_path / "evil.npz").read_bytes())
    return place


def test_the_attack_is_one(attack, tmp_path):
    """Read the careless way, it runs: otherwise the tests below would show nothing."""
    with np.load(attack / "sample.npz", allow_pickle=True) as arrays:
        arrays["input/dense"]
    assert (tmp_path / "executed").exists()


def test_a_pickled_sample_is_refused_and_not_unpickled(attack, tmp_path):
    manifest = verify_path(attack).manifest
    for entry in manifest.candidates:
        with pytest.raises(BundleInvalid, match=r"'sample\.npz' is not an npz of plain arrays") as caught:
            read_sample(attack, manifest, entry)
        assert "allow_pickle=False" in str(caught.value)
    assert not (tmp_path / "executed").exists()


READER = """
import sys
import tempfile
from pathlib import Path

bundle, archive, out = map(Path, sys.argv[1:])
from loka_onnx.bundle.inspection import inspect_bundle
from loka_onnx.bundle.format.archive import as_directory, unpack, verify_path
from loka_onnx.bundle.format.files import read_sample
from loka_onnx.errors import LokaError
from loka_onnx import runtime
from loka_onnx.runtime import load
import numpy, onnx, onnxruntime

# Raised by the interpreter itself, whichever module unpickles or runs a program.
FORBIDDEN = ("pickle.find_class", "subprocess.Popen", "os.system", "os.exec")
seen = []

def inside(path):
    return isinstance(path, str) and Path(path).resolve().is_relative_to(bundle.parent)

def hook(event, arguments):
    if event in FORBIDDEN:
        seen.append((event, str(arguments)[:300]))
    if event == "exec" and inside(arguments[0].co_filename):
        seen.append((event, arguments[0].co_filename))
    if event == "ctypes.dlopen" and inside(arguments[0]):
        seen.append((event, arguments[0]))
    if event == "open" and isinstance(arguments[0], str) and set(arguments[1] or "") & set("wax+"):
        if not Path(arguments[0]).resolve().is_relative_to(out.parent):
            seen.append((event, str(arguments)))

import pickle
pickle.loads = pickle.load = None
sys.addaudithook(hook)
manifest = verify_path(bundle).manifest
verify_path(archive)
inspect_bundle(bundle)
unpack(archive, out)
tempfile.tempdir = str(out.parent)
with as_directory(archive) as directory:
    verify_path(directory)
for entry in manifest.candidates:
    try:
        read_sample(bundle, manifest, entry)
    except LokaError as error:
        print("refused", type(error).__name__)
try:
    load(bundle)
except LokaError as error:
    print("refused", type(error).__name__)
assert not seen, seen
print("nothing ran")
"""


@pytest.mark.slow
def test_no_audit_event_of_unpickling_or_running_is_raised(sample, attack, tmp_path):
    good = write_bundle(sample.contents, tmp_path / "good")
    for number, bundle in enumerate((attack, good)):
        around = tmp_path / f"around-{number}"
        around.mkdir()
        archive = pack_bundle(bundle, tmp_path / f"{number}.loka")
        done = subprocess.run(
            [sys.executable, "-c", READER, str(bundle), str(archive), str(around / "out")],
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"},
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "nothing ran"
        assert ("refused" in done.stdout) == (bundle == attack)
        assert [p.name for p in around.iterdir()] == ["out"]
    assert not (tmp_path / "executed").exists()
