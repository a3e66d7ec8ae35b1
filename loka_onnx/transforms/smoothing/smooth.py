"""Smoothing: move range from an activation's channels to the weights that multiply them.

SmoothQuant (Xiao et al., arXiv 2211.10438, equation 3), with a positive factor sₖ for each input channel::

    x · W   =   (x · diag(s)⁻¹) · (diag(s) W)

diag(s)⁻¹ moves on into the maker of x (`makers`): a norm, a linear or a product with constants, at no cost,
or an input of the model, whose features then pass one Mul: scales of numeric features that share one FP8
scale in front of the first layer. Between the two may stand layout operators, Relu, which commutes with
positive factors, Slice, Split, Gather and Concat; all readers of the maker must be linears.

`numerics.smoothing` computes factors and states their use in FP8; `choose_smoothing` chooses tensors by
measured error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from loka_onnx.core.rewrite import Applied, Declined
from loka_onnx.errors import TransformError
from loka_onnx.graph.model import GraphModel
from loka_onnx.transforms.base import Found, Mod
from loka_onnx.transforms.linears.scaling import Vector, absorb_before
from loka_onnx.transforms.smoothing.makers import Maker, divide, find_makers


@dataclass(frozen=True)
class Smoothing:
    """Maker of a tensor, and the divisors of its channels.

    Attributes:
        divisors: s of each channel.
        why: Origin of the factors, for the log.
    """

    maker: Maker
    divisors: Vector
    why: str = ""

    def rewrite(self, model: GraphModel) -> Applied:
        """Divide at the maker, multiply at the readers."""
        maker = self.maker
        for reader in maker.readers:
            absorb_before(model, reader.node, reader.of_rows(self.divisors, 1.0))
        divide(model, maker, self.divisors)
        sites = list(dict.fromkeys(reader.node.name for reader in maker.readers))
        names = ", ".join(f"'{site}'" for site in sites)
        low, high = self.divisors.min(), self.divisors.max()
        what = f"divided by factors from {low:.3g} to {high:.3g}, which moved into {names}{self.why}"
        # Their operands hold other values now: they are calibrated again.
        changed = [*sites, maker.name] if maker.is_linear else sites
        return Applied(maker.name, what, {site: (site,) for site in changed})


class Smooth(Mod[Smoothing]):
    """Move factors of channels from activations into weights.

    Args:
        factors: Divisors sₖ of each channel, by name of the maker (norm, product or model input).

    Raises:
        TransformError: A factor is not a positive number.
    """

    name = "smooth"

    def __init__(self, factors: Mapping[str, npt.ArrayLike]) -> None:
        self._factors = {name: np.asarray(values, np.float64) for name, values in factors.items()}
        for name, values in self._factors.items():
            if values.ndim != 1 or not (np.isfinite(values) & (values > 0)).all():
                raise TransformError(
                    "a smoothing factor is not a positive number",
                    where=f"the factors of '{name}'",
                    evidence=f"their shape is {values.shape}, the least is {values.min(initial=np.inf):.4g}",
                    remedy="leave channels that are zero throughout at 1",
                )

    def match(self, model: GraphModel) -> Found[Smoothing]:
        """Match the makers of the tensors."""
        makers = find_makers(model)
        known = {maker.name: maker for maker in makers.found}
        matches: list[Smoothing] = []
        declined = [entry for entry in makers.declined if entry.at in self._factors]
        told = {entry.at for entry in declined}
        for name, values in self._factors.items():
            if np.all(values == 1.0):
                continue
            maker = known.get(name)
            if maker is not None and values.shape == (maker.channels,):
                matches.append(Smoothing(maker, values))
            elif maker is not None:
                declined.append(Declined(name, f"it has {maker.channels} channels, not {len(values)}"))
            elif name not in told:
                declined.append(Declined(name, "nothing of that name makes what a linear reads"))
        return Found(tuple(matches), tuple(declined))

    def rewrite(self, model: GraphModel, match: Smoothing) -> Applied:
        """Divide at one maker, multiply at its readers."""
        return match.rewrite(model)
