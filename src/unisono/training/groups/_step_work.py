"""The work of training steps, for `StepTimer` and the table of a launch: rows, tokens and operations.

Operations are counted in the traced program, once for each program. XLA's own analysis cannot serve: before
compilation it is not there for GPUs and TPUs (`NotImplementedError` in JAX 0.10 to 0.11), and behind it the
products of matrices are custom calls on GPUs, which it leaves out (https://github.com/jax-ml/jax/issues/22249).

Tests: tests/unit/training/test_step_work.py, tests/virtual/callbacks/test_timer_work.py.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.extend.core as jex
from jax.interpreters import partial_eval

from unisono._mesh import ReplicaMesh
from unisono._types import PyTree
from unisono.training._jaxprs import Trace, inner_programs
from unisono.training.groups._batch_policy import Mode
from unisono.training.groups._peak_flops import peak_flops_of

if TYPE_CHECKING:
    from unisono.training.groups._batch_placement import BatchGroup


class WorkTotals(NamedTuple):
    """The work of some steps.

    Args:
        rows: of all replicas.
        tokens: of all replicas; 0 where rows have none.
        flops: of one device; NaN where a program was not counted.
    """

    rows: int = 0
    tokens: int = 0
    flops: float = 0.0

    def since(self, earlier: WorkTotals) -> WorkTotals:
        """Return the work after an earlier count.

        >>> WorkTotals(8, 0, 6.0).since(WorkTotals(2, 0, 2.0))
        WorkTotals(rows=6, tokens=0, flops=4.0)
        """
        return WorkTotals(*map(operator.sub, self, earlier))


class StepWork:
    """Adds up the work of one train function.

    Args:
        mesh: the devices of its replicas; None where they are not known.
        dtype: in which the model computes.
    """

    def __init__(self, mesh: ReplicaMesh | None, dtype: str) -> None:
        self._num_replicas = 1 if mesh is None else mesh.num_replicas
        self._devices_per_replica = 1 if mesh is None else mesh.devices_per_replica
        self._devices = () if mesh is None else mesh.local_devices
        self._compute_type = dtype
        #: Tokens of a row; None to see them in the data.
        self.tokens_per_row: int | None = None
        #: The work so far.
        self.done = WorkTotals()
        self._flops_of: dict[Hashable, float] = {}
        self._last = WorkTotals()

    def learn(self, group: BatchGroup, steps: int, trace: Callable[[], jex.ClosedJaxpr]) -> None:
        """Count the operations of a group's program, once.

        Args:
            steps: of which `flops_of` counts the operations.
            trace: returns the program.
        """
        key = _program_of(group)
        if key not in self._flops_of:
            flops = flops_of(trace()) / steps
            # A replica's devices share its operations; joined rows have one program for all replicas.
            replicas = self._num_replicas if group.mode is Mode.JOINED else 1
            self._flops_of[key] = flops / (replicas * self._devices_per_replica)

    def count(self, group: BatchGroup) -> None:
        """Count a group that was started."""
        rows, tokens = _size_of(group.first)
        if self.tokens_per_row is not None:
            tokens = self.tokens_per_row * rows
        flops = self._flops_of.get(_program_of(group), math.nan)
        done, n = self.done, group.count
        self.done = WorkTotals(done.rows + n * rows, done.tokens + n * tokens, done.flops + n * flops)

    def new(self) -> WorkTotals:
        """Return the work since the last call."""
        since, self._last = self.done.since(self._last), self.done
        return since

    @property
    def peak(self) -> float | None:
        """The operations a second of one device at most; None where that is not known."""
        return peak_flops_of(self._devices[0].device_kind, self._compute_type) if self._devices else None

    def memory(self) -> int | None:
        """Return the most bytes in use so far on a device of this process; None where JAX does not count."""
        stats = [device.memory_stats() or {} for device in self._devices]
        sizes = [s.get("peak_bytes_in_use", s.get("bytes_in_use")) for s in stats]
        return max((int(size) for size in sizes if size is not None), default=None)


class WorkOfBatch:
    """The rows of one batch whose step another process runs, with its devices and operations.

    Args:
        batch: as `fit` gets it.

    >>> import numpy as np
    >>> WorkOfBatch((np.zeros((4, 8), "int32"), np.zeros(4))).new()
    WorkTotals(rows=4, tokens=32, flops=0.0)
    """

    peak: float | None = None

    def __init__(self, batch: PyTree) -> None:
        self._size = _size_of(batch)

    def new(self) -> WorkTotals:
        """Return the work."""
        return WorkTotals(*self._size)

    def memory(self) -> int | None:
        """Return None: the devices are another process'."""
        return None


def _program_of(group: BatchGroup) -> Hashable:
    """Return a key of a group's program: one of a mode has others for longer rows."""
    return group.form, tuple(getattr(x, "shape", ()) for x in jax.tree.leaves(group.first))


def _size_of(batch: PyTree) -> tuple[int, int]:
    """Return the rows of a batch, and its tokens: its first input is then `[rows, tokens]`, of integers.

    >>> import numpy as np
    >>> _size_of((np.zeros((4, 8), "int32"), np.zeros(4))), _size_of((np.zeros((4, 8)), None))
    ((4, 32), (4, 0))
    """
    leaves = jax.tree.leaves(batch)
    shape = getattr(leaves[0], "shape", ()) if leaves else ()
    if not shape:
        return 0, 0
    # Bytes are pixels rather than tokens.
    is_text = len(shape) == 2 and leaves[0].dtype.kind in "iu" and leaves[0].dtype.itemsize > 1
    return shape[0], shape[0] * shape[1] if is_text else 0


def flops_of(program: jex.ClosedJaxpr) -> float:
    """Return the operations of a program's matrix products and convolutions; of one replica in `shard_map`.

    A multiplication with an addition counts two. Other operations are left out, and so are calls of
    libraries, such as cuDNN's attention, and kernels in Pallas. The body of a `scan` counts as often as it
    runs, and the body of a loop whose length is data once.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((2, 3)), jnp.ones((3, 5))
    >>> flops_of(jax.make_jaxpr(lambda a, b: a @ b)(*x))
    60.0
    """
    # A step may have been traced twice for what its results say: what nothing needs is not computed.
    jaxpr, _ = partial_eval.dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    return _flops_in(jaxpr)


def _flops_in(program: Trace) -> float:
    return float(sum(map(_flops_of_equation, program.eqns)))


def _flops_of_equation(eqn: Any) -> float:
    name = eqn.primitive.name
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        products = math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[i] for i in contracted)
        return 2.0 * float(products)
    if name == "conv_general_dilated":
        return _flops_of_convolution(eqn)
    if name == "pallas_call":
        return 0.0
    inner = [_flops_in(program) for program in inner_programs(eqn)]
    if name == "cond":
        return max(inner, default=0.0)
    return sum(inner) * float(eqn.params["length"] if name == "scan" else 1)


def _flops_of_convolution(eqn: Any) -> float:
    """Count a convolution, with products at its padded edges, and without the zeros of a dilated image."""
    kernel = eqn.invars[1].aval.shape
    features = kernel[eqn.params["dimension_numbers"].rhs_spec[0]]
    products = math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) / features
    return float(2.0 * products / math.prod(eqn.params["lhs_dilation"]))
