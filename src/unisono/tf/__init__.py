"""TensorFlow's names over Unisono, Keras and JAX: `from unisono import tf`.

A program that was written for TensorFlow runs with this one line changed, but for what Keras 3 itself forces.
Each name stands in one table, which says what it is here. Where a name has no counterpart, the error says
what to write instead. `python -m unisono.tf script.py` runs a program without any edit: it provides
`tensorflow` and `tensorflow.keras` to that program alone.

>>> from unisono import tf
>>> float(tf.reduce_sum(tf.constant([1.0, 2.0])).numpy())
3.0
"""

import sys

from unisono._saved import _module as _saved_module
from unisono.tf._module import NameFinder, add_finder, as_names
from unisono.tf._table import TABLE
from unisono.tf.adapters import _elements, _keras, _tensors
from unisono.tf.packages._finder import adapt_packages

_tensors.add_methods()
_saved_module.add_methods()
_elements.add_methods()
_keras.add_methods()
as_names(sys.modules[__name__], TABLE, "")
add_finder(NameFinder(__name__, TABLE))
adapt_packages()
