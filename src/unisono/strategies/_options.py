"""`RunOptions`: what tf.distribute lets callers of `strategy.run` say."""

from __future__ import annotations

import dataclasses

from unisono._errors import InvalidTypeError
from unisono._types import UserValue


@dataclasses.dataclass(frozen=True)
class RunOptions:
    """Options of `strategy.run`, all for TPUs of TensorFlow; they change nothing here.

    Args:
        experimental_enable_dynamic_batch_size: uneven batches always work.
        experimental_bucketizing_dynamic_shape: a program is compiled for each shape.
        experimental_xla_options: accepted for the signature; set `XLA_FLAGS` instead.

    >>> RunOptions().experimental_enable_dynamic_batch_size
    True
    """

    experimental_enable_dynamic_batch_size: bool = True
    experimental_bucketizing_dynamic_shape: bool = False
    experimental_xla_options: UserValue = None


def check_run_options(options: UserValue) -> None:
    """Raise for options of another kind.

    Raises:
        InvalidTypeError: unless `options` is None or a `RunOptions`.
    """
    if options is not None and not isinstance(options, RunOptions):
        raise InvalidTypeError(
            f"`options` must be a `RunOptions`. Received: options={options!r}. Write "
            "`strategy.run(fn, args=(x,), options=unisono.RunOptions())`, or leave it out."
        )
