"""Names for types that Python cannot spell: JAX and Keras take structures of any shape.

They are `Any` for the type checker, and say for a reader what is meant.
"""

from __future__ import annotations

from typing import Any, TypeAlias

#: A nested structure of arrays, as `jax.tree` takes it: an array, tuples, lists and dicts of them, or None.
PyTree: TypeAlias = Any

#: Whatever becomes an array: a NumPy or JAX array, a Python number, nested lists of numbers.
ArrayLike: TypeAlias = Any

#: What the user's function returns, or an argument for it, which the library hands on unread.
UserValue: TypeAlias = Any
