"""Writes inputs and hands them to the package, in children that are given 30 s for each."""

from __future__ import annotations

import argparse
import json
import os
import queue
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

SECONDS = 30.0
"""A longer one is a hang; a whole run of the fuzzer's little model takes 10."""
MEMORY_BYTES = 12 << 30
LONGEST_MESSAGE = 6500
KINDS = {"models": 500, "rows": 230, "run_files": 150, "documents": 110, "resumed": 6, "runs": 4}
"""Inputs of each kind among a thousand."""


def main() -> int:
    """Run as many inputs as are asked for; returns 1 where there was a fault."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=sys.modules["tests.fuzz"].__doc__
    )
    parser.add_argument("--inputs", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no input after as many")
    parser.add_argument("--patience", type=float, default=SECONDS, help="seconds after which an input hangs")
    parser.add_argument("--kinds", default=",".join(KINDS), help="only these")
    parser.add_argument("--only", type=int, help="this input alone, in this process, with its traceback")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    with tempfile.TemporaryDirectory(prefix="loka-fuzz-") as folder:
        if given.child is None:
            _prepare(Path(folder))
        home = given.child or Path(folder)
        if given.only is not None:
            print(_one(given.seed, given.only, kinds, home, is_shown=True))
            return 0
        if given.child is not None:
            return _child(given.seed, kinds, home)
        return _parent(given, home)


def _prepare(home: Path) -> None:
    """A finished run of a little model, with a job that was executed: what documents are altered of."""
    subprocess.run([sys.executable, "-m", "tests.fuzz.prepare", str(home / "prepared")], check=True)


# The child -----------------------------------------------------------------------------------------


def _child(seed: int, kinds: list[str], home: Path) -> int:
    """Takes numbers of inputs from standard input, and writes a line for each."""
    told = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _attempts()  # What is imported is no part of an input's time.
    print(file=told, flush=True)
    for line in sys.stdin:
        print(json.dumps(_one(seed, int(line), kinds, home)), file=told, flush=True)
    return 0


def _one(seed: int, number: int, kinds: list[str], home: Path, *, is_shown: bool = False) -> dict[str, str]:
    """Hand one input to the package."""
    random = Random(f"{seed}/{number}")
    kind = random.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    base = Path(tempfile.mkdtemp(prefix="input-", dir=home))
    place = base / "place"
    try:
        kept = _lay_out(base, home / "prepared")
        fault, detail = _called(_attempts()[kind], random, place, is_shown=is_shown)
        if not fault and _outside(base) != kept:
            fault, detail = f"{kind}: a file outside was touched", str(_outside(base))
        return {"kind": kind, "fault": fault, "detail": detail}
    finally:
        shutil.rmtree(base, ignore_errors=True)


def _attempts() -> dict[str, Callable[[Random, Path], Any]]:
    from tests.fuzz import documents, models, rows, run_files

    return {
        "models": models.attempt,
        "rows": rows.attempt,
        "run_files": run_files.attempt,
        "documents": documents.attempt,
        "resumed": documents.attempt_resume,
        "runs": run_files.attempt_run,
    }


def _called(
    attempt: Callable[[Random, Path], Any], random: Random, place: Path, *, is_shown: bool
) -> tuple[str, str]:
    from loka_onnx.errors import InternalError, LokaError

    try:
        note = attempt(random, place)
    except LokaError as error:
        if is_shown:
            traceback.print_exc()
        if isinstance(error, InternalError):
            return _cause(error), traceback.format_exc()[-2000:]
        text = str(error)
        return (f"long message of {_cause(error)}", text[:300]) if len(text) > LONGEST_MESSAGE else ("", "")
    except BaseException as error:
        if is_shown:
            traceback.print_exc()
        return _cause(error), traceback.format_exc()[-2000:]
    return "", f"note: {note}" if note else ""


def _cause(error: BaseException) -> str:
    """Type of an error, and the last place in the package that it came through."""
    frames = traceback.extract_tb(error.__traceback__)
    inside = [f for f in frames if "loka_onnx/" in f.filename] or frames
    return f"{type(error).__name__} at {inside[-1].filename.rpartition('loka_onnx/')[2]}:{inside[-1].name}"


def _lay_out(base: Path, prepared: Path) -> Any:
    place = base / "place"
    (base / "outside").mkdir()
    (base / "outside" / "kept").write_text("kept")
    place.mkdir()
    for name in ("ranker.onnx", "rows.parquet", "RUN.yaml"):
        shutil.copyfile(prepared / name, place / name)
    (place / "prepared").symlink_to(prepared / "runs" / "RUN")
    return _outside(base)


def _outside(base: Path) -> Any:
    """Everything beside the place of an input, with its content."""
    here = sorted(path.name for path in base.iterdir())
    return here, {
        path.name: path.read_bytes() for path in sorted((base / "outside").iterdir()) if path.is_file()
    }


# The parent ----------------------------------------------------------------------------------------


def _parent(given: argparse.Namespace, home: Path) -> int:
    began, counts, faults, notes = (
        time.monotonic(),
        Counter[str](),
        defaultdict[str, list[int]](list),
        defaultdict[str, list[int]](list),
    )
    details: dict[str, str] = {}
    for number, found in _results(given, home, began):
        counts[found["kind"]] += 1
        if found["fault"]:
            if found["fault"] not in faults:
                print(f"{number}: {found['fault']}", file=sys.stderr, flush=True)
            faults[found["fault"]].append(number)
            details.setdefault(found["fault"], found["detail"])
        elif found["detail"]:
            notes[found["detail"]].append(number)
        if (number + 1) % 250 == 0:
            passed = time.monotonic() - began
            print(f"{number + 1} inputs in {passed:.0f} s", file=sys.stderr, flush=True)
    seconds = time.monotonic() - began
    print(f"seed {given.seed}: {sum(counts.values())} inputs in {seconds:.0f} s: {dict(counts)}")
    for note, numbers in sorted(notes.items(), key=lambda item: -len(item[1]))[:20]:
        print(f"  {note}: {len(numbers)} inputs, as --only {', '.join(map(str, numbers[:4]))}")
    for fault, numbers in sorted(faults.items(), key=lambda item: -len(item[1])):
        shown = ", ".join(map(str, numbers[:4]))
        print(f"FAULT {fault}: {len(numbers)} inputs, as --only {shown}")
        print("    " + details[fault].strip()[-400:].replace("\n", "\n    "))
    hangs = sum(len(numbers) for fault, numbers in faults.items() if fault.startswith("hang"))
    outside = sum(len(numbers) for fault, numbers in faults.items() if "outside was touched" in fault)
    total = sum(map(len, faults.values()))
    print(
        f"{total - hangs - outside} tracebacks, {hangs} hangs, {outside} files outside; {len(faults)} causes"
    )
    return 1 if faults else 0


def _results(given: argparse.Namespace, home: Path, began: float) -> Iterator[tuple[int, dict[str, str]]]:
    child: _Child | None = None
    for number in range(given.inputs):
        if time.monotonic() - began > given.seconds:
            break
        child = child or _Child(given, home)
        found = child.ask(number)
        if found is None:
            child.end()
            kind = Random(f"{given.seed}/{number}").choices(
                given.kinds.split(","), [KINDS[kind] for kind in given.kinds.split(",")]
            )[0]
            what = f"hang of {kind}" if child.was_late else f"the process of {kind} died"
            found, child = {"kind": kind, "fault": what, "detail": f"exit code {child.code}"}, None
        yield number, found
    if child is not None:
        child.end()


class _Child:
    """A process that takes inputs until one of them is too much for it."""

    def __init__(self, given: argparse.Namespace, home: Path) -> None:
        arguments = ["--seed", str(given.seed), "--kinds", given.kinds, "--child", str(home)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "LOKA_ONNX_CACHE": str(home / "cache")}
        self._process = subprocess.Popen(
            [sys.executable, *sys.orig_argv[1 : sys.orig_argv.index("-m")], "-m", "tests.fuzz", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment,
        )  # fmt: skip
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self._patience, self._is_new, self.was_late = given.patience, True, False

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def ask(self, number: int) -> dict[str, str] | None:
        """What became of an input; None where the process did not come through it."""
        assert self._process.stdin is not None
        if self._is_new:
            self._lines.get(timeout=600)
        try:
            print(number, file=self._process.stdin, flush=True)
            line = self._lines.get(timeout=self._patience)
        except queue.Empty:
            self.was_late = True
            return None
        except BrokenPipeError:
            return None
        self._is_new = False
        return json.loads(line) if line else None

    def end(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()

    @property
    def code(self) -> int | None:
        """Its exit code; that of a signal is negative."""
        return self._process.poll()


if __name__ == "__main__":
    sys.exit(main())
