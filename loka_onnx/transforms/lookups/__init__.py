"""Embedding lookups: one for many columns, and the cut of a model behind them."""
