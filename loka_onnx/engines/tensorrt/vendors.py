"""The libraries of the TensorRT family."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from loka_onnx.errors import MissingPackage


@dataclass(frozen=True)
class Vendor:
    """A library of the TensorRT family.

    Attributes:
        module: The module it is imported as.
        title: Its name in messages.
        package: Its package, as `pip` knows it.
        extra: The extra of this project that installs it.
    """

    module: str
    title: str
    package: str
    extra: str

    def load(self) -> Any:
        """The module.

        Raises:
            MissingPackage: It is not installed, or its libraries do not load.
        """
        try:
            module = importlib.import_module(self.module)
            if not hasattr(module, "__version__"):
                # Python takes a directory of that name on its path for a package.
                places = ", ".join(getattr(module, "__path__", ()))
                raise ImportError(f"'{self.module}' is not the library but {places}")
            return module
        except (ImportError, OSError) as error:
            raise MissingPackage(
                f"{self.title} is not installed",
                evidence=str(error),
                remedy=f"pip install 'loka-onnx[{self.extra}]'",
            ) from error


TENSORRT = Vendor("tensorrt", "TensorRT", "tensorrt", "tensorrt")
TENSORRT_RTX = Vendor("tensorrt_rtx", "TensorRT for RTX", "tensorrt-rtx-cu13", "tensorrt-rtx")
