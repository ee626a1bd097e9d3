"""What an `input_fn` gives on a worker of a cluster with parameter servers, also after its end.

Tests: tests/virtual/estimator/test_parameter_servers.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import jax
import numpy as np

from unisono._errors import InvalidTypeError
from unisono._types import PyTree
from unisono.data._batches import as_array, check_values
from unisono.data._sharding import InputContext
from unisono.estimator.session._input import elements_of
from unisono.estimator.session._model_step import argument_names

#: In place of a pair of features and labels: the worker has no further one.
END: Final = ()


@dataclasses.dataclass(frozen=True)
class WorkerInput:
    """Makes the elements of a worker; goes to the workers as bytes.

    Args:
        input_fn: the user's.
        given: further arguments by name, of which the input_fn gets those that it has.
    """

    input_fn: Callable[..., Any]
    given: Mapping[str, Any]

    def __call__(self, context: InputContext) -> WorkerElements:
        """Return the elements of one worker.

        Args:
            context: says which worker.
        """
        return WorkerElements(self, context)

    def pickled(self) -> bytes:
        """Return this object as bytes, without arguments that the input_fn does not have.

        Raises:
            InvalidTypeError: it cannot be pickled.
        """
        import cloudpickle

        known = argument_names(self.input_fn)
        own = WorkerInput(self.input_fn, {k: v for k, v in self.given.items() if k in known})
        try:
            return bytes(cloudpickle.dumps(own))
        except Exception as error:
            raise InvalidTypeError(
                "On a cluster with parameter servers the input_fn runs on the workers, and must be pickled "
                f"for that. Received: {self.input_fn!r}, which cannot be ({type(error).__name__}: {error}). "
                "Open files and make datasets inside of the input_fn."
            ) from error


@dataclasses.dataclass(frozen=True)
class WorkerElements:
    """The elements of one worker as host arrays, then `END` for ever.

    Args:
        made_by: what makes them.
        context: says which worker.
    """

    made_by: WorkerInput
    context: InputContext

    def __iter__(self) -> Iterator[PyTree]:
        """Begin from the first element."""
        for element in elements_of(self.made_by.input_fn, self.context, self.made_by.given):
            arrays = jax.tree.map(lambda leaf: np.asarray(as_array(leaf)), element)
            check_values(arrays, "(features, labels)")
            yield arrays
        yield from itertools.repeat(END)
