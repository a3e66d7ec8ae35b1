"""A model repository of NVIDIA Triton Inference Server, made from a bundle."""
