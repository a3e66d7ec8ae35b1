"""What goes to a machine with a GPU: forms of every variant, rows and exact logits.

The layout that is read is what `compare` leaves, one directory a model, one in it for each variant::

    <MODELS>/<model>/rows.npz                 the inputs of some 2,048 rows, by name
    <MODELS>/<model>/<variant>/model.onnx     what a tool wrote
    <MODELS>/<model>/<variant>/variant.json   {model, variant, peer, precision, …}

Exactly one variant of a model is in FP32 and of no tool: the exported model, which logits are held against
(``"exact": true`` in its `variant.json` marks another). What else may stand there: ``inside_budget`` (false:
its accuracy was judged elsewhere, and it may not be chosen), ``order`` (which engines are built first).

Each goes to Inductor in the form of `on_device_graphs`, and to ONNX Runtime as it was written. A variant of
no tool is compiled as a user without this project would, without its kernels. Where a plan is there twice,
with the rest in FP32 and (``…-bf16``) in BF16, Inductor gets the second. One variant is added, which
separates what ``loka-wide`` has together: ``bf16-kernels`` is the exported graph in BF16 with this project's
kernels and without mods. Its accuracy is that of ``bf16``, whose graph it is.

Beside each variant lie the logits of its own graph in ONNX Runtime on the CPU, in the form that its accuracy
is judged in: an engine is held against them, because what a tool did to the accuracy is not the engine's
doing.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx

from benchmarks.engines.plans import wide_plan
from benchmarks.peers.fastest import NOBODY
from benchmarks.peers.judging import as_run
from benchmarks.peers.on_device_graphs import Form, described, formed, has_float8
from benchmarks.peers.variants import KERNELS, OWN
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.engines.inductor.backend import FUSE
from loka_onnx.engines.inductor.fusions import fuse
from loka_onnx.engines.inductor.fusions.planned import PlannedGraph
from loka_onnx.errors import LokaError, ModelError
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan

ROWS, EXACT, VARIANT, MODEL = "rows.npz", "exact.npz", "variant.json", "model.onnx"
LOGITS = "own.npz"
"""Logits of a variant's own graph."""
INDUCTOR, ONNXRUNTIME = "inductor.onnx", "onnxruntime.onnx"
ORDER: tuple[tuple[str, ...], ...] = (
    ("bf16",),
    ("loka-bf16", "loka-wide"),
    ("blanket-bf16", "modelopt-best"),
    ("loka-split-bf16", "modelopt-default", "modelopt-linears"),
    ("onnxruntime-channels", "quark-channels"),
    ("onnxruntime-linears", "quark-linears"),
    ("fp16", KERNELS),
    ("fp32", "modelopt-fp32", "onnxruntime-default", "quark-default"),
)
"""Which engines are built first: time may run out."""


@dataclass(frozen=True)
class Variant:
    """One variant of a model, ready to build.

    Attributes:
        model: Name of the model.
        name: Name of the variant.
        directory: Its files.
        info: Its `variant.json`, with what was done to the graph.
    """

    model: str
    name: str
    directory: Path
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def artifact(self) -> ModelArtifact:
        """Of what Inductor takes."""
        return serde.read(ModelArtifact, self.directory / "model.json")

    @property
    def plan(self) -> PrecisionPlan:
        """What that runs where."""
        return serde.read(PrecisionPlan, self.directory / "plan.json")

    def takes(self, backend: str) -> Path | None:
        """The graph for a backend; None where it has none."""
        path = self.directory / {"inductor": INDUCTOR, "onnxruntime": ONNXRUNTIME}[backend]
        return path if path.is_file() else None


def variants_in(directory: Path) -> list[Variant]:
    """Every variant of every model, those first that are to be built first."""
    found = []
    for path in sorted(directory.glob(f"*/*/{VARIANT}")):
        info = json.loads(path.read_text(encoding="utf-8"))
        found.append(Variant(path.parent.parent.name, path.parent.name, path.parent, info))
    return sorted(found, key=lambda each: (order_of(each), each.name, each.model))


def order_of(variant: Variant) -> float:
    """What a comparison needs most comes first; a variant that is not known here, last."""
    ranks = {name: rank for rank, names in enumerate(ORDER) for name in names}
    return float(variant.info.get("order", ranks.get(variant.name, len(ORDER))))


def prepare(models: Path, target: Path, only: Sequence[str] = ()) -> list[Variant]:
    """Bring every variant into the form that engine makers take; see the module.

    A variant that cannot be is left out of what is built, with the reason in its `variant.json`.

    Args:
        models: The layout that the module describes.
        target: Where forms, rows and exact logits go; created anew.
        only: Models to take; all that have variants where none is named.

    Raises:
        ModelError: A model has no rows, or no exported model, or several.
    """
    shutil.rmtree(target, ignore_errors=True)
    for place in sorted(path.parent for path in models.glob(f"*/{ROWS}")):
        given = [v for v in variants_in(models) if v.model == place.name]
        if not given or (only and place.name not in only):
            continue
        exact = _exact_of(place, given)
        with np.load(place / ROWS, allow_pickle=False) as arrays:
            rows = {name: arrays[name] for name in arrays.files}
        for each in given:
            _prepare(each, target / place.name, is_exact=each is exact)
            _write_logits(each.directory / MODEL, rows, target / place.name / each.name / LOGITS)
        plain = next((v.info for v in given if v.name == "bf16"), {})
        _add_kernels(exact, target / place.name, plain.get("inside_budget"))
        if not _write_logits(exact.directory / MODEL, rows, target / place.name / EXACT):
            raise ModelError(f"ONNX Runtime does not run the exported model '{place.name}'", where=str(place))
        shutil.copyfile(place / ROWS, target / place.name / ROWS)
    prepared = variants_in(target)
    if not prepared:
        raise ModelError(f"there are no models under '{models}'", remedy=f"each needs {ROWS} and variants")
    return prepared


def _exact_of(place: Path, given: list[Variant]) -> Variant:
    plain = [v for v in given if v.info.get("precision") == Precision.FP32 and v.info.get("peer") in NOBODY]
    found = [v for v in given if v.info.get("exact")] or plain
    if len(found) != 1:
        raise ModelError(
            f"model '{place.name}' has {len(found)} variants that may be the exported model",
            where=str(place),
            evidence=", ".join(f"{v.name} ({v.info.get('precision')})" for v in given) or "no variants",
            remedy='mark it in its variant.json with "exact": true',
        )
    return found[0]


def _prepare(given: Variant, target: Path, *, is_exact: bool) -> None:
    place, source = target / given.name, given.directory / MODEL
    info = given.info | {"model": given.model, "variant": given.name, "exact": is_exact}
    place.mkdir(parents=True)
    narrow = given.directory.with_name(f"{given.name}-bf16")
    try:
        shutil.copyfile(source, place / ONNXRUNTIME)
        info["fp8_in_graph"] = has_float8(onnx.load(os.fspath(source)))
        if (narrow / MODEL).is_file():
            info["instead"] = narrow.name
        else:
            base = Precision.FP32 if is_exact else Precision.BF16
            info |= _write_form(formed(source, place / INDUCTOR, given.name, base), place)
    # Whatever a graph makes ONNX raise is this variant's row.
    except Exception as error:
        (place / INDUCTOR).unlink(missing_ok=True)
        info["not for inductor"] = " ".join(f"{type(error).__name__}: {error}".split())[:600]
    _write(place, info)


def _write_form(form: Form, place: Path) -> dict[str, Any]:
    serde.write(replace(form.model, path=Path(INDUCTOR)), place / "model.json")
    serde.write(form.plan, place / "plan.json")
    return {
        "form": list(form.notes),
        "base": str(form.plan.base),
        "fp8_products": list(form.plan.fp8_sites),
        "fp8_share": form.plan.fp8_share,
        "products": sum(site.n > 0 for site in form.model.sites),
        "fused": bool(fuse(PlannedGraph.load(place / INDUCTOR)).fused),
    }


def _add_kernels(exact: Variant, target: Path, inside: bool | None) -> None:
    """BF16 by this project's kernels, without mods.

    `inside` is the verdict on BF16 as exported: the graph is the same.
    """
    place = target / KERNELS
    source = described(onnx.load(os.fspath(exact.directory / MODEL)), exact.directory / MODEL)
    planned = apply_plan(
        source, wide_plan(source, Precision.BF16), PlanForm(Precision.BF16), place / "planned.onnx"
    )
    form = formed(planned.path, place / INDUCTOR, KERNELS)
    info = {"model": exact.model, "variant": KERNELS, "peer": OWN, "precision": "bf16", "added": True}
    info |= {} if inside is None else {"inside_budget": inside}
    _write(place, info | _write_form(form, place))
    (place / "planned.onnx").unlink()


def _write_logits(graph: Path, rows: dict[str, Any], target: Path) -> bool:
    """Outputs of a graph in ONNX Runtime on the CPU; false where it does not run it."""
    try:
        with TemporaryDirectory() as scratch:
            path = as_run(graph, Path(scratch))
            logits = OnnxSession(path, SessionOptions(optimize=False)).run(rows)
    except LokaError:
        return False
    np.savez(target, **logits)  # type: ignore[arg-type]  # allow_pickle is the other keyword
    return True


def _write(place: Path, info: dict[str, Any]) -> None:
    text = json.dumps(info, indent=1, sort_keys=True)
    (place / VARIANT).write_text(text + "\n", encoding="utf-8")


def options_of(variant: Variant) -> dict[str, int]:
    """Options of a build by Inductor: a user without this project has none of its kernels.

    Where they have nothing to compute, the engine is the same with them.
    """
    return {FUSE: 0} if variant.info.get("peer") in NOBODY and variant.info.get("fused", True) else {}
