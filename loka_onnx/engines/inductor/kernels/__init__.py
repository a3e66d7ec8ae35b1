"""Own kernels, as PyTorch operators that Inductor calls.

The modules `triton_*` hold operators for CUDA: Triton kernels and their launchers. The kernel of ``loka::X``
is named ``_loka_X_kernel``, by which `site_precision` finds it in generated code. `operators`
lowers nodes to these, or elsewhere to plain PyTorch, which rounds to the base precision where the graph does
and a kernel does not. Only the modules `triton_*` import Triton, and only on a GPU.
"""
