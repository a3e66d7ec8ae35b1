"""What FP8 does to the size of TensorRT-RTX engines, and what their bytes are.

Each model goes through the whole pipeline up to its engines: export, calibration, mods, plans, builds.
Weights are random and rows generated: the size of an engine depends on neither, except where two scales
happen to be equal. Every table has 100 ids, so that it is the dense part that is compared::

    python -m benchmarks.micro.engine_size

The bytes that FP8 weights save against BF16 are one per weight of the plan's sites. They are held against
what the constants of the two engines differ by, and against what the files do.
"""

from __future__ import annotations

import argparse
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.micro.engine_contents import EngineContents, read_contents
from benchmarks.recording import write_record
from loka_onnx.config import build_run_config
from loka_onnx.core import serde
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.engine import EngineSet
from loka_onnx.core.plan import PlanSet
from loka_onnx.pipeline.run import RunOptions, Stage, run
from loka_zoo.demo import BUILDER
from loka_zoo.prepared import PreparedData
from loka_zoo.synthetic import SyntheticOptions, prepare_synthetic

# Criteo's features, with small tables.
DATA = SyntheticOptions(rows=(1, 256, 16, 16), cardinalities=(100,) * 26, numeric=13)
MODELS = ("wukong:reference", "dlrm:production", "dcnv2:production", "wukong:paper-small", "wukong:small")
PLANS = ("fp32", "bf16", "fp8-all", "fp8-safe")
DEVICE, ARCHITECTURE = "nvidia-rtx-ada", "sm89"
MB = 1e6


@dataclass(frozen=True)
class Size:
    """One engine's bytes, and those that FP8 saves in it against BF16.

    Attributes:
        contents: What the file holds.
        deflated: Size of the file after zlib.
        fp8_sites: Sites that run in FP8.
        fallbacks: Sites of the plan that do not.
        expected: Weights of the FP8 sites: the bytes that they save.
    """

    contents: EngineContents
    deflated: int
    fp8_sites: int
    fallbacks: int
    expected: int

    def figures(self, base: Size) -> dict[str, Any]:
        """For the record; savings are against the BF16 engine."""
        constants = sum(base.contents.constants.values()) - sum(self.contents.constants.values())
        file = base.contents.total - self.contents.total
        return {
            **asdict(self),
            "saved_constants": constants,
            "saved_file": file,
            "constants_over_expected": constants / self.expected if self.expected else None,
            "file_over_expected": file / self.expected if self.expected else None,
        }


def measure(model: str, directory: Path, data: PreparedData) -> dict[str, Size]:
    """Sizes of the engines of every plan."""
    architecture, _, size = model.partition(":")
    arguments = {
        "architecture": architecture,
        "size": size,
        "categorical": dict(data.categorical),
        "numeric": list(data.numeric),
    }
    splits = ("calibration", "selection", "certification")
    config = build_run_config(
        {
            "name": "engine-size",
            "model": {"torch": BUILDER, "arguments": arguments},
            "outputs": [{"name": "logit", "kind": "logit", "label": data.label, "budget": 0.001}],
            "data": {
                **{split: data.splits[split].path for split in splits},
                "inputs": {b.input: list(b.columns) for b in data.bindings},
                "synthetic": True,
            },
            "calibration": {"sensitivity_rows": 64},
            "plan": {"plans": list(PLANS)},
            "targets": [{"device": DEVICE, "backends": ["tensorrt_rtx"]}],
            "output": directory,
        },
        directory,
    )
    run(config, RunOptions(until=Stage.BUILD))
    return sizes(directory)


def sizes(directory: Path) -> dict[str, Size]:
    """Sizes of the engines for sm89 in a run directory, by plan."""
    weights = {
        site.name: site.k * site.n
        for site in serde.read(ModelArtifact, directory / "model/modified.json").linear_sites
    }
    plans = {plan.id: plan for plan in serde.read(PlanSet, directory / "plan.json").plans}
    found = {}
    for engine in serde.read(EngineSet, directory / "engines.json").engines:
        if engine.backend != "tensorrt_rtx" or engine.architecture != ARCHITECTURE:
            continue
        if engine.path is None:
            raise SystemExit(f"{engine.id}: {engine.detail}")
        path = directory / engine.path
        sites = plans[engine.plan].fp8_sites
        found[engine.plan] = Size(
            contents=read_contents(path),
            deflated=len(zlib.compress(path.read_bytes(), 1)),
            fp8_sites=len(sites),
            fallbacks=len(engine.fallbacks),
            expected=sum(weights.get(site, 0) for site in sites),
        )
    return found


HEADER = (
    f"{'model':20} {'plan':9} {'sites':>5} {'file':>8} {'constants':>9} {'kernels':>12} {'deflated':>8} "
    f"{'expected':>8} {'constants saved':>16} {'file saved':>16}   (MB)"
)


def line(model: str, plan: str, size: Size, base: Size) -> str:
    """One row of the table."""
    figures, held = size.figures(base), size.contents
    text = (
        f"{model:20} {plan:9} {size.fp8_sites:5} {held.total / MB:8.2f} "
        f"{sum(held.constants.values()) / MB:9.2f} {held.kernels:4} = {held.sources / MB:5.2f} "
        f"{size.deflated / MB:8.2f}"
    )
    if not size.expected:
        return text
    return (
        f"{text} {size.expected / MB:8.2f} "
        f"{figures['saved_constants'] / MB:8.2f} {figures['constants_over_expected']:6.1%} "
        f"{figures['saved_file'] / MB:8.2f} {figures['file_over_expected']:7.1%}"
    )


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), metavar="MODEL:PRESET")
    parser.add_argument("--run", type=Path, help="also read the engines of this run directory")
    options = parser.parse_args()
    measured: dict[str, dict[str, Size]] = {}
    print(HEADER, flush=True)
    with TemporaryDirectory() as scratch:
        data = prepare_synthetic(Path(scratch) / "data", DATA)
        for number, model in enumerate([*options.models, *(["run"] if options.run else [])]):
            found = (
                sizes(options.run) if model == "run" else measure(model, Path(scratch) / f"{number}", data)
            )
            measured[model] = found
            for plan, size in found.items():
                print(line(model, plan, size, found["bf16"]), flush=True)
    figures = {
        model: {plan: size.figures(found["bf16"]) for plan, size in found.items()}
        for model, found in measured.items()
    }
    settings = {"weights": "random", "rows": "generated", "architecture": ARCHITECTURE, "data": asdict(DATA)}
    print(write_record("engine_size", figures, settings))


if __name__ == "__main__":
    main()
