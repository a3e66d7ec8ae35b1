"""Which choices and engines of two runs are compared with one another."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
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
        before, after = (
            [choice for choice in data.choice.targets if choice.target == target] for data in (old, new)
        )
        if len(before) <= 1 and len(after) <= 1:
            yield HardwarePair(target, "", next(iter(before), None), next(iter(after), None))
            continue
        was = _named(old, before, _names(new, after))
        now = _named(new, after, was)
        for architecture in dict.fromkeys((*was, *now)):
            yield HardwarePair(target, architecture, was.get(architecture), now.get(architecture))


def _named(
    data: ReportData, choices: Sequence[TargetChoice], others: Iterable[str]
) -> dict[str, TargetChoice]:
    """Choices of one target by their architecture.

    `others` are names that the other run has: one piece of hardware here may be one of several there.
    """
    names = _names(data, choices)
    if len(choices) == 1:
        rivals = _architectures(data, choices[0])
        names = [next((name for name in (*names, *others) if name in rivals and name in others), names[0])]
    return dict(zip(names, choices, strict=True))


def _names(data: ReportData, choices: Sequence[TargetChoice]) -> list[str]:
    """The architecture of each choice of one target: the one that its rivals have and no other choice's.

    An engine that is for no architecture in particular competes for each of them, and may be what is emitted.
    """
    rivals = [_architectures(data, choice) for choice in choices]
    names: list[str] = []
    for place, choice in enumerate(choices):
        elsewhere = {name for other, names_ in enumerate(rivals) if other != place for name in names_}
        emitted = data.engine(choice.engine)
        known = "" if emitted is None else emitted.architecture
        own = [name for name in rivals[place] if name not in elsewhere]
        name = known if known in own or not own else own[0]
        names.append(name if name not in names else f"{name} #{place + 1}")
    return names


def _architectures(data: ReportData, choice: TargetChoice) -> tuple[str, ...]:
    ids = (*choice.engines, *(loser.engine for loser in choice.losers))
    engines = (data.engine(name) for name in ids)
    return tuple(dict.fromkeys(engine.architecture for engine in engines if engine is not None))
