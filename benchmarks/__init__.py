"""Benchmarks: each writes its figures to `records/`."""
