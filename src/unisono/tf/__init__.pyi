"""Names of `tf`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
import numpy as _np
from typing import Any as _Any
from absl import (
    flags as flags,
)
from jax import (
    Array as _jax_Array,
    named_scope as _jax_named_scope,
)
from jax.lax import (
    complex as complex,
)
from jax.numpy import (
    dtype as _jax_numpy_dtype,
)
from keras.initializers import (
    Constant as _keras_initializers_Constant,
    Ones as _keras_initializers_Ones,
    RandomNormal as _keras_initializers_RandomNormal,
    RandomUniform as _keras_initializers_RandomUniform,
    TruncatedNormal as _keras_initializers_TruncatedNormal,
    Zeros as _keras_initializers_Zeros,
)
from keras.ops import (
    stop_gradient as _keras_ops_stop_gradient,
    is_tensor as is_tensor,
)
from keras.utils import (
    set_random_seed as set_random_seed,
)
from numpy import (
    dtype as _numpy_dtype,
)
from unisono import (
    GradientTape as GradientTape,
    IndexedSlices as IndexedSlices,
    Variable as Variable,
    VariableAggregation as VariableAggregation,
    VariableSynchronization as VariableSynchronization,
)
from unisono._saved._module import (
    Module as Module,
)
from unisono.data import (
    TensorSpec as TensorSpec,
)
from unisono.estimator.layers import (
    AUTO_REUSE as AUTO_REUSE,
    VariableScope as VariableScope,
    get_variable as get_variable,
    get_variable_scope as get_variable_scope,
    variable_scope as variable_scope,
)
from unisono.estimator.session._graph import (
    GraphKeys as GraphKeys,
    initializer as _unisono_estimator_session__graph_initializer,
    add_to_collection as add_to_collection,
    assign as assign,
    assign_add as assign_add,
    assign_sub as assign_sub,
    control_dependencies as control_dependencies,
    get_collection as get_collection,
    global_variables as global_variables,
    gradients as gradients,
    group as group,
    identity as identity,
    no_op as no_op,
    trainable_variables as trainable_variables,
)
from unisono.tf import (
    app as app,
    audio as audio,
    autograph as autograph,
    bitwise as bitwise,
    compat as compat,
    config as config,
    contrib as contrib,
    data as data,
    debugging as debugging,
    distribute as distribute,
    dtypes as dtypes,
    errors as errors,
    estimator as estimator,
    experimental as experimental,
    feature_column as feature_column,
    gfile as gfile,
    image as image,
    initializers as initializers,
    io as io,
    keras as keras,
    layers as layers,
    linalg as linalg,
    logging as logging,
    losses as losses,
    math as math,
    metrics as metrics,
    nest as nest,
    nn as nn,
    optimizers as optimizers,
    profiler as profiler,
    python_io as python_io,
    random as random,
    saved_model as saved_model,
    signal as signal,
    strings as strings,
    summary as summary,
    sysconfig as sysconfig,
    test as test,
    tpu as tpu,
    train as train,
    version as version,
)
from unisono.tf.adapters._config import (
    get_logger as get_logger,
)
from unisono.tf.adapters._estimator import (
    placeholder as placeholder,
)
from unisono.tf.adapters._keras import (
    SaveOptions as _unisono_tf_adapters__keras_SaveOptions,
)
from unisono.tf.adapters._records import (
    FixedLenFeature as FixedLenFeature,
    FixedLenSequenceFeature as FixedLenSequenceFeature,
)
from unisono.tf.adapters._spellings import (
    Dimension as Dimension,
)
from unisono.tf.adapters._tensors import (
    UnconnectedGradients as UnconnectedGradients,
    no_op as _unisono_tf_adapters__tensors_no_op,
    print_values as _unisono_tf_adapters__tensors_print_values,
    shape_of as _unisono_tf_adapters__tensors_shape_of,
    custom_gradient as custom_gradient,
    device as device,
    executing_eagerly as executing_eagerly,
    function as function,
    inside_function as inside_function,
)
from unisono.tf.adapters.inputs._host import (
    TensorArray as TensorArray,
)

ConfigProto = _unisono_tf_adapters__keras_SaveOptions
DType = _numpy_dtype
Tensor = _jax_Array
TensorShape = _unisono_tf_adapters__tensors_shape_of
__git_version__: _b.str
__version__: _b.str
as_dtype = _jax_numpy_dtype
bfloat16: _np.dtype[_Any]
bool: _np.dtype[_Any]
complex64: _np.dtype[_Any]
constant_initializer = _keras_initializers_Constant
disable_eager_execution = _unisono_tf_adapters__tensors_no_op
disable_tensor_equality = _unisono_tf_adapters__tensors_no_op
disable_v2_behavior = _unisono_tf_adapters__tensors_no_op
double: _np.dtype[_Any]
enable_eager_execution = _unisono_tf_adapters__tensors_no_op
enable_resource_variables = _unisono_tf_adapters__tensors_no_op
enable_tensor_equality = _unisono_tf_adapters__tensors_no_op
enable_v2_behavior = _unisono_tf_adapters__tensors_no_op
enable_v2_tensorshape = _unisono_tf_adapters__tensors_no_op
float16: _np.dtype[_Any]
float32: _np.dtype[_Any]
float64: _np.dtype[_Any]
global_variables_initializer = _unisono_estimator_session__graph_initializer
half: _np.dtype[_Any]
initialize_all_variables = _unisono_estimator_session__graph_initializer
int16: _np.dtype[_Any]
int32: _np.dtype[_Any]
int64: _np.dtype[_Any]
int8: _np.dtype[_Any]
local_variables_initializer = _unisono_estimator_session__graph_initializer
name_scope = _jax_named_scope
newaxis: None
no_gradient = _keras_ops_stop_gradient
ones_initializer = _keras_initializers_Ones
print = _unisono_tf_adapters__tensors_print_values
random_normal_initializer = _keras_initializers_RandomNormal
random_uniform_initializer = _keras_initializers_RandomUniform
string: _b.str
tables_initializer = _unisono_estimator_session__graph_initializer
truncated_normal_initializer = _keras_initializers_TruncatedNormal
uint16: _np.dtype[_Any]
uint32: _np.dtype[_Any]
uint64: _np.dtype[_Any]
uint8: _np.dtype[_Any]
variables_initializer = _unisono_estimator_session__graph_initializer
zeros_initializer = _keras_initializers_Zeros
def abs(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Shorthand for `keras.ops.absolute`."""
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
def argsort(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, values: _Any = ...) -> _Any:
    """Returns the indices that would sort a tensor."""
def asin(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Inverse sine, element-wise."""
def atan(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Trigonometric inverse tangent, element-wise."""
def atan2(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Element-wise arc tangent of `x1/x2` choosing the quadrant correctly."""
def boolean_mask(tensor: _Any, mask: _Any, axis: _b.int | None = ..., name: _b.str | None = ...) -> _Any:
    """Return the entries where a mask holds; outside of functions, since the size depends on the data."""
def broadcast_to(x: _Any = ..., shape: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Broadcast a tensor to a new shape."""
def cast(x: _Any, dtype: _Any, name: _b.str | None = ...) -> _Any:
    """Cast a tensor to the desired dtype."""
def clip_by_global_norm(t_list: _Any, clip_norm: _Any, use_norm: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return tensors, made shorter together where their norm is larger than `clip_norm`; and that norm."""
def clip_by_norm(t: _Any, clip_norm: _Any, axes: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor, made shorter where its norm is larger than `clip_norm`."""
def clip_by_value(x: _Any = ..., x_min: _Any = ..., x_max: _Any = ..., name: _b.str | None = ..., *, t: _Any = ..., clip_value_min: _Any = ..., clip_value_max: _Any = ...) -> _Any:
    """Clip (limit) the values in a tensor."""
def concat(values: _Any, axis: _b.int, name: _b.str | None = ...) -> _Any:
    """Return tensors one behind the other along an axis; one alone, not in a list, as it is."""
def cond(pred: _Any, true_fn: _Any, false_fn: _Any, name: _b.str | None = ...) -> _Any:
    """Return the result of one of two functions; in a step, keep what it assigns."""
def constant(value: _Any, dtype: _Any = ..., shape: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor of a value; one of strings stays on the host."""
def convert_to_tensor(value: _Any, dtype: _Any = ..., shape: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor of a value; one of strings stays on the host."""
def cos(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Cosine, element-wise."""
def cosh(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Hyperbolic cosine, element-wise."""
def cumsum(x: _Any, axis: _b.int = ..., exclusive: _b.bool = ..., reverse: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the sums of the entries up to each one along `axis`."""
def decode_raw(input_bytes: _Any, out_type: _Any, little_endian: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return bytes as numbers, in `Dataset.map`."""
def divide(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Divide arguments element-wise."""
def einsum(subscripts: _Any, *operands: _Any, name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Evaluates the Einstein summation convention on the operands."""
def equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Returns `(x1 == x2)` element-wise."""
def exp(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Calculate the exponential of all elements in the input tensor."""
def expand_dims(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Expand the shape of a tensor."""
def eye(num_rows: _b.int, num_columns: _b.int | None = ..., batch_shape: _Any = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return an identity matrix, or a batch of them."""
def fill(shape: _Any = ..., fill_value: _Any = ..., dtype: _Any = ..., name: _b.str | None = ..., *, dims: _Any = ..., value: _Any = ...) -> _Any:
    """Return a new tensor of given shape and type, filled with `fill_value`."""
def floor(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the floor of the input, element-wise."""
def gather(params: _Any, indices: _Any, validate_indices: _b.bool | None = ..., axis: _b.int | None = ..., batch_dims: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return the slices of `params` at `indices`."""
def gather_nd(params: _Any, indices: _Any, batch_dims: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return the entries or slices of `params` at rows of indices."""
def greater(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 > x2` element-wise."""
def greater_equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 >= x2` element-wise."""
def less(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 < x2` element-wise."""
def less_equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return the truth value of `x1 <= x2` element-wise."""
def linspace(start: _Any, stop: _Any, num: _Any = ..., endpoint: _b.bool = ..., retstep: _b.bool = ..., dtype: _Any = ..., axis: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return evenly spaced numbers over a specified interval."""
def log(x: _Any, name: _b.str | None = ...) -> _Any:
    """Natural logarithm, element-wise."""
def logical_and(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Computes the element-wise logical AND of the given input tensors."""
def logical_not(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Computes the element-wise NOT of the given input tensor."""
def logical_or(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Computes the element-wise logical OR of the given input tensors."""
def map_fn(fn: _Any, elems: _Any, dtype: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return a function's results for each row, stacked."""
def matmul(a: _Any, b: _Any, transpose_a: _b.bool = ..., transpose_b: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the product of matrices."""
def maximum(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Element-wise maximum of `x1` and `x2`."""
def meshgrid(*args: _Any, indexing: _b.str = ..., name: _b.str | None = ...) -> _Any:
    """Return the coordinates of a grid."""
def minimum(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Element-wise minimum of `x1` and `x2`."""
def multiply(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Multiply arguments element-wise."""
def negative(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Numerical negative, element-wise."""
def norm(x: _Any = ..., ord: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, tensor: _Any = ...) -> _Any:
    """Matrix or vector norm."""
def not_equal(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Return `(x1 != x2)` element-wise."""
def numpy_function(func: _Any = ..., inp: _Any = ..., Tout: _Any = ..., stateful: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Call a function with arrays of NumPy, in `Dataset.map` or outside of functions."""
def one_hot(indices: _Any, depth: _b.int, on_value: _b.float | None = ..., off_value: _b.float | None = ..., axis: _b.int | None = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return vectors that are `on_value` at their index, else `off_value`."""
def ones(shape: _Any, dtype: _Any = ..., name: _b.str | None = ..., *, layout: None = ...) -> _Any:
    """Return ones."""
def ones_like(x: _Any = ..., dtype: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return a tensor of ones with the same shape and type of `x`."""
def pad(x: _Any = ..., pad_width: _Any = ..., mode: _Any = ..., constant_values: _Any = ..., name: _b.str | None = ..., *, tensor: _Any = ..., paddings: _Any = ...) -> _Any:
    """Pad a tensor."""
def parse_example(serialized: _Any, features: _Any, name: _b.str | None = ...) -> _Any:
    """Return the features of a batch of records, as NumPy arrays by name; in `Dataset.map`."""
def parse_single_example(serialized: _Any, features: _Any, name: _b.str | None = ...) -> _Any:
    """Return the features of a record, as NumPy arrays by name; in `Dataset.map`."""
def pow(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """First tensor elements raised to powers from second tensor, element-wise."""
def py_function(func: _Any = ..., inp: _Any = ..., Tout: _Any = ..., stateful: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Call a function with tensors, each with `numpy()`, in `Dataset.map` or outside of functions."""
def random_normal(shape: _Any, mean: _b.float = ..., stddev: _b.float = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a normal distribution."""
def random_uniform(shape: _Any, minval: _b.float = ..., maxval: _b.float | None = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a uniform distribution."""
def range(start: _Any, limit: _Any = ..., delta: _Any = ..., dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the numbers from `start` (0 where it is alone) up to `limit`."""
def rank(input: _Any, name: _b.str | None = ...) -> _Any:
    """Return the number of dimensions, which is known while a function is traced."""
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
def reduce_sum(x: _Any = ..., axis: _Any = ..., keepdims: _b.bool = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ..., reduction_indices: _Any = ..., keep_dims: _b.bool = ...) -> _Any:
    """Sum of a tensor over the given axes."""
def repeat(x: _Any = ..., repeats: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Repeat each element of a tensor after themselves."""
def reshape(x: _Any = ..., newshape: _Any = ..., name: _b.str | None = ..., *, tensor: _Any = ..., shape: _Any = ...) -> _Any:
    """Gives a new shape to a tensor without changing its data."""
def reverse(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, tensor: _Any = ...) -> _Any:
    """Reverse the order of elements in the tensor along the given axis."""
def roll(x: _Any = ..., shift: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Roll tensor elements along a given axis."""
def round(x: _Any = ..., decimals: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Evenly round to the given number of decimals."""
def saturate_cast(x: _Any = ..., dtype: _Any = ..., name: _b.str | None = ..., *, value: _Any = ...) -> _Any:
    """Performs a safe saturating cast to the desired dtype."""
def scatter_nd(indices: _Any, updates: _Any, shape: _Any, name: _b.str | None = ...) -> _Any:
    """Return zeros of a shape, with updates added at rows of indices."""
def searchsorted(sorted_sequence: _Any, values: _Any, side: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Perform a binary search, returning indices for insertion of `values` into `sorted_sequence` that maintain the sorting order."""
def shape(input: _Any, out_type: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the shape, as integers: programs are compiled for given shapes."""
def sigmoid(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Sigmoid activation function."""
def sign(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Returns a tensor with the signs of the elements of `x`."""
def sin(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Trigonometric sine, element-wise."""
def sinh(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Hyperbolic sine, element-wise."""
def size(input: _Any, out_type: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return the number of entries, which is known while a function is traced."""
def slice(inputs: _Any = ..., start_indices: _Any = ..., shape: _Any = ..., name: _b.str | None = ..., *, input_: _Any = ..., begin: _Any = ..., size: _Any = ...) -> _Any:
    """Return a slice of an input tensor."""
def sort(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, values: _Any = ...) -> _Any:
    """Sorts the elements of `x` along a given axis in ascending order."""
def split(value: _Any, num_or_size_splits: _Any, axis: _b.int = ..., num: _b.int | None = ..., name: _b.str | None = ...) -> _Any:
    """Return a tensor in pieces: a number of equal ones, or ones of the given sizes."""
def sqrt(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the non-negative square root of a tensor, element-wise."""
def square(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Return the element-wise square of the input."""
def squeeze(x: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Remove axes of length one from `x`."""
def stack(values: _Any, axis: _b.int = ..., name: _b.str | None = ...) -> _Any:
    """Return tensors of one shape along a new axis."""
def stop_gradient(variable: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Stops gradient computation."""
def subtract(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Subtract arguments element-wise."""
def svd(tensor: _Any, full_matrices: _b.bool = ..., compute_uv: _b.bool = ..., name: _b.str | None = ...) -> _Any:
    """Return the singular values, and the matrices `u` and `v`: `tensor = u @ diag(s) @ v.T`."""
def tan(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Compute tangent, element-wise."""
def tanh(x: _Any = ..., name: _b.str | None = ..., *, input_tensor: _Any = ..., input: _Any = ..., tensor: _Any = ..., features: _Any = ..., logits: _Any = ..., t: _Any = ...) -> _Any:
    """Hyperbolic tangent, element-wise."""
def tensor_scatter_nd_add(tensor: _Any, indices: _Any, updates: _Any, name: _b.str | None = ...) -> _Any:
    ...
def tensor_scatter_nd_max(tensor: _Any, indices: _Any, updates: _Any, name: _b.str | None = ...) -> _Any:
    ...
def tensor_scatter_nd_min(tensor: _Any, indices: _Any, updates: _Any, name: _b.str | None = ...) -> _Any:
    ...
def tensor_scatter_nd_sub(tensor: _Any, indices: _Any, updates: _Any, name: _b.str | None = ...) -> _Any:
    ...
def tensor_scatter_nd_update(tensor: _Any, indices: _Any, updates: _Any, name: _b.str | None = ...) -> _Any:
    ...
def tensordot(x1: _Any = ..., x2: _Any = ..., axes: _Any = ..., name: _b.str | None = ..., *, a: _Any = ..., b: _Any = ...) -> _Any:
    """Compute the tensor dot product along specified axes."""
def tile(x: _Any = ..., repeats: _Any = ..., name: _b.str | None = ..., *, input: _Any = ..., multiples: _Any = ...) -> _Any:
    """Repeat `x` the number of times given by `repeats`."""
def to_double(x: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Cast a tensor to the desired dtype."""
def to_float(x: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Cast a tensor to the desired dtype."""
def to_int32(x: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Cast a tensor to the desired dtype."""
def to_int64(x: _Any, dtype: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Cast a tensor to the desired dtype."""
def transpose(x: _Any = ..., axes: _Any = ..., name: _b.str | None = ..., *, a: _Any = ..., perm: _Any = ...) -> _Any:
    """Returns a tensor with `axes` transposed."""
def truediv(x1: _Any = ..., x2: _Any = ..., name: _b.str | None = ..., *, x: _Any = ..., y: _Any = ...) -> _Any:
    """Alias for `keras.ops.divide`."""
def truncated_normal(shape: _Any, mean: _b.float = ..., stddev: _b.float = ..., dtype: _Any = ..., seed: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return numbers of a normal distribution, none further than two standard deviations from its mean."""
def unstack(x: _Any = ..., num: _Any = ..., axis: _Any = ..., name: _b.str | None = ..., *, value: _Any = ...) -> _Any:
    """Unpacks the given dimension of a rank-R tensor into rank-(R-1) tensors."""
def vectorized_map(fn: _Any, elems: _Any, dtype: _Any = ..., name: _b.str | None = ..., **kwargs: _Any) -> _Any:
    """Return a function's results for each row, stacked."""
def where(condition: _Any, x: _Any = ..., y: _Any = ..., name: _b.str | None = ...) -> _Any:
    """Return `x` where the condition holds, else `y`; with the condition alone, the indices where it holds."""
def while_loop(cond: _Any, body: _Any, loop_vars: _Any, shape_invariants: _Any = ..., parallel_iterations: _b.int = ..., back_prop: _b.bool = ..., swap_memory: _b.bool = ..., maximum_iterations: _b.int | None = ..., name: _b.str | None = ...) -> _Any:
    """Return the values after a loop; where a tape records, Python's: JAX cannot differentiate its own."""
def zeros(shape: _Any, dtype: _Any = ..., name: _b.str | None = ..., *, layout: None = ...) -> _Any:
    """Return zeros; of strings, empty ones."""
def zeros_like(x: _Any = ..., dtype: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return a tensor of zeros with the same shape and type as `x`."""
