"""The cyclic collector sleeps while a graph is built, and is afterwards what it was."""

from __future__ import annotations

import gc

import pytest

from loka_onnx.core.progress import collector_paused


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_what_it_was(was_enabled: bool) -> None:
    try:
        if not was_enabled:
            gc.disable()
        with pytest.raises(ZeroDivisionError), collector_paused():
            with collector_paused():
                pass
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == was_enabled
    finally:
        gc.enable()
