"""`indicator_column`, `embedding_column` and `shared_embeddings`: categories as numbers.

Source: https://www.tensorflow.org/api_docs/python/tf/feature_column

Tests: tests/unit/feature_column/test_columns.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from unisono._checks import whole_number
from unisono._errors import InvalidArgumentError, InvalidTypeError, UnsupportedError
from unisono.feature_column._column import CategoricalColumn, DenseColumn

if TYPE_CHECKING:
    from unisono._system._literals import Combiner

#: How the embeddings of a row's categories become one.
COMBINERS = ("mean", "sqrtn", "sum")


@dataclasses.dataclass(frozen=True)
class DenseCategories(DenseColumn):
    """A dense column that is made of a categorical one."""

    categorical_column: CategoricalColumn

    def feature_keys(self) -> tuple[str, ...]:
        """Return the keys of the features."""
        return self.categorical_column.feature_keys()


@dataclasses.dataclass(frozen=True)
class IndicatorColumn(DenseCategories):
    """How often each category occurs in a row; made by `indicator_column`."""

    @property
    def name(self) -> str:
        """The categories' name with "_indicator"."""
        return f"{self.categorical_column.name}_indicator"

    @property
    def width(self) -> int:
        """How many categories there are."""
        return self.categorical_column.num_buckets


@dataclasses.dataclass(frozen=True, eq=False)
class EmbeddingSettings:
    """Settings of a table, which columns share if they have the same object.

    Args:
        name: of the table; None for its column's.
        max_norm: the largest norm of a row that is used, or None.
    """

    name: str | None
    dimension: int
    combiner: str
    initializer: Any
    max_norm: float | None
    trainable: bool


@dataclasses.dataclass(frozen=True)
class EmbeddingColumn(DenseCategories):
    """The rows of a table for the categories, as one; made by `embedding_column`."""

    settings: EmbeddingSettings

    @property
    def name(self) -> str:
        """The categories' name with "_embedding", or "_shared_embedding"."""
        shared = "_shared" if self.settings.name else ""
        return f"{self.categorical_column.name}{shared}_embedding"

    @property
    def width(self) -> int:
        """The length of the table's rows."""
        return self.settings.dimension

    @property
    def table_name(self) -> str:
        """The name of the table."""
        return self.settings.name or self.name


def indicator_column(categorical_column: CategoricalColumn) -> IndicatorColumn:
    """Describe how often each category occurs in a row (one-hot, where it has one).

    Args:
        categorical_column: the categories.

    Returns:
        A dense column.

    Raises:
        InvalidTypeError: the argument is no categorical column.

    >>> from unisono.feature_column import categorical_column_with_identity
    >>> indicator_column(categorical_column_with_identity("weekday", 7)).width
    7
    """
    return IndicatorColumn(_categorical(categorical_column, "indicator_column"))


def _categorical(column: object, caller: str) -> CategoricalColumn:
    if not isinstance(column, CategoricalColumn):
        raise InvalidTypeError(f"{caller} takes a categorical column. Received: {column!r}.")
    return column


def embedding_column(
    categorical_column: CategoricalColumn,
    dimension: int,
    combiner: Combiner = "mean",
    initializer: Callable[..., Any] | str | None = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    use_safe_embedding_lookup: bool = True,
) -> EmbeddingColumn:
    """Describe categories by rows of a table that is learned.

    Args:
        categorical_column: the categories.
        dimension: the length of the table's rows.
        combiner: "mean", "sqrtn" or "sum" of a row's categories; a row without any gives zeros.
        initializer: of the table: a truncated normal of deviation `1 / sqrt(dimension)` by default.
        ckpt_to_load_from: None.
        tensor_name_in_ckpt: None.
        max_norm: the largest norm of a table's row that is used, or None.
        trainable: whether training changes the table.
        use_safe_embedding_lookup: accepted; rows without categories are always zeros.

    Returns:
        A dense column.

    Raises:
        InvalidArgumentError: a dimension or a combiner does not exist.
        UnsupportedError: a checkpoint is given.

    >>> from unisono.feature_column import categorical_column_with_hash_bucket
    >>> embedding_column(categorical_column_with_hash_bucket("city", 1000), 8).width
    8
    """
    if ckpt_to_load_from is not None or tensor_name_in_ckpt is not None:
        raise UnsupportedError(
            "embedding_column reads no checkpoint of TensorFlow. "
            f"Received: ckpt_to_load_from={ckpt_to_load_from!r}. Assign the table's variable."
        )
    settings = _settings(None, dimension, combiner, initializer, max_norm, trainable)
    return EmbeddingColumn(_categorical(categorical_column, "embedding_column"), settings)


def _settings(
    name: str | None,
    dimension: int,
    combiner: str,
    initializer: object,
    max_norm: float | None,
    trainable: bool,
) -> EmbeddingSettings:
    size = whole_number(dimension, 1)
    if size is None or combiner not in COMBINERS:
        raise InvalidArgumentError(
            f"An embedding's dimension must be at least 1, and its combiner one of {', '.join(COMBINERS)}. "
            f"Received: dimension={dimension!r}, combiner={combiner!r}."
        )
    return EmbeddingSettings(name, size, combiner, initializer, max_norm, trainable)


def shared_embeddings(
    categorical_columns: Sequence[CategoricalColumn],
    dimension: int,
    combiner: Combiner = "mean",
    initializer: Callable[..., Any] | str | None = None,
    shared_embedding_collection_name: str | None = None,
    ckpt_to_load_from: str | None = None,
    tensor_name_in_ckpt: str | None = None,
    max_norm: float | None = None,
    trainable: bool = True,
    use_safe_embedding_lookup: bool = True,
) -> list[EmbeddingColumn]:
    """Describe several features by rows of one table that is learned.

    Args:
        categorical_columns: the categories, equally many in each column.
        dimension: the length of the table's rows.
        combiner: "mean", "sqrtn" or "sum" of a row's categories.
        initializer: of the table: a truncated normal of deviation `1 / sqrt(dimension)` by default.
        shared_embedding_collection_name: the name of the table.
        ckpt_to_load_from: None.
        tensor_name_in_ckpt: None.
        max_norm: the largest norm of a table's row that is used, or None.
        trainable: whether training changes the table.
        use_safe_embedding_lookup: accepted; rows without categories are always zeros.

    Returns:
        A dense column for each categorical one, in their order.

    Raises:
        InvalidArgumentError: the columns have different numbers of categories.

    >>> from unisono.feature_column import categorical_column_with_identity as identity
    >>> [c.name for c in shared_embeddings([identity("a", 9), identity("b", 9)], 4)]
    ['a_shared_embedding', 'b_shared_embedding']
    """
    if ckpt_to_load_from is not None or tensor_name_in_ckpt is not None:
        raise UnsupportedError(
            f"shared_embeddings reads no checkpoint of TensorFlow. Received: {ckpt_to_load_from!r}."
        )
    columns = [_categorical(column, "shared_embeddings") for column in categorical_columns]
    if not columns or len({column.num_buckets for column in columns}) > 1:
        raise InvalidArgumentError(
            "shared_embeddings takes columns with equally many categories. "
            f"Received: {[(column.name, column.num_buckets) for column in columns]}."
        )
    name = shared_embedding_collection_name
    if name is None:
        name = "_".join(sorted(column.name for column in columns)) + "_shared_embedding"
    settings = _settings(name, dimension, combiner, initializer, max_norm, trainable)
    return [EmbeddingColumn(column, settings) for column in columns]
