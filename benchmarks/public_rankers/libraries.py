"""Where the libraries lie: a directory each, behind this project's own packages, torch and numpy too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers.environments import PINS
from benchmarks.public_rankers.catalog import Library

LIBRARIES_ENVIRONMENT = "LOKA_ONNX_PUBLIC_RANKERS"
"""Variable that holds the directory of the libraries' directories."""
_PINS = {Library.DEEPCTR: "deepctr"}
_IMPORTED = {
    Library.RECHUB: "torch_rechub",
    Library.DEEPCTR: "deepctr_torch",
    Library.FUXICTR: "fuxictr",
    Library.TORCHREC: "torchrec",
}


def directory_of(library: Library, libraries: Path) -> Path:
    """Directory of a library, whether it is there or not."""
    return libraries / library


def is_installed(library: Library, libraries: Path) -> bool:
    """Whether its package is in its directory."""
    return (directory_of(library, libraries) / _IMPORTED[library]).is_dir()


def install(library: Library, libraries: Path) -> None:
    """Install a library where it is not there, without what it depends on beside its pins."""
    if is_installed(library, libraries):
        return
    pins = PINS / f"{_PINS.get(library, str(library))}.txt"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade"]
    target = os.fspath(directory_of(library, libraries))
    subprocess.run([*pip, "--target", target, "-r", os.fspath(pins)], check=True)


def use(library: Library, libraries: Path) -> Path:
    """Put a library behind this project's own packages, and return its directory."""
    directory = directory_of(library, libraries)
    if os.fspath(directory) not in sys.path:
        sys.path.append(os.fspath(directory))
    return directory


def main() -> None:
    """Install all of them: ``python -m benchmarks.public_rankers.libraries DIRECTORY``."""
    for library in Library:
        install(library, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
