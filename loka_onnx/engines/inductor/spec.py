"""Inductor as a backend declares itself."""

from __future__ import annotations

from pathlib import Path

from loka_onnx.core.backends import ACTIVATIONS, ARITHMETIC, MOVEMENTS, Fusions
from loka_onnx.core.devices import CPU, NVIDIA
from loka_onnx.core.formats import E4M3FN, INT8
from loka_onnx.core.manifest import Need
from loka_onnx.engines.inductor.session import INSTALL, open_inductor
from loka_onnx.sessions import cuda
from loka_onnx.sessions.backends import BackendSpec, installed_version
from loka_onnx.sessions.onnx_session import SessionOptions
from loka_onnx.sessions.runner import Runner


class InductorSpec(BackendSpec):
    """Packages of AOTInductor."""

    def open(self, engine: Path, architecture: str, version: str, options: SessionOptions | None) -> Runner:
        """See `BackendSpec.open`; the package itself says which versions it needs."""
        return open_inductor(engine, architecture)

    def device_obstacle(self, architecture: str) -> str:
        """See `BackendSpec.device_obstacle`."""
        return "" if architecture == CPU else cuda.why_no_gpu(architecture)

    def version(self) -> str:
        """See `BackendSpec.version`; PyTorch, which takes seconds, is not imported for it."""
        return installed_version("torch", self.title)


INDUCTOR = InductorSpec(
    name="inductor",
    title="PyTorch",
    modules=("torch", "triton"),
    install=INSTALL,
    use="engines of inductor; models given as PyTorch and the demo, with [export]",
    maker="loka_onnx.engines.inductor.backend:InductorBackend",
    triton="loka_onnx.engines.inductor.triton:triton_form",
    devices={CPU: (CPU,), **NVIDIA},
    formats=(E4M3FN, INT8),
    need=Need.RELEASE,
    fusions=Fusions(
        frozenset({*ACTIVATIONS, *ARITHMETIC, "LayerNormalization", "RMSNormalization"}),
        frozenset({"LayerNormalization", "RMSNormalization"}),
        frozenset(MOVEMENTS),
        "read from code that Inductor of PyTorch 2.13 generates (tests/contract/test_inductor.py)",
    ),
)
