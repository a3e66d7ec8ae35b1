"""What differs between two bundles: nothing of one against itself, all that was changed, both ways."""

from __future__ import annotations

import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sample_run import SampleRun

from loka_onnx.bundle.format.archive import pack_bundle
from loka_onnx.bundle.format.files import verify_bundle
from loka_onnx.bundle.signing import sign_bundle, write_key_pair
from loka_onnx.bundle.writer import write_bundle
from loka_onnx.core import serde
from loka_onnx.core.formats import Precision
from loka_onnx.core.manifest import EngineEntry
from loka_onnx.core.plan import PlanSet
from loka_onnx.operations.compare.bundles import BundleFacts, diff_bundles, difference_of
from loka_onnx.operations.compare.bundles import leaves as differences
from loka_onnx.operations.compare.difference import Difference, Row, screen_lines
from loka_onnx.operations.compare.difference import lines as lines_of


@pytest.fixture(scope="module")
def bundle(sample: SampleRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With accuracy and latency recorded; do not write into it."""
    known = {e.engine: e for e in sample.report.evaluations.evaluations if e.split == "selection"}
    engines = (
        replace(engine, evaluation=known.get(engine.artifact.id)) for engine in sample.contents.engines
    )
    contents = replace(sample.contents, engines=tuple(engines))
    return write_bundle(contents, tmp_path_factory.mktemp("bundle") / "bundle")


@pytest.fixture
def copy(bundle: Path, tmp_path: Path) -> Path:
    return shutil.copytree(bundle, tmp_path / "copy")


@pytest.fixture(scope="module")
def facts(bundle: Path) -> BundleFacts:
    manifest = verify_bundle(bundle)
    return BundleFacts(manifest, serde.read(PlanSet, bundle / manifest.plans))


def with_manifest(facts: BundleFacts, **changes: Any) -> BundleFacts:
    return replace(facts, manifest=replace(facts.manifest, **changes))


def with_decision(facts: BundleFacts, plan_id: str, index: int, **changes: Any) -> BundleFacts:
    plan = facts.plans.plan(plan_id)
    decisions = tuple(replace(d, **changes) if i == index else d for i, d in enumerate(plan.decisions))
    plans = tuple(replace(p, decisions=decisions) if p is plan else p for p in facts.plans.plans)
    return replace(facts, plans=replace(facts.plans, plans=plans))


def described(difference: Difference) -> str:
    return "".join(f"{line.plain}\n" for line in lines_of(difference))


def sides(change: Row) -> tuple[str | None, str | None]:
    return change.before and change.before.text, change.after and change.after.text


def test_a_bundle_and_a_copy_of_it_are_equal(bundle: Path, copy: Path, tmp_path: Path) -> None:
    packed = pack_bundle(bundle, tmp_path / "bundle.loka")
    for other in (bundle, copy, packed):
        difference = diff_bundles(bundle, other)
        assert not difference.is_different
        assert described(difference).endswith("\nthe bundles are equal\n")


@pytest.mark.parametrize("other", [None, {}, "gone", 3])
@pytest.mark.parametrize("swapped", [False, True])
def test_a_list_and_what_is_none_are_one_change(other: Any, swapped: bool) -> None:
    """Nothing is compared element by element that one side has no elements of."""
    pair = [[{"name": "a", "size": 1}], other]
    one, two = reversed(pair) if swapped else pair
    (change,) = differences(one, two, ("files",))
    assert change.what == "files" and None not in sides(change)


def test_a_signature_is_a_difference_and_names_its_key(bundle: Path, copy: Path, tmp_path: Path) -> None:
    keys = write_key_pair(tmp_path)
    sign_bundle(copy, keys.private)
    (section,) = diff_bundles(bundle, copy).sections
    assert section.name == "signature"
    assert [sides(row) for row in section.rows] == [("[]", f"[{keys.fingerprint}]")]


def test_engines_and_files_that_one_side_lacks(bundle: Path, sample: SampleRun, tmp_path: Path) -> None:
    fewer = replace(sample.contents, engines=sample.contents.engines[:2])
    difference = diff_bundles(bundle, write_bundle(fewer, tmp_path / "fewer"))
    found = {s.name: {row.what: sides(row) for row in s.rows} for s in difference.sections}
    gone = "cpu-onnxruntime-cpu-fp8-safe"
    assert [name for name, (_, after) in found["engines"].items() if after is None] == [gone]
    assert found["files"][f"engines/{gone}/engine.onnx"][1] is None
    assert None not in found["files"]["sample.npz / content"]
    # Accuracy and latency were recorded in the one only.
    before, after = found["accuracy"][f"{gone} / ctr"]
    assert before.startswith("ΔNE ") and after is None
    assert "cpu-onnxruntime-cpu-fp32 / batch 1024" in found["latency"]


def test_sites_say_precision_recipe_and_the_largest_scale_ratio(facts: BundleFacts) -> None:
    scale = facts.plans.plan("fp8-safe").decisions[0].activation_scale
    other = with_decision(facts, "fp8-safe", 0, activation_scale=scale * 1.5, weight_scale=(0.5 / 448 / 4,))
    other = with_decision(other, "fp8-safe", 1, precision=Precision.BF16)
    difference = difference_of(facts, other)
    (pair,) = difference.rows("sites-by-plan")
    assert pair.what == "fp8-safe" and pair.note == "at over_arch.fc0, weight channel 0"
    assert pair.verdict.numbers == pytest.approx((3, 1, 0, 1, 0.25))
    assert pair.verdict.text == (
        "of 3 sites 1 in another precision, 0 by another recipe, 1 with other scales; largest scale ratio "
        "×0.25"
    )
    first, second = difference.rows("sites")
    scales = f"activation scale {scale}; 1 weight scales to {0.5 / 448}, 1 differ"
    assert first.what == "fp8-safe / over_arch.fc0" and scales in first.before.text
    assert sides(second) == ("fp32, unsafe", "bf16, unsafe")
    (back,) = difference_of(other, facts).rows("sites-by-plan")
    assert back.verdict.numbers[-1] == pytest.approx(4.0)


def test_recorded_accuracy_and_latency_are_one_line_for_each(facts: BundleFacts) -> None:
    entry = next(e for e in facts.manifest.engines if e.evaluation and e.evaluation.latencies)
    (output,), (first, *others) = entry.evaluation.outputs, entry.evaluation.latencies
    worse = replace(output.difference, delta_ne=output.difference.delta_ne.scaled(2.0))
    changed = with_evaluation(
        facts,
        entry,
        latencies=(replace(first, p50_us=150.0, p90_us=160.0), *others),
        outputs=(replace(output, difference=worse, budget_status="beyond"),),
    )
    difference = difference_of(facts, changed)
    (accuracy,), (latency,) = difference.rows("accuracy"), difference.rows("latency")
    assert accuracy.what == f"{entry.id} / ctr" and accuracy.after.text.endswith(", beyond")
    times = ("p50 123.4 µs, p99 171.9 µs on cpu", "p50 150.0 µs, p99 171.9 µs on cpu")
    assert (latency.what, sides(latency)) == (f"{entry.id} / batch 1024", times)
    # What is not shown still counts.
    hidden = with_evaluation(facts, entry, latencies=(replace(first, p90_us=131.0), *others))
    (section,) = difference_of(facts, hidden).sections
    assert [sides(row) for row in section.rows] == [(f"{times[0]}; 1 figures behind it differ",) * 2]


def with_evaluation(facts: BundleFacts, entry: EngineEntry, **changes: Any) -> BundleFacts:
    """Other records of an engine."""
    moved = replace(entry, evaluation=replace(entry.evaluation, **changes))
    return with_manifest(facts, engines=tuple(moved if e is entry else e for e in facts.manifest.engines))


# Every field ---------------------------------------------------------------------------------------

SKIPPED = {"seal", "lineage_digest"}
"""They follow from the rest (`difference.DERIVED`)."""


def slots(value: Any) -> list[tuple[Any, Any]]:
    """Container and key of each scalar of dicts and lists."""
    found = []
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        found += slots(item) if isinstance(item, (dict, list)) else [(value, key)]
    return found


def other_value(value: Any) -> Any:
    """Another value of the same type that the documents take."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value + 1
    return f"{value or ''}x"


def change_any(facts: BundleFacts, seed: int) -> BundleFacts:
    """One scalar of the manifest or of the plans changed, if its type takes another value."""
    plain = {part: serde.to_plain(getattr(facts, part)) for part in ("manifest", "plans")}
    choices = [(part, *slot) for part in ("manifest", "plans", "plans") for slot in slots(plain[part])]
    pick = [choice for choice in choices if choice[2] not in SKIPPED]
    part, container, key = random.Random(seed).choice(pick)
    container[key] = other_value(container[key])
    try:
        found = serde._adapter(type(getattr(facts, part))).validate_python(plain[part], strict=False)
    except ValueError:
        return facts
    return replace(facts, **{part: found})


@given(st.lists(st.integers(0, 2**32), min_size=0, max_size=6))
def test_any_changes_show_and_the_other_way_round_they_are_mirrored(
    facts: BundleFacts, seeds: list[int]
) -> None:
    other = facts
    for seed in seeds:
        other = change_any(other, seed)
    there, back = difference_of(facts, other), difference_of(other, facts)
    assert there.is_different == ((facts.manifest, facts.plans) != (other.manifest, other.plans))
    assert not difference_of(other, other).is_different
    assert difference_of(facts, other) == there
    assert serde.loads(Difference, serde.dumps(there)) == there
    for ours, theirs in zip(there.sections, back.sections, strict=True):
        assert ours.name == theirs.name
        if ours.name != "sites-by-plan":
            assert [(change.what, *sides(change)) for change in ours.rows] == [
                (change.what, *reversed(sides(change))) for change in theirs.rows
            ]
            continue
        for one, two in zip(ours.rows, theirs.rows, strict=True):
            assert one.verdict is not None and two.verdict is not None and one.note == two.note
            assert one.verdict.numbers[:4] == two.verdict.numbers[:4]
            ratios = [1 / ratio for ratio in two.verdict.numbers[4:]]
            assert list(one.verdict.numbers[4:]) == pytest.approx(ratios)


# Text ----------------------------------------------------------------------------------------------


def test_a_screen_holds_every_section(facts: BundleFacts) -> None:
    versions = {f"library-{index:03}": str(index) for index in range(200)}
    other = with_manifest(facts, versions=versions, model_digest="f" * 64, created_by="loka-onnx 9")
    other = with_decision(other, "fp8-safe", 1, precision=Precision.BF16, reason="because " * 60)
    difference = difference_of(facts, other)
    lines = [line.plain for line in screen_lines(difference)]
    assert all(section.title in lines for section in difference.sections)
    assert "versions: 200 only in B, 2 only in A, 1 changed" in lines
    whole = described(difference)
    assert "because because" in whole
    assert all(f"+ {name}: {value}\n" in whole for name, value in versions.items())
