"""Forms in which NVIDIA Triton serves engines; the `triton.py` of each backend builds on them."""
