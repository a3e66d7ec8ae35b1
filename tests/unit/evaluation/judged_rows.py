"""Rows that engines are judged on, and formulas of their losses written out."""

import numpy as np

from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.evaluation import OutputEvaluation
from loka_onnx.evaluation.accuracy import Units, evaluate_outputs
from loka_onnx.evaluation.columns import Groups

LOGIT = OutputSpec("ctr", OutputKind.LOGIT, "clicked")
UNLABELLED = OutputSpec("ctr", OutputKind.LOGIT, None)


def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def losses(z, y):
    return np.log1p(np.exp(z)) - y * z


def kl_of(z, z_prime):
    p, q = sigmoid(z), sigmoid(z_prime)
    return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def entropy_of(z):
    p = sigmoid(z)
    return -p * np.log(p) - (1 - p) * np.log(1 - p)


def sample(rows=4000, noise=0.05, seed=20):
    """Calibrated logits, the same with noise, and labels."""
    rng = np.random.default_rng(seed)
    z = rng.normal(-1, 1.2, rows)
    y = (rng.random(rows) < sigmoid(z)).astype(np.int64)
    return z, z + noise * rng.normal(size=rows), y


def one(reference, candidate, columns, spec=LOGIT, groups=None, units=None, **options) -> OutputEvaluation:
    """The evaluation of one output; `groups` are ids of users."""
    if groups is not None:
        units = Units(Groups.of("user", groups))
    outputs = {spec.name: reference}, {spec.name: candidate}
    (result,) = evaluate_outputs(*outputs, columns, (spec,), units, **options)
    return result
