"""Sensitivities against the loss itself, computed row by row from the outputs in extended precision."""

from __future__ import annotations

import numpy as np
import pytest
from test_switchable import make

from loka_onnx.calibration.sensitivity import measure_sensitivities
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.site import SiteKind
from loka_onnx.data.batch import Batch

pytest.importorskip("torch")

SITES = ("over.fc1", "over.norm1", "head")
OUTPUTS = (OutputSpec("logit", OutputKind.LOGIT, "label"),)


@pytest.fixture
def world(tmp_path):
    run, switchable, _ = make("dcnv2", tmp_path, SITES)
    rows, random = 400, np.random.default_rng(5)
    columns = {
        "label": (random.random(rows) < 0.3).astype(np.int8),
        "weight": random.integers(1, 4, rows),
        "user": random.integers(0, 40, rows),
        "rating": random.standard_normal(rows),
    }
    inputs = {name: array[:rows] for name, array in run.inputs().items()}

    def batches(size: int) -> list[Batch]:
        return [
            Batch(
                {k: v[i : i + size] for k, v in inputs.items()},
                {k: v[i : i + size] for k, v in columns.items()},
                i,
            )
            for i in range(0, rows, size)
        ]

    return switchable, inputs, columns, batches


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def cross_entropy(z, y):
    p = sigmoid(z)
    return -(y * np.log(p) + (1 - y) * np.log1p(-p))


@pytest.mark.parametrize("weighted", [False, True])
def test_logit_terms_are_the_change_of_the_loss(weighted, world):
    switchable, inputs, columns, batches = world
    outputs = (OutputSpec("logit", OutputKind.LOGIT, "label", "weight" if weighted else None),)
    seen: list[int] = []
    result = measure_sensitivities(switchable, batches(150), outputs, None, seen.append)
    assert seen == [150, 300, 400]
    w = columns["weight"].astype(np.longdouble) if weighted else np.ones(400, np.longdouble)
    y = columns["label"].astype(np.longdouble)
    z = switchable.run(inputs)["logit"].astype(np.longdouble)
    loss = cross_entropy(z, y)
    mean_loss = (w * loss).sum() / w.sum()
    assert result.baseline_loss["logit"] == pytest.approx(float(mean_loss), rel=1e-12)
    assert set(result.by_site) == set(SITES)
    for site in SITES:
        (item,) = result.by_site[site]
        changed = switchable.run(inputs, (site,))["logit"].astype(np.longdouble)
        delta = changed - z
        p, q = sigmoid(z), sigmoid(changed)
        kl = p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))
        assert item.output == "logit" and item.denominator == "loss"
        is_norm = next(s.site.kind is SiteKind.NORM for s in switchable.switches if s.site.name == site)
        assert (item.recipe == "bf16") == is_norm
        assert item.delta_rmse == pytest.approx(float(np.sqrt((w * delta**2).sum() / w.sum())), rel=1e-9)
        assert item.delta_mean == pytest.approx(float((w * delta).sum() / w.sum()), rel=1e-9)
        assert item.kl.value == pytest.approx(float((w * kl).sum() / (w * loss).sum()), rel=1e-6)
        assert item.kl.lower < item.kl.value < item.kl.upper and item.kl.rows == 400
        whole = (w * (cross_entropy(changed, y) - loss)).sum() / (w * loss).sum()
        assert item.labelled is not None
        assert item.kl.value + item.labelled.value == pytest.approx(float(whole), rel=1e-6)


def test_regression_terms_are_the_change_of_the_squared_error(world):
    switchable, inputs, columns, batches = world
    outputs = (OutputSpec("logit", OutputKind.REGRESSION, "rating"),)
    result = measure_sensitivities(switchable, batches(400), outputs, None, lambda done: None)
    y, f = columns["rating"], switchable.run(inputs)["logit"].astype(np.float64)
    changed = switchable.run(inputs, ("head",))["logit"].astype(np.float64)
    (item,) = result.by_site["head"]
    loss = np.square(f - y)
    assert item.kl.value == pytest.approx(np.square(changed - f).mean() / loss.mean(), rel=1e-9)
    assert item.labelled is not None
    total = (np.square(changed - y) - loss).mean() / loss.mean()
    assert item.kl.value + item.labelled.value == pytest.approx(total, rel=1e-6)


def test_batches_do_not_matter_and_groups_widen_only_the_interval(world):
    switchable, _, _, batches = world
    one, many, grouped = (
        measure_sensitivities(switchable, batches(size), OUTPUTS, group, lambda done: None).by_site["head"][0]
        for size, group in ((400, None), (64, None), (64, "user"))
    )
    # The size of a batch decides which FP32 kernel runs: the last bit of the outputs.
    assert many.kl.value == pytest.approx(one.kl.value, rel=1e-4)
    assert grouped.kl.value == many.kl.value
    assert grouped.labelled is not None and many.labelled is not None
    assert grouped.labelled.value == many.labelled.value
    assert grouped.kl.upper != many.kl.upper
