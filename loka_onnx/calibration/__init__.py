"""Probe: what FP8 does to every site on realistic data, and how sure we are."""
