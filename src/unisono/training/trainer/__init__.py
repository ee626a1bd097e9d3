"""The train, test and predict functions that Keras' loop calls."""
