"""`WarmStartSettings`: variables that begin with the values of another training.

Source: https://www.tensorflow.org/versions/r1.15/api_docs/python/tf/estimator/WarmStartSettings
"""

from __future__ import annotations

import dataclasses
import logging
import os
import re
from collections.abc import Mapping, Sequence

import keras

from unisono._errors import InvalidTypeError, UnsupportedError
from unisono._types import UserValue
from unisono.estimator.session._model_step import ModelVariables
from unisono.estimator.session._saving import Initializer, assign_from

_LOG = logging.getLogger("unisono")


@dataclasses.dataclass(frozen=True)
class WarmStartSettings:
    """Which variables begin with the values of a checkpoint.

    Args:
        ckpt_to_initialize_from: path of the checkpoint, or of a directory of checkpoints.
        vars_to_warm_start: a regular expression that paths of trainable variables contain; a list of such;
            None for no variables.
        var_name_to_vocab_info: must be empty: vocabularies are not compared.
        var_name_to_prev_var_name: the path in the checkpoint, where it is another, by the path here.

    >>> WarmStartSettings("/tmp/model", vars_to_warm_start="dense/kernel").vars_to_warm_start
    'dense/kernel'
    """

    ckpt_to_initialize_from: str | os.PathLike[str]
    vars_to_warm_start: str | Sequence[str] | None = ".*"
    var_name_to_vocab_info: Mapping[str, UserValue] | None = None
    var_name_to_prev_var_name: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.var_name_to_vocab_info:
            raise UnsupportedError(
                "A warm start takes variables of equal shapes. Received: var_name_to_vocab_info. Leave it "
                "out, and rename variables with `var_name_to_prev_var_name`."
            )


def initializer_of(warm_start: object) -> Initializer | None:
    """Return the initializer of a warm start."""
    if warm_start is None:
        return None
    if isinstance(warm_start, (str, os.PathLike)):
        warm_start = WarmStartSettings(warm_start)
    if isinstance(warm_start, WarmStartSettings):
        settings = warm_start
        return lambda variables: _warm_start(settings, variables)
    if callable(warm_start):
        initializer: Initializer = warm_start
        return initializer
    raise InvalidTypeError(
        "`warm_start_from` must be the path of a checkpoint, or WarmStartSettings. Received: "
        f"{type(warm_start).__name__}. Write `WarmStartSettings('/path/of/model_dir')`."
    )


def _warm_start(settings: WarmStartSettings, variables: ModelVariables) -> None:
    given = settings.vars_to_warm_start
    patterns = [] if given is None else [given] if isinstance(given, str) else list(given)
    renamed = dict(settings.var_name_to_prev_var_name or {})
    chosen: dict[str, list[keras.Variable]] = {}
    for path, variable in variables.variables.items():
        if variable.trainable and any(re.search(p, path) for p in patterns):
            chosen.setdefault(renamed.get(path, path), []).append(variable)
            _LOG.info("Warm-starting variable: %s; prev_var_name: %s.", path, renamed.get(path, path))
    advice = " Narrow `vars_to_warm_start`, or give its name there in `var_name_to_prev_var_name`."
    assign_from(settings.ckpt_to_initialize_from, chosen, advice)
