"""Passes over rows: what runs them, and the ones over ranges and FP8 errors."""
