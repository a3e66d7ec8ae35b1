"""Kernel times of a model's products: what to measure, and where the times are kept."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.progress import Progress, silent
from loka_onnx.core.site import Site
from loka_onnx.core.timing import Kernel, Shape
from loka_onnx.engines.device_lock import device_alone
from loka_onnx.engines.tuned_kernels import Operands
from loka_onnx.engines.tuning import KernelTimer, Refused
from loka_onnx.graph.entry import canonicalize
from loka_onnx.graph.sites import find_sites
from loka_onnx.planning.timings import TimingDatabase

TIMINGS = "timings.sqlite"
"""The database, below the run directory."""
SEED = 0
"""Of the operands that kernels are timed on."""


@dataclass(frozen=True)
class TuningResult:
    """Pairs of kernel and shape that were timed now, were known before, or do not run."""

    device: str
    measured: int
    known: int
    refused: tuple[Refused, ...]
    seconds: float


def tune_shapes(
    shapes: Sequence[Shape],
    database: Path,
    timer: KernelTimer,
    *,
    again: bool = False,
    progress: Progress = silent,
) -> TuningResult:
    """Time kernels on shapes, except pairs already timed on this very device, unless `again` is set.

    Each time is stored as soon as it is measured. Raises UserError if the file is no timing database,
    OutputError if it cannot be written, EngineError if the device failed.
    """
    wanted, began = timer.wanted(shapes), time.perf_counter()
    refused: list[Refused] = []
    measured = 0
    with TimingDatabase(database) as known, device_alone(timer.device):
        open_pairs = wanted if again else known.missing(wanted, timer.device_name)
        by_shape = defaultdict[Shape, list[Kernel]](list)
        for kernel, shape in open_pairs:
            by_shape[shape].append(kernel)
        progress("kernels", 0, len(by_shape))
        for done, (shape, kernels) in enumerate(sorted(by_shape.items()), start=1):
            tuned = timer.measure(kernels, Operands.generated(shape, SEED))
            known.add(tuned.measured)
            measured += len(tuned.measured)
            refused += tuned.refused
            progress(f"kernels {shape}", done, len(by_shape))
    seconds = time.perf_counter() - began
    return TuningResult(timer.device, measured, len(wanted) - len(open_pairs), tuple(refused), seconds)


def shapes_of(sites: Iterable[Site], batches: Sequence[int]) -> tuple[Shape, ...]:
    """Return the shapes of products that could run in FP8, ascending; stacks of weights are left out."""
    matrices = (site for site in sites if site.is_fp8_able and site.weight and len(site.weight.shape) == 2)
    return tuple(sorted({Shape(site.rows * batch, site.n, site.k) for site in matrices for batch in batches}))


def sites_of_run(directory: Path) -> tuple[Site, ...]:
    """Return the sites of a run's model: after mods if the run came so far, else of the exported model."""
    modified = directory / "model" / "modified.json"
    document = modified if modified.is_file() else directory / "model" / "exported.json"
    return serde.read(ModelArtifact, document).sites


def sites_of_file(path: Path) -> tuple[Site, ...]:
    """Return the sites of an ONNX file, without mods."""
    return find_sites(canonicalize(path).model)
