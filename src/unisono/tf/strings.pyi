"""Names of `tf.strings`, for editors and type checkers; `python -m tools.stubs` makes this file."""

import builtins as _b
from typing import Any as _Any

def join(inputs: _Any, separator: _b.str = ..., name: _b.str | None = ...) -> _Any:
    """Return strings made of one string of each input."""
def length(text: _Any = ..., unit: _b.str = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return how many bytes, or characters, strings have."""
def lower(text: _Any = ..., encoding: _b.str = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return strings in lower case."""
def regex_full_match(text: _Any = ..., pattern: _b.str = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return which strings a pattern describes as a whole."""
def regex_replace(text: _Any = ..., pattern: _b.str = ..., rewrite: _b.str = ..., replace_global: _b.bool = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return strings in which a pattern is replaced."""
def split(text: _Any = ..., sep: _b.str | _b.bytes | None = ..., maxsplit: _b.int = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return the parts of one string."""
def strip(text: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return strings without the white space at their ends."""
def substr(text: _Any = ..., start: _Any = ..., size: _Any = ..., unit: _b.str = ..., name: _b.str | None = ..., *, input: _Any = ..., pos: _Any = ..., len: _Any = ...) -> _Any:
    """Return a part of each string."""
def to_hash_bucket_fast(text: _Any = ..., num_buckets: _b.int = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return the bucket of each string."""
def to_number(text: _Any = ..., out_type: _Any = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return the numbers that strings show."""
def upper(text: _Any = ..., encoding: _b.str = ..., name: _b.str | None = ..., *, input: _Any = ...) -> _Any:
    """Return strings in upper case."""
