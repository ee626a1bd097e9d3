"""A call of `fit` on several workers: comparison, shared decisions, summary."""
