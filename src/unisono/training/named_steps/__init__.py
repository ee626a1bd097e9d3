"""Steps that return named values, for loops that take some steps at a time: those of an Estimator."""
