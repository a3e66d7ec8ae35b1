"""The chart of README and docs, and the table of backends, hold what the records hold."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.peers.loss_latency import BATCH, MODELS, PATH, chart, points_of
from benchmarks.results.records import load_records
from loka_onnx.core.backends import backend_names

ROOT = Path(__file__).parents[2]
RECORDS = ROOT / "benchmarks" / "records"
TITLE = re.compile(r"<title>(\w+), ([^,]+), (\S+): ([\d.]+) µs, ΔNE (\S+) % \[(\S+), (\S+)\]</title>")


def test_the_chart_is_the_one_of_the_record() -> None:
    record = load_records(RECORDS)["peers"]
    assert PATH.read_text(encoding="utf-8") == chart(record), "python -m benchmarks.peers.loss_latency"
    changed = replace(record, settings={**record.settings, "budget": 0.002})
    assert chart(changed) != chart(record)


def test_every_point_is_an_engine_that_was_timed_and_judged() -> None:
    models = json.loads((RECORDS / "peers.json").read_text(encoding="utf-8"))["figures"]["models"]
    shown = TITLE.findall(PATH.read_text(encoding="utf-8"))
    assert len(shown) == sum(len(list(points_of(models[model]))) for model in MODELS)
    for model, _, variant, us, *loss in shown:
        entry = models[model.lower()]["variants"][variant]
        timed = [
            e for e in entry["device"].values() if BATCH in e.get("microseconds", {}) and not e["simulated"]
        ]
        assert float(us) == pytest.approx(min(e["microseconds"][BATCH] for e in timed), abs=0.051)
        assert [float(each) for each in loss] == pytest.approx(
            entry["accuracy"]["delta_ne_percent"], abs=5.1e-5
        )


@pytest.mark.parametrize("image", ["architecture.svg", "latency-over-loss.svg"])
def test_pictures_bring_their_ground_and_a_title(image: str) -> None:
    """Dark pages show them as light ones do; nothing of them comes from another file."""
    text = (ROOT / "docs" / "assets" / image).read_text(encoding="utf-8")
    assert '<title id="t">' in text and 'fill="#fff"/>' in text
    assert not re.findall(r"(?:href|src)=|url\((?!#)", text)
    assert image in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_table_of_backends_says_what_records_know() -> None:
    page = (ROOT / "docs/how-to/backends.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| Backend \| Built .*?\n\n", page, re.S | re.M)
    rows = {match[1]: match[0] for match in re.finditer(r"^\| `(\w+)` .*$", table, re.M)}
    assert rows.keys() == set(backend_names())
    known = {path.name: path.read_text(encoding="utf-8") for path in RECORDS.glob("*.json")}
    for backend, row in rows.items():
        engine = re.compile(rf'-{backend}-(?:sm|cpu|gfx)|"{backend}"')
        named = [
            name for pattern in re.findall(r"`([\w*-]+\.json)`", row) for name in _matching(pattern, known)
        ]
        if backend == "inductor":  # `trained-*` names its engines otherwise
            named = [name for name in named if not name.startswith("trained-")]
        assert all(engine.search(known[name]) for name in named), backend
        if not named:
            built = re.compile(rf"-{backend}-(?:sm|cpu|gfx)")
            assert not any(built.search(text) for text in known.values()), backend


def _matching(pattern: str, names: dict[str, str]) -> list[str]:
    matched = [name for name in names if Path(name).match(pattern)]
    assert matched, pattern
    return matched
