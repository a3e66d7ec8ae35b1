"""The release: what is in it and what is not. `tests/release.sh` checks, installs and runs it."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import loka_onnx

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
PACKAGE = ("loka_onnx/", "loka_zoo/")


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    """What git tracks, or would: files that it ignores must not get into a release."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True)
    return [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def dist(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Source distribution and wheel; the wheel is built from the source distribution."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    command = [sys.executable, "-m", "build", "--outdir", out, source]
    done = subprocess.run(command, capture_output=True, check=False, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_is_the_package_and_nothing_else(wheel, tracked):
    names = [name for name in wheel.namelist() if not name.endswith("/")]
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == {name for name in tracked if name.startswith(PACKAGE)}
    suffixes = {Path(name).suffix or Path(name).name for name in packaged}
    assert suffixes >= {".py", ".typed", ".yaml", ".json", ".j2", ".css"}, "templates, records and types"
    for name in packaged:
        assert wheel.read(name) == (ROOT / name).read_bytes(), name


def test_the_source_distribution_builds_the_same(dist, wheel):
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        (top,) = {name.partition("/")[0] for name in archive.getnames()}
        files = {member.name.removeprefix(f"{top}/") for member in archive.getmembers() if member.isfile()}
    assert files >= {"LICENSE", "README.md", "pyproject.toml"}
    packaged = {name for name in wheel.namelist() if name.startswith(PACKAGE) and not name.endswith("/")}
    assert {name for name in files if name.startswith(PACKAGE)} == packaged
    assert not [name for name in files if name.startswith((".", "runs/", "build/", "shared/"))]


def test_the_metadata_is_whole(wheel):
    (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
    metadata = Parser().parsestr(wheel.read(name).decode())
    assert metadata["Name"] == "loka-onnx"
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["License-File"] == "LICENSE"
    assert metadata["Requires-Python"] and metadata["Summary"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier", [])
    assert "Typing :: Typed" in classifiers
    assert any(line.startswith("Programming Language :: Python :: 3.") for line in classifiers)
    assert metadata["Keywords"]
    extras = set(metadata.get_all("Provides-Extra", []))
    assert extras >= {"cpu", "nvidia", "amd", "export", "tensorrt", "serve", "sign", "registry"}
    # The changelog speaks of what is released.
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert f"## [{metadata['Version']}]" in changelog or "## [Unreleased]" in changelog
    assert loka_onnx.__all__, "what was built is what is imported here"
