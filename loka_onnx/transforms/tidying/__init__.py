"""Remove constant subgraphs, nodes without effect, twins, and a Split that is undone."""
