"""Environments of other tools: one file of pins each, made once by the benchmark that needs them.

Their pins conflict with each other and with this project's. A file holds a requirement a line, installed in
its order in one go up to a line with ``!``, which takes a package away again.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

MODEL_OPTIMIZER_ENVIRONMENT = "LOKA_ONNX_MODEL_OPTIMIZER"
"""Variable that holds the Python of an environment of NVIDIA Model Optimizer made by hand."""
PINS = Path(__file__).parent
DONE = "installed.txt"
"""File of an environment with the digest of its pins; without it, the environment was left half-made."""
REMOVE = "!"


class EnvironmentFailed(RuntimeError):
    """An environment could not be made; the text is the end of what its installer said."""


def steps_of(pins: str) -> list[tuple[str, list[str]]]:
    """What is done to make an environment.

    Args:
        pins: Text of a file of pins.

    Returns:
        ``("install" | "uninstall", packages)`` in order.
    """
    found: list[tuple[str, list[str]]] = []
    for line in pins.splitlines():
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        verb = "uninstall" if text.startswith(REMOVE) else "install"
        if not found or found[-1][0] != verb:
            found.append((verb, []))
        found[-1][1].append(text.removeprefix(REMOVE))
    return found


def python_of(name: str, cache: Path) -> Path:
    """The Python of an environment, which is made where it is not there or its pins have changed.

    Args:
        name: Of the file of pins.
        cache: Directory of the environments.

    Raises:
        EnvironmentFailed: An installation came to nothing.
    """
    pins = (PINS / f"{name}.txt").read_text(encoding="utf-8")
    digest = hashlib.sha256(pins.encode()).hexdigest()
    home = (cache / name).absolute()
    python, done = home / "bin" / "python", home / DONE
    if done.is_file() and done.read_text(encoding="ascii").strip() == digest:
        return python
    print(f"{name}: making its environment in {home}", flush=True)
    done.unlink(missing_ok=True)
    _run([sys.executable, "-m", "venv", os.fspath(home)], name)
    for verb, packages in steps_of(pins):
        extra = ["-y"] if verb == "uninstall" else []
        _run([os.fspath(python), "-m", "pip", verb, "--quiet", *extra, *packages], name)
    done.write_text(digest + "\n", encoding="ascii")
    return python


def _run(command: list[str], name: str) -> None:
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        said = (ended.stderr or ended.stdout)[-800:]
        raise EnvironmentFailed(f"environment '{name}': `{' '.join(command[1:5])} …` failed\n{said}")
