"""Differences of two bundles, two deployments or two runs."""
