"""From a torch module or a foreign ONNX file to a model with named sites."""
