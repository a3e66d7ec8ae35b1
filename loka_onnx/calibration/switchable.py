"""A model with one boolean a site that chooses between the exact and the low-precision site.

One session then evaluates any plan: one site at a time, a joint plan, a bisection, without building anything
again. The low-precision side sits in an If branch, so that a pass costs little more than the exact model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from loka_onnx.calibration.arithmetic import low_precision
from loka_onnx.core.recipe import Recipe
from loka_onnx.core.site import Site
from loka_onnx.graph.model import Branch, GraphModel
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions

SWITCHES = "loka_switches"

Arrays = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Switch:
    """One site in one recipe that can be turned on."""

    site: Site
    recipe: Recipe


class SwitchableModel:
    """Runs the model with any subset of its sites in low precision.

    Args:
        model: The exact model; consumed.
        switches: What can be turned on; a site may occur once only.
        scales: Activation scales by `Recipe.activation_id` and tensor name.
        scratch: Directory for the model file, on the file system of the tables.
        threads: Threads of one operator, 0 for ONNX Runtime's choice.
    """

    def __init__(
        self,
        model: GraphModel,
        switches: Sequence[Switch],
        scales: Mapping[str, dict[str, float]],
        scratch: Path,
        threads: int = 0,
    ) -> None:
        self.switches = tuple(switches)
        self._index = {switch.site.name: position for position, switch in enumerate(self.switches)}
        self.output_names = tuple(tensor.name for tensor in model.outputs)
        vector = model.add_input(SWITCHES, np.bool_, [len(self.switches)])
        for position, switch in enumerate(self.switches):
            self._add(model, switch, vector, position, dict(scales[switch.recipe.activation_id]))
        path = scratch / "switchable.onnx"
        model.save(path)
        self._session = OnnxSession(path, SessionOptions(threads=threads))

    def run(self, inputs: Arrays, on: Sequence[str] = ()) -> dict[str, npt.NDArray[Any]]:
        """Outputs with the named sites in low precision and everything else exact."""
        vector = np.zeros(len(self.switches), dtype=np.bool_)
        for site in on:
            vector[self._index[site]] = True
        return self._session.run({**inputs, SWITCHES: vector}, self.output_names)

    @staticmethod
    def _add(model: GraphModel, switch: Switch, vector: Any, position: int, scales: dict[str, float]) -> None:
        name = switch.site.name
        node = model.node(name)
        index = model.constant(f"{name}.switch_index", np.array(position, dtype=np.int64))
        condition = model.add("Gather", [vector, index], f"{name}.switch", np.bool_, {"axis": 0})
        original = node.outputs[0]
        readers = list(original.outputs)
        is_output = model.is_output(original)
        with model.collecting() as exact_nodes:
            exact = model.add_like(node, node.inputs, f"{name}.exact")
        with model.collecting() as low_nodes:
            low = low_precision(model, switch.site, switch.recipe, scales)
        chosen = model.choose(condition, Branch(low_nodes, low), Branch(exact_nodes, exact), f"{name}.chosen")
        model.replace_uses(original, chosen, None if is_output else readers)
        node.outputs.clear()
        node.inputs.clear()
        model.graph.nodes.remove(node)
