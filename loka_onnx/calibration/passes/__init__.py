"""Passes over rows and their executors."""
