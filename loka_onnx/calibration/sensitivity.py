"""What each site, alone in low precision, does to the model's outputs.

The loss change of a row is exactly KL(p ‖ p′) + (p − y)·δ (`numerics.loss_change`). The first term needs no
label and is what a site is judged on; the second is reported beside it. Both are relative to the FP32
model's loss on the same rows, or to the mean entropy of its predictions where there are no labels; the
ratio's interval is by the delta method, over groups of rows that belong together where there are any.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.arithmetic import NORM_PRECISION
from loka_onnx.calibration.switchable import Switch, SwitchableModel
from loka_onnx.core.artifact import OutputKind, OutputSpec
from loka_onnx.core.sensitivity import Sensitivity
from loka_onnx.core.site import SiteKind
from loka_onnx.data.batch import Batch
from loka_onnx.numerics.intervals import ratio_interval
from loka_onnx.numerics.loss_change import loss_change
from loka_onnx.numerics.task_metrics import log_loss_rows, logits_from_probabilities, squared_error_rows
from loka_onnx.sessions.streams import map_in_order

Rows = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Sensitivities:
    """The result of the pass.

    Attributes:
        by_site: Effect of each site on each output.
        baseline_loss: Mean loss of the exact model per output.
    """

    by_site: dict[str, tuple[Sensitivity, ...]]
    baseline_loss: dict[str, float]


@dataclass(frozen=True)
class _Runs:
    """Outputs of the model for one batch: exact, and with each site alone in low precision."""

    batch: Batch
    exact: Mapping[str, npt.NDArray[Any]]
    changed: Mapping[str, Mapping[str, npt.NDArray[Any]]]


@dataclass
class _Track:
    """Rows of one output, batch by batch."""

    kl: dict[str, list[Rows]]
    labelled: dict[str, list[Rows]]
    delta: dict[str, list[Rows]]
    loss: list[Rows]
    weights: list[Rows]


def measure_sensitivities(
    model: SwitchableModel,
    batches: Iterable[Batch],
    outputs: tuple[OutputSpec, ...],
    group: str | None,
    progress: Callable[[int], None],
    streams: int = 1,
) -> Sensitivities:
    """Turn on one site at a time over the same rows.

    Args:
        model: The switchable model.
        batches: Rows with labels, weights and groups among their columns.
        outputs: Judged outputs.
        group: Column of rows that belong together.
        progress: Called with the rows done.
        streams: Batches at once.
    """

    def run(batch: Batch) -> _Runs:
        names = (switch.site.name for switch in model.switches)
        changed = {name: model.run(batch.inputs, (name,)) for name in names}
        return _Runs(batch, model.run(batch.inputs), changed)

    tracks = {spec.name: _Track({}, {}, {}, [], []) for spec in outputs}
    groups: list[npt.NDArray[Any]] = []
    done = 0
    for runs in map_in_order(run, batches, streams):
        columns = runs.batch.columns
        if group is not None:
            groups.append(columns[group])
        for spec in outputs:
            _note_baseline(tracks[spec.name], spec, runs.exact, columns)
            for name, changed in runs.changed.items():
                _note_change(tracks[spec.name], spec, name, (runs.exact, changed), columns)
        done += runs.batch.rows
        progress(done)
    keys = np.concatenate(groups) if groups else None
    return Sensitivities(
        by_site={
            switch.site.name: tuple(_summarize(tracks[spec.name], spec, switch, keys) for spec in outputs)
            for switch in model.switches
        },
        baseline_loss={spec.name: _mean_loss(tracks[spec.name]) for spec in outputs},
    )


def as_scores(spec: OutputSpec, values: npt.NDArray[Any]) -> Rows:
    """(rows,) logits, or regression outputs, of a judged output."""
    flat = values.reshape(len(values)).astype(np.float64)
    return logits_from_probabilities(flat, spec.clip) if spec.kind is OutputKind.PROBABILITY else flat


def _note_baseline(
    track: _Track, spec: OutputSpec, exact: Mapping[str, Any], columns: Mapping[str, npt.NDArray[Any]]
) -> None:
    scores, labels = as_scores(spec, exact[spec.name]), columns[spec.label].astype(np.float64)
    rows = squared_error_rows if spec.kind is OutputKind.REGRESSION else log_loss_rows
    track.loss.append(rows(scores, labels))
    if spec.weight is not None:
        track.weights.append(columns[spec.weight].astype(np.float64))


def _note_change(
    track: _Track,
    spec: OutputSpec,
    site: str,
    runs: tuple[Mapping[str, Any], Mapping[str, Any]],
    columns: Mapping[str, npt.NDArray[Any]],
) -> None:
    before, after = (as_scores(spec, run[spec.name]) for run in runs)
    change = loss_change(spec.kind, before, after, columns[spec.label].astype(np.float64))
    track.kl.setdefault(site, []).append(change.kl)
    track.labelled.setdefault(site, []).append(change.labelled)
    track.delta.setdefault(site, []).append(after - before)


def _mean_loss(track: _Track) -> float:
    weights = np.concatenate(track.weights) if track.weights else None
    return float(np.average(np.concatenate(track.loss), weights=weights))


def _summarize(
    track: _Track, spec: OutputSpec, switch: Switch, groups: npt.NDArray[Any] | None
) -> Sensitivity:
    name = switch.site.name
    loss = np.concatenate(track.loss)
    weights = np.concatenate(track.weights) if track.weights else None
    delta = np.concatenate(track.delta[name])
    return Sensitivity(
        recipe=NORM_PRECISION if switch.site.kind is SiteKind.NORM else switch.recipe.id,
        output=spec.name,
        denominator="loss",
        delta_rmse=float(np.sqrt(np.average(delta**2, weights=weights))),
        delta_mean=float(np.average(delta, weights=weights)),
        kl=ratio_interval(np.concatenate(track.kl[name]), loss, weights, groups),
        labelled=ratio_interval(np.concatenate(track.labelled[name]), loss, weights, groups),
    )
