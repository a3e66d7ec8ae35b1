"""Writes inputs and hands them to the package, in children that are given 30 s for each."""

import argparse
import multiprocessing
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
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
    given = parser.parse_args()
    kinds = given.kinds.split(",")
    with tempfile.TemporaryDirectory(prefix="loka-fuzz-") as folder:
        home = Path(folder)
        os.environ |= {"OMP_NUM_THREADS": "1", "LOKA_ONNX_CACHE": str(home / "cache")}
        # A finished run of a little model, with a job that was executed: what documents are altered of.
        subprocess.run([sys.executable, "-m", "tests.fuzz.prepare", str(home / "prepared")], check=True)
        if given.only is not None:
            print(_one(given.seed, given.only, kinds, home, is_shown=True))
            return 0
        return _parent(given, home)


# The child -----------------------------------------------------------------------------------------


def _child(numbers: Connection, seed: int, kinds: list[str], home: Path) -> None:
    """Take numbers of inputs, and send what became of each."""
    for descriptor in (1, 2):
        os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _attempts()  # What is imported is no part of an input's time.
    numbers.send({})
    while True:
        numbers.send(_one(seed, numbers.recv(), kinds, home))


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
    kinds, child = given.kinds.split(","), None
    for number in range(given.inputs):
        if time.monotonic() - began > given.seconds:
            break
        child = child or _Child(given.seed, kinds, home)
        found = child.ask(number, given.patience)
        if found is None:
            kind = Random(f"{given.seed}/{number}").choices(kinds, [KINDS[kind] for kind in kinds])[0]
            what = f"hang of {kind}" if child.process.is_alive() else f"the process of {kind} died"
            child.process.kill()
            child.process.join()
            found = {"kind": kind, "fault": what, "detail": f"exit code {child.process.exitcode}"}
            child = None
        yield number, found


class _Child:
    """A process that takes inputs until one of them is too much for it."""

    def __init__(self, seed: int, kinds: list[str], home: Path) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._numbers, theirs = spawned.Pipe()
        self.process = spawned.Process(target=_child, args=(theirs, seed, kinds, home), daemon=True)
        self.process.start()
        theirs.close()
        self._numbers.recv()

    def ask(self, number: int, patience: float) -> dict[str, str] | None:
        """What became of an input; None where the process did not come through it."""
        try:
            self._numbers.send(number)
            if self._numbers.poll(patience):
                return self._numbers.recv()
        except (EOFError, OSError):
            self.process.join()
        return None
