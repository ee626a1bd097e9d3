"""Names of `tf.math`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any

def abs(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Shorthand for `keras.ops.absolute`."""
def accumulate_n(inputs: _Any, name: _b.str | None = ...) -> _Any:
    """Return the sum of a list of tensors of one shape."""
def acos(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Trigonometric inverse cosine, element-wise."""
def add(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Add arguments element-wise."""
def add_n(inputs: _Any, name: _b.str | None = ...) -> _Any:
    """Return the sum of a list of tensors of one shape."""
def argmax(input: _Any, axis: _b.int = ..., output_type: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the index of the largest number along an axis."""
def argmin(input: _Any, axis: _b.int = ..., output_type: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the index of the smallest number along an axis."""
def asin(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Inverse sine, element-wise."""
def atan(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Trigonometric inverse tangent, element-wise."""
def atan2(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Element-wise arc tangent of `x1/x2` choosing the quadrant correctly."""
def bincount(arr: _Any, weights: _Any = ..., minlength: _b.int | None = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return how often each number from 0 on is there."""
def ceil(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the ceiling of the input, element-wise."""
def confusion_matrix(labels: _Any, predictions: _Any, num_classes: _b.int | None = ..., weights: _Any = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return how often each label (row) was predicted as each class (column)."""
def conj(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Shorthand for `keras.ops.conjugate`."""
def cos(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Cosine, element-wise."""
def cosh(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Hyperbolic cosine, element-wise."""
def cumprod(x: _Any, axis: _b.int = ..., exclusive: _b.bool = ..., reverse: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the products of the entries up to each one along `axis`."""
def cumsum(x: _Any, axis: _b.int = ..., exclusive: _b.bool = ..., reverse: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the sums of the entries up to each one along `axis`."""
def divide(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Divide arguments element-wise."""
def divide_no_nan(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Safe element-wise division which returns 0 where the denominator is 0."""
def equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Returns `(x1 == x2)` element-wise."""
def erf(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Computes the error function of `x`, element-wise."""
def exp(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Calculate the exponential of all elements in the input tensor."""
def expm1(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Calculate `exp(x) - 1` for all elements in the tensor."""
def floor(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the floor of the input, element-wise."""
def floordiv(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Returns the largest integer smaller or equal to the division of inputs."""
def floormod(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Returns the element-wise remainder of division."""
def greater(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 > x2` element-wise."""
def greater_equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 >= x2` element-wise."""
def imag(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the imaginary part of the complex argument."""
def in_top_k(targets: _Any, predictions: _Any, k: _Any, name: _b.str | None = ...) -> _Any:
    """Checks if the targets are in the top-k predictions."""
def is_finite(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return whether a tensor is finite, element-wise."""
def is_inf(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Test element-wise for positive or negative infinity."""
def is_nan(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Test element-wise for NaN and return result as a boolean tensor."""
def l2_normalize(x: _Any, axis: _Any = ..., epsilon: _b.float = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor divided by its norm along an axis."""
def less(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 < x2` element-wise."""
def less_equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 <= x2` element-wise."""
def log(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Natural logarithm, element-wise."""
def log1p(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Returns the natural logarithm of one plus the `x`, element-wise."""
def log_sigmoid(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Logarithm of the sigmoid activation function."""
def logical_and(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Computes the element-wise logical AND of the given input tensors."""
def logical_not(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Computes the element-wise NOT of the given input tensor."""
def logical_or(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Computes the element-wise logical OR of the given input tensors."""
def logical_xor(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Compute the truth value of `x1 XOR x2`, element-wise."""
def maximum(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Element-wise maximum of `x1` and `x2`."""
def minimum(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Element-wise minimum of `x1` and `x2`."""
def mod(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Returns the element-wise remainder of division."""
def multiply(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Multiply arguments element-wise."""
def negative(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Numerical negative, element-wise."""
def not_equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return `(x1 != x2)` element-wise."""
def pow(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """First tensor elements raised to powers from second tensor, element-wise."""
def real(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the real part of the complex argument."""
def reciprocal(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the reciprocal of the argument, element-wise."""
def reduce_all(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Test whether all array elements along a given axis evaluate to `True`."""
def reduce_any(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Test whether any array element along a given axis evaluates to `True`."""
def reduce_logsumexp(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Computes the logarithm of sum of exponentials of elements in a tensor."""
def reduce_max(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., initial: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Return the maximum of a tensor or maximum along an axis."""
def reduce_mean(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Compute the arithmetic mean along the specified axes."""
def reduce_min(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., initial: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Return the minimum of a tensor or minimum along an axis."""
def reduce_prod(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., dtype: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Return the product of tensor elements over a given axis."""
def reduce_std(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Compute the standard deviation along the specified axis."""
def reduce_sum(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Sum of a tensor over the given axes."""
def reduce_variance(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Compute the variance along the specified axes."""
def round(x: _Any = ..., decimals: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Evenly round to the given number of decimals."""
def rsqrt(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Computes reciprocal of square root of x element-wise."""
def sigmoid(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Sigmoid activation function."""
def sign(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Returns a tensor with the signs of the elements of `x`."""
def sin(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Trigonometric sine, element-wise."""
def sinh(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Hyperbolic sine, element-wise."""
def softmax(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Softmax activation function."""
def softplus(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Softplus activation function."""
def sqrt(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the non-negative square root of a tensor, element-wise."""
def square(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the element-wise square of the input."""
def squared_difference(x: _Any, y: _Any, name: _b.str | None = ...) -> _Any:
    """Return `(x - y) ** 2`."""
def subtract(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Subtract arguments element-wise."""
def tan(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Compute tangent, element-wise."""
def tanh(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Hyperbolic tangent, element-wise."""
def top_k(x: _Any = ..., k: _Any = ..., sorted: _b.bool = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Finds the top-k values and their indices in a tensor."""
def truediv(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Alias for `keras.ops.divide`."""
def unsorted_segment_max(data: _Any, segment_ids: _Any, num_segments: _b.int | None = ..., indices_are_sorted: _b.bool = ..., unique_indices: _b.bool = ..., bucket_size: _b.int | None = ..., mode: _Any = ..., out_sharding: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Computes the maximum within segments of an array."""
def unsorted_segment_mean(data: _Any, segment_ids: _Any, num_segments: _b.int, name: _b.str | None = ...) -> _Any:
    """Return the means of segments; 0 where there is nothing."""
def unsorted_segment_sum(data: _Any, segment_ids: _Any, num_segments: _b.int | None = ..., indices_are_sorted: _b.bool = ..., unique_indices: _b.bool = ..., bucket_size: _b.int | None = ..., mode: _Any = ..., out_sharding: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Computes the sum within segments of an array."""
