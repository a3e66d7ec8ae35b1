"""Sensitivities against the loss itself, computed row by row from the outputs in extended precision."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from small_models import BODY, LOGIT, SHARED, artifact_of, columns_of, dataset_of

from loka_onnx.calibration.effects.loss_totals import buckets_of
from loka_onnx.calibration.effects.sensitivity import (
    Sensitivities,
    SensitivityPass,
    StoppingSchedule,
    SwitchedModel,
)
from loka_onnx.calibration.effects.switchable import Switch, units_of, write_switchable
from loka_onnx.calibration.observers.arithmetic import draw_factors
from loka_onnx.calibration.passes.executors import LocalExecutor
from loka_onnx.calibration.passes.probe import PassOptions
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.progress import silent
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR, Recipe
from loka_onnx.errors import CalibrationError
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.intervals import ratio_interval

ROWS = 1500


@dataclass
class World:
    """A model, rows, and a way to measure the one on the other."""

    folder: Path
    subject: SwitchedModel
    columns: dict[str, np.ndarray]

    @classmethod
    def of(cls, folder: Path, rows: int = ROWS, columns: dict[str, np.ndarray] | None = None) -> "World":
        artifact = artifact_of(folder)
        scales = {PER_TENSOR.activation_id: {o.tensor: 0.03125 for s in artifact.sites for o in s.operands}}
        switches = tuple(
            Switch(site, PER_CHANNEL_WEIGHT if site.name == "left" else PER_TENSOR) for site in artifact.sites
        )
        columns = columns_of(rows) if columns is None else columns
        return cls(folder, SwitchedModel(artifact.path, switches, scales, (LOGIT,)), columns)

    def measure(self, spec=LOGIT, open_sites=None, threads=2, progress=silent, **options):
        found = SensitivityPass(
            replace(self.subject, outputs=(spec,)),
            dataset_of(self.folder / "data", self.columns),
            PassOptions(**{"draws": 1, "batch_size": 512, **options}),
            LocalExecutor(threads),
            progress,
        )
        return found.measure(self.folder, found.draws(self.folder), open_sites)

    def scores(self, on: tuple[str, ...] = (), factor: float = 1.0) -> np.ndarray:
        """Logits in extended precision, by batches of the same size: the last bit depends on it."""
        path, subject = self.folder / f"reference-{factor}.onnx", self.subject
        graph = GraphModel.load(subject.model)
        model = write_switchable(graph, subject.switches, subject.scales, path, factor).open()
        x = self.columns["x"]
        parts = [model.run({"x": x[i : i + 512]}, on)["y"].reshape(-1) for i in range(0, len(x), 512)]
        return np.concatenate(parts).astype(np.longdouble)


def sigmoid(z: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-z))


def cross_entropy(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    p = sigmoid(z)
    return -(y * np.log(p) + (1 - y) * np.log1p(-p))


def divergence(z: np.ndarray, changed: np.ndarray) -> np.ndarray:
    p, q = sigmoid(z), sigmoid(changed)
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


@pytest.fixture
def world(tmp_path):
    return World.of(tmp_path)


@pytest.mark.parametrize("weighted", [False, True])
def test_logit_terms_are_the_change_of_the_loss(weighted, world):
    spec = OutputSpec("y", OutputKind.LOGIT, "label", "weight" if weighted else None)
    result = world.measure(spec)
    w = world.columns["weight"].astype(np.longdouble) if weighted else np.ones(ROWS, np.longdouble)
    y, z = world.columns["label"].astype(np.longdouble), world.scores()
    loss = cross_entropy(z, y)
    assert result.baseline_loss["y"].value == pytest.approx(float((w * loss).sum() / w.sum()), rel=1e-12)
    assert set(result.by_site) == {"left", "right", "norm", "deep", "head"}
    for site, (item,) in result.by_site.items():
        changed = world.scores((site,))
        delta, kl = changed - z, divergence(z, changed)
        assert (item.output, item.denominator) == ("y", "loss")
        assert item.recipe == {"norm": "bf16", "left": PER_CHANNEL_WEIGHT.id}.get(site, PER_TENSOR.id)
        assert item.delta.rmse == pytest.approx(float(np.sqrt((w * delta**2).sum() / w.sum())), rel=1e-9)
        assert item.delta.mean == pytest.approx(float((w * delta).sum() / w.sum()), rel=1e-9)
        assert item.kl.value == pytest.approx(float((w * kl).sum() / (w * loss).sum()), rel=1e-6)
        whole = (w * (cross_entropy(changed, y) - loss)).sum() / (w * loss).sum()
        assert item.kl.value + item.labelled.value == pytest.approx(float(whole), rel=1e-6, abs=1e-12)
        reference = ratio_interval((w * kl).astype(float), (w * loss).astype(float))
        assert (item.kl.lower, item.kl.upper) == pytest.approx((reference.lower, reference.upper), rel=1e-5)
        assert item.kl.rows == item.kl_moments.units == ROWS and item.draws is None


def test_regression_changes_the_squared_error_and_sites_of_one_tensor_are_measured_together(world):
    result = world.measure(OutputSpec("y", OutputKind.REGRESSION, "rating"))
    y, f, changed = world.columns["rating"], world.scores(), world.scores(("head",))
    (item,) = result.by_site["head"]
    loss = np.square(f - y)
    assert item.kl.value == pytest.approx(float(np.square(changed - f).mean() / loss.mean()), rel=1e-9)
    total = float((np.square(changed - y) - loss).mean() / loss.mean())
    assert item.kl.value + item.labelled.value == pytest.approx(total, rel=1e-6)
    result = world.measure()
    (group,) = result.groups
    assert (group.tensor, group.sites) == ("x", SHARED)
    z, together = world.scores(), world.scores(SHARED)
    loss = cross_entropy(z, world.columns["label"])
    item = group.sensitivity("y")
    assert item.recipe == "e4m3fn/amax"
    assert item.kl.value == pytest.approx(float(divergence(z, together).mean() / loss.mean()), rel=1e-6)


def test_without_labels_kl_is_relative_to_the_mean_entropy(world):
    spec = OutputSpec("y", OutputKind.LOGIT, None)
    del world.columns["rating"]
    result = world.measure(spec, draws=2)
    z, changed = world.scores(), world.scores(("deep",))
    p = sigmoid(z)
    entropy = (-p * np.log(p) - (1 - p) * np.log1p(-p)).mean()
    (item,) = result.by_site["deep"]
    assert item.denominator == "entropy"
    assert item.kl.value == pytest.approx(float(divergence(z, changed).mean() / entropy), rel=1e-6)
    assert item.labelled is None and item.labelled_moments is None
    assert item.draws is not None and item.draws.labelled_low is None and item.draws.labelled_high is None
    assert result.baseline_loss["y"].value == pytest.approx(float(entropy), rel=1e-12)


@pytest.mark.parametrize("group", ["user", "name"])
def test_groups_widen_the_interval_and_leave_the_value(group, world):
    plain, grouped = world.measure(), world.measure(group=group)
    mine, other = grouped.by_site["head"][0], plain.by_site["head"][0]
    assert mine.kl.value == pytest.approx(other.kl.value, rel=1e-12)
    z, changed = world.scores(), world.scores(("head",))
    kl, loss = (v.astype(float) for v in (divergence(z, changed), cross_entropy(z, world.columns["label"])))
    buckets = buckets_of(world.columns[group])
    reference = ratio_interval(kl, loss, groups=world.columns[group])
    assert len(np.unique(buckets)) == mine.kl_moments.units == 40
    assert (mine.kl.lower, mine.kl.upper) == pytest.approx((reference.lower, reference.upper), rel=1e-5)
    assert mine.kl.upper != other.kl.upper


def test_draws_are_the_same_rows_under_moved_scales(world):
    """1500 rows: fewer than are drawn, so that every row is in."""
    result = world.measure(draws=3)
    z, y = world.scores(), world.columns["label"]
    loss = cross_entropy(z, y).mean()
    for names, item in [
        *(((name,), items[0]) for name, items in result.by_site.items() if name != "norm"),
        (SHARED, result.groups[0].sensitivity("y")),
    ]:
        kls, labelled = [], []
        for factor in draw_factors(3):
            changed = world.scores(names, factor)
            kls.append(float(divergence(z, changed).mean() / loss))
            labelled.append(float(((sigmoid(z) - y) * (changed - z)).mean() / loss))
        assert len({round(kl / kls[0], 3) for kl in kls}) == 3
        draws = item.draws
        assert draws is not None and draws.count == 3
        assert (draws.kl_low, draws.kl_high) == pytest.approx((min(kls), max(kls)), rel=1e-6)
        assert draws.kl_growth == pytest.approx(max(kls) / kls[0], rel=1e-6) and draws.kl_growth >= 1.0
        assert (draws.labelled_low, draws.labelled_high) == pytest.approx(
            (min(labelled), max(labelled)), rel=1e-6
        )
    # A norm in BF16 has no scale to move.
    assert result.by_site["norm"][0].draws is None


def test_the_pass_stops_when_nothing_is_open_and_names_what_stays_open(tmp_path):
    world = World.of(tmp_path, 30_000)
    asked: list[Sensitivities] = []
    seen: list[tuple[str, int, int]] = []

    def open_sites(found: Sensitivities) -> tuple[str, ...]:
        asked.append(found)
        item = found.by_site["head"][0]
        # Not by an interval for a number of rows that is fixed.
        interval = found.sampling.interval_of(item.kl_moments)
        assert interval == item.kl_moments.anytime_interval(16384) and interval.upper > item.kl.upper
        return () if found.sampling.rows >= 9000 else ("left", "deep")

    stopped = world.measure(open_sites=open_sites, progress=lambda *step: seen.append(step))
    assert [(each.sampling.rows, each.sampling.looks) for each in asked] == [(4096, 1), (6144, 2), (9216, 3)]
    assert all(each.sampling.is_sequential and each.sampling.tightest_at == 16384 for each in asked)
    assert stopped.sampling == replace(asked[-1].sampling, undecided=())
    assert stopped.by_site["left"][0].kl.rows == 9216
    task = "sensitivity, until decided"
    assert seen[-2:] == [(task, 9216, 30_000), (task, 9216, 9216)]
    # The rows are those that the same order begins with.
    same = world.measure(sensitivity_rows=9216)
    assert same.by_site == stopped.by_site and same.sampling.looks == 1
    assert not same.sampling.is_sequential
    world = World.of(tmp_path, 5000)
    found = world.measure(open_sites=lambda found: ("deep",))
    assert (found.sampling.rows, found.sampling.looks, found.sampling.undecided) == (5000, 2, ("deep",))
    few = world.measure(open_sites=lambda found: ("deep",), sensitivity_rows=700)
    assert (few.sampling.rows, few.sampling.looks, few.sampling.is_sequential) == (700, 1, False)


@pytest.mark.parametrize("group", [None, "user"])
def test_threads_do_not_show_to_the_last_bit(group, world):
    one, many = (world.measure(threads=t, group=group, batch_size=100, draws=2) for t in (1, 3))
    assert one == many


def test_a_loss_of_zero_is_refused(tmp_path):
    columns = columns_of(600)
    columns["weight"][:] = 0
    world = World.of(tmp_path, columns=columns)
    with pytest.raises(CalibrationError) as caught:
        world.measure(OutputSpec("y", OutputKind.LOGIT, "label", "weight"))
    assert caught.value.code == "E0504" and "loss on output 'y' is 0" in caught.value.what


# When verdicts are looked at


def looked_at(limit: int, batch: int, may_stop: bool = True) -> list[int]:
    looks, found, done = StoppingSchedule(limit, may_stop), [], 0
    while done < limit:
        done = min(done + batch, limit)
        if looks.is_due(done):
            looks.take(done)
            found.append(done)
    assert looks.taken == len(found)
    return found


def test_looks_come_at_4096_rows_and_at_half_as_many_again_or_once():
    assert looked_at(30_000, 512) == [4096, 6144, 9216, 13824, 20992, 30_000]
    # A million rows take fifteen.
    assert len(looked_at(1_000_000, 512)) == 15
    # A batch that is larger than the step between looks takes one for all.
    assert looked_at(100_000, 20_000) == [20_000, 40_000, 60_000, 80_000, 100_000]
    assert looked_at(30_000, 512, may_stop=False) == [30_000]
    assert looked_at(4096, 512) == looked_at(4096, 4096) == [4096]
    assert looked_at(300, 512) == [300]
    assert not StoppingSchedule(4096, may_stop=True).may_stop_early
    assert not StoppingSchedule(30_000, may_stop=False).may_stop_early
    assert StoppingSchedule(4097, may_stop=True).may_stop_early


# Which sites are switched on together


def units(folder, body: str = BODY, **recipes: Recipe):
    artifact = artifact_of(folder, body)
    switches = [Switch(site, recipes.get(site.name, PER_TENSOR)) for site in artifact.sites]
    return units_of(GraphModel.load(artifact.path), switches)


def shared(folder, body: str = BODY, **recipes: Recipe) -> list[tuple[str | None, tuple[str, ...], str]]:
    return [(u.tensor, u.sites, u.recipe) for u in units(folder, body, **recipes) if len(u.sites) > 1]


def test_sites_that_read_one_tensor_are_switched_together(tmp_path):
    found = units(tmp_path)
    alone = [("left",), ("right",), ("norm",), ("deep",), ("head",)]
    assert [u.sites for u in found] == [*alone, ("left", "right")]
    assert [u.tensor for u in found] == [None] * 5 + ["x"]
    assert [u.recipe for u in found][2:] == ["bf16", PER_TENSOR.id, PER_TENSOR.id, "e4m3fn/amax"]
    assert [u.sites for u in found if not u.has_scales] == [("norm",)]
    assert shared(tmp_path, left=PER_CHANNEL_WEIGHT) == [("x", ("left", "right"), "e4m3fn/amax")]
    assert shared(tmp_path, left=replace(PER_TENSOR, scale="mse")) == []
    body = """
        t = Transpose <perm = [1, 0]> (x)  u = Transpose <perm = [1, 0]> (t)
        [left] a = MatMul(x, w_left)  [right] b = MatMul(u, w_right)
        c = Mul(a, b)  [head] y = MatMul(c, w_head)
    """
    assert shared(tmp_path, body) == [("x", ("left", "right"), "e4m3fn/amax")]
