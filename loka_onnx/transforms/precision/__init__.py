"""Writing a plan into the graph: Q/DQ, casts and corrections."""
