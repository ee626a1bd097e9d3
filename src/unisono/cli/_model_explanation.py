"""The command `unisono explain`: how each part of a model is computed on several replicas.

Tests: tests/unit/cli/test_model_plan.py.
"""

from __future__ import annotations

from typing import Any

from unisono._errors import InvalidArgumentError, UnisonoError
from unisono.cli._model_plan import ModelFile, batch_for, checked

#: Seconds for all: a large model is traced for minutes.
_TIME_LIMIT = 1800.0


def main(model: str, devices: int) -> str:
    """Read a model's step in a new process with virtual devices, and return the table as text."""
    from unisono.cli._launch_function import launch

    if devices < 2:
        raise InvalidArgumentError(
            "`--devices` must be at least 2, as one replica computes what plain Keras does. Received: "
            f"{devices}."
        )
    (text,) = launch(
        _explain, workers=1, args=(ModelFile(model), devices), devices_per_worker=devices, timeout=_TIME_LIMIT
    )
    if isinstance(text, UnisonoError):
        raise text
    return str(text)


def _explain(file: ModelFile, devices: int) -> Any:
    """Return the table, or the error that says why there is none."""
    from unisono.strategies._mirrored import MirroredStrategy

    strategy = MirroredStrategy([f"cpu:{i}" for i in range(devices)])
    lines: list[str] = []
    try:
        make_model, make_batch = file.load()
        with strategy.scope():
            model = checked(make_model(), file.model)
        rows = 4 * devices
        strategy.explain(model, make_batch(rows) if make_batch else batch_for(model, rows), lines.append)
    except UnisonoError as error:
        return error
    return "\n".join(lines)
