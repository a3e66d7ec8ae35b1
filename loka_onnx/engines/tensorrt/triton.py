"""Engines of TensorRT in Triton."""

from __future__ import annotations

from dataclasses import replace

from loka_onnx.engines.triton.forms import BundledEngine, Form, Refusal, model_of
from loka_onnx.engines.triton.models import Fields, map_field


def triton_form(source: BundledEngine) -> Form | Refusal:
    """Return the model of Triton's TensorRT backend for an engine, or why there is none."""
    model = model_of(source, ("tensorrt", "tensorrt_plan", "model.plan"), ())
    cuda: Fields = ()
    if model.sizes and not any(None in port.row_shape for port in model.inputs):
        shapes = {
            port.name: tuple(("dim", length) for length in port.row_shape if length is not None)
            for port in model.inputs
        }
        inputs = map_field("input", shapes)
        specs = (("graph_spec", (("batch_size", size), *inputs)) for size in model.sizes)
        cuda = (("cuda", (("graphs", True), *specs)),)
    remarks = [
        f"needs TensorRT {source.entry.version} and a GPU of {source.entry.architecture}: pick the release "
        "of Triton that has this version",
        "runs in the profile for every size; the profiles for single sizes behind it are used where "
        "`instance_group.profile` names them",
    ]
    return Form(replace(model, optimization=cuda), tuple(remarks))
