"""A model with one boolean per site that selects the exact or the low-precision site.

One session evaluates any subset of sites without a rebuild. The low-precision side is an If branch, so a pass
costs little more than the exact model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.observers.arithmetic import NORM_PRECISION, low_precision, moved_activations
from loka_onnx.core.recipe import Recipe, Scales
from loka_onnx.core.site import Site, SiteKind
from loka_onnx.graph.layout import layout_root
from loka_onnx.graph.model import Branch, GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

SWITCHES = "loka_switches"

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Switch:
    """A site and the recipe it can be switched to."""

    site: Site
    recipe: Recipe


@dataclass(frozen=True)
class SwitchableFile:
    """A switchable model on disk, picklable; `sites` are in the order of their switches."""

    path: Path
    sites: tuple[str, ...]
    outputs: tuple[str, ...]

    def open(self, threads: int = 1) -> SwitchableModel:
        """Load the model with so many threads per operator; 0 for ONNX Runtime's choice."""
        return SwitchableModel(self, threads)


def write_switchable(
    model: GraphModel,
    switches: Sequence[Switch],
    scales: Scales,
    path: Path,
    factor: float = 1.0,
    biases: Mapping[str, npt.NDArray[np.float64]] | None = None,
) -> SwitchableFile:
    """Write the model that runs any subset of its sites in low precision; `model` is consumed.

    Args:
        factor: Multiplies every scale, those of weights included (`observers.arithmetic`).
        biases: Added to a low-precision site, by its name; broadcasts to its output.
    """
    outputs = tuple(tensor.name for tensor in model.outputs)
    moved = moved_activations(scales, factor)
    vector = model.add_input(SWITCHES, np.bool_, [len(switches)])
    for position, switch in enumerate(switches):
        name = switch.site.name
        index = model.constant(f"{name}.switch_index", np.array(position, dtype=np.int64))
        condition = model.add("Gather", [vector, index], f"{name}.switch", np.bool_, {"axis": 0})
        _make_switchable(model, switch, condition, moved, factor, (biases or {}).get(name))
    model.save(path)
    return SwitchableFile(path, tuple(switch.site.name for switch in switches), outputs)


def _make_switchable(
    model: GraphModel,
    switch: Switch,
    condition: Any,
    scales: Scales,
    factor: float,
    bias: npt.NDArray[np.float64] | None,
) -> None:
    name = switch.site.name
    node = model.node(name)
    original = node.outputs[0]
    readers = list(original.outputs)
    is_output = model.is_output(original)
    with model.collecting() as exact_nodes:
        exact = model.add_like(node, node.inputs, f"{name}.exact")
    with model.collecting() as low_nodes:
        low = low_precision(model, switch.site, switch.recipe, scales, factor)
        if bias is not None:
            constant = model.constant(f"{name}.bias_of_error", bias.astype(np.float32))
            low = model.add("Add", [low, constant], f"{name}.unbiased", low.dtype)
    chosen = model.choose(condition, Branch(low_nodes, low), Branch(exact_nodes, exact), f"{name}.chosen")
    model.replace_uses(original, chosen, None if is_output else readers)
    node.outputs.clear()
    node.inputs.clear()
    model.graph.nodes.remove(node)


class SwitchableModel:
    """Session of a switchable model; `threads` per operator, 0 for ONNX Runtime's choice."""

    def __init__(self, file: SwitchableFile, threads: int = 0) -> None:
        self.file = file
        self._index = {site: position for position, site in enumerate(file.sites)}
        self._session = OnnxSession(file.path, SessionOptions(threads=threads))

    def run(
        self, inputs: Arrays, on: Sequence[str] = (), outputs: Sequence[str] | None = None
    ) -> dict[str, npt.NDArray[Any]]:
        """Run with the sites `on` in low precision and all others exact; `outputs` None for all."""
        vector = np.zeros(len(self._index), dtype=np.bool_)
        for site in on:
            vector[self._index[site]] = True
        wanted = self.file.outputs if outputs is None else outputs
        return self._session.run({**inputs, SWITCHES: vector}, wanted)


@dataclass(frozen=True)
class Unit:
    """Sites that are switched on together.

    Attributes:
        sites: Their names, in the model's order.
        recipe: Id of the recipe, or the precision of a norm; for several sites the rounding of the shared
            tensor (`Recipe.activation_id`).
        tensor: The tensor that several sites share, before layout operations; None for a single site.
        has_scales: Whether rounding depends on scales; rounding to BF16 does not.
    """

    sites: tuple[str, ...]
    recipe: str
    tensor: str | None = None
    has_scales: bool = True


def units_of(model: GraphModel, switches: Sequence[Switch]) -> tuple[Unit, ...]:
    """Return each site alone, then the sites that share a quantized tensor.

    Only linear sites that a plan may run in FP8 share: a norm is rounded otherwise, and a product too small
    for FP8 reads the exact tensor.
    """
    units: list[Unit] = []
    readers: dict[tuple[str, str], list[str]] = {}
    for switch in switches:
        site, is_norm = switch.site, switch.site.kind is SiteKind.NORM
        units.append(
            Unit((site.name,), NORM_PRECISION if is_norm else switch.recipe.id, has_scales=not is_norm)
        )
        if site.is_fp8_able:
            tensor = layout_root(model.node(site.name).inputs[site.activation.index]).tensor
            readers.setdefault((tensor.name, switch.recipe.activation_id), []).append(site.name)
    together = (
        Unit(tuple(sites), rounding, tensor)
        for (tensor, rounding), sites in readers.items()
        if len(sites) > 1
    )
    return (*units, *together)
