"""The plan stage: which plans compete, under which recipes, and the precision of each site in them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from dataclasses import replace

from loka_onnx.config import PlanId, RunConfig, ScaleRule, TargetConfig
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.devices import CPU
from loka_onnx.core.formats import INT8, UINT8, NumberFormat, Precision
from loka_onnx.core.plan import EIGHT_BITS, MIXED, Climbs, Decision, PlanSet, PrecisionPlan, Verdict
from loka_onnx.core.profile import Profile
from loka_onnx.core.recipe import AMAX, MSE, Granularity, Recipe
from loka_onnx.engines.base import Backend
from loka_onnx.engines.registry import get_backend
from loka_onnx.errors import Collected, ConfigError
from loka_onnx.pipeline.context import Context
from loka_onnx.pipeline.directory import DocumentStage
from loka_onnx.pipeline.tuning import TIMINGS
from loka_onnx.planning.policy import Planner, PlanOptions, make_plans
from loka_onnx.planning.site_speed import DeviceTimings
from loka_onnx.planning.timings import known_timings

PLAN = DocumentStage("plan", "plan.json", PlanSet)
_PERCENTILE = "percentile-99.99"
_RULES = {
    ScaleRule.AMAX: (AMAX,),
    ScaleRule.PERCENTILE: (_PERCENTILE,),
    ScaleRule.MSE: (MSE,),
    # The first of several equal ones is taken.
    ScaleRule.BEST: (AMAX, _PERCENTILE, MSE),
}


def planned_formats(config: RunConfig) -> tuple[NumberFormat, ...]:
    """Formats of activations in the plans of a run: of the precisions that it asks for, or else that its
    devices multiply, each FP8 if it can; FP8 where they multiply nothing in eight bits.

    INT8 activations are UINT8 with a zero point, unless a device that needs INT8 plans takes only INT8.
    Beside a device without FP8, one with a planned FP8 needs none, but where both are asked for and `mixed`
    competes.
    """
    float8 = config.plan.format.number_format
    multiplied, declared = (defaultdict[str, set[NumberFormat]](set) for _ in range(2))
    for target, backend, architecture in buildable(config):
        known = {f for f in (float8, INT8, UINT8) if multiplies(backend, architecture, f)}
        multiplied[target.device] |= known
        declared[target.device] |= {*backend.spec.formats_on(architecture)}
    plans = config.plan.plans
    asked = {*(config.plan.formats or (precision for plan in plans or () for precision in plan.precisions))}
    wants_int8 = bool(asked) and Precision.FP8 not in asked
    wants_int8 |= {*EIGHT_BITS} <= asked and PlanId.MIXED in (plans or (PlanId.MIXED,))
    int8_devices = [d for d, formats in multiplied.items() if wants_int8 or float8 not in formats]
    is_symmetric = any({INT8, UINT8} & declared[d] == {INT8} for d in int8_devices or multiplied)
    if not asked:
        asked = {Precision.FP8 for formats in multiplied.values() if float8 in formats}
        asked |= {Precision.INT8 for device in int8_devices if multiplied[device]}
    formats = {Precision.FP8: float8, Precision.INT8: INT8 if is_symmetric else UINT8}
    return tuple(f for precision, f in formats.items() if precision in (asked or {Precision.FP8}))


def multiplies(backend: Backend, architecture: str, format: NumberFormat) -> bool:
    """True if a backend multiplies a format on an architecture, and does not simulate it there."""
    decision = Decision("", format.precision, Recipe.of(format), Verdict.NOT_JUDGED, "")
    # A base that no architecture lacks.
    plan = PrecisionPlan(str(format.precision), "", Precision.FP16, (decision,), {}, 0.0)
    return backend.decline(plan, architecture) is None and not backend.is_simulated(plan, architecture)


def moot_precisions(config: RunConfig) -> dict[str, tuple[Precision, ...]]:
    """Planned precisions that get no engines, by device of the targets that multiply another one instead.

    A simulation cannot be chosen beside that. It judges a plan for targets whose engines do not run here.
    """
    planned, pairs = planned_formats(config), [*buildable(config)]
    waiting = {
        format
        for format in planned
        for _, backend, architecture in pairs
        if backend.why_not_run(architecture) and multiplies(backend, architecture, format)
    }
    moot: dict[str, tuple[Precision, ...]] = {}
    for device in dict.fromkeys(target.device for target, _, _ in pairs):
        here = [(backend, architecture) for target, backend, architecture in pairs if target.device == device]
        real = [format for format in planned if any(multiplies(*pair, format) for pair in here)]
        left = tuple(f.precision for f in planned if real and f not in real and f not in waiting)
        moot |= {device: left} if left else {}
    return moot


def planned_recipes(config: RunConfig) -> tuple[Recipe, ...]:
    """Recipes of every format in the plans of a run (`recipes_of`)."""
    formats, scale = planned_formats(config), config.plan.scale
    return tuple(recipe for format in formats for recipe in recipes_of(format, scale))


def recipes_of(format: NumberFormat, scale: ScaleRule | None = None) -> tuple[Recipe, ...]:
    """Both granularities of weights, which a profile shows, under each scale rule that a format has."""
    return tuple(
        Recipe.of(format, weight, rule)
        for rule in _RULES[scale or (ScaleRule.AMAX if format.is_float else ScaleRule.MSE)]
        for weight in (Granularity.PER_TENSOR, Granularity.PER_CHANNEL)
    )


def check_targets(config: RunConfig) -> None:
    """Check devices, backends and their options before any work is done.

    Raises ConfigError if a backend does not know a device or a setting, or no backend multiplies INT8, which
    `plan.formats` or a plan asks for; MissingPackage if one does not import.
    """
    wrong = Collected()
    for number, target in enumerate(config.targets):
        for name in target.backends:
            with wrong.check():
                _check_backend(target, name, f"targets[{number}]")
    wrong.raise_any()
    by_plans = {precision for plan in config.plan.plans or () for precision in plan.precisions}
    if Precision.INT8 in (config.plan.formats or by_plans) and not any(
        {INT8, UINT8} & {*backend.spec.formats_on(architecture)}
        for _, backend, architecture in buildable(config)
    ):
        names = sorted({name for target in config.targets for name in target.backends})
        raise ConfigError(
            "E1533 no backend of any target multiplies INT8",
            where=f"`plan.{'formats' if config.plan.formats else 'plans'}`",
            evidence=f"it asks for int8; the backends are {', '.join(names)}",
            remedy="add a target with onnxruntime on the CPU, or with inductor, tensorrt, tensorrt_rtx "
            "or migraphx on a GPU, or remove int8",
        )


def _check_backend(target: TargetConfig, name: str, key: str) -> None:
    backend, options = get_backend(name), target.options.get(name)
    if not target.architectures:
        try:
            backend.architectures(target.device)
        except ConfigError as error:
            error.restate(where=f"`{key}.device`")
            raise
    if options is not None:
        backend.check_options(options, f"`{key}.options.{name}` (device '{target.device}')")


def buildable(config: RunConfig) -> Iterator[tuple[TargetConfig, Backend, str]]:
    """Yield each target with each of its backends and each architecture to build for."""
    for target in config.targets:
        for backend in map(get_backend, target.backends):
            for architecture in target.architectures or backend.architectures(target.device):
                yield target, backend, architecture


def competing_plans(config: RunConfig, timed: Collection[DeviceTimings] = ()) -> tuple[PlanId, ...]:
    """Plans of a run, in the order they compete: those that the run file lists, if it lists any.

    Fast plans are made where kernel times in their precision are known of a device (`timed`). `untouched` has
    no lookups to leave out, so that there is none beside a model that is cut at its embeddings.
    """
    if config.plan.plans is not None:
        return config.plan.plans
    is_whole = not config.model.split_sparse
    compiles = is_whole and any(b.untouched and where != CPU for _, b, where in buildable(config))
    untouched = (PlanId.UNTOUCHED,) if compiles else ()
    fp16 = (PlanId.FP16,) if _takers(config, Precision.FP16) else ()
    of_format = {
        Precision.FP8: (PlanId.FP8_ALL, PlanId.FP8_SAFE, PlanId.FP8_FAST),
        Precision.INT8: (PlanId.INT8_ALL, PlanId.INT8_SAFE, PlanId.INT8_FAST),
    }
    here, formats = {target.device for target in config.targets}, planned_formats(config)
    quantized = list[PlanId]()
    for precision in (format.precision for format in formats):
        *others, fast = of_format[precision]
        is_timed = any(known.times(precision) for known in timed if known.device in here)
        quantized += [*others, fast] if is_timed else others
    both = (all(multiplies(backend, at, f) for f in formats) for _, backend, at in buildable(config))
    quantized += [PlanId.MIXED] if len(formats) > 1 and any(both) else []
    return (PlanId.FP32, PlanId.BF16, *fp16, *untouched, *quantized)


def _takers(config: RunConfig, precision: Precision) -> set[tuple[str, str]]:
    """Backends with architectures that run the whole model in a precision; no CPUs, which gain no time."""
    plan = PrecisionPlan(str(precision), "", precision, (), {}, 0.0)
    pairs = ((backend, at) for _, backend, at in buildable(config) if at != CPU)
    return {(backend.name, at) for backend, at in pairs if backend.decline(plan, at) is None}


def base_precision(config: RunConfig) -> Precision | None:
    """Return the precision of what is not quantized; None for FP16 where it fits, else BF16 (auto).

    That is the default where a GPU has FP16 and no BF16 (sm75).
    """
    if config.plan.base is None:
        has_fp16_alone = _takers(config, Precision.FP16) - _takers(config, Precision.BF16)
        return None if has_fp16_alone else Precision.BF16
    return None if config.plan.base == "auto" else config.plan.base


def plan_options(context: Context, model: ModelArtifact) -> PlanOptions:
    """Return the plan options of the run file and known kernel times; UserError for no timing database."""
    chosen = context.config.plan
    devices = tuple(_device_timings(context, model))
    return PlanOptions(
        keep=chosen.keep,
        force=chosen.force,
        base=base_precision(context.config),
        plans=competing_plans(context.config, devices),
        confidence=context.config.calibration.confidence,
        protect=chosen.protect,
        exported=context.exported,
        devices=devices,
    )


def _device_timings(context: Context, model: ModelArtifact) -> Iterator[DeviceTimings]:
    """Yield kernel times of every target: of its own backends, or else of another one's similar kernels."""
    config = context.config
    base = base_precision(config) or Precision.BF16
    databases = (context.path(TIMINGS), *((config.plan.timings,) if config.plan.timings else ()))
    for target in config.targets:
        timings = known_timings(target.device, databases)
        known = {timing.kernel.backend for timing in timings}
        names = [str(backend) for backend in target.backends]
        backend = next((name for name in names if name in known), min(known, default=names[0]))
        stands_for = "" if backend in names else names[0]
        fused = get_backend(stands_for or backend).fused_sites(model.path, base) if timings else {}
        yield DeviceTimings(target.device, backend, timings, config.batch.serve, stands_for, fused)


def decide_plans(context: Context, model: ModelArtifact, profile: Profile, safe: Climbs) -> PlanSet:
    """Make every plan of the run → `plan.json`; `safe` has the climbed rungs of the safe plans."""
    chosen, options = context.config.plan, replace(plan_options(context, model), safe=safe)
    reads = {
        "model": model,
        "profile": profile,
        "plan": chosen,
        "plans": options.plans,
        "confidence": options.confidence,
        "budgets": [spec.budget for spec in context.specs],
        "timings": [known.key for known in options.devices],
        "safe": safe,
    }
    recipes = planned_recipes(context.config)

    def make() -> PlanSet:
        plans = make_plans(model, profile, context.specs, recipes, options)
        planned = [format.precision.upper() for format in planned_formats(context.config)]
        notes = (
            f"{' and '.join(left).upper()} plans are not built for {device}, which multiplies "
            f"{' and '.join(name for name in planned if name.lower() not in left)}"
            for device, left in moot_precisions(context.config).items()
        )
        return replace(plans, notes=(*plans.notes, *notes))

    return context.directory.document(PLAN, reads, make)


def search_plans(context: Context, model: ModelArtifact, profile: Profile) -> tuple[PrecisionPlan, ...]:
    """Plans beside the best one by kernel times, for every device with such times; `mixed` ones first."""
    recipes, options = planned_recipes(context.config), plan_options(context, model)
    kinds: list[str] = [MIXED] if MIXED in options.plans else []
    kinds += dict.fromkeys(recipe.precision for recipe in recipes)
    planners = (Planner(model, profile, context.specs, recipes, options, kind) for kind in kinds)
    return tuple(plan for planner in planners for plan in planner.refinements())
