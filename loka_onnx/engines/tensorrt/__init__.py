"""TensorRT and TensorRT for RTX: a common build, and a reader of engines for each."""
