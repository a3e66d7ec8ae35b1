"""Reading and editing ONNX graphs; the only room that imports onnx_graphsurgeon."""
