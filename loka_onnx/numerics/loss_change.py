"""Exact effect of an output change on the loss of a row.

**Log loss.** With z the logit, δ = z′ − z, p = σ(z), p′ = σ(z′) and s = softplus, L = s(z) − y·z, so

    ΔL = s(z′) − s(z) − y·δ.

Because log p = z − s(z) and log(1 − p) = −s(z),

    KL(p ‖ p′) = p·log(p/p′) + (1−p)·log((1−p)/(1−p′)) = s(z′) − s(z) − p·δ,

and for any δ and any y in [0, 1]: ΔL = KL(p ‖ p′) + (p − y)·δ. The first term is never negative and needs no
label; the second is of first order. **Squared error.** With δ = f′ − f: (f′ − y)² − (f − y)² = δ² + 2·(f −
y)·δ.

**Precision of KL.** It is of order p(1−p)δ²/2, a tiny difference of terms of order pδ. By symmetry KL(z, z′)
= KL(−z, −z′) the row is turned so that p ≤ ½. Then

- |δ| ≤ 0.01: the cumulant series of a Bernoulli variable, Σ κ_k δᵏ / k! for k = 2…6, because s(z + δ) − s(z)
  is its cumulant generating function; the remainder is below 2⁻⁴⁴ of the value;
- 0.01 < |δ| and δ ≤ 1: log1p(p·expm1(δ)) − p·δ, which loses at most a factor 4/|δ| of an ulp;
- δ > 1: s(z′) − s(z) − p·δ, which cannot overflow and no longer cancels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import expit

from loka_onnx.core.artifact import OutputKind
from loka_onnx.numerics.task_metrics import softplus

SERIES_BELOW = 0.01
"""Largest |δ| of the series; there its remainder and the cancellation of the closed form are both ~1e-13."""

Array = npt.NDArray[Any]
Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class LossChange:
    """Parts of the loss change, (rows,): KL(p ‖ p′) in nats and (p − y)·δ, or δ² and 2·(f − y)·δ."""

    kl: Rows
    labelled: Rows

    @property
    def total(self) -> Rows:
        """(rows,) loss of the candidate minus loss of the reference."""
        return self.kl + self.labelled


def loss_change(kind: OutputKind, reference: Array, candidate: Array, labels: Array) -> LossChange:
    """Return both parts for an output of `kind`, of logits (for a probability too) or regression outputs. All
    arrays are (rows,); the candidate may be (candidates, rows), here and below.
    """
    if kind is OutputKind.REGRESSION:
        f, y = reference.astype(np.float64), labels.astype(np.float64)
        labelled = 2.0 * (f - y) * (candidate.astype(np.float64) - f)
        return LossChange(squared_change_rows(reference, candidate), np.asarray(labelled))
    return LossChange(kl_rows(reference, candidate), labelled_rows(reference, candidate, labels))


def kl_rows(z: Array, z_prime: Array) -> Rows:
    """Return (rows,) KL(σ(z) ‖ σ(z′)) of finite logits, in nats, to a relative error of about 1e-13."""
    z = z.astype(np.float64)
    sign = np.where(z > 0, -1.0, 1.0)
    delta = sign * (z_prime.astype(np.float64) - z)
    z = sign * z
    p = expit(z)
    # Each branch is computed on every row, so each clips δ to where it cannot overflow.
    bounded = np.minimum(delta, 1.0)
    middle = np.log1p(p * np.expm1(bounded)) - p * bounded
    far = softplus(z + delta) - softplus(z) - p * delta
    near = _cumulant_series(p, np.clip(delta, -SERIES_BELOW, SERIES_BELOW))
    closed = np.where(delta > 1.0, far, middle)
    return np.maximum(np.where(np.abs(delta) <= SERIES_BELOW, near, closed), 0.0)


def labelled_rows(z: Array, z_prime: Array, labels: Array) -> Rows:
    """Return (rows,) (p − y)·δ in nats, from finite logits and labels in [0, 1]."""
    z, y = z.astype(np.float64), labels.astype(np.float64)
    # p − y as (1 − y)·p − y·(1 − p): a confident and right row keeps its small residual.
    residual = (1.0 - y) * expit(z) - y * expit(-z)
    return np.asarray(residual * (z_prime.astype(np.float64) - z), dtype=np.float64)


def squared_change_rows(f: Array, f_prime: Array) -> Rows:
    """Return (rows,) δ²: the label-free part for squared error."""
    return np.square(f_prime.astype(np.float64) - f.astype(np.float64))


def _cumulant_series(p: Rows, delta: Rows) -> Rows:
    """Σ κ_k δᵏ / k!, k = 2…6, with the cumulants of a Bernoulli variable."""
    q = 1.0 - p
    v, skew = p * q, q - p
    third = skew / 6.0
    fourth = (1.0 - 6.0 * v) / 24.0
    fifth = skew * (1.0 - 12.0 * v) / 120.0
    sixth = (1.0 - 30.0 * v + 120.0 * v**2) / 720.0
    bracket = 0.5 + delta * (third + delta * (fourth + delta * (fifth + delta * sixth)))
    return v * delta**2 * bracket
