"""Packages of Inductor in Triton: in its PyTorch backend, or in Python where that does not take them.

The PyTorch backend asks a package for the program called ``model`` and gives it tensors by position, as
``INPUT__0`` and so on (`src/pt2/model_state.cc` of triton-inference-server/pytorch_backend). This project's
programs are called after the rows that they take, in a directory of that name inside the archive alone.
"""

from __future__ import annotations

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

from loka_onnx.core.devices import CPU
from loka_onnx.core.digests import CHUNK_BYTES
from loka_onnx.engines.inductor import triton_model
from loka_onnx.engines.inductor.package import InductorEngine, read_engine
from loka_onnx.engines.triton.forms import BY_MODEL, ON_CPU, BundledEngine, Form, Refusal, model_of
from loka_onnx.engines.triton.models import VERSION, ModelFile
from loka_onnx.errors import BundleError


def triton_form(source: BundledEngine) -> Form | Refusal:
    """Return the model of Triton's PyTorch backend for an engine, or why there is none."""
    engine = read_engine(source.path)
    names = [{port.name for port in ports} for ports in (engine.inputs, engine.outputs)]
    if names != [{spec.name for spec in specs} for specs in (source.inputs, source.outputs)]:
        known = sorted(set.union(*names))
        return Refusal(f"its document has other inputs or outputs than the bundle: {known}")
    loose = [port.name for port in engine.outputs if not port.batched]
    if loose:
        return Refusal(f"output '{loose[0]}' is one for the whole batch, and Triton cuts outputs by request")
    needs = f"needs PyTorch {engine.torch}, and the processor and the GPU that the engine was compiled for"
    reason = _why_not_native(engine)
    return _python(source, engine, needs, reason) if reason else _torch(source, engine, needs)


def _why_not_native(engine: InductorEngine) -> str:
    """Reason why Triton's PyTorch backend cannot run an engine; empty when it can."""
    if len(engine.programs) > 1:
        return f"it has {len(engine.programs)} programs, for batches of one size each, and one is loaded"
    if engine.is_static or engine.minimum > 1:
        return f"batches smaller than the {engine.programs[0].minimum} rows of its program have to be padded"
    return ""


def _torch(source: BundledEngine, engine: InductorEngine, needs: str) -> Form:
    names = {port.name: f"INPUT__{index}" for index, port in enumerate(engine.inputs)}
    names |= {port.name: f"OUTPUT__{index}" for index, port in enumerate(engine.outputs)}
    model = model_of(source, ("pytorch", "torch_aoti", "model.pt2"), engine.sizes, names)
    # The backend finds positions by these names; in their order, nothing depends on that.
    inputs, outputs = (
        tuple(sorted(ports, key=lambda port: int(port.name.partition("__")[2])))
        for ports in (model.inputs, model.outputs)
    )
    package = ModelFile(f"{VERSION}/model.pt2", source.entry.path, program=engine.programs[0].name)
    # Under `platform: "torch_aoti"` the backend checks types, not versions: a wrong one is a crash.
    remarks = [f"{needs}; the server does not check that"]
    if source.entry.architecture != CPU:
        remarks.append("runs without CUDA graphs")
    return Form(
        replace(model, inputs=inputs, outputs=outputs, files=(package, *model.files[1:])), tuple(remarks)
    )


def _python(source: BundledEngine, engine: InductorEngine, needs: str, reason: str) -> Form:
    model = model_of(source, ("python", "", "model.py"), engine.sizes)
    package = ModelFile(f"{VERSION}/model.pt2", source.entry.path)
    code = ModelFile(f"{VERSION}/model.py", content=Path(triton_model.__file__).read_bytes())
    # The session picks the GPU of the engine's architecture itself.
    kind = ON_CPU if source.entry.architecture == CPU else BY_MODEL
    remarks = (f"runs in Triton's Python backend: {reason}", f"{needs}, and loka-onnx in the server's Python")
    return Form(replace(model, kind=kind, files=(code, package, *model.files[1:])), remarks)


def rename_program(package: Path, program: str, target: Path) -> None:
    """Write a ``.pt2`` package whose only program has the name that the PyTorch backend asks for. Raises
    BundleError if the package has no such program.
    """
    old, new = f"/data/aotinductor/{program}/", "/data/aotinductor/model/"
    renamed = 0
    with zipfile.ZipFile(package) as source, zipfile.ZipFile(target, "w") as archive:
        for member in source.infolist():
            # Names begin with the name of the archive.
            place, inside, rest = member.filename.partition(old)
            renamed += bool(inside)
            copied = zipfile.ZipInfo(f"{place}{new}{rest}" if inside else member.filename, member.date_time)
            copied.compress_type, copied.external_attr = member.compress_type, member.external_attr
            # Weights may be larger than memory, and an archive must know of more than 4 GiB beforehand.
            copied.file_size = member.file_size
            with source.open(member) as reader, archive.open(copied, "w") as writer:
                shutil.copyfileobj(reader, writer, CHUNK_BYTES)
    if not renamed:
        raise BundleError(
            f"E0838 the package has no program '{program}'",
            where=str(package),
            remedy="build the engine again",
        )
