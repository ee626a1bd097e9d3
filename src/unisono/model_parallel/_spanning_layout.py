"""Variables in parts on replicas whose devices belong to several processes.

No process has all parts of such a variable: it is whole where all of them gather it.

Tests: tests/virtual/strategies/test_spanning_workers.py, which tests/cluster/test_contract.py starts.
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from unisono._context import current
from unisono._errors import ContextError
from unisono.collectives._process_group import ProcessGroup
from unisono.model_parallel._cut_layout import CutLayout
from unisono.model_parallel._first_values import made
from unisono.step._value_handle import AgreedHandle, DeferredValue, VariableValue, different_values

if TYPE_CHECKING:
    from jax.typing import DTypeLike


class SpannedParts(AgreedHandle):
    """The value of a variable whose parts lie on devices of several processes; an array where it is read.

    Args:
        array: on the devices of all replicas.
        layout: how it lies.
        token: the same where the value is: zeros for what steps have left, a checksum of what was assigned.
    """

    def __init__(self, array: jax.Array, layout: SpanningLayout, token: np.ndarray | None = None) -> None:
        super().__init__(array.shape, array.dtype)
        self.array, self.layout = array, layout
        self._token = np.zeros(2, np.uint32) if token is None else token
        #: On the host; a process may then read the value alone.
        self._gathered: np.ndarray | None = None

    @property
    def token(self) -> np.ndarray:
        """Two numbers that are the same on all workers where these are parts of the same value."""
        return self._token

    def agreed(self, token: np.ndarray) -> SpannedParts:
        """Return these parts, if they are of the value that the first worker has."""
        if not np.array_equal(token, self._token):
            raise different_values()
        return self

    def assigned(self, value: jax.Array) -> VariableValue:
        """Return the parts of another value; in a trace, that value."""
        return value if isinstance(value, jax.core.Tracer) else self.layout.parts_of(value)

    def is_deleted(self) -> bool:
        """True if a step was given the parts."""
        return self.array.is_deleted()

    @property
    def needs_all(self) -> bool:
        return self._gathered is None

    def whole(self) -> jax.Array:
        """Return the variable's value as one array: all workers must call it, unless they called `gather`."""
        return self.layout.gathered(self.array) if self._gathered is None else jnp.asarray(self._gathered)

    def lie_as(self, layout: SpanningLayout) -> None:
        """Lie in other parts from now on, in place of these ones; all must call it."""
        with self.layout.group.collective():
            self.array = _lying(layout.sharding)(self.array).block_until_ready()
        self.layout = layout

    def gather(self) -> None:
        """Bring the value to the host of every worker; all must call it."""
        if self._gathered is None:
            self._gathered = np.asarray(self.layout.gathered(self.array))

    def read(self) -> jax.Array:
        """Return the value for code that reads the variable."""
        context = current()
        if self.needs_all and context is not None and context.is_of_method:
            raise ContextError(
                "Variables in parts on devices of several workers can be read where an epoch ends, or "
                "outside of `fit`, by all workers. Received: a read within an epoch. Save at the end of "
                'epochs (`save_freq="epoch"`), save weights only, or use '
                "`unisono.callbacks.BackupAndRestore`."
            )
        return self.whole()

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if self._gathered is not None:
            return self._gathered.astype(dtype or self.dtype)
        return super().__array__(dtype, copy)


@dataclasses.dataclass(frozen=True)
class SpanningLayout(CutLayout):
    """How a variable lies in parts on devices of several processes: the same on all replicas.

    Args:
        group: the processes that train together.
    """

    group: ProcessGroup = dataclasses.field(kw_only=True)

    @property
    def holds_arrays(self) -> bool:
        return False

    def place(self, value: VariableValue) -> jax.Array:
        """Return the array that a program takes; see `VariableLayout.place`."""
        if not isinstance(value, SpannedParts):
            return super().place(value)
        if value.layout.cut != self.cut:
            # Read from a file before it was decided how the variable lies.
            value.lie_as(self)
        return value.array

    def make(self, value: DeferredValue) -> jax.Array:
        """Return a first value, of which each process makes its parts: all run one program."""
        with self.group.collective():
            first: jax.Array = made(value, self.sharding)
            return first.block_until_ready()

    def hold(self, array: jax.Array) -> SpannedParts:
        """Return the value of the variable for all parts."""
        return SpannedParts(array, self)

    def assigned(self, array: jax.Array) -> VariableValue:
        """Return the parts of an array; see `VariableLayout.assigned`."""
        return self.parts_of(array)

    def parts_of(self, value: Any) -> SpannedParts:
        """Return the value of the variable after all processes have assigned it a whole array."""
        whole: Any = np.asarray(value)
        token = np.array([2, zlib.crc32(np.ascontiguousarray(whole).tobytes())], np.uint32)
        dtype = jax.dtypes.canonicalize_dtype(whole.dtype)

        def part(index: tuple[slice, ...] | None) -> np.ndarray:
            # A copy: an array of a CPU may be the memory that it was made of, here all of the whole.
            return np.array(whole if index is None else whole[index], dtype)

        return SpannedParts(jax.make_array_from_callback(whole.shape, self.sharding, part), self, token)

    def gathered(self, array: jax.Array) -> jax.Array:
        """Return the whole value: a collective."""
        self.group.note_read()
        with self.group.collective():
            whole: jax.Array = self.mesh.local(_lying(self.mesh.replicated)(array))
            # A worker that waits is then seen by those that have ended.
            return whole.block_until_ready()


@functools.lru_cache(maxsize=16)
def _lying(sharding: jax.sharding.Sharding) -> Callable[[jax.Array], jax.Array]:
    # Cached, because a new `jit` would compile at each read.
    return jax.jit(lambda x: x, out_shardings=sharding)
