"""A resumed run: what made which stage stale, further calibration rows, another FP8 format."""

import re
import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx_text import parsed
from synthetic_runs import RUN_VALUES, Workplace, make_columns, make_workplace, write_rows

from loka_onnx.config import load_run_file
from loka_onnx.core import serde
from loka_onnx.core.engine import BuildStatus, EngineSet
from loka_onnx.core.plan import PlanSet
from loka_onnx.core.profile import Profile
from loka_onnx.pipeline.directory import MOST_READ, changes, readable
from loka_onnx.pipeline.run import RunOptions, Stage, run
from loka_onnx.planning.costs import LABELLED_ALLOWANCE
from loka_onnx.transforms.linears.outer_to_mul import OuterToMul
from loka_onnx.transforms.sequence import DEFAULT_MODS


def profile_at(place: Workplace, name: str = "calibration/exported.json") -> Profile:
    return serde.read(Profile, place.output / name)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    """Without splitting, up to its plans. Do not write into its directory."""
    place = make_workplace(tmp_path_factory.mktemp("planned"))
    place.write_run_file(mods={"split_channels": False})
    run(place.run_file, RunOptions(until=Stage.PLAN))
    return place


@pytest.fixture
def place(planned: Workplace, tmp_path: Path) -> Workplace:
    """A copy of it."""
    return Workplace(Path(shutil.copytree(planned.path, tmp_path / "work")))


@pytest.fixture
def fresh(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path / "fresh")


@pytest.mark.slow
def test_sampling_stops_when_every_verdict_is_reached_and_says_so(fresh, command):
    place = fresh
    write_rows(place.path / "rows.parquet", make_columns(30_000))
    place.write_run_file(data={"group": None})  # rows of a request say less than as many rows
    done = command("calibrate", place.run_file)
    assert done.code == 0, done.err
    stopped = profile_at(place)
    assert stopped.sampling.may_stop_early and stopped.sampling.undecided == ()
    assert 4096 <= stopped.sampling.rows < stopped.error_rows < stopped.rows
    assert "Sensitivities stopped where the verdict of every site was reached" in done.out
    assert f"sensitivities: {stopped.sampling.rows:,} rows" in done.out

    # fc1 and fc2 are as large as one another. A budget of which half is what the costlier of them costs: the
    # rows end with its verdict open.
    ctr = [stopped.site(name).sensitivities[0] for name in ("fc1", "fc2")]
    costs = [item.kl_moments.value * item.draws.kl_growth for item in ctr if item.draws is not None]
    budget = 2 * max(costs) / (1 - LABELLED_ALLOWANCE)
    done = command("calibrate", place.run_file, "--set", f"outputs.0.budget={budget}")
    assert done.code == 0, done.err
    ended = profile_at(place)
    assert ended.sampling.rows == ended.error_rows and ended.sampling.looks > 1
    (still_open,) = ended.sampling.undecided
    assert f"after {ended.error_rows:,}: {still_open}. More rows may decide them" in done.out

    done = command("calibrate", place.run_file, "--set", "calibration.stop_when_decided=false")
    fixed = profile_at(place)
    assert (fixed.sampling.looks, fixed.sampling.may_stop_early) == (1, False)
    assert fixed.sampling.rows == fixed.error_rows


@pytest.mark.slow
def test_where_batches_run_does_not_matter_to_a_finished_calibration(planned, command):
    done = command("calibrate", planned.run_file, "--executor", "ray")
    assert done.code == 0, done.err
    assert any("calibrate" in line and "reused" in line for line in done.err.splitlines())


@pytest.mark.slow
def test_another_confidence_plans_anew(place, command):
    done = command("plan", place.run_file, "--set", "calibration.confidence=0.99")
    assert done.code == 0, done.err
    (safe,) = (p for p in serde.read(PlanSet, place.output / "plan.json").plans if p.id == "fp8-safe")
    levels = [re.search(r"at ([0-9.]+) %, corrected for 2 bounds", d.reason) for d in safe.decisions]
    assert all(level is not None and float(level[1]) >= 99.0 for level in levels)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["E4M3FNUZ", pytest.param("E5M2", marks=pytest.mark.slow)])
def test_a_plan_in_another_format_is_built_and_run(fresh, format):
    place = fresh
    place.write_run_file(plan={"format": format, "scale": "best"})
    run(place.run_file, RunOptions(until=Stage.BUILD))
    plan = serde.read(PlanSet, place.output / "plan.json").plans[1]
    recipes = [decision.recipe for decision in plan.decisions]
    assert plan.id == "fp8-all" and {r.format.id for r in recipes if r} == {format.lower()}
    engines = serde.read(EngineSet, place.output / "engines.json").engines
    assert {engine.plan: engine.status for engine in engines}["fp8-all"] is BuildStatus.READY, engines
    assert Path(place.output / "planned").is_dir()


# More rows --------------------------------------------------------------------------------------------


def new_rows(place: Workplace, name: str = "new.parquet", seed: int = 2) -> Path:
    write_rows(place.path / name, make_columns(2000, seed))
    return place.path / name


@pytest.mark.slow
def test_rows_are_added_to_the_profile_and_later_stages_follow(place, command):
    before, lineage = profile_at(place), (place.output / "run.json").read_text()
    done = command("calibrate", place.run_file, "--update", new_rows(place))
    assert done.code == 0, done.err
    assert "Calibration rows were added to those of the split: digest " in done.out
    after = profile_at(place)
    assert after.rows == before.rows + 2000
    old, new = after.data_digest.split("+")
    assert old == before.data_digest != new
    assert after.scales == before.scales
    for entry in before.sites:
        known = after.site(entry.site)
        for mine, theirs in zip(entry.sensitivities, known.sensitivities, strict=True):
            assert theirs.kl_moments.rows == mine.kl_moments.rows + 2000
            assert theirs.kl_moments.a.value > mine.kl_moments.a.value
        assert {t: s.count for t, s in known.operands.items() if t not in after.weights} == {
            t: s.count * after.rows // before.rows
            for t, s in entry.operands.items()
            if t not in after.weights
        }
    assert (place.output / "run.json").read_text() != lineage

    # The calibration stands, what follows is done again.
    done = command("plan", place.run_file)
    assert done.code == 0, done.err
    stages = [line for line in done.err.splitlines() if line.startswith("✓ ")]
    fresh = [line for line in stages if "reused" not in line and "check data" not in line]
    assert [line.split()[1] for line in fresh] == ["mods", "recalibrate", "ladder", "plan"]
    assert profile_at(place) == after
    assert profile_at(place, "profile.json").data_digest == after.data_digest

    # What must not be added is refused, and the profile stays.
    new, kept = place.path / "new.parquet", (place.output / "calibration/exported.json").read_bytes()
    write_rows(place.path / "unlabelled.parquet", {"clicked": [0.0]})
    broken = make_columns(100, 4)
    broken["clicked"][7] = 7.0
    write_rows(place.path / "broken.parquet", broken)
    for arguments, message in (
        (["--update", new], "the rows of 'new.parquet' are in the profile already"),
        (["--update", place.path / "rows.parquet"], "calibration and selection share rows of the same file"),
        (["--update", place.path / "absent.parquet"], "the data file does not exist"),
        (
            ["--update", place.path / "unlabelled.parquet"],
            "column 'bought' of 'unlabelled.parquet' does not exist",
        ),
        (["--update", place.path / "broken.parquet"], "'broken.parquet'"),
    ):
        done = command("calibrate", place.run_file, *arguments)
        assert done.code == 2 and message in done.err, (arguments, done.err)
        assert (place.output / "calibration/exported.json").read_bytes() == kept


def test_a_fresh_run_whose_added_rows_are_wrong_leaves_no_trace(fresh, command):
    done = command("calibrate", fresh.run_file, "--update", fresh.path / "absent.parquet")
    assert done.code == 2
    assert not fresh.output.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "changed", "stage"),
    [
        ("calibration.batch_size=256", "calibration.batch_size: 512 → 256", "calibrate"),
        ("outputs.0.budget=0.02", "outputs[0].budget: 0.01 → 0.02", "ladder"),
    ],
)
def test_the_terminal_names_the_key_for_which_a_stage_is_done_again(copied, command, setting, changed, stage):
    done = command("plan", copied.run_file, "--set", setting)
    assert done.code == 0, done.err
    ended = [line for line in done.err.splitlines() if line.startswith("✓ ") and "check data" not in line]
    again = next(line for line in ended if "reused" not in line)
    assert again.startswith(f"✓ {stage} ") and f"again: {changed}" in again


def test_inputs_are_told_by_their_parts():
    before = readable({"batch": {"serve": [1, 2], "max": 8}, "model": {"big": [0] * (MOST_READ + 1)}})
    now = readable({"batch": {"serve": [1, 3], "max": 8}, "model": {"big": [1] * (MOST_READ + 1)}})
    assert changes(before, now) == "batch.serve[1]: 2 → 3, model.big"
    assert changes(now, now) == ""
    assert changes({}, {"group": '"user"'}) == 'group: none → "user"'


@pytest.fixture
def outer(tmp_path: Path) -> Workplace:
    """A ranker with a linear of one input channel, which a mod makes elementwise."""
    place, random = make_workplace(tmp_path / "outer"), np.random.default_rng(0)
    weights = {name: random.standard_normal(shape) / 4 for name, shape in (("w", (16, 16)), ("o", (1, 16)))}
    weights |= {"h": random.standard_normal((16, 1)) / 4, "first": np.array([0]), "one": np.array([1])}
    model = parsed(
        """column = Gather<axis=1>(dense, first) [outer] a = MatMul(column, o) [fc] b = MatMul(dense, w)
        c = Add(a, b) r = Relu(c) [head] s = MatMul(r, h) ctr = Squeeze(s, one)""",
        weights,
        inputs="float[batch,16] dense",
        outputs="float[batch] ctr",
    )
    onnx.save(model, place.path / "ranker.onnx")
    outputs, data = RUN_VALUES["outputs"][:1], {"inputs": {"dense": RUN_VALUES["data"]["inputs"]["dense"]}}
    place.write_run_file(outputs=outputs, data=data)
    return place


def test_a_site_that_becomes_elementwise_is_not_calibrated(outer, monkeypatch):
    run(outer.run_file, RunOptions(until=Stage.TRANSFORM))
    calibrated, modified = profile_at(outer), profile_at(outer, "profile.json")
    assert [entry.site for entry in calibrated.sites] == ["fc", "head"]
    assert modified.sites == calibrated.sites
    # Where the mod is skipped, or leaves it as it is, the site is measured.
    skipping = {"mods.skip": ["outer-to-mul"], "output": str(outer.path / "skipped")}
    skipped = run(load_run_file(outer.run_file, skipping), RunOptions(until=Stage.TRANSFORM)).directory
    profile = serde.read(Profile, skipped / "calibration/exported.json")
    assert [entry.site for entry in profile.sites] == ["fc", "outer", "head"]
    assert profile.sites[::2] == calibrated.sites
    left = tuple(kind for kind in DEFAULT_MODS if kind is not OuterToMul)
    monkeypatch.setattr("loka_onnx.pipeline.mods.DEFAULT_MODS", left)
    kept = run(
        load_run_file(outer.run_file, {"output": str(outer.path / "kept")}), RunOptions(until=Stage.TRANSFORM)
    )
    assert serde.read(Profile, kept.directory / "profile.json").sites == profile.sites
