"""Every number of README and docs is recomputed from a record, or is of a kind that measures nothing."""

import ast
import json
import re
from pathlib import Path

import number_formulas
import public_numbers
import pytest
from public_numbers import ROOT, Mismatch, numbers_of, pages

SOURCES = [Path(public_numbers.__file__), Path(number_formulas.__file__)]
README = ROOT / "README.md"
UNITS = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30, "%": 0.01}


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_every_number_of_a_page_is_bound(page: Path) -> None:
    unbound = [f"{each.page}:{each.line}: {each.text}" for each in numbers_of(page) if not each.bound]
    assert not unbound, "bind these in tests/docs/numbers.yaml, to a record and a formula"


def test_no_formula_asks_the_package() -> None:
    """A number that the package computes a second time is held against itself."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.partition(".")[0] for name in names} & {"loka_onnx", "benchmarks", "docs_site"}


def copied(page: str, old: str, new: str, folder: Path) -> Path:
    """A page with a change, in a root of its own."""
    text = (ROOT / page).read_text(encoding="utf-8")
    assert text.count(old) == 1
    path = folder / page
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, new), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("page", "old", "new"),
    [
        ("README.md", "1.16 ×", "1.17 ×"),
        ("README.md", "over the 16 in", "over the 17 in"),
        ("docs/drift.md", "(435 and 939", "(435 and 940"),
    ],
)
def test_a_number_that_is_not_the_record_s_is_found(page: str, old: str, new: str, tmp_path: Path) -> None:
    path = copied(page, old, new, tmp_path)
    with pytest.raises(Mismatch, match="printed"):
        numbers_of(path, tmp_path)


@pytest.mark.parametrize(
    ("claim", "number"),
    [("It is 3.7 times as fast.", "3.7"), ("| a | 12 |", "12"), ("FP8 saves 41 %.", "41"), ("in 5 µs", "5")],
)
def test_a_new_number_is_bound_to_nothing(claim: str, number: str, tmp_path: Path) -> None:
    path = copied("README.md", "## Where to go next", f"{claim}\n\n## Where to go next", tmp_path)
    (found,) = [each for each in numbers_of(path, tmp_path) if not each.bound]
    assert found.text == number


def test_what_was_measured_once_says_so() -> None:
    """Its paragraph, or the one that leads to its table, has the words."""
    for page, known in public_numbers.BINDINGS.items():
        for snippet in known.get("stated", {}).get("measured once, without a record", ()):
            text = (ROOT / page).read_text(encoding="utf-8")
            match = re.search(public_numbers._spaced(snippet), text)
            assert match is not None
            around = text[max(0, match.start() - 900) : match.end() + 500]
            assert "measured once, without a record" in " ".join(around.split()), f"{page}: {snippet}"


def demo_rows(text: str) -> dict[str, str]:
    """Plan → all that the table says of it."""
    (block,) = re.findall(r"^```text\n(demo, .*?)^```$", text, re.S | re.M)
    rows: dict[str, str] = {}
    plan = ""
    for line in block.splitlines():
        name = re.match(r"(\S+)(?: \*)? +\S", line)
        if name and name[1].lower() == name[1] and name[1] not in ("demo,", "engine", "*"):
            plan = name[1]
            rows[plan] = line[len(plan) :]
        elif plan and line.startswith(" "):
            rows[plan] += line
    return rows


def test_the_demo_s_table_is_the_record_s() -> None:
    """`python -m benchmarks.pipeline.demo_table` writes both; each number is held against the raw ones."""
    record = json.loads((number_formulas.RECORDS / "demo_table.json").read_text(encoding="utf-8"))
    rows = demo_rows(README.read_text(encoding="utf-8"))
    assert rows.keys() == record["figures"].keys()
    for plan, row in rows.items():
        figures = dict(record["figures"][plan])
        figures |= {batch: us / 1000 for batch, us in figures.pop("p50_us").items()}
        known = [float(value) for value in figures.values() if value is not None]
        for match in re.finditer(rf"(?<![\w.])({public_numbers.PRINTED})( ?(?:%|[KMG]iB))?", row):
            unit = (match[2] or "").strip()
            # An interval has its unit at its estimate.
            scales = [UNITS[unit]] if unit else [1.0, UNITS["%"]]
            half = 0.5 * 10.0 ** -len(match[1].partition(".")[2]) * (1 + 1e-6)
            shown = float(match[1].replace("−", "-"))
            assert any(abs(shown - value / scale) <= half for value in known for scale in scales), (
                plan,
                match[0],
            )
