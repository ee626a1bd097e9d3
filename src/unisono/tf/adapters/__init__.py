"""What TensorFlow's names are here, where it takes more than another name."""
