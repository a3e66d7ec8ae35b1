"""The model of Triton's Python backend that runs an engine of the inductor backend.

An export copies this file into the repository. It needs loka-onnx and PyTorch in the Python of the server;
another release of PyTorch or another processor than the engine was compiled for is refused before its code is
loaded. The server's own module exists only inside the server.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from loka_onnx.engines.inductor.session import open_inductor
from loka_onnx.errors import LokaError

ARCHITECTURE = "loka_onnx.architecture"
"""Parameter of the configuration: the architecture that the engine was built for."""


class TritonPythonModel:
    """One instance of the model."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the engine of the directory, version and configuration that the server gives."""
        config = json.loads(args["model_config"])
        package = Path(args["model_repository"]) / args["model_version"] / "model.pt2"
        self._session = open_inductor(package, config["parameters"][ARCHITECTURE]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer requests by one run for all of them; one response for each, in their order."""
        import triton_python_backend_utils as server  # type: ignore[import-not-found]  # in the server only

        engine = self._session.engine
        rows: list[int] = []
        parts: dict[str, list[Any]] = {port.name: [] for port in engine.inputs}
        for request in requests:
            for port in engine.inputs:
                value = server.get_input_tensor_by_name(request, port.name).as_numpy()
                parts[port.name].append(value.reshape(-1, *port.row_shape))
            rows.append(len(parts[engine.inputs[0].name][-1]))
        try:
            answers = self._session.run({name: np.concatenate(values) for name, values in parts.items()})
        except LokaError as error:
            failed = server.TritonError(str(error))
            return [server.InferenceResponse(output_tensors=[], error=failed) for _ in requests]
        ends = np.cumsum(rows)
        return [
            server.InferenceResponse(
                output_tensors=[
                    server.Tensor(port.name, np.ascontiguousarray(answers[port.name][end - count : end]))
                    for port in engine.outputs
                ]
            )
            for count, end in zip(rows, ends, strict=True)
        ]

    def finalize(self) -> None:
        """Free the engine."""
        self._session.close()
