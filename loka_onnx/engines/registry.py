"""Engine makers by name."""

from __future__ import annotations

from collections.abc import Callable

from loka_onnx.engines.base import Backend
from loka_onnx.sessions.backends import get_spec, resolve


def get_backend(name: str) -> Backend:
    """Return the backend of that name; a `ConfigError` where there is none."""
    return maker_of(name)()


def maker_of(name: str) -> Callable[[], Backend]:
    """Return the class of a backend."""
    maker: Callable[[], Backend] = resolve(get_spec(name).maker)
    return maker
