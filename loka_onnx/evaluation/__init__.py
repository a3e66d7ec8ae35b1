"""Accuracy and latency of built engines."""
