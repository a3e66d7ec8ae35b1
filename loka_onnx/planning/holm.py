"""Holm's step-down: many claims at once, none wrong but for one risk.

Each of n claims says that an unknown θ_u is at most a limit c_u fixed before the data were seen; it is shown
when an upper bound U_u(r), which fails with risk r, is inside c_u. All claims are tested at risk α/n each;
shown ones pass their risk to the others, which are tested at α/(number left), and so on until no further one
is shown. The result bounds *every* θ_u, all at once but for the risk α:

    θ_u ≤ c_u                     where the claim was shown,
    θ_u ≤ U_u(α/number left)      where it was not.

Let F be the set of false claims (θ_u > c_u). With F empty, the first line is true, and so is the second,
because a bound that did not show its claim is above c_u. Otherwise, but for the risk α, U_u(α/|F|) ≥ θ_u >
c_u for all u in F at once. Then no claim of F is ever shown: before the first of them at most n − |F| others
were shown, so it was tested at no more than α/|F|. Hence at least |F| claims are left, α/number left is at
most α/|F|, and the bounds of F hold; claims outside F are at most their limits, which either line allows.

The bounds hold at once, so decisions from them need no further correction. The price of passing on risk: for
a shown claim only the limit is known, however small U_u is.

Sources: Holm, "A Simple Sequentially Rejective Multiple Test Procedure" (Scandinavian Journal of Statistics
1979); the bounds as in Strassburger and Bretz, "Compatible simultaneous lower confidence bounds for the Holm
procedure and other Bonferroni-based closed tests" (Statistics in Medicine 2008).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Generic, TypeVar

C = TypeVar("C")


@dataclass(frozen=True)
class StepDown(Generic[C]):
    """Shown claims with the risk of their tests, and the risk of the last test of the others."""

    shown: dict[C, float]
    risk: float


def step_down(claims: Collection[C], risk: float, is_shown: Callable[[C, float], bool]) -> StepDown[C]:
    """Test all claims at a joint risk α of showing a false one.

    `is_shown` tells whether a claim's bound at a risk is inside its limit; a larger risk must not undo it.
    """
    left, shown, each = list(claims), dict[C, float](), risk
    while left:
        each = risk / len(left)
        now = [claim for claim in left if is_shown(claim, each)]
        if not now:
            break
        shown |= dict.fromkeys(now, each)
        left = [claim for claim in left if claim not in shown]
    return StepDown(shown, each)
