"""Names of `tf.estimator.export`, for editors and type checkers; `python -m tools.stubs` makes this file."""

from unisono.estimator import (
    ClassificationOutput as ClassificationOutput,
    PredictOutput as PredictOutput,
    RegressionOutput as RegressionOutput,
    ServingInputReceiver as ServingInputReceiver,
    TensorServingInputReceiver as TensorServingInputReceiver,
    build_parsing_serving_input_receiver_fn as build_parsing_serving_input_receiver_fn,
    build_raw_serving_input_receiver_fn as build_raw_serving_input_receiver_fn,
)
