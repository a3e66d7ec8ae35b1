"""Whole runs of two checkouts on the same inputs, document by document: a redesign must change nothing.

    python -m benchmarks.pipeline.golden run --tree CHECKOUT --output DIRECTORY RUN.yaml [RUN.yaml …]
    python -m benchmarks.pipeline.golden compare DIRECTORY DIRECTORY

`run` keeps every document of each run, without what differs between two runs of one checkout: times, dates,
paths, versions and digests of files that hold them. `compare` prints what differs and exits with 1 if
anything does.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx

VOLATILE = frozenset({"bytes", "created", "digest", "host", "key", "lineage", "lineage_digest", "packages"})
VOLATILE |= {"parents", "python", "seal", "sha256", "versions"}
"""Keys whose values differ between two runs of one checkout, beside times (digests: of files with times)."""


def run(tree: Path, run_file: Path, output: Path) -> None:
    """Run a checkout on a run file and keep its documents.

    Raises:
        SystemExit: The run failed.
    """
    # The same path for every run, because documents hold it.
    scratch = Path(tempfile.gettempdir()) / "loka-onnx-golden"
    command = [sys.executable, "-P", "-c", "from loka_onnx.cli.main import main; main()"]
    command += ["--log", "json", "run", str(run_file), "--force", "--output", str(scratch)]
    environment = os.environ | {"LOKA_ONNX_CACHE": str(output / ".cache"), "PYTHONPATH": str(tree)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        sys.exit(f"{run_file}: exit {done.returncode}\n{done.stderr[-4000:]}")
    for path in sorted(scratch.rglob("*")):
        kept = output / path.relative_to(scratch)
        if path.suffix == ".json":
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(stripped(json.loads(path.read_text())), indent=1, sort_keys=True))
        elif path.suffix == ".onnx":
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.with_suffix(".onnx.json").write_text(json.dumps(graph_of(path)))
    shutil.rmtree(scratch)
    shutil.rmtree(output / ".cache", ignore_errors=True)


def stripped(value: Any) -> Any:
    """A document without volatile keys."""
    if isinstance(value, dict):
        return {key: _kept(key, one) for key, one in value.items() if not _is_volatile(key)}
    return [stripped(one) for one in value] if isinstance(value, list) else value


def _is_volatile(key: str) -> bool:
    return key in VOLATILE or "seconds" in key or "latenc" in key


def _kept(key: str, value: Any) -> Any:
    """Of files by digest, the names alone."""
    return sorted(value) if key == "files" and isinstance(value, dict) else stripped(value)


def graph_of(path: Path) -> dict[str, str]:
    """Digest of a model's graph with its weights, wherever they are stored."""
    model = onnx.load(path)
    onnx.external_data_helper.convert_model_from_external_data(model)
    return {"graph": hashlib.sha256(model.SerializeToString(deterministic=True)).hexdigest()}


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Places at which two documents differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other}):
            if key not in one or key not in other:
                yield f"{where}.{key}: only in the {'second' if key not in one else 'first'}"
            else:
                yield from differences(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for place, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}[{place}]")
    elif one != other:
        yield f"{where}: {str(one)[:80]} → {str(other)[:80]}"


def compare(first: Path, second: Path) -> int:
    """Print what differs between two directories of documents.

    Returns:
        Number of differences.
    """
    count = 0
    names = {path.relative_to(home) for home in (first, second) for path in home.rglob("*.json")}
    for name in sorted(names):
        if not (first / name).exists() or not (second / name).exists():
            print(f"{name}: only in {second if not (first / name).exists() else first}")
            count += 1
            continue
        documents = (json.loads((home / name).read_text()) for home in (first, second))
        found = list(differences(*documents))
        for line in found[:8]:
            print(f"{name}{line}")
        if len(found) > 8:
            print(f"{name}: {len(found) - 8} more")
        count += len(found)
    print(f"{len(names)} documents, {count} differences")
    return count


def main() -> None:
    """Run or compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run")
    running.add_argument("--tree", type=Path, required=True)
    running.add_argument("--output", type=Path, required=True)
    running.add_argument("run_files", type=Path, nargs="+")
    comparing = commands.add_parser("compare")
    comparing.add_argument("directories", type=Path, nargs=2)
    options = parser.parse_args()
    if options.command == "compare":
        sys.exit(1 if compare(*options.directories) else 0)
    for run_file in options.run_files:
        run(options.tree.resolve(), run_file.resolve(), options.output / run_file.parent.name)


if __name__ == "__main__":
    main()
