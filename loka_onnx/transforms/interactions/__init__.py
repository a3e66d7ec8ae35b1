"""Products of two activations: Einsum as MatMul, and chains in their cheapest order."""
