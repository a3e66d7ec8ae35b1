"""TensorRT and TensorRT for RTX: one way to build an engine, two ways to read what was built."""
