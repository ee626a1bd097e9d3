"""Names of `tf.nn`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any
from unisono.nn import (
    compute_average_loss as compute_average_loss,
    embedding_lookup as embedding_lookup,
    scale_regularization_loss as scale_regularization_loss,
)

def avg_pool(input: _Any, ksize: _Any, strides: _Any, padding: _b.str, data_format: _b.str | None = ..., name: _b.str | None = ...) -> _Any:
    """Average pooling operation."""
def avg_pool2d(input: _Any, ksize: _Any, strides: _Any, padding: _b.str, data_format: _b.str | None = ..., name: _b.str | None = ...) -> _Any:
    """Average pooling operation."""
def batch_normalization(x: _Any, mean: _Any, variance: _Any, offset: _Any = ..., scale: _Any = ..., epsilon: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, variance_epsilon: _Any = ...) -> _Any:
    """Normalizes `x` by `mean` and `variance`."""
def bias_add(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, value: _Any = ..., bias: _Any = ...) -> _Any:
    """Add arguments element-wise."""
def conv2d(input: _Any, filters: _Any, strides: _Any, padding: _b.str, data_format: _b.str | None = ..., dilations: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a convolution."""
def dropout(x: _Any, rate: _b.float | None = ..., noise_shape: _Any = ..., seed: _Any = ..., name: _b.str | None = ..., keep_prob: _b.float | None = ...) -> _Any:
    """Return a tensor with entries set to zero at random, and the others scaled."""
def elu(x: _Any = ..., alpha: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Exponential Linear Unit activation function."""
def gelu(x: _Any = ..., approximate: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Gaussian Error Linear Unit (GELU) activation function."""
def in_top_k(targets: _Any, predictions: _Any, k: _Any, name: _b.str | None = ...) -> _Any:
    """Checks if the targets are in the top-k predictions."""
def l2_loss(t: _Any, name: _b.str | None = ...) -> _Any:
    """Return half of the sum of squares."""
def l2_normalize(x: _Any, axis: _Any = ..., epsilon: _b.float = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor divided by its norm along an axis."""
def leaky_relu(x: _Any = ..., negative_slope: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Leaky version of a Rectified Linear Unit activation function."""
def log_softmax(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Log-softmax activation function."""
def max_pool(input: _Any, ksize: _Any, strides: _Any, padding: _b.str, data_format: _b.str | None = ..., name: _b.str | None = ...) -> _Any:
    """Max pooling operation."""
def max_pool2d(input: _Any, ksize: _Any, strides: _Any, padding: _b.str, data_format: _b.str | None = ..., name: _b.str | None = ...) -> _Any:
    """Max pooling operation."""
def moments(x: _Any, axes: _Any, keepdims: _b.bool = ..., synchronized: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Calculates the mean and variance of `x`."""
def relu(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Rectified linear unit activation function."""
def relu6(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Rectified linear unit activation function with upper bound of 6."""
def selu(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Scaled Exponential Linear Unit (SELU) activation function."""
def sigmoid(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Sigmoid activation function."""
def sigmoid_cross_entropy_with_logits(labels: _Any, logits: _Any, name: _b.str | None = ...) -> _Any:
    """Return the cross entropy of each entry, in the form that never overflows."""
def silu(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Sigmoid Linear Unit (SiLU) activation function, also known as Swish."""
def softmax(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Softmax activation function."""
def softmax_cross_entropy_with_logits(labels: _Any, logits: _Any, axis: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return the cross entropy of each example."""
def softmax_cross_entropy_with_logits_v2(labels: _Any, logits: _Any, axis: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return the cross entropy of each example."""
def softplus(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Softplus activation function."""
def softsign(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Softsign activation function."""
def sparse_softmax_cross_entropy_with_logits(target: _Any = ..., output: _Any = ..., from_logits: _b.bool = ..., axis: _Any = ..., name: _b.str | None = ..., *, labels: _Any = ..., logits: _Any = ...) -> _Any:
    """Computes sparse categorical cross-entropy loss."""
def swish(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Sigmoid Linear Unit (SiLU) activation function, also known as Swish."""
def tanh(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Hyperbolic tangent, element-wise."""
def top_k(x: _Any = ..., k: _Any = ..., sorted: _b.bool = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Finds the top-k values and their indices in a tensor."""
