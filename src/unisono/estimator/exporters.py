"""Exporters: `train_and_evaluate` calls them after each evaluation, and they write a model to be served.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/estimator/Exporter
"""

from __future__ import annotations

import abc
import inspect
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from unisono._checks import digits
from unisono._errors import InvalidArgumentError, InvalidTypeError
from unisono._system._object_store import StorePath, given_place
from unisono.estimator._docstrings import Texts

if TYPE_CHECKING:
    from unisono.estimator._estimator import Estimator

__all__ = ["BestExporter", "Exporter", "FinalExporter", "LatestExporter"]


def __dir__() -> list[str]:
    return __all__


_LOG = logging.getLogger("unisono")

#: Metrics of an evaluation by name.
Results = Mapping[str, Any]

#: Returns what an exported model takes.
ReceiverFunction = Callable[[], Any]


class Exporter(abc.ABC):
    """An element of `EvalSpec(exporters=...)`.

    >>> class Nothing(Exporter):
    ...     name = "nothing"
    ...     def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
    ...         return None
    """

    @property
    @abc.abstractmethod
    def name(self) -> str:
        """The directory of the exports, below `model_dir/export`."""

    @abc.abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Results,
        is_the_final_export: bool,
    ) -> str | None:
        """Export the model of a checkpoint, or not.

        Args:
            estimator: the `Estimator`.
            export_path: the directory below which the export is written.
            checkpoint_path: of the checkpoint that was evaluated.
            eval_result: what `Estimator.evaluate` returned.
            is_the_final_export: whether training has ended.

        Returns:
            The path of the export; None for none.
        """


class _SavedModelExporter(Exporter):
    """Exports each model, and keeps the newest exports."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: ReceiverFunction,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        if not name or not isinstance(name, str):
            raise InvalidArgumentError(f"`name` must be a directory's name. Received: {name!r}.")
        if exports_to_keep is not None and exports_to_keep <= 0:
            raise InvalidArgumentError(
                f"`exports_to_keep` must be positive. Received: {exports_to_keep!r}. Write None for all."
            )
        self._name, self._exports_to_keep = name, exports_to_keep
        self._receiver_fn, self._assets_extra = serving_input_receiver_fn, assets_extra

    @property
    def name(self) -> str:
        """The directory of the exports."""
        return self._name

    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: Results,
        is_the_final_export: bool,
    ) -> str | None:
        """Export the model of a checkpoint, if this exporter's rule says so."""
        if not self._is_due(estimator, eval_result, is_the_final_export):
            return None
        extra: dict[str, Any] = {} if self._assets_extra is None else {"assets_extra": self._assets_extra}
        path: str | bytes = estimator.export_saved_model(
            export_path, self._receiver_fn, checkpoint_path=checkpoint_path, **extra
        )
        _remove_old(export_path, self._exports_to_keep)
        return os.fsdecode(path)

    def _is_due(self, estimator: Estimator, eval_result: Results, is_the_final_export: bool) -> bool:
        return True


_TEXTS = Texts(
    {
        "name": "string; the directory of the exports.",
        "serving_input_receiver_fn": "function that returns what the exported model takes.",
        "event_file_pattern": "string; the event files of the evaluations, below `model_dir`, from which "
        "the best one of an earlier process is read. None for none.",
        "compare_fn": "function from `best_eval_result` and `current_eval_result` to whether the latter is "
        "better; by default, whether its loss is smaller.",
        "assets_extra": "dict of source paths of files to copy, by their paths in the export; None for none.",
        "as_text": "bool; has no effect.",
        "exports_to_keep": "whole number; how many exports are kept. None for all.",
    },
    raises={"InvalidArgumentError": "`exports_to_keep` is not positive, or `name` is no name."},
)


@_TEXTS.with_texts(raises={"InvalidArgumentError": "`name` is no name."})
class FinalExporter(_SavedModelExporter):
    """Exports once, when training has ended.

    >>> FinalExporter("final", lambda: None).name
    'final'
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: ReceiverFunction,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, None)

    def _is_due(self, estimator: Estimator, eval_result: Results, is_the_final_export: bool) -> bool:
        if is_the_final_export:
            _LOG.info("Performing the final export in the end of training.")
        return is_the_final_export


@_TEXTS
class LatestExporter(_SavedModelExporter):
    """Exports after each evaluation, and keeps the newest exports.

    >>> LatestExporter("latest", lambda: None, exports_to_keep=2).name
    'latest'
    """


def _has_smaller_loss(best_eval_result: Results, current_eval_result: Results) -> bool:
    for name, result in (
        ("best_eval_result", best_eval_result),
        ("current_eval_result", current_eval_result),
    ):
        if not result or "loss" not in result:
            raise InvalidArgumentError(
                f"`{name}` cannot be empty, or without a loss. Received: {result!r}. Pass a `compare_fn`."
            )
    return bool(best_eval_result["loss"] > current_eval_result["loss"])


@_TEXTS.with_texts(
    raises={
        "InvalidArgumentError": "`exports_to_keep` is not positive, or `compare_fn` has other arguments.",
        "InvalidTypeError": "`compare_fn` cannot be called.",
    }
)
class BestExporter(_SavedModelExporter):
    """Exports where an evaluation is better than all before it, and keeps the newest exports.

    >>> BestExporter(serving_input_receiver_fn=lambda: None).name
    'best_exporter'
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: ReceiverFunction | None = None,
        event_file_pattern: str | None = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = _has_smaller_loss,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        if serving_input_receiver_fn is None:
            raise InvalidArgumentError(
                "`serving_input_receiver_fn` must be given. Received: None. Write "
                "`tf.estimator.export.build_raw_serving_input_receiver_fn({...})`."
            )
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        _check_compare(compare_fn)
        self._compare = compare_fn
        self._pattern = event_file_pattern
        self._model_dir: str | None = None
        self._best: Results | None = None
        self._has_exported = False

    def _is_due(self, estimator: Estimator, eval_result: Results, is_the_final_export: bool) -> bool:
        """Return whether a model is the best so far, or the first of this process."""
        if self._pattern and self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = self._best_of_files()
        is_better = self._best is None or self._compare(
            best_eval_result=self._best, current_eval_result=eval_result
        )
        if self._has_exported and not is_better:
            return False
        _LOG.info("Performing best model export.")
        self._best, self._has_exported = eval_result, True
        return True

    def _best_of_files(self) -> Results | None:
        """Return the best evaluation that event files have."""
        from unisono._summary._event_files import read_scalars

        directory = os.path.dirname(os.path.join(self._model_dir or "", self._pattern or ""))
        best: Results | None = None
        for result in read_scalars(directory).values():
            if best is None or self._compare(best_eval_result=best, current_eval_result=result):
                best = result
        return best


def _check_compare(function: Callable[..., bool]) -> None:
    if not callable(function):
        raise InvalidTypeError(f"`compare_fn` must be a function. Received: {function!r}.")
    wanted = {"best_eval_result", "current_eval_result"}
    known = set(inspect.signature(function).parameters)
    if known != wanted:
        raise InvalidArgumentError(
            f"`compare_fn` must have the arguments {sorted(wanted)}. Received: {sorted(known)}."
        )


def _remove_old(directory: str, number: int | None) -> None:
    """Remove all but the newest exports, whose names are times."""
    folder = given_place(directory)
    if isinstance(folder, StorePath):
        names = [name for name, stat in folder.children().items() if stat is None]
    else:
        names = [path.name for path in folder.glob("*") if path.is_dir()]
    times = {name: time for name in names if (time := digits(name)) is not None}
    for name in sorted(times, key=lambda name: times[name])[: -number if number else 0]:
        path = folder / name
        try:
            path.rmtree() if isinstance(path, StorePath) else shutil.rmtree(path)
        except OSError as error:
            # Another process may read it: it is removed after the next export.
            _LOG.warning("Can not delete %s: %s.", path, error)
