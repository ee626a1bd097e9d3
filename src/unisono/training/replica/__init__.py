"""What Keras' losses, metrics and layers do inside a replica."""
