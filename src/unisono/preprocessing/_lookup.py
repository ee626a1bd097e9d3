"""`StringLookup` and `IntegerLookup` on the host."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import keras
import numpy as np

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono._types import UserValue
from unisono.preprocessing._encoding import checked_mode, encoded, encoded_shape
from unisono.preprocessing._fingerprints import hash_buckets, on_host, terms_of_file
from unisono.preprocessing._hashing import prepare_host_layer, refuse_sparse

#: A term of a vocabulary: bytes of a string, or an integer.
Term = bytes | int


def as_term(token: str | bytes | int) -> Term:
    r"""Return a token as it stands in the arrays of a pipeline: strings as bytes.

    >>> as_term("ü")
    b'\xc3\xbc'
    """
    return token.encode() if isinstance(token, str) else token


class Vocabulary:
    """The terms of a lookup with their indices, and the counts of `adapt`; no dict that Keras would track."""

    def __init__(self) -> None:
        self.counts: collections.Counter[Term] = collections.Counter()
        self.terms: tuple[Term, ...] = ()
        self.indices: dict[Term, int] = {}

    def set(self, terms: Sequence[Term], first: int) -> None:
        """Set the terms."""
        self.terms = tuple(terms)
        self.indices = {term: first + index for index, term in enumerate(terms)}


class IndexLookup(keras.layers.Layer):
    """The base of both lookups: a vocabulary, given or adapted to data, and its indices.

    For the arguments see `StringLookup`.
    """

    #: True if the terms are strings.
    _strings = True

    def __init__(
        self,
        max_tokens: int | None,
        num_oov_indices: int,
        mask_token: str | bytes | int | None,
        oov_token: str | bytes | int,
        vocabulary: object = None,
        invert: bool = False,
        output_mode: Literal["int", "one_hot", "multi_hot", "count"] = "int",
        pad_to_max_tokens: bool = False,
        sparse: bool = False,
        salt: object = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        layer = type(self).__name__
        refuse_sparse(sparse, layer)
        if salt is not None:
            raise UnsupportedError(f"{layer} has FarmHash alone, no salted hash. Received: salt={salt}.")
        if max_tokens is not None and max_tokens <= 1:
            raise InvalidArgumentError(f"{layer}'s max_tokens must be above 1. Received: {max_tokens}.")
        if num_oov_indices < 0:
            raise InvalidArgumentError(
                f"{layer}'s num_oov_indices must be at least 0. Received: {num_oov_indices}."
            )
        if pad_to_max_tokens and max_tokens is None:
            raise InvalidArgumentError(
                f"{layer}'s pad_to_max_tokens needs max_tokens. Received: max_tokens=None."
            )
        if invert and output_mode != "int":
            raise InvalidArgumentError(
                f'{layer}(invert=True) has output_mode="int". Received: {output_mode!r}.'
            )
        self.max_tokens = max_tokens
        self.num_oov_indices = num_oov_indices
        self.mask_token = mask_token
        self.oov_token = oov_token
        self.invert = invert
        self.output_mode = checked_mode(output_mode, layer)
        self.pad_to_max_tokens = pad_to_max_tokens
        prepare_host_layer(self)
        self._vocabulary = Vocabulary()
        self._given = vocabulary is not None
        if vocabulary is not None:
            self.set_vocabulary(vocabulary)

    def set_vocabulary(self, vocabulary: object) -> None:
        """Set the terms.

        Args:
            vocabulary: a list, an array, or the path of a file with a term in each line.

        Raises:
            InvalidArgumentError: it is empty, too long, has a term twice, or other text than integers.
        """
        terms = self._terms_of(vocabulary)
        special = self._special_terms()
        if special and terms[: len(special)] == special:
            terms = terms[len(special) :]
        self._check(terms)
        self._vocabulary.set(terms, self._first_index())

    def _terms_of(self, vocabulary: object) -> list[Term]:
        if isinstance(vocabulary, (str, Path)):
            return list(terms_of_file(vocabulary, is_integer=not self._strings))
        array = on_host(vocabulary, type(self).__name__)
        return [term if self._strings else int(term) for term in array.ravel().tolist()]

    def _check(self, terms: Sequence[Term]) -> None:
        layer = type(self).__name__
        repeated = [term for term, count in collections.Counter(terms).items() if count > 1]
        size = self._first_index() + len(terms)
        tokens = [self.mask_token, self.oov_token] if self.invert else [self.mask_token]
        reserved = [token for token in tokens if token is not None and as_term(token) in terms]
        if not terms:
            raise InvalidArgumentError(f"{layer}'s vocabulary must have a term. Received: an empty one.")
        if repeated:
            raise InvalidArgumentError(
                f"{layer}'s vocabulary must have each term once. Received twice: {repeated[:10]}."
            )
        if self.max_tokens is not None and size > self.max_tokens:
            raise InvalidArgumentError(
                f"{layer}'s vocabulary must have at most max_tokens={self.max_tokens} terms, mask and "
                f"out-of-vocabulary indices included. Received: {size}."
            )
        if reserved:
            raise InvalidArgumentError(
                f"{layer}'s vocabulary must not contain the mask or out-of-vocabulary token after its start. "
                f"Received: {reserved}. Leave it out of the vocabulary."
            )

    def _has_mask(self) -> bool:
        return self.mask_token is not None and self.output_mode == "int"

    def _first_index(self) -> int:
        return int(self._has_mask()) + self.num_oov_indices

    def _special_terms(self) -> list[Term]:
        mask = [self.mask_token] if self.mask_token is not None and self._has_mask() else []
        return [as_term(token) for token in mask + [self.oov_token] * self.num_oov_indices]

    def adapt(self, data: UserValue, steps: int | None = None) -> None:
        """Learn the vocabulary: frequent terms first, and of equally frequent ones the largest first.

        Args:
            data: strings or integers: an array, a list, or a data set of batches.
            steps: how many batches to take.

        Raises:
            InvalidArgumentError: the vocabulary was given.
        """
        self._refuse_given()
        self.reset_state()
        for number, batch in enumerate([data] if _is_plain(data) else data):
            if steps is not None and number >= steps:
                break
            self.update_state(batch)
        self.finalize_state()

    def _refuse_given(self) -> None:
        if self._given:
            raise InvalidArgumentError(
                f"{type(self).__name__}.adapt() learns a vocabulary, and this layer was given one. "
                "Received: vocabulary=... when it was created. Create it without, or do not call adapt()."
            )

    def reset_state(self) -> None:
        """Forget the counts of `update_state`."""
        self._vocabulary.counts.clear()

    def update_state(self, data: object) -> None:
        """Count the terms of a batch.

        Args:
            data: an array or list of them.
        """
        self._refuse_given()
        self._vocabulary.counts.update(self._terms_of(data))

    def finalize_state(self) -> None:
        """Make the vocabulary of what was counted."""
        counts = self._vocabulary.counts
        for token in (self.mask_token, self.oov_token):
            if token is not None:
                counts.pop(as_term(token), None)
        ordered = sorted(counts, key=lambda term: (counts[term], term), reverse=True)
        if self.max_tokens is not None:
            ordered = ordered[: self.max_tokens - self._first_index()]
        if ordered:
            self._vocabulary.set(ordered, self._first_index())
        self.reset_state()

    def get_vocabulary(self, include_special_tokens: bool = True) -> list[str | int]:
        """Return the terms in the order of their indices.

        Args:
            include_special_tokens: whether mask and out-of-vocabulary tokens stand before them.
        """
        special = self._special_terms() if include_special_tokens else []
        return [
            term.decode() if isinstance(term, bytes) else term for term in (*special, *self._vocabulary.terms)
        ]

    def vocabulary_size(self) -> int:
        """Return the number of indices, with mask and out-of-vocabulary tokens."""
        return self._first_index() + len(self._vocabulary.terms)

    def _depth(self) -> int:
        return int(self.max_tokens or 0) if self.pad_to_max_tokens else self.vocabulary_size()

    def call(self, inputs: object) -> np.ndarray:
        """Return the indices of values, as int64, or their encoding; with `invert` the values."""
        values = on_host(inputs, type(self).__name__)
        if not self._vocabulary.terms:
            raise InvalidArgumentError(
                f"{type(self).__name__} needs a vocabulary before it is called. Received: none. "
                "Pass vocabulary=..., or call adapt(data)."
            )
        if self.invert:
            return self._inverted(values)
        indices = self._indices(values)
        mask = None if self.mask_token is None else values == as_term(self.mask_token)
        # In integers, as Keras' layer does.
        return encoded(indices, self.output_mode, self._depth(), mask).astype(np.int64)

    def _inverted(self, indices: np.ndarray) -> np.ndarray:
        terms = np.array([*self._special_terms(), *self._vocabulary.terms, as_term(self.oov_token)], object)
        known = (indices >= 0) & (indices < self.vocabulary_size())
        decoded: np.ndarray = terms[np.where(known, indices, -1)]
        return decoded if self._strings else decoded.astype(np.int64)

    def _indices(self, values: np.ndarray) -> np.ndarray:
        table, flat = self._vocabulary.indices, values.ravel()
        indices = np.fromiter((table.get(value, -1) for value in flat.tolist()), np.int64, flat.size)
        if self.mask_token is not None:
            indices[flat == as_term(self.mask_token)] = 0
        unknown = indices < 0
        if unknown.any():
            indices[unknown] = self._unknown_indices(flat[unknown])
        return indices.reshape(values.shape)

    def _unknown_indices(self, values: np.ndarray) -> np.ndarray:
        if self.num_oov_indices == 0:
            raise InvalidArgumentError(
                f"{type(self).__name__}(num_oov_indices=0) takes values of its vocabulary alone. "
                f"Received: {values[:10].tolist()}. Set num_oov_indices=1."
            )
        if self._strings:
            buckets = hash_buckets(values, self.num_oov_indices)
        else:
            buckets = values.astype(np.int64) % self.num_oov_indices
        return int(self._has_mask()) + buckets

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        """Return the shape and dtype of the output for a symbolic input."""
        shape = encoded_shape(tuple(inputs.shape), self.output_mode, self._depth())
        return keras.KerasTensor(shape, "string" if self.invert and self._strings else "int64")

    def get_config(self) -> dict[str, Any]:
        """Return the arguments, with the vocabulary."""
        names = "max_tokens num_oov_indices mask_token oov_token invert output_mode pad_to_max_tokens"
        own = {name: getattr(self, name) for name in names.split()}
        terms = self.get_vocabulary(include_special_tokens=False)
        return {**super().get_config(), **own, "vocabulary": terms or None}


def _is_plain(data: object) -> bool:
    """Return whether data are one batch, and not a data set of batches."""
    return isinstance(data, (list, tuple, np.ndarray, str, bytes)) or not isinstance(data, Iterable)


@keras.saving.register_keras_serializable("unisono")
class StringLookup(IndexLookup):
    """Map strings to indices, as `keras.layers.StringLookup` does with TensorFlow.

    Args:
        max_tokens: the largest vocabulary, mask and out-of-vocabulary indices included; None for any.
        num_oov_indices: how many indices strings outside the vocabulary share by hash; 0 makes them errors.
        mask_token: the string of index 0, or None.
        oov_token: what `invert` returns for other indices.
        vocabulary: a list, an array, a file with a string in each line, or None before `adapt`.
        invert: whether indices become strings (bytes, as TensorFlow returns them).
        output_mode: "int", "one_hot", "multi_hot" or "count".
        pad_to_max_tokens: whether encodings are `max_tokens` wide.
        sparse: False.
        salt: None.
        **kwargs: arguments of any layer.

    Raises:
        InvalidArgumentError: an argument is out of range.
        UnsupportedError: `sparse` or `salt` is set.

    >>> lookup = StringLookup(vocabulary=["a", "b", "c"])
    >>> lookup([["a", "c"], ["z", "b"]]).tolist()
    [[1, 3], [0, 2]]
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: str | bytes | None = None,
        oov_token: str | bytes = "[UNK]",
        vocabulary: object = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("encoding", None)
        super().__init__(max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, **kwargs)


@keras.saving.register_keras_serializable("unisono")
class IntegerLookup(IndexLookup):
    """Map integers to indices, as `keras.layers.IntegerLookup` does with TensorFlow.

    Args:
        max_tokens: the largest vocabulary, mask and out-of-vocabulary indices included; None for any.
        num_oov_indices: how many indices integers outside the vocabulary share by remainder; 0 makes them
            errors.
        mask_token: the integer of index 0, or None.
        oov_token: what `invert` returns for other indices.
        vocabulary: a list, an array, a file with an integer in each line, or None before `adapt`.
        **kwargs: arguments of `StringLookup` and of any layer.

    Raises:
        InvalidArgumentError: an argument is out of range.

    >>> IntegerLookup(vocabulary=[12, 36])([36, 7]).tolist()
    [2, 0]
    """

    _strings = False

    def __init__(
        self,
        max_tokens: int | None = None,
        num_oov_indices: int = 1,
        mask_token: int | None = None,
        oov_token: int = -1,
        vocabulary: object = None,
        **kwargs: Any,
    ) -> None:
        kwargs.pop("vocabulary_dtype", None)
        super().__init__(max_tokens, num_oov_indices, mask_token, oov_token, vocabulary, **kwargs)
