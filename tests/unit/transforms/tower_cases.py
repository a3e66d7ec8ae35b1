"""Towers behind a Split that `batch_towers` must rewrite, in every form."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from shape_models import Case, weight

from loka_onnx.transforms.linears.batch_towers import BatchTowers


@dataclass(frozen=True)
class Form:
    """Text of towers of some layers.

    Attributes:
        count: Number of towers.
        widths: K of the first layer, then N of each.
        layer: Text of a layer, with ``{h}`` and ``{x}`` for its result and input, ``{w}`` and ``{b}``.
        function: Text of what follows a layer, with ``{y}`` and ``{h}``; empty for nothing.
        tail: What follows the towers, whose results are ``y0``, ``y1`` and so on.
        out: Columns of the model's output.
    """

    count: int
    widths: tuple[int, ...]
    layer: str = "{h} = Gemm<transB=1>({x}, {w}, {b})"
    function: str = "{y} = Relu({h})"
    tail: str = ""
    out: int = 0

    def case(self) -> Case:
        parts = [f"p{tower}" for tower in range(self.count)]
        body = [f"[cut] {', '.join(parts)} = Split<axis=-1>(x, sizes)"]
        constants: dict[str, Any] = {"sizes": np.full(self.count, self.widths[0])}
        body.extend(self._tower(tower, constants) for tower in range(self.count))
        results = ", ".join(f"y{tower}" for tower in range(self.count))
        body.append(self.tail or f"y = Concat<axis=1>({results})")
        columns = self.out or self.count * self.widths[-1]
        return Case(
            " ".join(body),
            constants=constants,
            inputs=f"float[batch,{self.count * self.widths[0]}] x",
            outputs=f"float[batch,{columns}] y",
            mod=BatchTowers,
        )

    def _tower(self, tower: int, constants: dict[str, Any]) -> str:
        """One tower; its weights are others than those of the next."""
        text, x, depth = [], f"p{tower}", len(self.widths) - 1
        for number, (k, n) in enumerate(zip(self.widths, self.widths[1:], strict=False)):
            w, b, h = (f"{letter}{number}_{tower}" for letter in "wbh")
            y = f"y{tower}" if number == depth - 1 else f"a{number}_{tower}"
            is_transposed = "transB=1" in self.layer
            constants[w] = weight(*((n, k) if is_transposed else (k, n)), seed=10 * tower + number)
            if "{b}" in self.layer:
                constants[b] = weight(n, seed=100 + 10 * tower + number)
            made = h if self.function else y
            text.append(f"[towers__{tower}__fc{number}] " + self.layer.format(h=made, x=x, w=w, b=b))
            text.append(self.function.format(y=y, h=h))
            x = y
        return " ".join(text)


TOWERS: dict[str, Case] = {
    "four_of_one_layer": Form(4, (8, 5)).case(),
    "three_of_two_layers": Form(3, (8, 4, 6), function="{y} = Tanh({h})").case(),
    "two_of_three_layers": Form(2, (4, 8, 8, 3)).case(),
    "products_and_additions": Form(3, (8, 4, 4), "m{h} = MatMul({x}, {w}) {h} = Add({b}, m{h})").case(),
    "without_bias": Form(4, (8, 4), "{h} = MatMul({x}, {w})", "").case(),
    "functions_with_attributes": Form(4, (8, 4), function="{y} = LeakyRelu<alpha=0.25>({h})").case(),
    "what_follows_differs": Form(
        4, (8, 4), tail="z0 = Softmax(y0) z1 = Mul(y1, y2) z2 = Add(z0, y3) y = Sub(z1, z2)", out=4
    ).case(),
}
