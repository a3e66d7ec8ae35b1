"""Fusing decomposed norms, and folding norms into the linears beside them."""
