"""Benchmarks of whole stages."""
