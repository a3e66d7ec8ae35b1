"""Declaration of a backend: everything that is known without importing its compiler."""

from __future__ import annotations

import importlib
import importlib.util
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from loka_onnx.core.backends import NOTHING_KNOWN, Fusions, spec_paths
from loka_onnx.core.formats import FLOATS, NumberFormat
from loka_onnx.core.manifest import Need
from loka_onnx.errors import ConfigError, MissingPackage, nearest
from loka_onnx.sessions.onnx_session import SessionOptions
from loka_onnx.sessions.runner import Runner


@dataclass(frozen=True)
class BackendSpec(ABC):
    """Declaration in ``engines/<name>/spec.py``, which imports neither torch nor any graph library.

    Attributes:
        name: Name in run files.
        title: Name of its library in messages.
        modules: Modules whose distributions determine its engines; the first is its library.
        install: Command or instruction that installs its library.
        use: Use of the library, for `doctor`; empty where it is no package.
        maker: Import path (``module:class``) of the `engines.base.Backend` that builds.
        triton: Import path of the function that makes an engine's form for Triton; empty if it has none.
        devices: Architectures of each device of run files.
        formats: Formats of activations that it multiplies anywhere.
        need: Versions of the library that load an engine.
        fusions: Operators that it computes in one kernel.
        request_form: Architectures whose engines take users and candidates apart (`Part.REQUEST`).
    """

    name: str
    title: str
    modules: tuple[str, ...]
    install: str
    use: str
    maker: str
    devices: Mapping[str, tuple[str, ...]]
    triton: str = ""
    no_triton: str = "Triton has no backend for it"
    formats: tuple[NumberFormat, ...] = FLOATS
    need: Need = Need.EXACTLY
    fusions: Fusions = NOTHING_KNOWN
    request_form: tuple[str, ...] = ()

    @abstractmethod
    def open(self, engine: Path, architecture: str, version: str, options: SessionOptions | None) -> Runner:
        """Load an engine that comes from elsewhere, by its main file, with `options` of an ONNX Runtime
        session. Raises a LokaError if it does not load, or the library is not of `version`, if any.
        """

    @abstractmethod
    def device_obstacle(self, architecture: str) -> str:
        """Reason why this host has no device for an architecture; empty when it has."""

    def knows(self, architecture: str) -> bool:
        """True if it has engines for an architecture."""
        return True

    def formats_on(self, architecture: str) -> tuple[NumberFormat, ...]:
        """Formats of activations that it multiplies on an architecture."""
        return self.formats

    def is_program(self, architecture: str) -> bool:
        """True if loading an engine runs code in it."""
        return True

    def files_beside(self, engine: Path) -> tuple[str, ...]:
        """Names of an engine's further files, without external data."""
        return ()

    def load_library(self) -> Any:
        """Import the library; a `MissingPackage` where it does not load."""
        with MissingPackage(f"E0901 {self.title} is not installed", remedy=self.install).in_place_of(
            ImportError, OSError
        ):
            return importlib.import_module(self.modules[0])

    def library_obstacle(self) -> str:
        """Reason why the library is missing, without importing it; empty when it is installed."""
        return "" if is_installed(self.modules[0]) else f"{self.title} is not installed; {self.install}"

    def version(self) -> str:
        """Version of the library on this host; see `load_library`."""
        return str(self.load_library().__version__)

    def requirement(self, version: str, architecture: str) -> tuple[Need, str]:
        """Versions of the library that load an engine built by `version`, and the version to show."""
        if self.need is Need.NOT_STATED or not version:
            return Need.NOT_STATED, ""
        return self.need, release(version) if self.need is Need.RELEASE else version

    def loads(self, built_by: str, here: str) -> bool:
        """True if version `here` of the library loads a program that `built_by` made."""
        return here == built_by or (self.need is Need.RELEASE and release(here) == release(built_by))


def in_phrase(error: MissingPackage) -> str:
    """Format a missing package and its remedy in one phrase."""
    return f"{error.what}; {error.remedy}" if error.remedy else error.what


def release(version: str) -> str:
    """Major and minor version, for example ``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def is_installed(module: str) -> bool:
    """True if a module is installed, without importing it."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def installed_version(distribution: str, title: str) -> str:
    """Version of a distribution, without importing it; a `MissingPackage` where there is none."""
    with MissingPackage(f"E0902 {title} is not installed").in_place_of(metadata.PackageNotFoundError):
        return metadata.version(distribution)


def has_spec(name: str) -> bool:
    """True if there is a backend of that name."""
    return name in spec_paths()


def get_spec(name: str) -> BackendSpec:
    """The declaration of a backend; ConfigError if there is none, MissingPackage if it does not import."""
    paths = spec_paths()
    if name not in paths:
        raise ConfigError(
            f"E0903 there is no backend '{name}'",
            evidence=f"known backends: {', '.join(sorted(paths))}",
            remedy=nearest(name, paths) or "name one of these",
        )
    with MissingPackage(
        f"E0904 backend '{name}' does not import",
        where=paths[name],
        remedy="mend or remove the package that adds it",
    ).in_place_of(ImportError, AttributeError):
        spec: BackendSpec = resolve(paths[name])
    return spec


def fusions_of(backend: str) -> Fusions:
    """Operators that a backend computes in one kernel; none for an unknown backend."""
    return get_spec(backend).fusions if has_spec(backend) else NOTHING_KNOWN


def resolve(path: str) -> Any:
    """The value at an import path, ``module:value``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)
