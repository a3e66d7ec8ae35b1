"""A ranker of production size made ready for engines: trained, exported, rewritten, calibrated, planned.

What took long stays in files, so that a run that was cut short goes on from them.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from benchmarks.engines.cases import RECIPES, Case
from benchmarks.engines.plans import WORTH
from benchmarks.engines.projected import Projected, Rows, best_trial, create_projected, exact_products
from benchmarks.engines.timing import alone
from benchmarks.pipeline.training import GROUP
from loka_onnx.calibration.calibrate import ProbeOptions, calibrate
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact, OutputKind, OutputSpec
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.serde import write_text
from loka_onnx.data.selection import RowRange
from loka_onnx.engines.registry import get_backend
from loka_onnx.evaluation.predictions import Run
from loka_onnx.export.torch_module import export_torch
from loka_onnx.planning.high_error_channels import errors_to_leave
from loka_onnx.planning.policy import FAST, PlanOptions, make_plans
from loka_onnx.planning.site_speed import DeviceTimings
from loka_onnx.planning.timings import known_timings
from loka_onnx.sessions.onnx_session import OnnxSession
from loka_onnx.transforms.base import Mod
from loka_onnx.transforms.linears.split_high_error_channels import SplitHighErrorChannels
from loka_onnx.transforms.sequence import DEFAULT_MODS, apply_mods
from loka_zoo import FeatureSpec
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import Part, PreparedData
from loka_zoo.training import TrainOptions

Tell = Callable[[str], None]
CHECK_ROWS = 64
"""Rows that mods are checked on."""
PARITY_ROWS = 512
PARITY = 1e-4
"""Largest accepted difference of logits between the reference on the GPU and the exported model, relative to
the larger of 1 and the largest logit (`export.torch_module` has the reason)."""
LARGE = 1 << 28
"""Operations a row, for which calibration on a CPU takes fewer rows."""


@dataclass(frozen=True)
class Counts:
    """How much is calibrated.

    Attributes:
        rows: Rows of ranges and errors.
        sensitivity: Rows of sensitivities.
        draws: Draws of the rounding noise.
    """

    rows: int
    sensitivity: int
    draws: int


@dataclass(frozen=True)
class Trained:
    """A trained model.

    Attributes:
        exported: As ONNX.
        spec: Its output, with the budget.
        run: Runs it in FP32 where it was trained.
        facts: How it was trained, for the record.
    """

    exported: ModelArtifact
    spec: OutputSpec
    run: Run
    facts: dict[str, Any]


@dataclass(frozen=True)
class Prepared:
    """What engines are built from.

    Attributes:
        model: After mods.
        plans: Its plans.
        facts: How they came about, for the record.
    """

    model: ModelArtifact
    plans: PlanSet
    facts: dict[str, Any]


def opened_data(directory: Path, scratch: Path, rows: int | None) -> PreparedData:
    """The four splits, or the first rows of each.

    Args:
        directory: Holds the three files.
        scratch: Where the directory is linked under the name that the data have.
        rows: Rows of each split; None for all.
    """
    link = scratch / "movielens-1m"
    link.unlink(missing_ok=True)
    link.symlink_to(directory.resolve(), target_is_directory=True)
    data = movielens_1m(scratch)
    if rows is None:
        return data
    first = {}
    for name, part in data.splits.items():
        start = (part.rows.start or 0) if part.rows else 0
        first[name] = Part(part.path, RowRange(start, start + min(rows, data.open(name).rows)))
    return replace(data, splits=first)


def reference_run(module: nn.Module, device: str, output: str) -> Run:
    """Runs a module in FP32, without TF32."""

    @torch.inference_mode()
    def run(inputs: Mapping[str, npt.NDArray[Any]]) -> Mapping[str, npt.NDArray[Any]]:
        with exact_products():
            feeds = {name: torch.from_numpy(value).to(device) for name, value in inputs.items()}
            return {output: module(**feeds).cpu().numpy()}

    return run


def calibrated(model: ModelArtifact, spec: OutputSpec, data: PreparedData, counts: Counts) -> Profile:
    """Probe the model on real rows; batches so small that every core has one."""
    batch = max(16, min(512, counts.sensitivity // (os.cpu_count() or 1)))
    options = ProbeOptions(
        recipes=RECIPES,
        batch_size=batch,
        rows=counts.rows,
        error_precision=None,
        sensitivity_rows=counts.sensitivity,
        group=GROUP,
        draws=counts.draws,
    )
    rows = data.open("calibration", (data.label, GROUP))
    with TemporaryDirectory(dir=model.path.parent) as scratch:
        return calibrate(model, (spec,), rows, Path(scratch), options)


def planned(
    model: ModelArtifact, profile: Profile, spec: OutputSpec, case: Case, device: str
) -> tuple[PlanSet, dict[str, str]]:
    """Plans as a run makes them, and three that leave to the fused kernels what they compute.

    One of them may cost half of the budget, because what is inside of it must be so by the upper end of an
    interval, and the rows that choose are few.

    Returns:
        The plans, each with other sites in FP8, and of a name that has no plan the reason.
    """
    fused = get_backend("inductor").fused_sites(model.path, Precision.BF16)
    timings = known_timings(device, ())
    known = DeviceTimings(device, "inductor", timings, case.batches, "", fused)
    small = {site.name for site in model.sites if site.is_fp8_able and site.k * site.n < WORTH}
    outside = {site.name for site in model.sites if site.is_fp8_able and site.name in fused}

    def made(plans: tuple[str, ...], keep: Collection[str], part: float = 1.0) -> PlanSet:
        options = PlanOptions(tuple(sorted(keep)), plans=plans, devices=(known,))
        judged = replace(spec, budget=part * spec.budget)
        return make_plans(model, profile, (judged,), RECIPES, options)

    plain = made(("bf16", "fp8-all", FAST, "fp8-safe"), ())
    named = {plan.id: plan for plan in plain.plans}
    # What leaves more to the fused kernels goes first: of plans with the same sites the first stays.
    for name, keep, part in (
        ("fp8-half", outside | small, 0.5),
        ("fp8-pays", outside | small, 1.0),
        ("fp8-outside", outside, 1.0),
    ):
        (plan,) = made(("fp8-safe",), keep, part).plans
        named[name] = replace(plan, id=name)
    named["fp8-safe"] = named.pop("fp8-safe")
    left_out = {FAST: "; ".join(plain.notes)} if plain.notes else {}
    unlike: dict[frozenset[str], PrecisionPlan] = {}
    for name, plan in named.items():
        same = unlike.setdefault(frozenset(plan.fp8_sites), plan)
        if same is not plan:
            left_out[name] = f"has the sites of {same.id}"
    return PlanSet(tuple(unlike.values())), left_out


def trained_model(
    case: Case, data: PreparedData, options: argparse.Namespace, directory: Path, tell: Tell
) -> Trained:
    """Train and export, or go on from the files, and check that both are the same model.

    Raises:
        RuntimeError: They are not.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    features = FeatureSpec(data.categorical, data.numeric)

    def make() -> Projected:
        return create_projected(case.model, case.preset, features, case.categorical, 0).to(device)

    weights, facts = directory / "trained.pt", directory / "trained.json"
    if not facts.exists():
        rows = {name: Rows.of(data.open(name), data.label, device) for name in ("train", "selection")}
        tell(f"{rows['train'].count} rows to train on, on {device}")
        trials = [
            TrainOptions(epochs, options.training_batch, rate)
            for epochs in options.epochs
            for rate in options.rates
        ]
        with alone(options.target):
            best = best_trial(make, rows, trials, tell)
        torch.save(best.module.state_dict(), weights)
        write_text(json.dumps(best.facts | {"device": device}), facts)
        del best, rows
        # What training held is not there for the engines otherwise.
        torch.cuda.empty_cache()
    module = make()
    module.load_state_dict(torch.load(weights, map_location=device, weights_only=True))
    module.eval()
    spec = OutputSpec("logit", OutputKind.LOGIT, data.label, budget=options.budget)
    example = next(data.open("certification").batches(PARITY_ROWS)).inputs
    document = directory / "exported.json"
    if not document.exists():
        exported = export_torch(module.cpu(), example, directory / "exported.onnx", (spec,))
        serde.write(exported, document)
    exported = serde.read(ModelArtifact, document)
    run = reference_run(module.to(device), device, spec.name)
    found, exact = run(example)[spec.name], OnnxSession(exported.path).run(example)[spec.name]
    apart = float(np.abs(found - exact).max() / max(1.0, np.abs(exact).max()))
    if apart > PARITY:
        raise RuntimeError(f"the FP32 reference on {device} and the exported model are {apart:g} apart")
    return Trained(exported, spec, run, json.loads(facts.read_text()) | {"parity": apart})


def modified_model(
    model: Trained, data: PreparedData, counts: Counts, split_channels: bool, directory: Path
) -> ModelArtifact:
    """The model after mods."""
    rows = next(data.open("calibration").batches(CHECK_ROWS)).inputs
    mods: list[Mod[Any]] = [kind() for kind in DEFAULT_MODS]
    if split_channels:
        profile = calibrated(model.exported, model.spec, data, counts)
        judged = {split: data.open(split).rows for split in ("selection", "certification")}
        left = errors_to_leave(model.exported, profile, (model.spec,), RECIPES, PlanOptions(), judged)
        mods.append(SplitHighErrorChannels(left, [rows], directory))
    return apply_mods(model.exported, [rows], directory / "modified.onnx", mods).model


def prepared(
    model: Trained, data: PreparedData, case: Case, options: argparse.Namespace, directory: Path, tell: Tell
) -> Prepared:
    """Mods, calibration and plans, or what the files have of them."""
    documents = [directory / name for name in ("modified.json", "plans.json", "prepared.json")]
    if not documents[-1].exists():
        flops = sum(site.flops_per_example for site in model.exported.sites)
        tell(f"{len(model.exported.sites)} sites, {flops / 1e6:.0f} MFLOP a row")
        counts = Counts(
            options.calibration_rows or (4096 if flops > LARGE else 16384),
            options.sensitivity_rows or (1024 if flops > LARGE else 8192),
            options.draws,
        )
        modified = modified_model(model, data, counts, options.split_channels, directory)
        tell(f"mods: {len(modified.sites)} sites")
        profile = calibrated(modified, model.spec, data, counts)
        seconds = {name: round(total.value, 1) for name, total in profile.seconds.items()}
        tell(f"calibrated: {json.dumps(seconds)}")
        plans, left_out = planned(modified, profile, model.spec, case, options.timings)
        serde.write(modified, documents[0])
        serde.write(plans, documents[1])
        facts = {"rows": asdict(counts), "seconds": seconds, "left_out": left_out, "sites": sites_of(plans)}
        write_text(json.dumps(facts), documents[2])
    plans = serde.read(PlanSet, documents[1])
    facts = json.loads(documents[2].read_text())
    shares = {plan.id: round(plan.fp8_share, 4) for plan in plans.plans}
    tell(f"planned: {json.dumps(shares)}, left out {json.dumps(facts['left_out'])}")
    return Prepared(serde.read(ModelArtifact, documents[0]), plans, facts)


def sites_of(plans: PlanSet) -> dict[str, str]:
    """Verdict and reason of each product, as the plan of all safe sites has them."""
    plan = next((p for p in plans.plans if p.id == "fp8-safe"), plans.plans[-1])
    return {d.site: f"{d.verdict}: {d.reason}" for d in plan.decisions if d.verdict is not Verdict.NOT_JUDGED}
