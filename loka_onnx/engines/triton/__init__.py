"""Forms in which NVIDIA Triton serves engines: what the `triton.py` of each backend builds on."""
