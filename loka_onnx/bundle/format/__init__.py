"""The format of a bundle, as a directory and as a single file: reading without trust, replacing as a whole.

The runtime reads bundles with these modules, so they import nothing of the rest of `loka_onnx.bundle`.
"""
