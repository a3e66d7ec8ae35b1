"""Terms and denominators of rows against the losses themselves, in extended precision."""

from __future__ import annotations

import numpy as np
import pytest

from loka_onnx.calibration.effects.loss_totals import as_scores, denominator_of, loss_rows
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.errors import CalibrationError

LOGIT = OutputSpec("ctr", OutputKind.LOGIT, "click", "value")
UNLABELLED = OutputSpec("ctr", OutputKind.LOGIT, None)


def cross_entropy(z: np.ndarray, y: np.ndarray) -> np.ndarray:
    wide = z.astype(np.longdouble)
    return np.log1p(np.exp(-np.abs(wide))) + np.maximum(wide, 0) - y * wide


def world(rows: int = 500):
    random = np.random.default_rng(0)
    z = random.standard_normal(rows) * 2
    changed = [z + random.standard_normal(rows) * size for size in (1e-4, 0.3)]
    columns = {"click": (random.random(rows) < 0.3).astype(np.int8), "value": random.integers(1, 9, rows)}
    return z, changed, columns


def test_the_change_of_the_loss_is_kl_plus_the_labelled_term():
    z, changed, columns = world()
    found = loss_rows(LOGIT, z, changed, columns)
    y, w = columns["click"], columns["value"]
    np.testing.assert_allclose(found.denominator, w * cross_entropy(z, y), rtol=1e-12)
    np.testing.assert_array_equal(found.weights, w)
    for unit, after in enumerate(changed):
        kl, labelled = found.terms[:, unit]
        assert kl.min() >= 0.0 and labelled.min() < 0.0 < labelled.max()
        np.testing.assert_allclose(
            kl + labelled, w * (cross_entropy(after, y) - cross_entropy(z, y)), rtol=1e-9, atol=1e-17
        )
        np.testing.assert_array_equal(found.delta[unit], after - z)
    squared = OutputSpec("ctr", OutputKind.REGRESSION, "value")
    found = loss_rows(squared, z, changed, columns)
    np.testing.assert_allclose(
        found.terms.sum(axis=0)[1], np.square(changed[1] - w) - np.square(z - w), rtol=1e-9, atol=1e-12
    )
    np.testing.assert_allclose(found.denominator, np.square(z - w))


def test_without_labels_there_is_kl_over_entropy():
    z, changed, columns = world()
    found, labelled = loss_rows(UNLABELLED, z, changed, {}), loss_rows(LOGIT, z, changed, columns)
    assert found.terms.shape == (1, 2, 500)
    np.testing.assert_allclose(found.terms[0] * columns["value"], labelled.terms[0], rtol=1e-12)
    p = 1 / (1 + np.exp(-z.astype(np.longdouble)))
    np.testing.assert_allclose(found.denominator, -p * np.log(p) - (1 - p) * np.log(1 - p), rtol=1e-12)
    assert (denominator_of(UNLABELLED), denominator_of(LOGIT)) == ("entropy", "loss")


def test_entropy_is_the_loss_that_a_calibrated_model_expects():
    """y ~ Bernoulli(p): over labels, entropy and loss agree, and the labelled term is nought."""
    z, changed, _ = world(200_000)
    p = 1 / (1 + np.exp(-z))
    y = (np.random.default_rng(1).random(z.size) < p).astype(np.int8)
    with_labels = loss_rows(OutputSpec("ctr", OutputKind.LOGIT, "click"), z, changed, {"click": y})
    without = loss_rows(UNLABELLED, z, changed, {})
    for difference in (with_labels.denominator - without.denominator, with_labels.terms[1, 1]):
        assert abs(difference.mean()) < 3 * difference.std() / np.sqrt(z.size)
    # A model that is sure of twice the logit that is true has less entropy than loss.
    true = 1 / (1 + np.exp(-z / 2))
    wrong = (np.random.default_rng(1).random(z.size) < true).astype(np.int8)
    off = loss_rows(OutputSpec("ctr", OutputKind.LOGIT, "click"), z, changed, {"click": wrong})
    assert off.denominator.mean() - without.denominator.mean() > 0.05


def test_probabilities_are_turned_into_logits():
    spec = OutputSpec("p", OutputKind.PROBABILITY, None, clip=1e-3)
    scores = as_scores(spec, np.array([[0.5], [0.0], [0.75]], dtype=np.float32))
    assert scores.tolist() == pytest.approx([0.0, np.log(1e-3 / (1 - 1e-3)), np.log(3.0)])


@pytest.mark.parametrize(
    ("where", "text", "remedy"),
    [
        ("exact", "output 'ctr' is not finite\n  evidence: 1 of 500 values", "or correct the model"),
        ("click", "column 'click' is not finite\n  evidence: 1 of 500 values", "fill the values"),
        ("value", "column 'value' is not finite\n  evidence: 1 of 500 values", "fill the values"),
        (
            "changed",
            "with a site in low precision, output 'ctr' is not finite\n  evidence: 1 of 1000 values",
            "`plan.keep`",
        ),
    ],
)
def test_what_is_not_finite_is_refused(where, text, remedy):
    z, changed, columns = world()
    columns = {name: values.astype(np.float64) for name, values in columns.items()}
    {"exact": z, "changed": changed[1], **columns}[where][7] = np.inf
    with pytest.raises(CalibrationError) as caught:
        loss_rows(LOGIT, z, changed, columns)
    assert str(caught.value).startswith(f"{text}, in a batch of 500 rows") and remedy in str(caught.value)
