"""Letting requests in until an engine is closed, and closing it when the last one is out."""

from __future__ import annotations

import threading

from loka_onnx.errors import EngineError


class Closed(EngineError):
    """The engine was closed; a request to it is a mistake of the caller, not of the engine."""


class Gate:
    """Counts who is inside. Cheap to pass; safe for any number of threads."""

    def __init__(self) -> None:
        self._state = threading.Condition(threading.Lock())
        self._inside, self._is_closed = 0, False

    @property
    def inside(self) -> int:
        """How many are inside now."""
        return self._inside

    @property
    def is_closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._is_closed

    def enter(self) -> None:
        """Go in; `leave` must follow.

        Raises:
            Closed: It is closed.
        """
        with self._state:
            if self._is_closed:
                raise Closed("the engine is closed", remedy="load the bundle again")
            self._inside += 1

    def leave(self) -> None:
        """Go out."""
        with self._state:
            self._inside -= 1
            if self._is_closed and not self._inside:
                self._state.notify_all()

    def close(self) -> bool:
        """Let nobody in from now on, and wait for those inside.

        Returns:
            Whether this call closed it: False for every call but the first, which waits as well.
        """
        with self._state:
            is_first, self._is_closed = not self._is_closed, True
            self._state.wait_for(lambda: not self._inside)
        return is_first
