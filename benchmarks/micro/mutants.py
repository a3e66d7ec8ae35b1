"""Which small defects the tests see: 100 seeded mutants of the library, each against neighbouring tests.

A mutant is one change of the syntax tree: a comparison, an operator, `and` for `or`, a number, a statement
that is left out, a return value. Points are drawn by a digest of the seed, the file and the text of the line,
as many of each kind, so that most stay the same when the library changes. Texts for readers are no points.

Neighbours are the tests whose imports lead to the module in the fewest steps, those in the mirrored folder
and those of its name first: at most `QUICK` files, and of the tests marked slow those of the first `SLOW`. A
mutant is caught where one of them fails, or a test takes longer than `SECONDS_A_TEST`. A test that caught one
is run on the library as it is: one that fails there too has caught nothing, and the others go on without it.
Mutants that are equivalent, and those of lines that only a GPU runs, are listed with the reason in
`equivalent_mutants.json`, by file, line and change, and do not count.

    python -m benchmarks.micro.mutants --minutes 5 --jobs 2

goes on where it stopped: the quick tests of every mutant, then the slow ones. The last writes the record.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from benchmarks.recording import write_record

ROOT = Path(__file__).parents[2]
LIBRARY, TESTS = ROOT / "loka_onnx", ROOT / "tests"
EQUIVALENT = Path(__file__).with_name("equivalent_mutants.json")
COUNT, SEED = 100, 17
QUICK, SLOW, FARTHER = 24, 5, 2
TIERS = (("not slow", QUICK), ("slow", SLOW))
"""Most files of each tier, and steps behind the nearest file at which others are no neighbours."""
FALSE_ALARMS = 6
"""As many tests that fail without a mutant too, and nothing is said of a mutant in this environment."""
SECONDS_A_TEST, SECONDS_A_TIER = 150, 240
COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}


@dataclass(frozen=True)
class Mutant:
    """One change.

    Attributes:
        path: The file, from the root.
        line: Of the change, from 1.
        kind: Kind of change.
        source: Text of the line.
        old: What is replaced.
        new: By what.
        start: Offset in bytes.
        end: Offset behind it.
    """

    path: str
    line: int
    kind: str
    source: str
    old: str
    new: str
    start: int
    end: int
    nth: int = 1

    @property
    def name(self) -> str:
        """What tells it from others, whatever stands above it in its file; the `nth` of one text."""
        again = f" #{self.nth}" if self.nth > 1 else ""
        return " | ".join((self.path, self.source, f"{self.old} -> {self.new}{again}"))

    def apply(self, text: bytes) -> bytes:
        """The file with the change."""
        assert text[self.start : self.end] == self.old.encode()
        return text[: self.start] + self.new.encode() + text[self.end :]


def mutants_of(path: Path) -> Iterator[Mutant]:
    """Every mutant of a file."""
    text = path.read_bytes()
    lines = text.splitlines(keepends=True)
    offsets = [0]
    for line in lines:
        offsets.append(offsets[-1] + len(line))

    seen: Counter[str] = Counter()
    points = _points(ast.parse(text))
    for node, kind, new in sorted(points, key=lambda point: (point[0].lineno, point[0].col_offset)):
        start = offsets[node.lineno - 1] + node.col_offset
        end = offsets[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        old = text[start:end].decode()
        told = " ".join(lines[node.lineno - 1].decode().split())
        mutant = Mutant(
            path.relative_to(ROOT).as_posix(), node.lineno, kind, told, old, ast.unparse(new), start, end
        )
        seen[mutant.name] += 1
        yield replace(mutant, nth=seen[mutant.name])


def _points(tree: ast.Module) -> Iterator[tuple[Any, str, ast.AST]]:
    pending: list[tuple[ast.AST, ast.expr | None]] = [(tree, None)]
    while pending:
        node, returns = pending.pop()
        if isinstance(node, ast.FunctionDef):
            returns = node.returns
            children: list[ast.AST] = [*node.args.defaults, *node.body]
        elif isinstance(node, ast.AnnAssign):
            children = [node.value] if node.value else []
        elif _is_silent(node):
            children = []
        else:
            children = list(ast.iter_child_nodes(node))
        pending += [(child, returns) for child in children]
        yield from ((node, kind, new) for kind, new in _changes(node, returns))


def _is_silent(node: ast.AST) -> bool:
    """Texts: of errors, of the log, and those that are put together for readers."""
    if isinstance(node, ast.Raise | ast.JoinedStr | ast.arguments):
        return True
    if isinstance(node, ast.keyword) and node.arg in {"remedy", "evidence", "where"}:
        return True
    return isinstance(node, ast.Call) and ast.unparse(node.func).startswith("_LOG.")


def _changes(node: ast.AST, returns: ast.expr | None) -> Iterator[tuple[str, ast.AST]]:
    match node:
        case ast.Compare(left, [op], [right]) if type(op) in COMPARISONS:
            yield "comparison", ast.Compare(left, [COMPARISONS[type(op)]()], [right])
        case ast.BinOp(left, op, right) if type(op) in ARITHMETIC and not _is_text(node):
            yield "arithmetic", ast.BinOp(left, ARITHMETIC[type(op)](), right)
        case ast.BoolOp(op, values):
            yield "boolean", ast.BoolOp(ast.And() if isinstance(op, ast.Or) else ast.Or(), values)
        case ast.UnaryOp(ast.Not(), operand):
            yield "boolean", operand
        case ast.Constant(bool(value)):
            yield "constant", ast.Constant(not value)
        case ast.Constant(int(value)):
            yield "constant", ast.Constant(value + 1)
        case ast.Constant(float(value)):
            yield "constant", ast.Constant(2.0 * value or 1.0)
        case ast.Return(value) if value is not None and not _is_nothing(value):
            is_bool = returns is not None and ast.unparse(returns) == "bool"
            new = ast.UnaryOp(ast.Not(), value) if is_bool else ast.Constant(None)
            yield "return value", ast.Return(new)
        case ast.Expr(ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            if not _is_silent(getattr(node, "value", node)):
                yield "statement", ast.Pass()
        case ast.If(_, [ast.Raise() | ast.Return() | ast.Continue()], []):
            yield "statement", ast.Pass()


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(part, ast.JoinedStr) or (isinstance(part, ast.Constant) and isinstance(part.value, str))
        for part in ast.walk(node)
    )


def _is_nothing(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def drawn(count: int, seed: int) -> list[Mutant]:
    """As many of each kind, by a digest."""

    def rank(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.name}".encode()).hexdigest()

    kinds: dict[str, list[Mutant]] = {}
    for path in sorted(LIBRARY.rglob("*.py")):
        for mutant in mutants_of(path):
            kinds.setdefault(mutant.kind, []).append(mutant)
    columns = [sorted(kinds[kind], key=rank) for kind in sorted(kinds)]
    return [each for row in zip_longest(*columns) for each in row if each is not None][:count]


def _module(path: Path) -> str:
    name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return name.removesuffix(".__init__")


@cache
def _imports() -> dict[str, frozenset[str]]:
    """File of a test, helper of tests or module of the library → what it imports, likewise."""
    library = {_module(path): path for path in LIBRARY.rglob("*.py")}
    helpers = {path.stem: _module(path) for path in TESTS.rglob("*.py") if not path.name.startswith("test_")}
    found = {}
    for path in (*library.values(), *TESTS.rglob("*.py")):
        names: set[str] = set()
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                # A package is no neighbour for the sake of one of its modules.
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= (inside & library.keys()) or {node.module}
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                # Names of what runs in another process.
                names |= ({node.value} & library.keys()) | ({node.value.removesuffix(".py")} & helpers.keys())
        found[_module(path)] = frozenset(
            {helpers[name] for name in names if name in helpers} | (names & library.keys())
        )
    return found


def neighbours(path: str) -> list[Path]:
    """Files of tests, the nearest first."""
    imports, module = _imports(), _module(ROOT / path)
    importers: dict[str, set[str]] = {}
    for name, names in imports.items():
        for each in names:
            importers.setdefault(each, set()).add(name)
    steps, at = {module: 0}, [module]
    while at:
        now = at.pop(0)
        for name in importers.get(now, ()):
            if name not in steps:
                steps[name] = steps[now] + 1
                at.append(name)
    mirror = TESTS / "unit" / Path(path).parent.relative_to("loka_onnx")
    while not mirror.is_dir():
        mirror = mirror.parent
    words = set(re.split(r"_", Path(path).stem)) - {"the", "of"}
    ranked = []
    for test in TESTS.rglob("test_*.py"):
        # Tests on devices skip here.
        if "gpu" in test.parts or "browser" in test.parts or "release" in test.name:
            continue
        distance = steps.get(_module(test), 99)
        is_mirrored = test.is_relative_to(mirror) and mirror.name != "unit"
        named = len(words & set(test.stem.split("_")))
        if distance < 99 or is_mirrored:
            ranked.append((distance - 2 * named - is_mirrored, test.stat().st_size, test))
    ranked.sort()
    farthest = ranked[0][0] + FARTHER if ranked else 0
    return [test for distance, _, test in ranked[:QUICK] if distance <= farthest]


@dataclass
class Outcome:
    """What became of a mutant.

    Attributes:
        name: The mutant.
        kind: Its kind.
        line: Of the change.
        caught_by: The test; empty where none failed.
        seconds: Taken.
    """

    name: str
    kind: str
    line: int
    caught_by: str
    seconds: float


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Where this module is a plugin: a test that hangs fails."""

    def late(*_: object) -> None:
        pytest.fail(f"longer than {SECONDS_A_TEST} s", pytrace=False)

    signal.signal(signal.SIGALRM, late)
    signal.alarm(SECONDS_A_TEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)


def _pytest(tree: Path, *arguments: str) -> tuple[int, str]:
    """Exit code and output; the code is 0 where time ran out without a failure."""
    beside = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(tree), *([beside] if beside else [])])
    ours = {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:randomly"]
    command += ["-p", "benchmarks.micro.mutants", "-rfE", "--no-header", *arguments]
    with subprocess.Popen(
        command,
        cwd=tree,
        env={**os.environ, **ours},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            printed, _ = process.communicate(timeout=SECONDS_A_TIER)
            return process.returncode, printed
        except subprocess.TimeoutExpired:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            return 0, ""


def judged(mutant: Mutant, tier: int, tree: Path) -> Outcome | None:
    """Runs a tier of a mutant's neighbours in a copy of the tree; None where too many fail without it too."""
    began, file = time.monotonic(), tree / mutant.path
    whole, caught, false = file.read_bytes(), "", set[str]()
    marked, count = TIERS[tier]
    tests = [test.relative_to(ROOT).as_posix() for test in neighbours(mutant.path)][:count]
    try:
        for _ in range(FALSE_ALARMS):
            file.write_bytes(mutant.apply(whole))
            files = [test for test in tests if test not in false]
            left_out = [f"--deselect={name}" for name in sorted(false - set(tests))]
            code, printed = _pytest(tree, "-m", marked, *left_out, *files) if files else (0, "")
            if code in (0, 5):
                break
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", printed, re.M)
            file.write_bytes(whole)
            code, _ = _pytest(tree, failed[1]) if failed else _pytest(tree, "--collect-only", *files)
            if code in (0, 5):
                caught = failed[1] if failed else "at import"
                break
            print(f"fails without a mutant: {failed[1] if failed else files}", flush=True)
            false.add(failed[1] if failed else "")
        else:
            return None
    finally:
        file.write_bytes(whole)
    return Outcome(mutant.name, mutant.kind, mutant.line, caught, round(time.monotonic() - began, 1))


def outcomes_of(left: list[Mutant], jobs: int, until: float) -> Iterator[Outcome]:
    """Judges as many at a time, and begins none after a moment of the monotonic clock."""
    trees = SimpleQueue[Path]()
    _imports()  # Once, before the threads ask for it.

    def judge(mutant: Mutant, tier: int) -> Outcome | None:
        if time.monotonic() > until:
            return None
        tree = trees.get()
        try:
            return judged(mutant, tier, tree)
        finally:
            trees.put(tree)

    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(jobs) as pool:
        for index in range(jobs):
            trees.put(_copied(Path(place) / str(index)))
        for tier in range(len(TIERS)):
            waiting = {pool.submit(judge, mutant, tier): mutant for mutant in left}
            left = []
            for done in as_completed(waiting):
                outcome, mutant = done.result(), waiting[done]
                if outcome is None:
                    continue
                at = f"{mutant.path}:{mutant.line}: {mutant.old} -> {mutant.new}, {outcome.seconds} s"
                if not outcome.caught_by and tier + 1 < len(TIERS):
                    left.append(mutant)
                    print(f"not caught by quick tests: {at}", flush=True)
                    continue
                print(f"{outcome.caught_by or 'NOT CAUGHT'}: {at}", flush=True)
                yield outcome


def main() -> None:
    """Judge as many as the time allows; write the record with the last."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this time")
    parser.add_argument(
        "--state", type=Path, default=ROOT / "runs" / "mutants.jsonl", help="what is known so far"
    )
    parser.add_argument("--jobs", type=int, default=1, help="as many at a time")
    parser.add_argument("--again", action="store_true", help="judge those that nothing caught once more")
    parser.add_argument("--list", action="store_true", help="print the mutants and their tests, run nothing")
    options = parser.parse_args()
    chosen, until = drawn(COUNT, SEED), time.monotonic() + 60 * options.minutes
    if options.list:
        for mutant in chosen:
            print(f"{mutant.path}:{mutant.line}: {mutant.kind}: {mutant.old!r} -> {mutant.new!r}")
            print("    ", *(test.name for test in neighbours(mutant.path)))
        return
    options.state.parent.mkdir(parents=True, exist_ok=True)
    known = {}
    if options.state.is_file():
        outcomes = [Outcome(**json.loads(line)) for line in options.state.read_text().splitlines()]
        known = {outcome.name: outcome for outcome in outcomes}
    reasons = {entry["mutant"]: entry["reason"] for entry in json.loads(EQUIVALENT.read_text())}
    if options.again:
        known = {name: outcome for name, outcome in known.items() if outcome.caught_by}
    asked = [m for m in chosen if m.name not in reasons]
    for outcome in outcomes_of([m for m in asked if m.name not in known], options.jobs, until):
        known[outcome.name] = outcome
        with options.state.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
    unknown = [mutant for mutant in asked if mutant.name not in known]
    if unknown:
        print(f"{len(unknown)} are left: run it again")
        return
    _record([known[m.name] for m in asked], chosen, reasons)


def _copied(tree: Path) -> Path:
    """What git has of this tree."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    for name in filter(None, listed):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, tree / name)
    return tree


def _record(found: list[Outcome], chosen: list[Mutant], reasons: dict[str, str]) -> None:
    caught = [each for each in found if each.caught_by]
    kinds, of_kind = Counter(each.kind for each in caught), Counter(each.kind for each in found)
    figures = {
        "mutants": len(chosen),
        "equivalent, or of lines that only a GPU runs": len(chosen) - len(found),
        "caught": len(caught),
        "score": len(caught) / len(found),
        "by kind": {kind: {"mutants": of_kind[kind], "caught": kinds[kind]} for kind in sorted(of_kind)},
        "not caught": sorted(each.name for each in found if each not in caught),
        "not counted": {m.name: reasons[m.name] for m in chosen if m.name in reasons},
    }
    settings = {
        "seed": SEED,
        "files_of_quick_tests": QUICK,
        "files_of_slow_tests": SLOW,
        "seconds_a_test": SECONDS_A_TEST,
    }
    print(f"{len(caught)} of {len(found)}: {write_record('mutants', figures, settings)}")


if __name__ == "__main__":
    main()
