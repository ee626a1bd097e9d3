"""Names of `tf.keras.dtype_policies` with Keras 3.15, for editors and type checkers; `python -m tools.stubs` makes this file."""

from keras.dtype_policies import (
    AWQDTypePolicy as AWQDTypePolicy,
    DTypePolicy as DTypePolicy,
    DTypePolicyMap as DTypePolicyMap,
    FloatDTypePolicy as FloatDTypePolicy,
    GPTQDTypePolicy as GPTQDTypePolicy,
    Int4DTypePolicy as Int4DTypePolicy,
    QuantizedDTypePolicy as QuantizedDTypePolicy,
    QuantizedFloat8DTypePolicy as QuantizedFloat8DTypePolicy,
    deserialize as deserialize,
    get as get,
    serialize as serialize,
)
