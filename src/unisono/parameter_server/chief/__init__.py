"""The chief's side: closures and their workers, and Keras' training on them."""
