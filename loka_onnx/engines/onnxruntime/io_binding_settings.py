"""Settings beside an engine of ONNX Runtime that say how to load it.

An engine may come from someone who may not run code on this host, so that its settings cannot name files or
libraries.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from loka_onnx.core.serde import STRICT
from loka_onnx.engines.onnxruntime.providers import PROVIDERS
from loka_onnx.errors import EngineError

SETTINGS_FILE = "settings.json"
"""File beside the engine."""
PROGRAMS = "programs"
"""Directory beside the engine with the programs that a provider compiled."""


@dataclass(frozen=True)
class BoundSettings:
    """Settings of an engine; the document beside it.

    Attributes:
        version: ONNX Runtime that built it.
        options: Options of the provider, other than the device and the directory of its programs.
        sizes: Batch sizes with fixed buffers, ascending; empty: every batch runs unpadded.
        programs: Whether the provider's programs are in `PROGRAMS`.

    Raises:
        EngineError: The provider or an option is unknown, or sizes are out of order.
    """

    SCHEMA: ClassVar[str] = "onnxruntime-engine/1"
    __pydantic_config__ = STRICT

    provider: str
    version: str
    options: dict[str, str] = field(default_factory=dict)
    sizes: tuple[int, ...] = ()
    programs: bool = False

    def __post_init__(self) -> None:
        provider = PROVIDERS.get(self.provider)
        if provider is None:
            raise EngineError(
                f"there is no provider '{self.provider}'", evidence=f"known: {', '.join(PROVIDERS)}"
            )
        unknown = sorted(set(self.options) - provider.options)
        if unknown:
            raise EngineError(
                f"an engine cannot set option '{unknown[0]}' of {provider.name}",
                evidence=f"it may set {', '.join(sorted(provider.options)) or 'none'}",
            )
        if list(self.sizes) != sorted({*self.sizes}) or any(size < 1 for size in self.sizes):
            raise EngineError("sizes of an engine are out of order", evidence=str(list(self.sizes)))


def settings_beside(engine: Path) -> tuple[str, ...]:
    """Names of the files that the settings of an engine add beside it; none without settings."""
    if engine.suffix != ".onnx" or not engine.with_name(SETTINGS_FILE).is_file():
        return ()
    programs = (path for path in (engine.parent / PROGRAMS).rglob("*") if path.is_file())
    return (SETTINGS_FILE, *sorted(path.relative_to(engine.parent).as_posix() for path in programs))
