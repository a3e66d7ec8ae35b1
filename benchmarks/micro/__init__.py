"""Benchmarks of single pieces."""
