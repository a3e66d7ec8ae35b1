"""What a host must have for an engine, beside a device of its architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping

from loka_onnx.core.devices import CPU
from loka_onnx.core.manifest import Need, Requirement
from loka_onnx.sessions.backends import get_spec

LEAST_DRIVER: Mapping[int, str] = {11: "450.80.02", 12: "525.60.13", 13: "580"}
"""Least Linux driver of the host for programs of each major version of the CUDA toolkit.

NVIDIA, CUDA Compatibility, "Minor Version Compatibility", table 1; CUDA Toolkit Release Notes, table 2.
"""


def requirements_of(backend: str, version: str, architecture: str) -> tuple[Requirement, ...]:
    """Libraries and drivers that an engine needs.

    Args:
        backend: The backend that built it.
        version: Version of the library that built it.
        architecture: Its device architecture, as the backend names it.
    """
    spec = get_spec(backend)
    library = Requirement(spec.title, *spec.requirement(version, architecture))
    if architecture == CPU:
        return (library,)
    if not architecture.startswith("sm"):
        return (library, Requirement("AMD GPU driver", Need.NOT_STATED))
    toolkit = re.search(r"\+cu(\d+)\d$", version)
    least = LEAST_DRIVER.get(int(toolkit.group(1))) if toolkit else None
    if least is None:
        return (library, Requirement("NVIDIA driver", Need.NOT_STATED))
    return (library, Requirement("NVIDIA driver", Need.AT_LEAST, least))
