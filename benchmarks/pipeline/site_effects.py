"""Trained models on MovieLens 1M, and what each of their sites does to every row of a split.

Shared by the benchmarks that ask how sites add up and how well their intervals cover.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from benchmarks.pipeline.training import GROUP, arguments_of, trained
from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.calibration.effects.switchable import Switch, SwitchableModel, write_switchable
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import PER_CHANNEL_WEIGHT, PER_TENSOR
from loka_onnx.data import Dataset
from loka_onnx.data.batch import Batch
from loka_onnx.export.checkpoint import load_checkpoint
from loka_onnx.export.torch_module import export_torch
from loka_onnx.graph.model import GraphModel
from loka_onnx.numerics.loss_change import LossChange, loss_change
from loka_onnx.numerics.task_metrics import log_loss_rows
from loka_onnx.sessions.runner import Arrays, map_in_order, stream_count
from loka_zoo.builders import build
from loka_zoo.prepared import PreparedData

OUTPUT = "logit"
BATCH = 512
EXPORT_ROWS = 2048
RECIPES = (PER_TENSOR, PER_CHANNEL_WEIGHT)

Rows = npt.NDArray[np.float64]


def exported(model: str, data: PreparedData, checkpoints: Path, scratch: Path) -> ModelArtifact:
    """The trained model as ONNX; it is trained first where there is no checkpoint."""
    checkpoint = trained(model, data, checkpoints)
    module, _ = build(**arguments_of(model, data))
    module.load_state_dict(load_checkpoint(checkpoint))
    rows = next(data.open("calibration").batches(EXPORT_ROWS)).inputs
    return export_torch(module, rows, scratch / f"{model}.onnx", (output_of(data, 0.0),))


def output_of(data: PreparedData, budget: float) -> OutputSpec:
    """The judged output."""
    return OutputSpec(OUTPUT, OutputKind.LOGIT, data.label, budget=budget)


def split_of(data: PreparedData, name: str) -> Dataset:
    """A split with labels and users."""
    return data.open(name, (data.label, GROUP))


def profile_of(
    artifact: ModelArtifact,
    spec: OutputSpec,
    data: Dataset,
    scratch: Path,
    threads: int,
    rows: int | None = None,
) -> Profile:
    """Every site calibrated on all rows of a split, or so many: the number of rows is fixed beforehand."""
    options = ProbeOptions(
        recipes=RECIPES,
        batch_size=BATCH,
        threads=threads,
        rows=rows,
        group=GROUP,
        error_precision=None,
    )
    return calibrate(artifact, (spec,), data, scratch, options)


class Switched(Protocol):
    """A model with names that may be turned on, as those of sites in low precision."""

    def run(self, inputs: Arrays, on: Sequence[str]) -> Arrays:
        """Outputs of a batch."""
        ...


@dataclass(frozen=True)
class RowEffects:
    """What sets of sites in low precision do to each row.

    Attributes:
        exact: (rows,) logits of the exact model.
        changed: (rows,) logits with a set of sites in low precision, by the name of the set.
        labels: (rows,).
        units: (rows,) ids of what belongs together.
    """

    exact: Rows
    changed: Mapping[str, Rows]
    labels: Rows
    units: npt.NDArray[Any]

    def delta(self, name: str) -> Rows:
        """(rows,) change of the logit."""
        return self.changed[name] - self.exact

    def change(self, name: str) -> LossChange:
        """Both parts of the loss change of each row."""
        return loss_change(OutputKind.LOGIT, self.exact, self.changed[name], self.labels)

    @property
    def loss(self) -> Rows:
        """(rows,) loss of the exact model."""
        return log_loss_rows(self.exact, self.labels)


def switchable_of(
    artifact: ModelArtifact, profile: Profile, scratch: Path, factor: float = 1.0
) -> SwitchableModel:
    """The model with a switch at each site, in the recipe that calibration used and with its scales.

    Args:
        artifact: The exact model.
        profile: Its profile.
        scratch: Where the switchable model is written.
        factor: What scales are multiplied by, for another draw of the rounding noise.
    """
    recipes = {recipe.id: recipe for recipe in RECIPES}
    switches = [
        # A norm has no recipe: it is tried in its own precision, whatever the switch says.
        Switch(site, recipes.get(profile.site(site.name).sensitivities[0].recipe, PER_TENSOR))
        for site in artifact.sites
    ]
    path = scratch / f"effects-{factor:.3f}.onnx"
    return write_switchable(GraphModel.load(artifact.path), switches, profile.scales, path, factor).open()


def row_effects(
    model: Switched,
    data: Dataset,
    sets: Mapping[str, Sequence[str]],
    threads: int = 0,
    rows: int | None = None,
) -> RowEffects:
    """Run every set of sites over the rows of a split.

    Args:
        model: A switchable model, or another.
        data: Rows with labels and users.
        sets: Sites to turn on, by the name of the set.
        threads: Batches at once; 0 for one a core.
        rows: Rows to run; None for all.
    """
    label, unit = data.layout.columns

    def run(batch: Batch) -> tuple[Batch, npt.NDArray[np.float64]]:
        logits = [model.run(batch.inputs, on)[OUTPUT].reshape(-1) for on in ((), *sets.values())]
        return batch, np.stack(logits).astype(np.float64)

    batches = data.batches(BATCH, stop=rows)
    done = list(map_in_order(run, batches, stream_count(threads)))
    logits = np.concatenate([part for _, part in done], axis=1)
    return RowEffects(
        exact=logits[0],
        changed=dict(zip(sets, logits[1:], strict=True)),
        labels=np.concatenate([batch.columns[label] for batch, _ in done]).astype(np.float64),
        units=np.concatenate([batch.columns[unit] for batch, _ in done]),
    )
