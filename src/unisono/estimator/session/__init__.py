"""One training, evaluation or prediction of an Estimator."""
