"""Kernels that the compiler does not make by itself, as PyTorch operators that it calls.

Each module `triton_*` holds one operator: the Triton kernel and what launches it, on CUDA. The kernel of
``loka::X`` is named ``_loka_X_kernel``: by that name generated code tells which it calls (`site_precision`).
`operators` says how nodes are lowered to them, and elsewhere to plain PyTorch, which rounds to the base
precision where the graph does and a kernel does not. Triton is imported when a module of `triton_*` is, which
nothing on a CPU does.
"""
