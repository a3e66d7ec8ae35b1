"""Which choices and engines of two runs are compared with one another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from loka_onnx.core.evaluation import TargetChoice
from loka_onnx.report import ReportData


@dataclass(frozen=True)
class HardwarePair:
    """Choices of both runs for one target, and architecture where a run has engines for several."""

    target: str
    architecture: str
    old: TargetChoice | None
    new: TargetChoice | None

    @property
    def name(self) -> str:
        """Target, and architecture where there are several: ``rtx (sm120)``."""
        return f"{self.target} ({self.architecture})" if self.architecture else self.target

    @property
    def engines(self) -> tuple[tuple[str | None, str | None], ...]:
        """Ids of the two engines that answer requests of one size, by ascending size; each two once.

        A main engine that no size is routed to is emitted all the same: it comes last.
        """
        old, new = self.old, self.new
        sizes = sorted({route.batch for side in (old, new) if side for route in side.routes}) or [1]
        pairs = [(old.route(size) if old else None, new.route(size) if new else None) for size in sizes]
        mains = (old.engine if old else None, new.engine if new else None)
        is_routed = all(
            main in {pair[side] for pair in pairs} for side, main in enumerate(mains) if main is not None
        )
        return tuple(dict.fromkeys(pairs if is_routed else [*pairs, mains]))


def hardware_pairs(old: ReportData, new: ReportData) -> Iterator[HardwarePair]:
    """The choices of both runs by target and, where one has several for a target, by architecture."""
    for target in dict.fromkeys(choice.target for data in (old, new) for choice in data.choice.targets):
        was, now = (_by_architecture(data, target) for data in (old, new))
        if len(was) <= 1 and len(now) <= 1:
            yield HardwarePair(target, "", next(iter(was.values()), None), next(iter(now.values()), None))
            continue
        for architecture in dict.fromkeys((*was, *now)):
            yield HardwarePair(target, architecture, was.get(architecture), now.get(architecture))


def _by_architecture(data: ReportData, target: str) -> dict[str, TargetChoice]:
    """Choices of one target by the architecture of the emitted engine, numbered where several have one."""
    choices = dict[str, TargetChoice]()
    for choice in data.choice.targets:
        if choice.target == target:
            engine = data.engine(choice.engine)
            name = "" if engine is None else engine.architecture
            choices[name if name not in choices else f"{name} #{len(choices) + 1}"] = choice
    return choices
