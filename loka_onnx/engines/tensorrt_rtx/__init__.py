"""TensorRT for RTX: builds for a GPU that need not be present, and says what it compiled."""
