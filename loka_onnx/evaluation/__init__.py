"""Accuracy and latency of a built engine, never of a promise."""
