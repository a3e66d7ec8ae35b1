"""Kernels that the compiler does not make by itself, as PyTorch operators that it calls.

Each module holds one operator: the Triton kernel, the operator that launches it (on CUDA), and the same
arithmetic in plain PyTorch, which runs on the CPU and is what tests compare with. Triton is imported when a
module of `triton_*` is, which nothing on a CPU does.
"""
