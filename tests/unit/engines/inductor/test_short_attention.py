"""Which attentions our own kernel takes."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="needs torch: pip install 'loka-onnx[export]'")

from loka_onnx.engines.inductor.kernels.operators import _is_short  # noqa: E402


@pytest.mark.parametrize("alike", [True, False])
def test_a_batch_of_one_that_is_broadcast_is_not_short(alike: bool) -> None:
    """Our own kernel has a program for each example of Q."""
    q = torch.zeros(3 if alike else 1, 2, 5, 16)
    k, v = torch.zeros(3, 2, 20, 16), torch.zeros(3, 2, 20, 16)
    assert _is_short(q, k.transpose(2, 3), v, None) is alike
    assert _is_short(q, k.transpose(2, 3), v, torch.zeros(1, 1, 5, 20)) is alike
    assert not _is_short(q, k.transpose(2, 3), v, torch.zeros(2, 1, 5, 20))
