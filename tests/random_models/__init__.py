"""Random models and steps on strategies, compared with plain Keras on one device; see `checks`."""
