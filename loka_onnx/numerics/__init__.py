"""Reference numerics: FP8 casts, scales, task metrics, exact loss changes and intervals."""
