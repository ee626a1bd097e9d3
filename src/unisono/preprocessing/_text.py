"""`TextVectorization` on the host."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

import keras
import numpy as np

from unisono._errors import InvalidArgumentError, UnsupportedError
from unisono.preprocessing._encoding import encoded_shape
from unisono.preprocessing._fingerprints import on_host
from unisono.preprocessing._lookup import StringLookup

_PUNCTUATION = re.compile(rb"""[!"#$%&()*+,\-./:;<=>?@\[\\\]^_`{|}~']""")

_STANDARDIZE = (None, "lower_and_strip_punctuation", "lower", "strip_punctuation")
_SPLIT: dict[str | None, Callable[[bytes], list[bytes]]] = {
    None: lambda text: [text],
    "whitespace": lambda text: text.split(),
    "character": lambda text: [character.encode() for character in text.decode("utf-8", "replace")],
}


@keras.saving.register_keras_serializable("unisono")
class TextVectorization(StringLookup):
    """Map texts to indices of their words, as `keras.layers.TextVectorization` does with TensorFlow.

    Args:
        max_tokens: the largest vocabulary, padding and the out-of-vocabulary index included; None for any.
        standardize: "lower_and_strip_punctuation", "lower", "strip_punctuation", None, or a function of an
            array of texts as bytes.
        split: "whitespace", "character" or None.
        ngrams: None, the length up to which neighbours are joined by a space, or a tuple of lengths.
        output_mode: "int", "multi_hot" or "count".
        output_sequence_length: how many indices each text has, cut or padded by 0; None for as
            many as the longest text of a batch has.
        pad_to_max_tokens: whether encodings are `max_tokens` wide.
        vocabulary: a list, an array, a file with a word in each line, or None before `adapt`.
        sparse: False.
        ragged: False.
        **kwargs: arguments of any layer.

    Raises:
        InvalidArgumentError: an argument is out of range.
        UnsupportedError: `ragged`, `sparse` or `idf_weights` is set.

    >>> vectorize = TextVectorization(vocabulary=["the", "film"])
    >>> vectorize(["The film!", "a film"]).tolist()
    [[2, 3], [1, 3]]
    """

    def __init__(
        self,
        max_tokens: int | None = None,
        standardize: Literal["lower_and_strip_punctuation", "lower", "strip_punctuation"]
        | Callable[[Any], Any]
        | None = "lower_and_strip_punctuation",
        split: Literal["whitespace", "character"] | None = "whitespace",
        ngrams: int | Sequence[int] | None = None,
        output_mode: Literal["int", "multi_hot", "count"] = "int",
        output_sequence_length: int | None = None,
        pad_to_max_tokens: bool = False,
        vocabulary: object = None,
        idf_weights: object = None,
        sparse: bool = False,
        ragged: bool = False,
        **kwargs: Any,
    ) -> None:
        if not callable(standardize) and standardize not in _STANDARDIZE:
            raise InvalidArgumentError(
                f"TextVectorization's standardize must be a function or one of {_STANDARDIZE}. "
                f"Received: {standardize!r}."
            )
        if split not in _SPLIT:
            raise InvalidArgumentError(
                f"TextVectorization's split must be one of {tuple(_SPLIT)}. Received: {split!r}. Split by "
                "white space, after a function for `standardize` that puts a space between the parts."
            )
        if ragged or idf_weights is not None or output_mode in ("one_hot", "tf_idf"):
            raise UnsupportedError(
                'TextVectorization has dense output, in the modes "int", "multi_hot" and "count". Received: '
                f"output_mode={output_mode!r}, ragged={ragged}, idf_weights={idf_weights}."
            )
        self.standardize = standardize
        self.split = split
        self.ngrams = tuple(range(1, ngrams + 1)) if isinstance(ngrams, int) else ngrams
        self.output_sequence_length = output_sequence_length
        options = {"output_mode": output_mode, "pad_to_max_tokens": pad_to_max_tokens, "sparse": sparse}
        kwargs = {"mask_token": "", **kwargs, **options}
        super().__init__(max_tokens, vocabulary=vocabulary, **kwargs)

    def update_state(self, data: object) -> None:
        """Count the words of a batch.

        Args:
            data: texts: an array or a list.
        """
        self._refuse_given()
        for words in self._words(self._texts(data)):
            self._vocabulary.counts.update(words)

    def _texts(self, inputs: object) -> np.ndarray:
        texts = on_host(inputs, "TextVectorization")
        if texts.ndim > 1 and texts.shape[-1] != 1:
            raise InvalidArgumentError(
                "TextVectorization takes one text for each example. Received: an array of shape "
                f"{texts.shape}. Call it on each column."
            )
        return texts[..., 0] if texts.ndim > 1 else texts

    def _words(self, texts: np.ndarray) -> list[list[bytes]]:
        if callable(self.standardize):
            texts = on_host(self.standardize(texts), "TextVectorization")
        flat: list[bytes] = texts.ravel().tolist()
        kind = "" if callable(self.standardize) else self.standardize or ""
        if "lower" in kind:
            flat = [text.lower() for text in flat]
        if "punctuation" in kind:
            flat = [_PUNCTUATION.sub(b"", text) for text in flat]
        rows = [_SPLIT[self.split](text) for text in flat]
        return rows if self.ngrams is None else [_joined(words, self.ngrams) for words in rows]

    def call(self, inputs: object) -> np.ndarray:
        """Return the indices of words, as int64, or their encoding."""
        texts = self._texts(inputs)
        rows = self._words(texts)
        cut = self.output_sequence_length if self.output_mode == "int" else None
        width = max(map(len, rows), default=0) if cut is None else cut
        words = np.full((len(rows), width), b"", object)
        for row, of_text in zip(words, rows, strict=True):
            row[: len(of_text)] = of_text[:width]
        return super().call(words.reshape(*texts.shape, width))

    def compute_output_spec(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        rows = tuple(inputs.shape[:-1] if len(inputs.shape) > 1 else inputs.shape)
        shape = encoded_shape((*rows, self.output_sequence_length), self.output_mode, self._depth())
        return keras.KerasTensor(shape, "int64")

    def get_config(self) -> dict[str, Any]:
        config = super().get_config()
        for name in ("num_oov_indices", "mask_token", "oov_token", "invert"):
            del config[name]
        return {
            **config,
            "standardize": keras.saving.serialize_keras_object(self.standardize),
            "split": self.split,
            "ngrams": self.ngrams,
            "output_sequence_length": self.output_sequence_length,
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> TextVectorization:
        """Make the layer that a configuration describes."""
        standardize = config["standardize"]
        if isinstance(standardize, dict):
            standardize = keras.saving.deserialize_keras_object(standardize)
        return cls(**{**config, "standardize": standardize})


def _joined(words: Sequence[bytes], lengths: Sequence[int]) -> list[bytes]:
    """Return neighbours joined by spaces, in the order of the lengths."""
    return [b" ".join(words[i : i + n]) for n in lengths for i in range(len(words) - n + 1)]
