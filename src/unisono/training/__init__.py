"""How Keras' `fit`, `evaluate` and `predict` use a strategy."""
