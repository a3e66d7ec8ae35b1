"""Removing what says nothing: constant subgraphs, nodes without effect, twins, a Split that is undone."""
