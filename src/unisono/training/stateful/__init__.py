"""Steps in TensorFlow's form: `train_step(self, data)`, which reads and writes variables itself."""
