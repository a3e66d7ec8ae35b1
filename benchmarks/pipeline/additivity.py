"""Do the effects of single sites add up to that of a plan, and do they hold on other rows?

On each trained model, from the calibration split: each site's (and each group's) effect alone. Then on the
certification split: the plans `fp8-all` and `fp8-safe` jointly, and every site alone again.

- **Joint.** Energy of the logit change, E[δ²], and KL of a plan against the sum over its parts (groups of
  sites that share a quantized tensor count once, jointly; other sites alone), with the parts measured on
  calibration rows and on the very rows that the plan is measured on.
- **Order.** Spearman's rank correlation over sites of KL from calibration rows with KL on certification rows;
  and of KL, and of the whole loss change, from calibration rows with ΔNE on certification rows. ΔNE of one
  site is mostly noise, so that not even the truth correlates with it fully. The ceiling, from Spearman's
  attenuation and the Spearman-Brown formula: users are halved at random; with r the correlation over sites of
  ΔNE on one half with ΔNE on the other, ΔNE on all rows has the reliability 2r/(1 + r), and nothing that
  knows the truth only correlates with it by more than √(2r/(1 + r)). Two ceilings, because ΔNE depends on the
  draw of the rounding noise as well as on the rows: both halves under the very scales of the profile, and one
  half under moved scales. KL knows of no draw (its expectation hardly depends on it), so the second is its
  own; more rows would not average a draw away, so that it still is too high, if anything.

Needs the files under ``$LOKA_ONNX_DATA``::

    python -m benchmarks.pipeline.additivity --models dcnv2 wukong dlrm interformer
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from benchmarks.pipeline.site_effects import (
    OUTPUT,
    RECIPES,
    RowEffects,
    exported,
    output_of,
    profile_of,
    row_effects,
    split_of,
    switchable_of,
)
from benchmarks.pipeline.training import GROUP, TRAINING
from benchmarks.recording import write_record
from loka_onnx.calibration.effects.perturbation import draw_factors
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.plan import PrecisionPlan
from loka_onnx.core.profile import Profile, Sensitivity
from loka_onnx.core.site import SiteKind
from loka_onnx.numerics.intervals import ratio_interval
from loka_onnx.planning.policy import PlanOptions, make_plans
from loka_zoo.movielens1m import movielens_1m
from loka_zoo.prepared import PreparedData

PLANS = ("fp8-all", "fp8-safe")
HALVINGS = 400
MOST_ROWS = {"interformer": 20_000}
"""Rows of calibration, and of certification, of a model whose many sites would take hours over all rows."""

Values = npt.NDArray[np.float64]


def parts_of(sites: Sequence[str], profile: Profile) -> dict[str, tuple[str, ...]]:
    """What a plan's effect is predicted from: groups that are wholly in it, and the other sites alone."""
    found: dict[str, tuple[str, ...]] = {}
    left = set(sites)
    for group in profile.groups:
        if set(group.sites) <= left:
            found[f"group:{group.tensor}"] = group.sites
            left -= set(group.sites)
    return found | {site: (site,) for site in sites if site in left}


def from_calibration(profile: Profile, name: str) -> Sensitivity:
    """Effect of a part on the calibration rows."""
    if name.startswith("group:"):
        group = next(g for g in profile.groups if f"group:{g.tensor}" == name)
        return group.sensitivity(OUTPUT)
    return next(s for s in profile.site(name).sensitivities if s.output == OUTPUT)


def joint(plan: PrecisionPlan, profile: Profile, effects: RowEffects) -> dict[str, Any]:
    """A plan's effect against what its parts add up to."""
    parts = parts_of(plan.fp8_sites, profile)
    deltas = np.stack([effects.delta(name) for name in parts])
    loss = float(effects.loss.mean())
    energy = float(np.mean(effects.delta(plan.id) ** 2))
    kl = float(effects.change(plan.id).kl.mean()) / loss
    here = [float(effects.change(name).kl.mean()) / loss for name in parts]
    known = [from_calibration(profile, name) for name in parts]
    # A site that changes nothing correlates with nothing.
    moving = deltas[deltas.any(axis=1)]
    correlations = np.zeros(1)
    if len(moving) > 1:
        correlations = np.asarray(np.corrcoef(moving))[np.triu_indices(len(moving), 1)]
    interval = ratio_interval(effects.change(plan.id).total, effects.loss, None, effects.units)
    return {
        "sites": len(plan.fp8_sites),
        "groups": sum(name.startswith("group:") for name in parts),
        "fp8_share_of_flops": plan.fp8_share,
        "logit_energy": energy,
        "kl_percent": 100 * kl,
        "delta_ne_percent": [100 * v for v in (interval.value, interval.lower, interval.upper)],
        "predicted_over_measured": {
            "energy": {
                "calibration": sum(s.delta.rmse**2 for s in known) / energy,
                "same rows": float(np.mean(deltas**2, axis=1).sum()) / energy,
                # Zero-mean errors add in energy, mean shifts linearly and with their signs.
                "same rows, shifts with sign": (
                    float(np.var(deltas, axis=1).sum()) + float(np.mean(deltas, axis=1).sum()) ** 2
                )
                / energy,
            },
            "kl": {
                "calibration": sum(s.kl.value for s in known) / kl,
                "same rows": sum(here) / kl,
                "plan's own prediction": plan.predicted_kl[OUTPUT] / kl,
            },
        },
        "correlation_of_parts": {
            "largest": float(np.abs(correlations).max()),
            "root_mean_square": float(np.sqrt(np.mean(correlations**2))),
        },
    }


def order(profile: Profile, effects: RowEffects, moved: RowEffects, names: Sequence[str]) -> dict[str, Any]:
    """Rank correlations over sites of what calibration rows say with what certification rows say.

    Args:
        profile: From calibration rows.
        effects: Of certification rows, under the scales of the profile.
        moved: The same under moved scales.
        names: Sites.
    """
    known = [from_calibration(profile, name) for name in names]
    known_kl = np.array([s.kl.value for s in known])
    known_total = np.array([s.kl.value + (s.labelled.value if s.labelled else 0.0) for s in known])
    kl = np.array([effects.change(name).kl.sum() for name in names])
    total = np.array([effects.change(name).total.sum() for name in names])
    return {
        "sites": len(names),
        "kl_with_kl": _rank_correlation(known_kl, kl),
        "kl_with_delta_ne": _rank_correlation(known_kl, total),
        "loss_change_with_delta_ne": _rank_correlation(known_total, total),
        "ceiling_of_delta_ne": {
            "this draw": ceiling(effects, effects, names),
            "another draw": ceiling(effects, moved, names),
        },
    }


def ceiling(
    effects: RowEffects, others: RowEffects, names: Sequence[str], halvings: int = HALVINGS
) -> dict[str, float]:
    """The largest correlation with ΔNE that its noise allows (see above), over random halves of the users.

    Args:
        effects: What one half is taken from.
        others: What the other half is taken from: the same rows, under the same scales or others.
        names: Sites.
        halvings: How often users are halved.
    """
    members = np.unique(effects.units, return_inverse=True)[1]
    loss = np.bincount(members, effects.loss)
    sums, other_sums = (
        np.stack([np.bincount(members, rows.change(name).total) for name in names])
        for rows in (effects, others)
    )
    random = np.random.default_rng(0)
    found = []
    for _ in range(halvings):
        half = random.permutation(loss.size) < loss.size // 2
        one = sums[:, half].sum(axis=1) / loss[half].sum()
        other = other_sums[:, ~half].sum(axis=1) / loss[~half].sum()
        r = max(_rank_correlation(one, other), 0.0)
        found.append((r, np.sqrt(2 * r / (1 + r))))
    halves, ceilings = np.array(found).T
    low, high = np.quantile(ceilings, (0.05, 0.95))
    return {
        "between_halves": float(np.median(halves)),
        "median": float(np.median(ceilings)),
        "from": float(low),
        "to": float(high),
    }


def _rank_correlation(one: Values, other: Values) -> float:
    return float(spearmanr(one, other).statistic)


def by_site(artifact: ModelArtifact, profile: Profile, effects: RowEffects) -> dict[str, Any]:
    """What each site does, on both splits, and its share of the sum of KL over products."""
    products = [site.name for site in artifact.sites if site.kind is not SiteKind.NORM]
    whole = sum(effects.change(name).kl.sum() for name in products)
    found = {}
    for site in artifact.sites:
        known, change = from_calibration(profile, site.name), effects.change(site.name)
        intervals = {
            name: ratio_interval(rows, effects.loss, None, effects.units)
            for name, rows in {"kl": change.kl, "delta_ne": change.total}.items()
        }
        found[site.name] = {
            "kind": str(site.kind),
            "k": site.k,
            "n": site.n,
            "share_of_kl": float(change.kl.sum() / whole) if site.name in products else None,
            "logit_rmse": {
                "calibration": known.delta.rmse,
                "certification": float(np.sqrt(np.mean(effects.delta(site.name) ** 2))),
            },
            "calibration_kl_percent": [100 * v for v in (known.kl.value, known.kl.lower, known.kl.upper)],
        } | {
            f"certification_{name}_percent": [100 * v for v in (i.value, i.lower, i.upper)]
            for name, i in intervals.items()
        }
    return found


def measure(model: str, data: PreparedData, options: argparse.Namespace) -> dict[str, Any]:
    """Figures of one model."""
    spec = output_of(data, options.budget)
    options.directory.mkdir(parents=True, exist_ok=True)
    rows = options.rows or MOST_ROWS.get(model)
    with TemporaryDirectory(dir=options.directory) as directory:
        scratch = Path(directory)
        artifact = exported(model, data, options.directory, scratch)
        profile = profile_of(
            artifact, spec, split_of(data, "calibration"), scratch, options.threads, MOST_ROWS.get(model)
        )
        plans = make_plans(artifact, profile, (spec,), RECIPES, PlanOptions(plans=PLANS)).plans
        sets = _sets(artifact, profile, plans)
        switchable = switchable_of(artifact, profile, scratch)
        held_out = split_of(data, "certification")
        effects = row_effects(switchable, held_out, sets, options.threads, rows)
        factor = draw_factors(2)[-1]
        alone: dict[str, Sequence[str]] = {site.name: (site.name,) for site in artifact.sites}
        another = switchable_of(artifact, profile, scratch, factor)
        moved = row_effects(another, held_out, alone, options.threads, rows)
    names = [site.name for site in artifact.sites]
    products = [site.name for site in artifact.sites if site.kind is not SiteKind.NORM]
    return {
        "rows": {"calibration": profile.sampling.rows, "certification": int(effects.exact.size)},
        "plans": {plan.id: joint(plan, profile, effects) for plan in plans if plan.fp8_sites},
        "order": {
            "sites": order(profile, effects, moved, names),
            "products": order(profile, effects, moved, products),
        },
        "by_site": by_site(artifact, profile, effects),
    }


def _sets(
    artifact: ModelArtifact, profile: Profile, plans: Sequence[PrecisionPlan]
) -> Mapping[str, Sequence[str]]:
    """Every site alone, every group, every plan."""
    sets: dict[str, Sequence[str]] = {site.name: (site.name,) for site in artifact.sites}
    sets |= {f"group:{group.tensor}": group.sites for group in profile.groups}
    return sets | {plan.id: plan.fp8_sites for plan in plans}


def main() -> None:
    """Run and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=sorted(TRAINING), choices=sorted(TRAINING))
    parser.add_argument(
        "--directory", type=Path, default=Path("runs/bench-movielens1m"), help="of checkpoints"
    )
    parser.add_argument("--budget", type=float, default=0.0002)
    parser.add_argument("--rows", type=int, help="most certification rows; all by default, or MOST_ROWS")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    options.directory = options.directory.absolute()
    data = movielens_1m()
    found = {}
    for model in options.models:
        found[model] = measure(model, data, options)
        print(model, json.dumps({k: v for k, v in found[model].items() if k != "by_site"}), flush=True)
    settings = {"budget": options.budget, "group": GROUP, "halvings": HALVINGS}
    print(write_record("additivity", found, settings))


if __name__ == "__main__":
    main()
