"""Rankers of public libraries, exported as their users export them, each through `loka-onnx run`."""
