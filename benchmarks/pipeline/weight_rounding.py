r"""Would weights rounded by what they do to the output help, over those rounded to the nearest?

The plans `fp8-all` and `int8-all` run in simulation (Q/DQ in FP32 in ONNX Runtime), with the weights Ŵ of
their linear sites chosen in several ways on calibration rows. Every choice lies on the grid of the plan's
scales. With x the activation in the FP32 model, x̂ the same rounded and H = Σ x̂ᵀx̂ about the mean:

- **nearest**: as the library rounds; **no biases**: the same without bias corrections.
- **gptq**: lowers ‖x̂W − x̂Ŵ‖² by OBQ's update in the order of the diagonal of H, with 1 % damping (Frantar et
  al., "GPTQ", arXiv 2210.17323, section 3).
- **least squares**: W* = W + (H + λ)⁻¹ (Σ x̂ᵀx − H) W in place of W, rounded to the nearest: weights make up
  for the part of the *activations'* error that is linear in x̂.
- **least squares + gptq**: W*, rounded by GPTQ.
- **sequential**: the last, site by site, with x̂ what the site reads in the plan after earlier sites were
  chosen.
- **exact weights**: W is not rounded at all. No rounding that only lowers the error of W does better, up to
  chance: what is left is the error of activations.

- **weights alone**: weights are rounded to the nearest, activations are not; without biases.

The others have the library's bias corrections, fitted to their own weights; so H is about the mean. Figures
are KL over the loss on certification rows, which nothing was fitted to or chosen on. Beside them, from
calibration rows: the energy of each product's error that comes from weights and from activations, over that
of the product.

Figures that are in `--scratch` are not measured again. `--models` are trained on MovieLens 100K; further run
files are those of public rankers (`benchmarks.public_rankers.prepare`)::

    python -m benchmarks.pipeline.weight_rounding --scratch DIRECTORY --models wukong dlrm dcnv2 \
        CACHE/rechub-deepfm/run.yaml CACHE/fuxictr-dcnv2/run.yaml …
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import yaml

from benchmarks.pipeline.training import arguments_of
from benchmarks.pipeline.weight_moments import DAMPING, Grid, Matrix, Moments, energy, gptq
from benchmarks.recording import write_record
from loka_onnx.calibration.corrections.biases import fit_biases
from loka_onnx.config import DataConfig, load_run_file
from loka_onnx.core.artifact import ModelArtifact
from loka_onnx.core.correction import BiasCorrection, Corrections, Variant
from loka_onnx.core.formats import Precision
from loka_onnx.core.plan import Decision, PrecisionPlan
from loka_onnx.core.recipe import Granularity, Recipe
from loka_onnx.core.site import Operand, Site, SiteKind
from loka_onnx.evaluation.corrections import try_corrections
from loka_onnx.export.checkpoint import save_checkpoint
from loka_onnx.graph.biases import expose_scores
from loka_onnx.graph.model import GraphModel, values_of
from loka_onnx.graph.sites import channel_axis
from loka_onnx.numerics.rounding import fake_quantize
from loka_onnx.pipeline.accepting import accept
from loka_onnx.pipeline.context import Context, RunSettings
from loka_onnx.pipeline.correcting import mean_rows, simulate
from loka_onnx.pipeline.directory import RunDirectory
from loka_onnx.pipeline.mods import HIGH_ERROR
from loka_onnx.pipeline.plans import PLAN
from loka_onnx.pipeline.run import RunOptions, Stage, recorded, run
from loka_onnx.pipeline.versions import library_versions
from loka_onnx.sessions.onnx_session import OnnxSession, SessionOptions
from loka_onnx.transforms.precision.apply_plan import PlanForm, apply_plan
from loka_zoo.builders import build
from loka_zoo.movielens100k import prepare_movielens_100k
from loka_zoo.training import TrainOptions, train

CALIBRATION_ROWS = 8192
SEQUENTIAL_ROWS = 4096
CERTIFICATION_ROWS = 20_000
FORMATS = ("int8", "fp8")
ALONE, PLAIN, NEAREST, GPTQ, SOLVED, SOLVED_GPTQ, SEQUENTIAL, EXACT = (
    "weights alone",
    "nearest, no biases",
    "nearest",
    "gptq",
    "least squares",
    "least squares + gptq",
    "sequential",
    "exact weights",
)
CHOICES = (ALONE, PLAIN, NEAREST, GPTQ, SOLVED, SOLVED_GPTQ, EXACT)
"""All but `SEQUENTIAL`, which runs the model once for each site."""


@dataclass(frozen=True)
class Linear:
    """A quantized linear site with a weight of rank 2, seen as (K, N)."""

    site: Site
    operand: Operand
    decision: Decision
    recipe: Recipe
    weight: Matrix
    moments: Moments = field(default_factory=Moments)

    @property
    def name(self) -> str:
        """Name of the site."""
        return self.site.name

    @property
    def grid(self) -> Grid:
        """What its weights are rounded to."""
        per_channel = self.recipe.weight is Granularity.PER_CHANNEL
        scales = self.decision.weight_scale if per_channel else self.decision.weight_scale[0]
        return Grid(np.array(scales, np.float32), self.recipe.format.of_weights)

    @cached_property
    def centred(self) -> Moments:
        """Moments about the means, once all rows are in."""
        return self.moments.centred()

    def stored(self, weight: Matrix) -> npt.NDArray[np.float32]:
        """A weight in the orientation of the graph."""
        turned = weight if channel_axis(self.operand) == 1 else weight.T
        return np.ascontiguousarray(turned.astype(np.float32))

    def rows(self, activation: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An activation as (rows, K)."""
        axis = self.site.activation.contracting_axis
        moved = np.moveaxis(activation, -1 if axis is None else axis, -1)
        return moved.reshape(-1, moved.shape[-1])

    def rounded(self, activation: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """An activation after rounding as the plan does."""
        scale, zero_point = self.decision.scales[0], self.decision.activation_zero_point
        return fake_quantize(activation, scale, self.recipe.format, zero_point=zero_point)

    def chosen(self, choice: str) -> Matrix:
        """The weight by one of `CHOICES`."""
        gram, solved = self.centred.gram, self.weight
        if choice == EXACT:
            return self.weight
        if choice in {SOLVED, SOLVED_GPTQ}:
            solved = self.centred.least_squares(self.weight)
        if choice in {GPTQ, SOLVED_GPTQ}:
            return gptq(solved, gram, self.grid)
        return self.grid.nearest(solved)

    def errors(self) -> dict[str, Any]:
        """Energy of the error of the product from either operand, over that of the product."""
        moments, weight = self.centred, self.weight
        product = max(energy(weight, moments.gram), np.finfo(np.float64).tiny)
        return {
            "k": weight.shape[0],
            "n": weight.shape[1],
            "scales": str(self.recipe.weight),
            "from_weights": energy(weight - self.grid.nearest(weight), moments.gram) / product,
            "from_activations": energy(weight, moments.error) / product,
        }


def correction(one: Linear, shape: tuple[int, ...], values: npt.NDArray[Any]) -> BiasCorrection:
    """A bias correction of a site, of the shape that the library gives it."""
    return BiasCorrection(one.name, shape, tuple(np.reshape(values, -1).tolist()), 0.0, 0.0)


@dataclass(frozen=True)
class Case:
    """A plan of one run in simulation, to be judged with other weights; files go to `scratch`."""

    context: Context
    model: ModelArtifact
    plan: PrecisionPlan
    scratch: Path

    def session(self, graph: GraphModel, name: str) -> OnnxSession:
        """Write a graph and open it."""
        path = self.scratch / name
        graph.save(path)
        return OnnxSession(path, SessionOptions(threads=self.context.threads))

    @cached_property
    def linears(self) -> tuple[Linear, ...]:
        """Quantized linear sites with weights of rank 2, and their moments on calibration rows."""
        graph, sites = GraphModel.load(self.model.path), []
        for site in self.model.sites:
            if site.kind is not SiteKind.LINEAR or site.name not in self.plan.quantized_sites:
                continue
            decision = self.plan.decision(site.name)
            if site.weight is None or decision.recipe is None:
                raise ValueError(f"site '{site.name}' has no weight or no recipe")
            stored = values_of(graph.node(site.name).inputs[site.weight.index]).astype(np.float64)
            if stored.ndim == 2:
                weight = stored if channel_axis(site.weight) == 1 else stored.T
                sites.append(Linear(site, site.weight, decision, decision.recipe, weight))
        return self._observed(graph, sites)

    def _observed(self, graph: GraphModel, sites: Sequence[Linear]) -> tuple[Linear, ...]:
        graph.graph.outputs = []
        # Sites that share a tensor share their moments.
        shared: dict[Any, tuple[str, Linear]] = {}
        observed = []
        for one in sites:
            name = exposed(graph, one)
            key = (name, one.site.activation.contracting_axis, one.decision.activation_scaling)
            shared.setdefault(key, (name, one))
            observed.append(replace(one, moments=shared[key][1].moments))
        session, rows = self.session(graph, "exact.onnx"), mean_rows(self.context)
        for span in rows.spans:
            for batch in rows.data.batches(rows.batch_size, start=span.start, stop=span.stop):
                values = session.run(batch.inputs)
                for name, one in shared.values():
                    x = one.rows(values[name])
                    one.moments.add(x, one.rounded(x))
        return tuple(observed)

    @cached_property
    def biases(self) -> Mapping[str, Matrix]:
        """The library's bias corrections of the plan, for weights rounded to the nearest."""
        path = self.scratch / "means.onnx"
        fit = fit_biases(self.model, [self.plan], self.context.specs, mean_rows(self.context), path)
        return fit.plans[self.plan.id].values

    def corrections(self, weights: Mapping[str, Matrix]) -> Corrections:
        """The library's bias corrections, for other weights."""
        fitted = []
        for one in self.linears:
            low, values = one.moments.low / one.moments.count, self.biases[one.name]
            moved = one.stored((low @ (one.grid.nearest(one.weight) - weights[one.name]))[None])
            fitted.append(correction(one, values.shape, values + moved.reshape(values.shape)))
        others = self.biases.keys() - weights.keys()
        rest = [
            BiasCorrection(n, v.shape, tuple(v.reshape(-1).tolist()), 0.0, 0.0)
            for n, v in self.biases.items()
        ]
        return Corrections((*fitted, *(one for one in rest if one.site in others)))

    def with_weights(self, weights: Mapping[str, Matrix], corrections: Corrections) -> GraphModel:
        """The planned model with other weights, by site."""
        form = PlanForm(Precision.FP32, corrections=corrections)
        return self.replaced(
            apply_plan(self.model, self.plan, form, self.scratch / "planned.onnx").path, weights
        )

    def replaced(self, path: Path, weights: Mapping[str, Matrix]) -> GraphModel:
        """A model, planned or not, with other weights, by site."""
        graph = GraphModel.load(path)
        for one in self.linears:
            if one.name in weights:
                chosen = graph.constant(f"{one.name}/chosen", one.stored(weights[one.name]))
                graph.node(one.name).inputs[one.operand.index] = chosen
        return graph

    def sequential(self) -> tuple[dict[str, Matrix], Corrections]:
        """Weights and biases of all sites, each chosen in the plan with earlier ones as they were chosen."""
        weights: dict[str, Matrix] = {}
        biases: list[BiasCorrection] = []
        for one in self.linears:
            moments, planned = Moments(), self.with_weights(weights, Corrections(tuple(biases)))
            runs = []
            for number, graph in enumerate((GraphModel.load(self.model.path), planned)):
                graph.graph.outputs = []
                name = exposed(graph, one)
                runs.append((self.session(graph, f"sequential-{number}.onnx"), name))
            rows = mean_rows(self.context, SEQUENTIAL_ROWS)
            for span in rows.spans:
                for batch in rows.data.batches(rows.batch_size, start=span.start, stop=span.stop):
                    moments.add(*(one.rows(session.run(batch.inputs)[name]) for session, name in runs))
            centred = moments.centred()
            chosen = gptq(centred.least_squares(one.weight), centred.gram, one.grid)
            moved = (moments.high @ one.weight - moments.low @ chosen) / moments.count
            biases.append(correction(one, self.biases[one.name].shape, one.stored(moved[None])))
            weights[one.name] = chosen
        return weights, Corrections(tuple(biases))

    def judged(self, graph: GraphModel) -> dict[str, Any]:
        """KL and ΔNE of a model on certification rows, by output."""
        context = self.context
        scores = expose_scores(graph, {spec.name: spec.kind for spec in context.specs})
        session = self.session(graph, "judged.onnx")
        split = replace(context.certification, most=CERTIFICATION_ROWS)
        simulated = simulate(context, session.run, split, scores, ({}, {}), "judge")
        result = {}
        for output in try_corrections(context.specs, context.reference(split), simulated, None):
            trial = output.trial(Variant.NONE)
            ends = trial.delta_ne and [trial.delta_ne.value, trial.delta_ne.lower, trial.delta_ne.upper]
            result[output.output] = {
                "kl_percent": 100 * trial.kl.value,
                "delta_ne_percent": ends and [100 * end for end in ends],
            }
        return result

    def measure(self, choices: Sequence[str]) -> dict[str, Any]:
        """Figures of some choices of weights."""
        result: dict[str, Any] = {"sites": {one.name: one.errors() for one in self.linears}, "choices": {}}
        for choice in choices:
            began = time.perf_counter()
            weights, corrections = self._chosen(choice)
            graph = (
                self.replaced(self.model.path, weights)
                if choice == ALONE
                else self.with_weights(weights, corrections)
            )
            result["choices"][choice] = {
                "seconds": time.perf_counter() - began,
                "outputs": self.judged(graph),
                "weight_error_over_nearest": self._ratio(weights),
            }
            print(f"  {choice}: {json.dumps(result['choices'][choice])}", flush=True)
        return result

    def _chosen(self, choice: str) -> tuple[dict[str, Matrix], Corrections]:
        if choice == SEQUENTIAL:
            return self.sequential()
        weights = {one.name: one.chosen(choice) for one in self.linears}
        return weights, Corrections() if choice in {ALONE, PLAIN} else self.corrections(weights)

    def _ratio(self, weights: Mapping[str, Matrix]) -> float:
        """Energy of the error from weights over that of the nearest, geometric mean over sites."""
        logs = []
        for one in self.linears:
            gram = one.centred.gram
            before = energy(one.weight - one.grid.nearest(one.weight), gram)
            after = energy(one.weight - weights[one.name], gram)
            if min(before, after) > 0.0:
                logs.append(np.log(after / before))
        return float(np.exp(np.mean(logs))) if logs else 0.0


def exposed(graph: GraphModel, one: Linear) -> str:
    """Make the activation of a site an output; returns its name."""
    tensor = graph.node(one.name).inputs[one.site.activation.index]
    if all(tensor.name != output.name for output in graph.graph.outputs):
        graph.add_output(tensor, np.float32, tensor.shape)
    return str(tensor.name)


def trained_run(architecture: str, directory: Path) -> Path:
    """The run file of a model of the zoo, trained on MovieLens 100K."""
    data = prepare_movielens_100k(directory / "data")
    checkpoint, arguments = directory / f"{architecture}.safetensors", arguments_of(architecture, data)
    if not checkpoint.exists():
        module, _ = build(**arguments)
        train(module, data.open("train"), TrainOptions(seed=0))
        save_checkpoint(checkpoint, module.state_dict())
    values = {
        "name": architecture,
        "model": {
            "torch": "loka_zoo.builders:build",
            "checkpoint": str(checkpoint),
            "arguments": arguments,
        },
        "outputs": [{"name": "logit", "kind": "logit", "label": data.label, "budget": 0.001}],
        "data": {
            **{split: str(data.splits[split].path) for split in DataConfig.SPLITS},
            "inputs": {binding.input: list(binding.columns) for binding in data.bindings},
        },
        "targets": [{"device": "cpu", "backends": ["onnxruntime"]}],
    }
    path = directory / f"{architecture}.yaml"
    path.write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")
    return path


def measure(
    run_file: Path, format: str, scratch: Path, choices: Sequence[str], threads: int
) -> dict[str, Any]:
    """Run the pipeline up to its plans, or take that over, and judge every choice of weights."""
    output = scratch / "run"
    overrides = {
        "plan.formats": [format],
        "plan.plans": ["fp32", f"{format}-all"],
        "output": str(output),
        "threads": threads,
        "refine.rounds": 0,
        "calibration.rows": CALIBRATION_ROWS,
    }
    config = load_run_file(run_file, overrides)
    run(config, RunOptions(until=Stage.PLAN, resume=output.exists()))
    with RunDirectory.create(
        output, recorded(config), library_versions(), force=False, resume=True
    ) as directory:
        context = accept(RunSettings(config, directory)).context
        plan, model = PLAN.read(output).plan(f"{format}-all"), HIGH_ERROR.read(output).model
        return Case(context, model, plan, scratch).measure(choices)


def summary(figures: Mapping[str, Any]) -> dict[str, Any]:
    """KL of nearest weights with biases over that of each choice, summed over outputs; above 1 is a gain."""
    kl = {
        choice: sum(one["kl_percent"] for one in known["outputs"].values())
        for choice, known in figures["choices"].items()
    }
    return {choice: kl[NEAREST] / value for choice, value in kl.items() if choice != NEAREST}


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_files", nargs="*", type=Path)
    parser.add_argument("--models", nargs="*", default=[], help="of the zoo")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--choices", nargs="+", default=list(CHOICES), help=f"{SEQUENTIAL} beside them")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    scratch: Path = options.scratch.absolute()
    run_files = {path.parent.name: path for path in options.run_files}
    run_files |= {model: trained_run(model, scratch / "zoo") for model in options.models}
    for name, run_file in run_files.items():
        for format in options.formats:
            place = scratch / f"{name}-{format}"
            done = place.with_suffix(".json")
            known = json.loads(done.read_text("utf-8"))["choices"] if done.exists() else {}
            missing = [choice for choice in options.choices if choice not in known]
            if not missing:
                continue
            print(place.name, flush=True)
            place.mkdir(parents=True, exist_ok=True)
            figures = measure(run_file, format, place, missing, options.threads)
            figures["choices"] = {**known, **figures["choices"]}
            done.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    runs = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(scratch.glob("*.json"))}
    record = {"gain": {name: summary(figures) for name, figures in runs.items()}, "runs": runs}
    print(json.dumps(record["gain"], indent=1))
    rows = {
        "calibration": CALIBRATION_ROWS,
        "sequential": SEQUENTIAL_ROWS,
        "certification": CERTIFICATION_ROWS,
    }
    print(write_record("weight_rounding", record, {"rows": rows, "damping": DAMPING}))


if __name__ == "__main__":
    main()
