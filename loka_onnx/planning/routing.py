"""Assign batch sizes to engines.

One engine is best over all served batch sizes. At one size another may be faster, because FP8's savings grow
with the rows and the cost of quantizing does not. A second engine costs device memory and a start, so a size
gets its own engine only where the whole interval of the gain lies above a margin. An engine timed apart from
the main one has no interval, and gets no size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import Route
from loka_onnx.planning.evidence import Evidence
from loka_onnx.planning.speed import Speed


def alike(
    engines: Sequence[EngineArtifact], speeds: Mapping[str, Speed], noise: float
) -> tuple[EngineArtifact, ...]:
    """Return the fastest of one or more engines, then those not surely slower; timed apart, medians decide.

    `noise` is the relative difference that counts for nothing, beside the spread of the measurement.
    """
    fastest = min(engines, key=lambda e: speeds[e.id].per_row_us)
    others = (
        engine
        for engine in engines
        if engine is not fastest and not speeds[engine.id].is_slower(speeds[fastest.id], noise)
    )
    return (fastest, *others)


def pick(
    engines: Sequence[EngineArtifact], speeds: Mapping[str, Speed], evidence: Evidence, noise: float
) -> EngineArtifact:
    """Return the fastest engine; of those within noise of it, the most exact."""
    return min(alike(engines, speeds, noise), key=lambda e: (evidence.exactness(e), speeds[e.id].per_row_us))


def routes(
    engines: Sequence[EngineArtifact],
    speeds: Mapping[str, Speed],
    evidence: Evidence,
    noise: float,
    margin: float,
) -> tuple[Route, ...]:
    """Return the table of batch sizes, ascending; empty where one engine serves all.

    All engines are in `speeds`, at the same batch sizes. `margin` is the least gain, relative to the main
    engine, that is worth another engine.
    """
    main = pick(engines, speeds, evidence, noise)
    best = {}
    for batch in speeds[main.id].batches:
        at_size = {engine.id: speeds[engine.id].at(batch) for engine in engines}
        beside = [engine for engine in engines if at_size[engine.id].over(at_size[main.id]) is not None]
        best[batch] = pick(beside, at_size, evidence, noise)
    table = _table(main, best, speeds, margin)
    if table and main.id not in {route.engine for route in table}:
        # Beaten at every size: the best serving engine becomes the main one.
        serving = [engine for engine in engines if engine.id in {route.engine for route in table}]
        table = _table(pick(serving, speeds, evidence, noise), best, speeds, margin)
    return table


def main_of(table: Sequence[Route]) -> str:
    """Return the id of the main engine of a table: the one whose routes have no gain."""
    return next(route.engine for route in table if route.times is None)


def _table(
    main: EngineArtifact, best: Mapping[int, EngineArtifact], speeds: Mapping[str, Speed], margin: float
) -> tuple[Route, ...]:
    table = []
    for batch, other in best.items():
        gain = speeds[main.id].at(batch).over(speeds[other.id].at(batch))
        if other is not main and gain is not None and gain.lower > 1.0 + margin:
            table.append(Route(batch, other.id, other.plan, gain))
        else:
            table.append(Route(batch, main.id, main.plan))
    return tuple(table) if any(route.engine != main.id for route in table) else ()
