"""A host on which packages are missing: programs that run in a process of their own."""

from __future__ import annotations

import subprocess
import sys

_FINDER = """
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Absent())
"""


def python(code: str, *arguments: object, without: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """Runs a program that can import none of the packages `without`."""
    line = [sys.executable, "-c", _FINDER.format(names=without) + code, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)
