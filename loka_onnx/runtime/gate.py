"""Gate that admits requests until an engine is closed, and waits for the running ones."""

from __future__ import annotations

import threading

from loka_onnx.errors import EngineError


class Closed(EngineError):
    """The engine was closed; a request to it is the caller's mistake."""


class Gate:
    """Counts running requests; fast and thread-safe."""

    def __init__(self) -> None:
        self._state = threading.Condition(threading.Lock())
        self._inside, self._is_closed = 0, False

    @property
    def inside(self) -> int:
        """Number of running requests."""
        return self._inside

    @property
    def is_closed(self) -> bool:
        """True if no request is admitted any more."""
        return self._is_closed

    def __enter__(self) -> None:
        """Register a request, or raise `Closed`."""
        with self._state:
            if self._is_closed:
                raise Closed("the engine is closed", remedy="load the bundle again")
            self._inside += 1

    def __exit__(self, *_: object) -> None:
        with self._state:
            self._inside -= 1
            if self._is_closed and not self._inside:
                self._state.notify_all()

    def close(self) -> bool:
        """Admit no more requests and wait for the running ones; True for the call that closed it."""
        with self._state:
            is_first, self._is_closed = not self._is_closed, True
            self._state.wait_for(lambda: not self._inside)
        return is_first
