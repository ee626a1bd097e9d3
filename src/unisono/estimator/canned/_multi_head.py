"""`MultiHead`: several heads of one model.

Source: https://github.com/tensorflow/estimator (tensorflow_estimator/python/estimator/head/multi_head.py)

Tests: tests/unit/estimator/test_heads.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras

from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._types import UserValue
from unisono.estimator._serving import PredictOutput
from unisono.estimator._spec import EstimatorSpec, ModeKeys
from unisono.estimator.canned._head import SUM_OVER_BATCH_SIZE, Head
from unisono.estimator.canned._texts import TEXTS


class MultiHead(Head):
    """The head of several objectives: its loss is the weighted sum of theirs.

    Labels are a dict by the heads' names. Predictions have keys such as `("first", "logits")`, metrics names
    such as `"accuracy/first"`.

    Args:
        heads: each with another name.
        head_weights: by which their losses are multiplied; None for ones.

    Raises:
        InvalidArgumentError: there are no heads, a name is missing or is there twice, or the weights are not
            as many.

    >>> from unisono import estimator
    >>> heads = [estimator.RegressionHead(name="price"), estimator.MultiClassHead(3, name="kind")]
    >>> MultiHead(heads).logits_dimension
    4
    """

    def __init__(self, heads: Sequence[Head], head_weights: Sequence[float] | None = None) -> None:
        if not heads:
            raise InvalidArgumentError("Must specify heads. Received: an empty list.")
        names = [head.name for head in heads]
        if None in names or "" in names or len(set(names)) != len(names):
            raise InvalidArgumentError(
                f"All given heads must have a name, each another. Received: {names}. Write "
                "`RegressionHead(name='price')`."
            )
        if head_weights and len(head_weights) != len(heads):
            raise InvalidArgumentError(
                "heads and head_weights must have the same size. Received: "
                f"{len(heads)} heads and {len(head_weights)} weights."
            )
        super().__init__(None, SUM_OVER_BATCH_SIZE, None, "_".join(str(name) for name in names))
        self._heads = {str(head.name): head for head in heads}
        self._head_weights = list(head_weights) if head_weights else [1.0] * len(heads)

    @property
    def logits_dimension(self) -> int:
        """Those of all heads."""
        return sum(head.logits_dimension for head in self._heads.values())

    @property
    def loss_reduction(self) -> str:
        """That of all heads.

        Raises:
            InvalidArgumentError: they have several.
        """
        reductions = {head.loss_reduction for head in self._heads.values()}
        if len(reductions) > 1:
            raise InvalidArgumentError(
                f"The loss_reduction must be the same for different heads. Received: {sorted(reductions)}."
            )
        return reductions.pop()

    @property
    def feature_keys(self) -> tuple[str, ...]:
        """The keys of the features that the heads read."""
        return tuple(dict.fromkeys(key for head in self._heads.values() for key in head.feature_keys))

    def losses(self, labels: Any, logits: Any) -> Any:
        """Raise an error: each head has losses of its own."""
        raise InvalidTypeError("A MultiHead has no losses of rows. Received: a call. Call `loss`.")

    def loss(
        self,
        labels: Any,
        logits: Any,
        features: Mapping[str, Any] | None = None,
        mode: str | None = None,
        regularization_losses: Sequence[Any] | None = None,
    ) -> Any:
        """Return the weighted sum of the heads' losses.

        Args:
            labels: by the names of heads.
            logits: by the names of heads, or an array of all.
            features: by key.
            mode: accepted; the loss is the same in all.
            regularization_losses: scalars that are added.
        """
        losses = self._head_losses(labels, logits, features)
        total = sum(loss * weight for loss, weight in zip(losses, self._head_weights, strict=True))
        return total + sum(regularization_losses) if regularization_losses else total

    def _head_losses(self, labels: Any, logits: Any, features: Mapping[str, Any] | None) -> list[Any]:
        parts, given = self._split(logits), self._checked_labels(labels)
        return [head.loss(given[name], parts[name], features) for name, head in self._heads.items()]

    def _checked_labels(self, labels: Any) -> Mapping[str, Any]:
        if not isinstance(labels, Mapping) or not set(self._heads) <= set(labels):
            received = sorted(labels) if isinstance(labels, Mapping) else type(labels).__name__
            raise InvalidArgumentError(
                f"A MultiHead takes a dict of labels with the keys {list(self._heads)}. Received: {received}."
            )
        return labels

    def _split(self, logits: Any) -> Mapping[str, Any]:
        if isinstance(logits, Mapping):
            if set(self._heads) <= set(logits):
                return logits
            raise InvalidArgumentError(
                f"A MultiHead takes logits by the names {list(self._heads)}. Received: {sorted(logits)}."
            )
        logits, parts, at = self._checked_logits(logits), {}, 0
        for name, head in self._heads.items():
            parts[name] = logits[..., at : at + head.logits_dimension]
            at += head.logits_dimension
        return parts

    def predictions(self, logits: Any, keys: Sequence[str] | None = None) -> dict[Any, Any]:
        """Return predictions by the name of a head and a key.

        Args:
            logits: by the names of heads, or an array of all.
            keys: those that are wanted of each head; all by default.
        """
        parts = self._split(logits)
        return {
            (name, key): value
            for name, head in self._heads.items()
            for key, value in head.predictions(parts[name], keys).items()
        }

    @TEXTS
    def metrics(self, regularization_losses: Sequence[Any] | None = None) -> dict[str, keras.metrics.Metric]:
        """Return new metrics by name, of all heads and of their losses."""
        made: dict[str, keras.metrics.Metric] = {}
        if regularization_losses:
            made[self.key("regularization_loss")] = keras.metrics.Mean(name="regularization_loss")
        for name, head in self._heads.items():
            made[f"loss/{name}"] = keras.metrics.Mean(name=f"loss_{name}")
            made.update(head.metrics())
        return made

    @TEXTS.with_texts(
        logits="dict of arrays by the names of heads, or an array of all.",
        labels="dict of arrays by the names of heads.",
    )
    def update_metrics(
        self,
        eval_metrics: Mapping[str, Any],
        features: Mapping[str, Any] | None,
        logits: Any,
        labels: Any,
        regularization_losses: Sequence[Any] | None = None,
    ) -> Mapping[str, Any]:
        """Update metrics with a batch, and return them."""
        if regularization_losses:
            eval_metrics[self.key("regularization_loss")].update_state(sum(regularization_losses))
        losses = self._head_losses(labels, logits, features)
        for (name, part), loss in zip(self._split(logits).items(), losses, strict=False):
            eval_metrics[f"loss/{name}"].update_state(loss)
            self._heads[name].update_metrics(eval_metrics, features, part, labels[name])
        return eval_metrics

    def create_estimator_spec(self, *args: Any, **kwargs: Any) -> EstimatorSpec:
        """Return the result of a model_fn; see `Head.create_estimator_spec`.

        Args:
            *args: see `Head.create_estimator_spec`.
            **kwargs: see `Head.create_estimator_spec`.

        Returns:
            A spec that exports the outputs of the first head by default.
        """
        spec = super().create_estimator_spec(*args, **kwargs)
        if spec.mode != ModeKeys.PREDICT:
            return spec
        outputs: dict[str, Any] = {}
        for name in self._heads:
            own = {key: value for (owner, key), value in spec.predictions.items() if owner == name}
            outputs.setdefault("serving_default", PredictOutput(own))
            outputs[name] = outputs[f"predict/{name}"] = PredictOutput(own)
        return spec.replace(export_outputs=outputs)

    # --- on the host -------------------------------------------------------------------------------

    def _host_labels(self, labels: object) -> UserValue:
        """Return labels in each head's form for steps.

        Args:
            labels: of a batch, by the names of heads.
        """
        if labels is None:
            return None
        given = self._checked_labels(labels)
        return {name: head._host_labels(given[name]) for name, head in self._heads.items()}

    def _host_predictions(self, predictions: dict[Any, Any]) -> dict[Any, Any]:
        """Return predictions with those that are strings.

        Args:
            predictions: NumPy arrays by the name of a head and a key.
        """
        named: dict[Any, Any] = {}
        for name, head in self._heads.items():
            own = {key: value for (owner, key), value in predictions.items() if owner == name}
            if own:
                named |= {(name, key): value for key, value in head._host_predictions(own).items()}
        return named
