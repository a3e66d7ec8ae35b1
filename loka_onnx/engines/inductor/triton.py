"""Packages of Inductor in Triton: in its PyTorch backend, or in Python where that does not take them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loka_onnx.core.devices import CPU
from loka_onnx.engines.inductor import triton_model
from loka_onnx.engines.inductor.package import InductorEngine, read_engine
from loka_onnx.engines.inductor.triton_package import why_not_native
from loka_onnx.engines.triton.forms import BY_MODEL, ON_CPU, Form, Refusal, Source, model_of
from loka_onnx.engines.triton.models import VERSION, ModelFile


def triton_form(source: Source) -> Form | Refusal:
    """See `engines.triton.forms`."""
    engine = read_engine(source.path)
    taken, given = ({port.name for port in ports} for ports in (engine.inputs, engine.outputs))
    if taken != {spec.name for spec in source.inputs} or given != {spec.name for spec in source.outputs}:
        return Refusal(f"its document has other inputs or outputs than the bundle: {sorted(taken | given)}")
    loose = [port.name for port in engine.outputs if not port.batched]
    if loose:
        return Refusal(f"output '{loose[0]}' is one for the whole batch, and Triton cuts outputs by request")
    needs = f"needs PyTorch {engine.torch}, and the processor and the GPU that the engine was compiled for"
    reason = why_not_native(engine)
    return _python(source, engine, needs, reason) if reason else _torch(source, engine, needs)


def _torch(source: Source, engine: InductorEngine, needs: str) -> Form:
    names = {port.name: f"INPUT__{index}" for index, port in enumerate(engine.inputs)}
    names |= {port.name: f"OUTPUT__{index}" for index, port in enumerate(engine.outputs)}
    model = model_of(source, ("pytorch", "torch_aoti", "model.pt2"), engine.sizes, names)
    # The backend finds positions by these names; in their order, nothing depends on that.
    inputs, outputs = (
        tuple(sorted(ports, key=lambda port: int(port.name.partition("__")[2])))
        for ports in (model.inputs, model.outputs)
    )
    package = ModelFile(f"{VERSION}/model.pt2", source.entry.path, program=engine.programs[0].name)
    others = tuple(file for file in model.files if file.path != package.path)
    # Under `platform: "torch_aoti"` the backend checks types, not versions: a wrong one is a crash.
    remarks = [f"{needs}; the server does not check that"]
    if source.entry.architecture != CPU:
        remarks.append("runs without CUDA graphs")
    return Form(replace(model, inputs=inputs, outputs=outputs, files=(package, *others)), tuple(remarks))


def _python(source: Source, engine: InductorEngine, needs: str, reason: str) -> Form:
    model = model_of(source, ("python", "", "model.py"), engine.sizes)
    package = ModelFile(f"{VERSION}/model.pt2", source.entry.path)
    code = ModelFile(f"{VERSION}/model.py", content=Path(triton_model.__file__).read_bytes())
    others = tuple(file for file in model.files if not file.path.startswith(f"{VERSION}/"))
    # The session picks the GPU of the engine's architecture itself.
    kind = ON_CPU if source.entry.architecture == CPU else BY_MODEL
    remarks = (
        f"runs in Triton's Python backend: {reason}",
        f"{needs}, and loka-onnx in the server's Python",
    )
    return Form(replace(model, kind=kind, files=(code, package, *others)), remarks)
