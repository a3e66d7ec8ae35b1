"""A model with one boolean per switch that selects the exact or the low-precision site.

One session evaluates any subset of sites without a rebuild. The low-precision side is an If branch, so a pass
costs little more than the exact model. A site with several recipes has a switch for each: its exact side is
the If of the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
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
    """A switchable model on disk, picklable: for each switch its site, and the tensor that it sets."""

    path: Path
    sites: tuple[str, ...]
    outputs: tuple[str, ...]
    conditions: tuple[str, ...]

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

    The `switches` of one site stand together. `factor` multiplies every scale, those of weights included
    (`observers.arithmetic`). `biases` are added to low-precision sites by name, and broadcast to the output.
    """
    outputs = tuple(tensor.name for tensor in model.outputs)
    moved = moved_activations(scales, factor)
    vector = model.add_input(SWITCHES, np.bool_, [len(switches)])
    conditions = []
    for position, switch in enumerate(switches):
        name = switch.site.name
        index = model.constant(f"{name}.switch_index", np.array(position, dtype=np.int64))
        conditions.append(model.add("Gather", [vector, index], f"{name}.switch", np.bool_, {"axis": 0}))
    for name, of_site in groupby(zip(switches, conditions, strict=True), lambda each: each[0].site.name):
        _make_switchable(model, [*of_site], moved, factor, (biases or {}).get(name))
    model.save(path)
    sites, tensors = (switch.site.name for switch in switches), (each.name for each in conditions)
    return SwitchableFile(path, tuple(sites), outputs, tuple(tensors))


def _make_switchable(
    model: GraphModel,
    switches: Sequence[tuple[Switch, Any]],
    scales: Scales,
    factor: float,
    bias: npt.NDArray[np.float64] | None,
) -> None:
    """Add the switches of one site, each with its condition."""
    name = switches[0][0].site.name
    node = model.node(name)
    original = node.outputs[0]
    readers = list(original.outputs)
    is_output = model.is_output(original)
    with model.collecting() as nodes:
        chosen = model.add_like(node, node.inputs, f"{name}.exact")
    for switch, condition in switches:
        with model.collecting() as low_nodes:
            low = low_precision(model, switch.site, switch.recipe, scales, factor)
            if bias is not None:
                constant = model.constant(f"{name}.bias_of_error", bias.astype(np.float32))
                low = model.add("Add", [low, constant], f"{name}.unbiased", low.dtype)
        inner = Branch(nodes, chosen)
        with model.collecting() as nodes:
            chosen = model.choose(condition, Branch(low_nodes, low), inner, f"{name}.chosen")
    model.graph.nodes.extend(nodes)
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
        """Run with the sites `on` in low precision and all others exact; `outputs` None for all.

        Of several switches of a site, the last one counts.
        """
        vector = np.zeros(len(self.file.sites), dtype=np.bool_)
        vector[[self._index[site] for site in on]] = True
        wanted = self.file.outputs if outputs is None else outputs
        return self._session.run({**inputs, SWITCHES: vector}, wanted)


@dataclass(frozen=True)
class Unit:
    """Sites that are switched on together; `switches` are positions.

    `recipe` is the id of the recipe or the precision of a norm; for several sites, which share the `tensor`
    (before layout operations), the rounding of it (`Recipe.activation_id`). Without `has_scales` rounding
    depends on no scale, as to BF16.
    """

    sites: tuple[str, ...]
    switches: tuple[int, ...]
    recipe: str
    tensor: str | None = None
    has_scales: bool = True


def units_of(model: GraphModel, switches: Sequence[Switch]) -> tuple[Unit, ...]:
    """Return each switch alone, then the sites that share a quantized tensor.

    Only linear sites that a plan may run in FP8 share: a norm is rounded otherwise, and a product too small
    for FP8 reads the exact tensor.
    """
    units: list[Unit] = []
    readers: dict[tuple[str, str], dict[str, int]] = {}
    for position, switch in enumerate(switches):
        site, is_norm = switch.site, switch.site.kind is SiteKind.NORM
        recipe = NORM_PRECISION if is_norm else switch.recipe.id
        units.append(Unit((site.name,), (position,), recipe, has_scales=not is_norm))
        if site.is_fp8_able:
            tensor = layout_root(model.node(site.name).inputs[site.activation.index]).tensor
            readers.setdefault((tensor.name, switch.recipe.activation_id), {})[site.name] = position
    together = (
        Unit(tuple(sites), tuple(sites.values()), rounding, tensor)
        for (tensor, rounding), sites in readers.items()
        if len(sites) > 1
    )
    return (*units, *together)
