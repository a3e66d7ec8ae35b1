"""Observers: graph outputs that measure the graph itself."""
