"""`CannedEstimator`: an Estimator of a head and of feature columns."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._types import PyTree
from unisono.data._dataset import Dataset
from unisono.estimator._estimator import Estimator
from unisono.estimator._run_config import RunConfig
from unisono.estimator._spec import EstimatorSpec, ModeKeys
from unisono.estimator._train_op import TrainOpGroup, group
from unisono.estimator.canned._head import Head, minimized
from unisono.estimator.canned._logits import Part
from unisono.estimator.session._evaluate import PassTask
from unisono.estimator.session._input import InputFunction
from unisono.feature_column._encode import FeatureEncoder
from unisono.spi import batches_of

if TYPE_CHECKING:
    from unisono.feature_column._column import FeatureColumn

#: Predictions that are strings, and of what the host makes them.
_STRINGS = {"classes": "class_ids", "all_classes": "all_class_ids"}

#: The key of the feature that only says how many rows there are, for models without columns.
ROWS = "rows"


class CannedEstimator(Estimator):
    """An Estimator whose model_fn is a head on the sum of the logits of one model or several.

    Data that an input_fn returns are encoded on the host: strings, hashes and crosses become integers.
    """

    def __init__(
        self,
        head: Head,
        columns: Sequence[FeatureColumn],
        parts: Sequence[Part],
        model_dir: str | os.PathLike[str] | None,
        config: RunConfig | None,
        warm_start_from: object = None,
    ) -> None:
        self._head = head
        #: Makes of raw features those that an exported model takes.
        self.encode = (
            FeatureEncoder(columns, head.feature_keys) if columns else RowsEncoder(head.feature_keys)
        )

        def model_fn(features: Mapping[str, jax.Array], labels: jax.Array, mode: str) -> EstimatorSpec:
            made = [(*logits_of(features, mode), make_optimizer) for logits_of, make_optimizer in parts]

            def train_op(loss: jax.Array) -> TrainOpGroup:
                return group(*(minimized(make(), loss, variables) for _, variables, make in made))

            first, *others = (logits for logits, _, _ in made)
            return head.create_estimator_spec(
                features, mode, sum(others, first), labels, train_op_fn=train_op
            )

        super().__init__(model_fn, model_dir=model_dir, config=config, warm_start_from=warm_start_from)

    def _predictions(
        self, task: PassTask, data: InputFunction, keys: Sequence[str] | str | None, single: bool
    ) -> Iterator[Any]:
        wanted = {keys} if isinstance(keys, str) else set(keys or ())
        computed: Any = list({_computed(key) for key in wanted}) if wanted else None
        for predictions in super()._predictions(task, data, computed, single):
            named = self._head._host_predictions(predictions)
            yield {key: value for key, value in named.items() if not wanted or key in wanted}

    def _input_fn(self, input_fn: Callable[..., Any], mode: str) -> Callable[..., Any]:
        """Return an input_fn of the same arguments, whose data a step can take."""

        @functools.wraps(input_fn)
        def encoded(*args: Any, **kwargs: Any) -> Any:
            return self._encoded_data(input_fn(*args, **kwargs), mode != ModeKeys.PREDICT)

        return encoded

    def _encoded_data(self, data: object, with_labels: bool) -> Any:
        def encode(*parts: PyTree) -> Any:
            features = self.encode(parts[0])
            if len(parts) == 1 or not with_labels:
                return features
            return features, self._head._host_labels(parts[1]), *parts[2:]

        if isinstance(data, dict):
            return encode(data)
        if isinstance(data, (tuple, list)):
            return encode(*data)
        if isinstance(data, Dataset):
            return data.map(encode)
        if data is None:
            return None
        return (encode(*e) if isinstance(e, (tuple, list)) else encode(e) for e in batches_of(data))


def _computed(key: str | tuple[str, str]) -> str | tuple[str, str]:
    """Return the prediction of which the host makes one; of a `MultiHead` with the head's name."""
    return (key[0], _STRINGS.get(key[1], key[1])) if isinstance(key, tuple) else _STRINGS.get(key, key)


class RowsEncoder:
    """Keeps the features that a head needs, and the number of rows, for a model that reads none."""

    def __init__(self, kept: Sequence[str]) -> None:
        self._kept = tuple(kept)

    def __call__(self, features: Mapping[str, jax.Array]) -> dict[str, Any]:
        if not features:
            raise InvalidArgumentError("An input_fn must return a dict of features. Received: an empty one.")
        rows = len(np.asarray(next(iter(features.values()))))
        return {
            ROWS: np.zeros((rows, 1), np.float32),
            **{k: features[k] for k in self._kept if k in features},
        }
