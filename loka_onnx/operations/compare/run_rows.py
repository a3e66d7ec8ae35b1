"""Sections of the difference of two reports, one kind of thing at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import isclose

from loka_onnx.core.engine import EngineArtifact
from loka_onnx.core.evaluation import BudgetStatus, InputPlace, Latency, OutputEvaluation, TargetChoice
from loka_onnx.core.intervals import Interval
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.numerics.intervals import median_interval
from loka_onnx.operations.compare import run_decisions
from loka_onnx.operations.compare.difference import Row, Section, number, row
from loka_onnx.operations.compare.difference import times as times_of
from loka_onnx.operations.compare.run_decisions import HardwarePair, hardware_pairs, reasons_of
from loka_onnx.planning.choice import NOISE
from loka_onnx.report import ReportData, numbers
from loka_onnx.report.choice_tables import times_text
from loka_onnx.report.data import BASELINES
from loka_onnx.report.document import BUDGET_TONES, Tone
from loka_onnx.report.figures import joined, percent_interval, told

OVERLAP, APART = "intervals overlap", "intervals do not overlap"
_COSTS_TEXT = (
    "Costs are those of each run's own engine against its own FP32 model. Intervals of the same rows are "
    "not independent: where they overlap, the costs may differ all the same. The command compare "
    "runs both deployments on the same rows."
)
_LATENCY_TEXT = (
    "Latencies were measured at different times, not in turns, and neither the clock rate nor the load "
    "of the machine is recorded; of a processor, not even its model. A ratio therefore has no interval; "
    "slower is said where it took longer by more than 1 % and than the median wandered in either run. "
    "A gain over an engine of the same run was timed in turns with it, and bears the comparison better."
)


def sections(old: ReportData, new: ReportData) -> Iterator[Section]:
    """All sections but the settings; some have no rows."""
    targets = _targets(old, new)
    costs = [cost for target in targets for cost in _costs(old, new, target.pair)]
    times = [time for target in targets for time in _latencies(old, new, target.pair)]
    yield Section("engines", "Emitted engines", tuple(_engine_rows(targets, [*costs, *times])))
    text = f"{_COSTS_TEXT} {_levels(old, new)}"
    yield Section("cost", "Cost of the emitted engines", tuple(cost.row for cost in costs), text)
    rows = tuple(time.row for time in times)
    yield Section("latency", "Latency of the emitted engines", rows, _LATENCY_TEXT)
    yield Section("gain", "Gain over engines of the same run", tuple(_gains(old, new)))
    yield from run_decisions.sites(old, new)
    yield Section("plans", "Plans that differ", tuple(run_decisions.plans(old, new)))
    moved = tuple(run_decisions.rewrites(old, new))
    yield Section("rewrites", "Places that transforms treated differently", moved)
    yield Section("data", "Rows of each split", tuple(_splits(old, new)))
    yield entries("versions", "Versions that differ", old.versions, new.versions)


def is_other_engine(old: ReportData, new: ReportData) -> bool:
    """True if a target gets another engine, or requests of some size go to another one."""
    return any(target.change is not Change.SAME for target in _targets(old, new))


class Change(StrEnum):
    """Change of the engine of a target from the old run to the new one."""

    SAME = "the same"
    CHANGED = "changed"
    APPEARED = "appeared"
    VANISHED = "vanished"


@dataclass(frozen=True)
class _Emitted:
    """The engine selected for a target; of several, the main one."""

    choice: TargetChoice
    engine: EngineArtifact
    plan: PrecisionPlan | None

    @property
    def identity(self) -> tuple[object, ...]:
        """Identity of an engine without its digest, so that one that is built anew is the same.

        Requests go by size to engines: largest requests, None for the rest; sizes of one engine are joined.
        """
        routes = [(route.batch, route.engine) for route in self.choice.routes] or [(0, self.engine.id)]
        ends = [route for route, following in pairwise(routes) if route[1] != following[1]]
        routing = (*ends, (None, routes[-1][1]))
        return self.engine.backend, self.engine.architecture, self.choice.plan, routing


@dataclass(frozen=True)
class _Target:
    pair: HardwarePair
    old: _Emitted | None
    new: _Emitted | None

    @property
    def change(self) -> Change:
        if self.old is None or self.new is None:
            return Change.APPEARED if self.old is None else Change.VANISHED
        return Change.SAME if self.old.identity == self.new.identity else Change.CHANGED


@dataclass(frozen=True)
class _Finding:
    """A cost or latency: it `holds` if both runs know it and it is not worse; `is_bad` if surely worse."""

    hardware: str
    row: Row
    holds: bool
    is_bad: bool = False


def _targets(old: ReportData, new: ReportData) -> list[_Target]:
    return [
        _Target(pair, _emitted(old, pair.old), _emitted(new, pair.new)) for pair in hardware_pairs(old, new)
    ]


def _emitted(data: ReportData, choice: TargetChoice | None) -> _Emitted | None:
    engine = None if choice is None else data.engine(choice.engine)
    if choice is None or engine is None:
        return None
    return _Emitted(choice, engine, data.plan(choice.plan))


def _engine_rows(targets: Sequence[_Target], findings: Sequence[_Finding]) -> Iterator[Row]:
    """The engines of all targets first, then the properties of each."""
    for target in targets:
        sides = target.old, target.new
        reasons = (
            None if side is None else f"{side.choice.reason.rstrip('.')}, speed: {side.choice.basis}"
            for side in sides
        )
        yield row(
            target.pair.name,
            *(None if side is None else f"{side.engine.id} (plan {side.choice.plan})" for side in sides),
            verdict=target.change,
            tone=_tone(target, [f for f in findings if f.hardware == target.pair.name]),
            note=reasons_of(*reasons),
        )
    for target in targets:
        before, after = map(_properties, (target.old, target.new))
        for name in dict.fromkeys((*before, *after)):
            yield row(f"{target.pair.name}: {name}", before.get(name), after.get(name))


def _tone(target: _Target, findings: Sequence[_Finding]) -> Tone:
    """Bad where something got worse for certain or is gone; green only where all is seen to hold."""
    if target.change is Change.VANISHED or any(finding.is_bad for finding in findings):
        return Tone.BAD
    holds = target.change is Change.SAME and all(finding.holds for finding in findings)
    return Tone.GOOD if holds else Tone.WARN


def _properties(side: _Emitted | None) -> dict[str, str]:
    if side is None:
        return {}
    engine, plan = side.engine, side.plan
    routes = [told("up to {} rows: {}", number(numbers.count, r.batch), r.engine) for r in side.choice.routes]
    sites, share = (0, 0.0) if plan is None else (len(plan.quantized_sites), plan.fp8_share)
    return {
        **({"requests by size": joined("; ", routes)} if routes else {}),
        "backend": f"{engine.backend} {engine.backend_version}".strip(),
        "sites in FP8, of the FLOPs": told(
            "{}, {}", number(numbers.count, sites), number(numbers.share, share)
        ),
        "size": number(numbers.size, engine.bytes) if engine.digest else numbers.NONE,
        "SHA-256": numbers.digest(engine.digest),
    }


def _costs(old: ReportData, new: ReportData, pair: HardwarePair) -> Iterator[_Finding]:
    """Cost of the emitted engines that answer requests of one size, by output and split."""
    others, is_other_model = other_splits(old, new), old.exported.digest != new.exported.digest
    of_model = ["relative to another FP32 model"] if is_other_model else []
    for engines in pair.engines:
        before, after = (
            {
                (output.output, evaluation.split): output
                for evaluation in data.evaluations.evaluations
                if evaluation.engine == engine
                for output in evaluation.outputs
            }
            for data, engine in zip((old, new), engines, strict=True)
        )
        for output, split in dict.fromkeys((*before, *after)):
            sides = before.get((output, split)), after.get((output, split))
            of_rows = ["measured on another file, another selection of rows or other columns of them"]
            remarks = [*of_rows, *of_model] if split in others else [*of_model]
            names = _both(*(engine if side else None for engine, side in zip(engines, sides, strict=True)))
            yield _cost(pair.name, f"{output} · {split} · {names}", sides, remarks)


_Sides = tuple[OutputEvaluation | None, OutputEvaluation | None]


def _cost(hardware: str, what: str, sides: _Sides, remarks: list[str]) -> _Finding:
    old, new = (None if side is None else side.difference for side in sides)
    is_same_basis, verdict, caution, holds, is_worse = not remarks, "", "", False, False
    if old is None or new is None:
        remarks = [f"it was not measured in the {'old' if old is None else 'new'} run"]
    elif old.judged_name != new.judged_name:
        remarks = [f"the old run judges {old.judged_name}, the new one {new.judged_name}"]
    else:
        less = new.judged.value - old.judged.value
        decimals = max(map(numbers.interval_decimals, (old.judged, new.judged)))
        overlap, caution = _overlap(old.judged, new.judged)
        verdict = told("{}; {}", number(lambda v: numbers.signed_percent(v, decimals), less), overlap)
        is_worse = is_same_basis and overlap == APART and less > 0.0
        holds = is_same_basis and len({side.budget_status for side in sides if side}) == 1
    status = sides[1].budget_status if sides[1] else ""
    what, tone = f"{hardware} · {what}", BUDGET_TONES.get(status, Tone.PLAIN)
    note = "; ".join(filter(None, (*remarks, caution)))
    item = row(what, *map(_judged, sides), verdict=verdict, tone=tone, note=note)
    return _Finding(hardware, item, holds, is_worse or status == BudgetStatus.BEYOND)


def _judged(output: OutputEvaluation | None) -> str | None:
    if output is None:
        return None
    judged: str = "reference"
    if change := output.difference:
        judged = told("{} {}", change.judged_name, percent_interval(change.judged, output.budget))
    budget = number(numbers.budget_percent, output.budget)
    entropy = number(numbers.metric, output.metrics.normalized_entropy)
    return told("{}; {}, budget {}; NE {}", judged, output.budget_status, budget, entropy)


def _overlap(old: Interval, new: Interval) -> tuple[str, str]:
    """Return if two intervals overlap, in words, and a caution where their confidence differs."""
    is_alike = isclose(old.confidence, new.confidence)
    words = OVERLAP if old.lower <= new.upper and new.lower <= old.upper else APART
    return words, "" if is_alike else "the intervals are of different confidence"


def _levels(old: ReportData, new: ReportData) -> str:
    """Confidence of the intervals of both runs, down to a tenth of a percent."""
    texts = []
    for data in (old, new):
        outputs = (output for evaluation in data.evaluations.evaluations for output in evaluation.outputs)
        levels = sorted({o.difference.judged.confidence for o in outputs if o.difference is not None})
        shown = dict.fromkeys(f"{math.floor(1000 * level + 1e-6) / 10:g} %" for level in levels)
        texts.append(" or ".join(shown) or "no confidence")
    return f"Intervals are of {texts[0]} in the old run and of {texts[1]} in the new one."


def _both(old: str | None, new: str | None) -> str:
    """Names of the compared engines: ``a then, b now``."""
    if old == new:
        return f"{new}"
    return ", ".join(f"{name} {when}" for name, when in ((old, "then"), (new, "now")) if name is not None)


def _latencies(old: ReportData, new: ReportData, pair: HardwarePair) -> Iterator[_Finding]:
    """Median latencies of the emitted engines, by batch size."""
    before, after = _timed(old, pair.old), _timed(new, pair.new)
    for batch, inputs in sorted({*before, *after}):
        was, now = before.get((batch, inputs)), after.get((batch, inputs))
        remark = _why_no_ratio(was, now)
        verdict, is_slower = "", False
        if not remark and was is not None and now is not None:
            is_slower = _medians(now)[0] > _medians(was)[1] * (1.0 + NOISE)
            ratio = number("{:.3f}×".format, now.p50_us / was.p50_us)
            verdict = told("{}; {}", ratio, "slower" if is_slower else "not slower")
        holds = not is_slower if not remark else was is None or not was.counts_for_choice
        routes = (
            choice.route(batch) if choice and side else None
            for choice, side in ((pair.old, was), (pair.new, now))
        )
        devices = " → ".join(dict.fromkeys(side.device for side in (was, now) if side))
        item = row(
            f"{pair.name} · batch {numbers.count(batch)} · on the {inputs}",
            *(None if side is None else times_of(side) for side in (was, now)),
            verdict=verdict,
            tone=Tone.WARN if is_slower else Tone.PLAIN,
            note="; ".join(text for text in (_both(*routes), devices, remark) if text),
        )
        yield _Finding(pair.name, item, holds)


def _medians(latency: Latency) -> tuple[float, float]:
    """Least and largest median over loads; where loads were not kept, the median stands for all."""
    median, loads = latency.p50_us, latency.loads_us
    spread = median_interval(loads) if loads else None
    return (median, median) if spread is None else (min(median, spread.lower), max(median, spread.upper))


def _timed(data: ReportData, choice: TargetChoice | None) -> dict[tuple[int, InputPlace], Latency]:
    """Of the engine that takes requests of each size; simulations, whose speed says nothing, are left out."""
    timed: dict[tuple[int, InputPlace], Latency] = {}
    for evaluation in data.evaluations.evaluations if choice is not None else ():
        engine = data.engine(evaluation.engine)
        for item in evaluation.latencies if engine is not None and not engine.simulated else ():
            if choice is not None and choice.route(item.batch) == evaluation.engine:
                timed.setdefault((item.batch, item.inputs), item)
    return timed


def _why_no_ratio(old: Latency | None, new: Latency | None) -> str:
    if old is None or new is None:
        return f"it was not measured in the {'old' if old is None else 'new'} run"
    if old.device != new.device:
        return f"not comparable: measured on '{old.device}' and on '{new.device}'"
    if not (old.counts_for_choice and new.counts_for_choice):
        return "not comparable: not measured on the target"
    return ""


def _gains(old: ReportData, new: ReportData) -> Iterator[Row]:
    """Speed of each emitted engine over the baselines of its own run, timed in turns."""
    for pair in hardware_pairs(old, new):
        for baseline in BASELINES:
            before, after = _gain(old, pair.old, baseline), _gain(new, pair.new, baseline)
            if before is None and after is None:
                continue
            verdict = caution = ""
            if before is not None and after is not None:
                verdict, caution = _overlap(before, after)
            sides = (times_text(times) for times in (before, after))
            yield row(f"{pair.name} · {baseline}", *sides, verdict=verdict, note=caution)


def _gain(data: ReportData, choice: TargetChoice | None, baseline: str) -> Interval | None:
    """Of several baselines of one plan, the fastest."""
    losers = [] if choice is None else data.losers(choice, {baseline})
    return losers[0].times if losers else None


def other_splits(old: ReportData, new: ReportData) -> frozenset[str]:
    """Splits whose rows are not the same for certain: by the file, the columns, and which rows are read."""
    before, after = ({s.split: (s.digest, s.rule) for s in data.data.splits} for data in (old, new))
    return frozenset(name for name in {*before, *after} if before.get(name) != after.get(name))


def _splits(old: ReportData, new: ReportData) -> Iterator[Row]:
    others = other_splits(old, new)
    before, after = ({split.split: split for split in data.data.splits} for data in (old, new))
    for name in dict.fromkeys((*before, *after)):
        sides = before.get(name), after.get(name)
        verdict, tone = "the same", Tone.GOOD
        if name in others:
            verdict = "read in one run only" if None in sides else "another file, selection or columns"
            tone = Tone.WARN
        sources = (f"{s.name}, {s.rule}, digest {numbers.digest(s.digest)}" for s in sides if s is not None)
        rows = (None if side is None else number(numbers.count, side.rows) for side in sides)
        yield row(name, *rows, verdict=verdict, tone=tone, note=" → ".join(dict.fromkeys(sources)))


def entries(name: str, title: str, old: Mapping[str, str], new: Mapping[str, str]) -> Section:
    """A section of the entries that differ, by name."""
    keys = (key for key in sorted({*old, *new}) if old.get(key) != new.get(key))
    return Section(name, title, tuple(row(key, old.get(key), new.get(key)) for key in keys))
