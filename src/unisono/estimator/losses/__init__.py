"""Losses with TensorFlow 1's names and arguments: `tf.losses`.

Each returns one number: the weighted sum of its elements by the number of those whose weight is not zero, or
what `reduction` says. On several replicas that number is of the elements of all of them, as one device would
compute it: a replica returns its part. In a model_fn a loss joins those that `get_total_loss` adds up.
Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/losses

Tests: tests/unit/estimator/test_losses.py, tests/virtual/estimator/test_replica_losses.py.
"""

from unisono import _names

__getattr__, __dir__, __all__ = _names.lazy_names(__name__)
