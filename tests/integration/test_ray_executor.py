"""A real Ray cluster of two worker processes against this process, and what happens when workers die."""

import os
import signal
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.calibration.passes.executors import (
    BatchExecutor,
    BatchResult,
    BatchWork,
    LocalExecutor,
    Span,
    spans_in_order,
)
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.data import Batch, Dataset
from loka_onnx.errors import CalibrationError, DataError
from loka_onnx.export.torch_module import export_torch
from loka_zoo import FeatureSpec, create
from loka_zoo.synthetic import SyntheticOptions, prepare_synthetic

pytest.importorskip("torch", reason="needs torch")
# Installed in CI, where this is no expected skip (tests/conftest.py).
ray = pytest.importorskip("ray", reason="needs ray")
pytestmark = pytest.mark.slow

from loka_onnx.calibration.passes.ray_executor import RETRIES, RayExecutor  # noqa: E402

ROWS, BATCH = 60_000, 512
OUTPUTS = (OutputSpec("logit", OutputKind.LOGIT, "label"),)


@dataclass(frozen=True)
class World:
    artifact: ModelArtifact
    data: Dataset

    def profile(self, folder: Path, executor: BatchExecutor) -> Any:
        """Everything that calibration measures, but the time it took."""
        folder.mkdir()
        options = ProbeOptions(
            batch_size=BATCH, sensitivity_rows=6000, draws=2, error_precision=0.1, executor=executor
        )
        profile = calibrate(self.artifact, OUTPUTS, self.data, folder, options)
        return replace(profile, seconds={})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("ray")
    prepared = prepare_synthetic(folder / "data", SyntheticOptions(rows=(10, ROWS, 10, 10), seed=3))
    data = prepared.open("calibration")
    module = create("dcnv2", FeatureSpec(prepared.categorical, prepared.numeric), "tiny", seed=1)
    rows = next(iter(data.batches(64))).inputs
    return World(export_torch(module, rows, folder / "model.onnx", OUTPUTS), data)


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayExecutor]:
    # Workers cannot import this file.
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    with RayExecutor(workers=2) as executor:
        yield executor
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@pytest.fixture(scope="module")
def local(world: World, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return world.profile(tmp_path_factory.mktemp("local") / "scratch", LocalExecutor(2))


def test_a_cluster_measures_the_same_profile_to_the_last_bit(world, cluster, local, tmp_path):
    found = world.profile(tmp_path / "scratch", cluster)
    assert found == local
    # Stopped early, in the order that was drawn.
    assert 0 < found.error_rows < ROWS == found.rows


@dataclass(frozen=True)
class Deadly(BatchWork[Any]):
    """Kills its own process in the middle of a span, as often as it is told to."""

    inner: BatchWork[Any]
    folder: Path
    deaths: int

    def open(self) -> Callable[[Batch], Any]:
        run = self.inner.open()

        def deadly(batch: Batch) -> Any:
            if batch.first_row == 3 * BATCH and len(list(self.folder.iterdir())) < self.deaths:
                (self.folder / str(os.getpid())).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return run(batch)

        return deadly


class DeadlyExecutor(BatchExecutor):
    def __init__(self, inner: BatchExecutor, folder: Path, deaths: int) -> None:
        self.inner, self.folder, self.deaths = inner, folder, deaths

    def run(
        self, work: BatchWork[Any], data: Dataset, spans: Iterable[Span], batch_size: int
    ) -> Generator[BatchResult[Any]]:
        folder = self.folder / work.path.stem
        folder.mkdir(parents=True)
        return self.inner.run(Deadly(work.path, work, folder, self.deaths), data, spans, batch_size)


def test_a_worker_that_is_killed_midway_changes_nothing(world, cluster, local, tmp_path):
    executor = DeadlyExecutor(cluster, tmp_path / "deaths", 1)
    assert world.profile(tmp_path / "scratch", executor) == local
    killed = sorted(path.relative_to(tmp_path / "deaths").parts for path in (tmp_path / "deaths").glob("*/*"))
    # In the range pass at least, which sees every row; and it was a worker, not this process.
    assert ("ranges" in {name for name, _ in killed}) and str(os.getpid()) not in {pid for _, pid in killed}


def test_workers_that_keep_dying_are_an_error(world, cluster, tmp_path):
    executor = DeadlyExecutor(cluster, tmp_path / "deaths", 99)
    with pytest.raises(CalibrationError) as caught:
        world.profile(tmp_path / "scratch", executor)
    text = str(caught.value)
    assert text.startswith("the Ray cluster cannot run rows 0 to 4096: its workers keep dying")
    assert f"WorkerCrashedError, after {RETRIES} retries" in text
    assert "remedy: look at `ray status`" in text
    assert len(list((tmp_path / "deaths/ranges").iterdir())) == RETRIES + 1


@dataclass(frozen=True)
class Noting(BatchWork[int]):
    """Says in which process it was opened."""

    folder: Path

    def open(self) -> Callable[[Batch], int]:
        np.save(self.folder / f"{os.getpid()}.{len(list(self.folder.iterdir()))}.npy", 0)
        return lambda batch: batch.first_row


def test_a_model_is_opened_once_in_each_process_and_results_keep_their_order(world, cluster, tmp_path):
    (tmp_path / "opened").mkdir()
    spans = spans_in_order(ROWS, 64)[::-1]
    work = Noting(world.artifact.path, tmp_path / "opened")
    results = list(cluster.run(work, world.data, spans, 64))
    assert [r.value for r in results] == [row for s in spans for row in range(s.start, s.stop, 64)]
    assert sum(result.rows for result in results) == ROWS
    opened = [path.name.split(".")[0] for path in (tmp_path / "opened").iterdir()]
    assert 1 <= len(opened) == len(set(opened)) <= 2


@dataclass(frozen=True)
class Failing(Noting):
    def open(self) -> Callable[[Batch], int]:
        raise DataError("column 'x' holds NaN", evidence="3 rows", remedy="drop them")


def test_an_error_in_a_worker_is_raised_as_it_is(world, cluster, tmp_path):
    work = Failing(world.artifact.path, tmp_path)
    with pytest.raises(DataError) as caught:
        list(cluster.run(work, world.data, [Span(0, BATCH)], BATCH))
    assert str(caught.value).splitlines()[0] == "column 'x' holds NaN"
    assert (caught.value.evidence, caught.value.remedy) == ("3 rows", "drop them")
