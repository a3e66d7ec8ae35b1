"""Judging sites of a profile, in the words of the tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planned_models import CTR, kl_of

from loka_onnx.core.artifact import OutputSpec
from loka_onnx.core.intervals import RatioMoments
from loka_onnx.core.plan import Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.site import Site
from loka_onnx.planning.costs import LABELLED_ALLOWANCE
from loka_onnx.planning.judging import SiteVerdict, judge

ALLOWED = CTR.budget * (1 - LABELLED_ALLOWANCE)

Moments = Mapping[str, Mapping[str, RatioMoments]]


def judged(
    sites: Sequence[Site],
    profile: Profile,
    outputs: tuple[OutputSpec, ...] = (CTR,),
    confidence: float = 0.95,
) -> dict[str, SiteVerdict]:
    return judge(sites, (), profile, outputs, confidence)


def safe(sites: Sequence[Site], profile: Profile, outputs: tuple[OutputSpec, ...] = (CTR,)) -> set[str]:
    return {name for name, found in judged(sites, profile, outputs).items() if found.verdict is Verdict.SAFE}


def exactly(parts: Mapping[str, float]) -> Moments:
    """KL without error, in parts of what is allowed."""
    return {name: {"ctr": kl_of(part * ALLOWED)} for name, part in parts.items()}


def moments_of(estimated: Mapping[str, tuple[float, float]]) -> Moments:
    return {n: {"ctr": kl_of(v * ALLOWED, e * ALLOWED)} for n, (v, e) in estimated.items()}
