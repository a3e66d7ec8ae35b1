"""The sections of the run file about precision: measurements, mods and plans."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from loka_onnx.config.fields import (
    CLOSEST,
    EACH_ONCE,
    Batch,
    Count,
    Executor,
    Float8Format,
    PlanId,
    ResolvedPath,
    ScaleRule,
    Seed,
    Strict,
    Text,
    WeightGranularity,
    fault,
)
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Protection


class CalibrationConfig(Strict):
    """Measurement of ranges, errors and sensitivities."""

    batch_size: Batch = Field(512, description="rows in one calibration batch")
    rows: Count | None = Field(None, description="rows that are used at all, the first ones; null for all")
    range_rows: Count | None = Field(
        None,
        description="fewest of these that ranges, and the scales that follow, are taken from, in a drawn "
        "order; null for all. From n rows, about one in n of those served exceeds the range of a tensor and "
        "saturates there",
    )
    sensitivity_rows: Count | None = Field(
        None,
        description="most rows that the effect of each site on the outputs is measured on; null for as many "
        "as are used at all",
    )
    stop_when_decided: bool = Field(
        True,
        description="whether that ends before, when the verdict of every site is reached; verdicts then rest "
        "on intervals that hold at any number of rows, which are wider than those at a fixed one",
    )
    confidence: Annotated[float, Field(gt=0.5, le=1.0 - CLOSEST)] = Field(
        0.95, description="of the intervals that verdicts rest on, all of them together"
    )
    draws: Annotated[int, Field(ge=1, le=8)] = Field(
        4,
        description="draws of the rounding noise, 1 to 8: some rows are measured again under scales that "
        "were moved a little, and a site counts as the worst of its draws; 1 for no other",
    )
    error_precision: Annotated[float, Field(ge=CLOSEST, lt=1.0)] | None = Field(
        0.02,
        description="relative precision of each site's own error at which no further rows are taken for it; "
        "null to take it from all rows",
    )
    seed: Seed = Field(0, description="seed of everything that is drawn")
    executor: Executor = Field(
        Executor.LOCAL, description="local for threads of this process, ray for the machines of a Ray cluster"
    )
    ray_address: Text | None = Field(
        None,
        description="address of the Ray cluster that this machine belongs to, as in 10.0.0.5:6379, or auto; "
        "null starts one on this machine",
    )

    @model_validator(mode="after")
    def _address_has_a_use(self) -> Self:
        if self.ray_address is not None and self.executor is not Executor.RAY:
            raise fault(
                "`ray_address` belongs to the executor 'ray'",
                at=("ray_address",),
                evidence=f"`executor` is {self.executor}",
                remedy="remove it, or write `executor: ray`",
            )
        return self


class ModsConfig(Strict):
    """Mods that rewrite the model; the transform stage knows their names."""

    skip: Annotated[tuple[Text, ...], EACH_ONCE] = Field(
        (), description="names of mods that are not run, as `loka-onnx transform` prints them"
    )
    smoothing: bool = Field(
        True,
        description="whether range is moved from activations to weights (and from numeric features to the "
        "first layer) where that lowers the FP8 error that is measured on calibration rows",
    )
    split_channels: bool = Field(
        True,
        description="whether the few input channels that make most of the error of a site are split off as a "
        "product of their own, so that the rest can run in FP8; in a plan where it does not, they are one "
        "product again",
    )


class PlanConfig(Strict):
    """Limits and selection of plans. Patterns are those of a shell, over site names."""

    keep: tuple[Text, ...] = Field(
        (),
        description="patterns of sites that stay in the base precision (norms in FP32), by their names in "
        "the exported model or the modules that they are in; a pattern that names no site names other nodes, "
        "which stay in FP32",
    )
    protect: tuple[Protection, ...] = Field(
        (Protection.LOGITS,),
        description="what else stays in FP32 where the base is not: logits (temperature, calibration, sums "
        "and whatever else is computed behind the last product of an output), residual (Adds that join a "
        "block to its own input; FP8 never reaches them, FP32 costs twice the memory traffic of BF16)",
    )
    force: tuple[Text, ...] = Field((), description="patterns of sites that run in FP8 whatever was measured")
    base: Literal[Precision.BF16, Precision.FP16, Precision.FP32, "auto"] | None = Field(
        None,
        description="bf16, fp16, fp32 or auto: precision of what is not quantized; auto takes fp16 "
        "where the calibration rows show that it fits with a factor of 8 to spare, else bf16; null for bf16, "
        "or auto where a GPU of the targets has fp16 only",
    )
    weight_granularity: WeightGranularity = Field(
        WeightGranularity.BEST,
        description="per_tensor, per_channel, or best to take at each site the one with the smaller error",
    )
    format: Float8Format = Field(
        Float8Format.E4M3FN,
        description="E4M3FN, E4M3FNUZ or E5M2: FP8 format of both operands; an engine maker that cannot "
        "multiply it declines the plan",
    )
    formats: (
        Annotated[tuple[Literal[Precision.FP8, Precision.INT8], ...], Field(min_length=1), EACH_ONCE] | None
    ) = Field(
        None,
        description="number formats of the plans: fp8, int8 or both; int8 rounds weights to INT8 and "
        "activations to UINT8 with a zero point, or to INT8 where a GPU is to multiply them; null for those "
        "that `plans` names, or else that the targets multiply: fp8 on a GPU that has it, int8 on another or "
        "a CPU with VNNI, AMX or ARM's dot product, and fp8 where there is neither",
    )
    scale: ScaleRule | None = Field(
        None,
        description="rule of activation scales: amax (no calibration row saturates), percentile (99.99 % of "
        "the values do not), mse (smallest squared error that the histogram predicts), or best to measure "
        "these and take at each site the one with the smallest error; null for amax in FP8 and mse in INT8; "
        "weights are scaled by amax",
    )
    corrections: bool = Field(
        True,
        description="whether constants are fitted to each quantized plan (the mean error of a site into its "
        "bias, the FP32 model's mean logit on an output) and kept where they help on the selection split",
    )
    timings: ResolvedPath | None = Field(
        None,
        description="database of kernel times (`loka-onnx tune`) that fast plans are made by, beside "
        "the one in the run directory and the times that are shipped; null for these alone",
    )
    plans: Annotated[tuple[PlanId, ...], EACH_ONCE] | None = Field(
        None,
        description="plans that are built and compete: fp32, bf16, fp16, untouched, fp8-all, fp8-safe, "
        "fp8-fast, int8-all, int8-safe, int8-fast, mixed (each site in the one of fp8 and int8 that suits "
        "it); null for fp32, bf16, -all and -safe of each of `formats`, with fp16 where a backend of a "
        "target can run it, untouched where one is inductor on a GPU, -fast where kernel times of a target "
        "are known, and mixed where a backend multiplies both `formats`",
    )

    @model_validator(mode="after")
    def _rules(self) -> Self:
        for index, pattern in enumerate(self.force):
            if pattern in self.keep:
                raise fault(
                    f"the pattern '{pattern}' is both kept and forced",
                    at=("force", index),
                    evidence="`keep` leaves a site out of FP8, `force` puts it there",
                    remedy="remove it from one of the two",
                )
        for index, plan in enumerate(self.plans or ()):
            missing = [p for p in plan.precisions if self.formats and p not in self.formats]
            if self.formats and missing:
                raise fault(
                    f"the plan '{plan}' needs {' and '.join(missing)} in `formats`",
                    at=("plans", index),
                    evidence=f"`formats` is [{', '.join(self.formats)}]",
                    remedy=f"add {' and '.join(missing)} to it, or remove the plan",
                )
        if self.plans is not None and PlanId.FP32 not in self.plans:
            raise fault(
                "the plan 'fp32' must compete",
                at=("plans",),
                evidence=f"plans are {', '.join(self.plans) or 'none'}",
                remedy="add fp32: it is what is deployed when nothing else is inside of the budget",
            )
        return self
