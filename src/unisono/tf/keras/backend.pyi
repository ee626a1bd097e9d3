"""Names of `tf.keras.backend` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any
from keras.backend import (
    backend as backend,
    epsilon as epsilon,
    floatx as floatx,
    get_uid as get_uid,
    image_data_format as image_data_format,
    is_float_dtype as is_float_dtype,
    is_int_dtype as is_int_dtype,
    is_keras_tensor as is_keras_tensor,
    result_type as result_type,
    set_epsilon as set_epsilon,
    set_floatx as set_floatx,
    set_image_data_format as set_image_data_format,
    standardize_dtype as standardize_dtype,
)
from keras.utils import (
    clear_session as clear_session,
)
from unisono import (
    Variable as _unisono_Variable,
)
from unisono.tf.adapters._keras import (
    get_value as _unisono_tf_adapters__keras_get_value,
    set_value as _unisono_tf_adapters__keras_set_value,
    get_value as get_value,
    set_value as set_value,
)
from unisono.tf.adapters._tensors import (
    no_op as _unisono_tf_adapters__tensors_no_op,
)

eval = _unisono_tf_adapters__keras_get_value
set_learning_phase = _unisono_tf_adapters__tensors_no_op
update = _unisono_tf_adapters__keras_set_value
variable = _unisono_Variable
def abs(x: _Any, name: _b.str | None = ...) -> _Any:
    """Shorthand for `keras.ops.absolute`."""
def all(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Test whether all array elements along a given axis evaluate to `True`."""
def any(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Test whether any array element along a given axis evaluates to `True`."""
def arange(start: _Any, stop: _Any = ..., step: _Any = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return evenly spaced values within a given interval."""
def argmax(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Returns the indices of the maximum values along an axis."""
def argmin(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Returns the indices of the minimum values along an axis."""
def binary_crossentropy(target: _Any, output: _Any, from_logits: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Computes binary cross-entropy loss between target and output tensor."""
def cast(x: _Any, dtype: _Any, name: _b.str | None = ...) -> _Any:
    """Cast a tensor to the desired dtype."""
def categorical_crossentropy(target: _Any, output: _Any, from_logits: _b.bool = ..., axis: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Computes categorical cross-entropy loss between target and output tensor."""
def clip(x: _Any, x_min: _Any = ..., x_max: _Any = ..., name: _b.str | None = ..., *, min_value: _Any = ..., max_value: _Any = ...) -> _Any:
    """Clip (limit) the values in a tensor."""
def concatenate(xs: _Any, axis: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Join a sequence of tensors along an existing axis."""
def constant(value: _Any, dtype: _Any = ..., shape: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor of a value; one of strings stays on the host."""
def cos(x: _Any, name: _b.str | None = ...) -> _Any:
    """Cosine, element-wise."""
def cumprod(x: _Any, axis: _Any = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the cumulative product of elements along a given axis."""
def cumsum(x: _Any, axis: _Any = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Returns the cumulative sum of elements along a given axis."""
def dot(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Dot product of two tensors."""
def dropout(x: _Any, rate: _b.float | None = ..., noise_shape: _Any = ..., seed: _Any = ..., name: _b.str | None = ..., keep_prob: _b.float | None = ...) -> _Any:
    """Return a tensor with entries set to zero at random, and the others scaled."""
def elu(x: _Any, alpha: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Exponential Linear Unit activation function."""
def equal(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Returns `(x1 == x2)` element-wise."""
def exp(x: _Any, name: _b.str | None = ...) -> _Any:
    """Calculate the exponential of all elements in the input tensor."""
def expand_dims(x: _Any, axis: _Any, name: _b.str | None = ...) -> _Any:
    """Expand the shape of a tensor."""
def eye(N: _Any, M: _Any = ..., k: _Any = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a 2-D tensor with ones on the diagonal and zeros elsewhere."""
def flatten(x: _Any, name: _b.str | None = ...) -> _Any:
    """Return a contiguous flattened tensor."""
def gather(x: _Any = ..., indices: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, reference: _Any = ...) -> _Any:
    """Take elements from a tensor along an axis."""
def greater(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Return the truth value of `x1 > x2` element-wise."""
def greater_equal(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Return the truth value of `x1 >= x2` element-wise."""
def hard_sigmoid(x: _Any, name: _b.str | None = ...) -> _Any:
    """Hard sigmoid activation function."""
def int_shape(x: _Any, name: _b.str | None = ...) -> _Any:
    """Gets the shape of the tensor input."""
def l2_normalize(x: _Any, axis: _Any = ..., epsilon: _b.float = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor divided by its norm along an axis."""
def less(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Return the truth value of `x1 < x2` element-wise."""
def less_equal(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Return the truth value of `x1 <= x2` element-wise."""
def log(x: _Any, name: _b.str | None = ...) -> _Any:
    """Natural logarithm, element-wise."""
def logsumexp(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Computes the logarithm of sum of exponentials of elements in a tensor."""
def map_fn(fn: _Any, elems: _Any, dtype: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return a function's results for each row, stacked."""
def max(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., initial: _Any = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Return the maximum of a tensor or maximum along an axis."""
def maximum(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Element-wise maximum of `x1` and `x2`."""
def mean(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Compute the arithmetic mean along the specified axes."""
def min(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., initial: _Any = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Return the minimum of a tensor or minimum along an axis."""
def minimum(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Element-wise minimum of `x1` and `x2`."""
def ndim(x: _Any, name: _b.str | None = ...) -> _Any:
    """Return the number of dimensions of a tensor."""
def not_equal(x1: _Any, x2: _Any, name: _b.str | None = ...) -> _Any:
    """Return `(x1 != x2)` element-wise."""
def one_hot(x: _Any = ..., num_classes: _Any = ..., axis: _Any = ..., dtype: _Any = ..., sparse: _b.bool = ..., name: _b.str | None = ..., *, indices: _Any = ...) -> _Any:
    """Converts integer tensor `x` into a one-hot tensor."""
def ones(shape: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a new tensor of given shape and type, filled with ones."""
def ones_like(x: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor of ones with the same shape and type of `x`."""
def permute_dimensions(x: _Any, axes: _Any = ..., name: _b.str | None = ..., *, pattern: _Any = ...) -> _Any:
    """Returns a tensor with `axes` transposed."""
def pow(x1: _Any, x2: _Any = ..., name: _b.str | None = ..., *, a: _Any = ...) -> _Any:
    """First tensor elements raised to powers from second tensor, element-wise."""
def prod(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., dtype: _Any = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Return the product of tensor elements over a given axis."""
def random_normal(shape: _Any, mean: _b.float = ..., stddev: _b.float = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a normal distribution."""
def random_uniform(shape: _Any, minval: _b.float = ..., maxval: _b.float | None = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a uniform distribution."""
def relu(x: _Any, name: _b.str | None = ...) -> _Any:
    """Rectified linear unit activation function."""
def repeat(x: _Any, repeats: _Any, axis: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Repeat each element of a tensor after themselves."""
def reshape(x: _Any, newshape: _Any, name: _b.str | None = ...) -> _Any:
    """Gives a new shape to a tensor without changing its data."""
def reverse(x: _Any, axis: _Any = ..., name: _b.str | None = ..., *, axes: _Any = ...) -> _Any:
    """Reverse the order of elements in the tensor along the given axis."""
def round(x: _Any, decimals: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Evenly round to the given number of decimals."""
def shape(x: _Any, name: _b.str | None = ...) -> _Any:
    """Gets the shape of the tensor input."""
def sigmoid(x: _Any, name: _b.str | None = ...) -> _Any:
    """Sigmoid activation function."""
def sign(x: _Any, name: _b.str | None = ...) -> _Any:
    """Returns a tensor with the signs of the elements of `x`."""
def sin(x: _Any, name: _b.str | None = ...) -> _Any:
    """Trigonometric sine, element-wise."""
def softmax(x: _Any, axis: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Softmax activation function."""
def softplus(x: _Any, name: _b.str | None = ...) -> _Any:
    """Softplus activation function."""
def softsign(x: _Any, name: _b.str | None = ...) -> _Any:
    """Softsign activation function."""
def sparse_categorical_crossentropy(target: _Any, output: _Any, from_logits: _b.bool = ..., axis: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Computes sparse categorical cross-entropy loss."""
def sqrt(x: _Any, name: _b.str | None = ...) -> _Any:
    """Return the non-negative square root of a tensor, element-wise."""
def square(x: _Any, name: _b.str | None = ...) -> _Any:
    """Return the element-wise square of the input."""
def squeeze(x: _Any, axis: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Remove axes of length one from `x`."""
def stack(values: _Any, axis: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return tensors of one shape along a new axis."""
def std(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Compute the standard deviation along the specified axis."""
def stop_gradient(variable: _Any, name: _b.str | None = ...) -> _Any:
    """Stops gradient computation."""
def sum(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Sum of a tensor over the given axes."""
def tanh(x: _Any, name: _b.str | None = ...) -> _Any:
    """Hyperbolic tangent, element-wise."""
def tile(x: _Any, repeats: _Any, name: _b.str | None = ...) -> _Any:
    """Repeat `x` the number of times given by `repeats`."""
def transpose(x: _Any, axes: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Returns a tensor with `axes` transposed."""
def truncated_normal(shape: _Any, mean: _b.float = ..., stddev: _b.float = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a normal distribution, none further than two standard deviations from its mean."""
def var(x: _Any, axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, keep_dims: _b.bool = ...) -> _Any:
    """Compute the variance along the specified axes."""
def zeros(shape: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a new tensor of given shape and type, filled with zeros."""
def zeros_like(x: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor of zeros with the same shape and type as `x`."""
