"""State in parts: of optimizers, and of weights."""
