"""Programs of update and initialization: StableHLO that the chief exported, compiled once by digest.

A program arrives as the bytes of `jax.export`. The server knows neither Keras nor the user's code.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Sequence
from typing import Any

import jax
import jax.export
import numpy as np

from unisono._errors import InvalidArgumentError
from unisono._lowering._compiler_options import compiler_options
from unisono._mesh import local_devices
from unisono.parameter_server.state._push import Array

#: What JAX computes with 32 bits unless 64 bits are enabled.
_WIDE = frozenset({"int64", "uint64", "float64", "complex128"})


def digest_of(blob: bytes) -> str:
    """Return the name of a program: a hash of its bytes.

    >>> len(digest_of(b"program"))
    32
    """
    return hashlib.blake2b(blob, digest_size=16).hexdigest()


def own_platform() -> str:
    """Return on what programs run in this process, as `jax.export` names it; starts JAX."""
    platform: str = jax.export.default_export_platform()
    return platform


class ExportedProgram:
    """A program and its compiled form.

    Args:
        blob: what `jax.export.Exported.serialize` returned.
    """

    def __init__(self, blob: bytes) -> None:
        try:
            # The message of a reader of flat buffers for bytes that are none is of any type.
            exported = jax.export.deserialize(bytearray(blob))
        except Exception as error:
            raise InvalidArgumentError(
                f"A program must be what `jax.export` has written. Received: {len(blob)} bytes, which "
                f"cannot be read ({type(error).__name__}: {error})."
            ) from error
        if "cpu" not in exported.platforms:
            raise InvalidArgumentError(
                "A program must be exported for CPUs, where servers compute. Received: one for "
                f"{exported.platforms}. Export it with `platforms=('cpu', ...)`."
            )
        self.exported = exported
        #: The number of values, slots and gradients that an update takes; other programs have none.
        self.counts = _list_lengths(exported)
        self._specs = [(a.shape, a.dtype) for a in exported.in_avals]
        avals = (*exported.in_avals, *exported.out_avals)
        self._needs_x64 = any(str(a.dtype) in _WIDE for a in avals)
        # Values and slots are given back in their own memory. Where a reader still holds a view of one, JAX
        # takes new memory for this one. For 80 MB: 5 ms instead of 18, because new pages are costly
        # (2 cores, jaxlib 0.10.2, 2026-11-22).
        donated = (0, 1) if self.counts is not None else ()
        #: How often the program was compiled: once for each number of rows, where that is open.
        self.compiled_count = 0
        platform = own_platform()
        #: Where it runs, if that is not the usual device of this process.
        self.device = None if platform in exported.platforms else local_devices("cpu")[0]
        options = compiler_options(platform if self.device is None else "cpu")
        self._call = jax.jit(self._traced, donate_argnums=donated, compiler_options=options)

    def _traced(self, *args: Any) -> Any:
        self.compiled_count += 1
        return self.exported.call(*args)

    def check(self, values: Sequence[Any], slots: Sequence[Any], gradients: Sequence[Any]) -> None:
        """Raise an error unless the arguments have the shapes and dtypes of the program."""
        given = (len(values), len(slots), len(gradients))
        if self.counts == given and self._specs == [
            (a.shape, a.dtype) for a in (*values, *slots, *gradients)
        ]:
            return
        if self.counts != given:
            raise InvalidArgumentError(
                f"An update program must get as many arrays as it takes. Received: {given} values, slots and "
                f"gradients for one of {self.counts}."
            )
        kinds = ["value"] * given[0] + ["slot"] * given[1] + ["gradient"] * given[2]
        for i, (aval, array) in enumerate(
            zip(self.exported.in_avals, [*values, *slots, *gradients], strict=True)
        ):
            fits = len(aval.shape) == len(array.shape) and all(
                n == m for n, m in zip(aval.shape, array.shape, strict=True) if isinstance(n, int)
            )
            if not fits or aval.dtype != array.dtype:
                raise InvalidArgumentError(
                    f"A program's {kinds[i]} must have the shape and dtype that it was exported for, "
                    f"{aval.str_short()}. Received: shape {tuple(array.shape)}, dtype {array.dtype}, as "
                    f"argument {i}."
                )

    def __call__(self, *args: Any) -> Any:
        """Run the program; the results may not be computed yet.

        Args:
            args: the program's arguments; of an update, `values` and `slots` are donated.
        """
        with contextlib.ExitStack() as stack:
            if self._needs_x64:
                stack.enter_context(jax.enable_x64(True))
            if self.device is not None:
                stack.enter_context(jax.default_device(self.device))
            # All arrays are on one device, committed: otherwise the second call would compile again.
            return self._call(*args)


def _list_lengths(exported: jax.export.Exported) -> tuple[int, int, int] | None:
    """Return the lengths of a program's three lists of arguments, or None where it is no update."""
    placeholders: Any = jax.tree.unflatten(exported.in_tree, exported.in_avals)
    args, kwargs = placeholders
    if kwargs or len(args) != 3 or not all(isinstance(a, (list, tuple)) for a in args):
        return None
    lengths = tuple(len(a) for a in args)
    results: Any = jax.tree.unflatten(exported.out_tree, exported.out_avals)
    wanted = [(a.shape, a.dtype) for a in exported.in_avals[: lengths[0] + lengths[1]]]
    if (
        sum(lengths) != len(exported.in_avals)
        or len(results) != 2
        or [len(r) for r in results] != list(lengths[:2])
        or [(a.shape, a.dtype) for a in exported.out_avals] != wanted
    ):
        raise InvalidArgumentError(
            "An update program must return new values and slots of the shapes and dtypes of its first two "
            f"lists. Received: {wanted} and results {exported.out_tree}."
        )
    return lengths[0], lengths[1], lengths[2]


class ProgramStore:
    """The programs that the chief has brought.

    >>> programs = ProgramStore()
    >>> double = jax.export.export(jax.jit(lambda x: 2 * x))(jax.ShapeDtypeStruct((2,), "float32"))
    >>> digest = programs.add(bytes(double.serialize()))
    >>> programs[digest](np.ones(2, "float32"))
    Array([2., 2.], dtype=float32)
    """

    def __init__(self) -> None:
        self._programs: dict[str, ExportedProgram] = {}
        self._lock = threading.Lock()

    def add(self, blob: bytes) -> str:
        """Keep a program, and return its digest; one that is known is kept as it is."""
        digest = digest_of(blob)
        with self._lock:
            if digest not in self._programs:
                self._programs[digest] = ExportedProgram(blob)
        return digest

    def __contains__(self, digest: object) -> bool:
        return digest in self._programs

    def __iter__(self) -> Any:
        return iter(list(self._programs))

    def __getitem__(self, digest: str) -> ExportedProgram:
        """Return a program.

        Raises:
            UnknownProgramError: there is none.
        """
        program = self._programs.get(digest)
        if program is None:
            raise UnknownProgramError(
                f"A push needs a program that the server knows. Received: {digest!r}. Send it with PROGRAM "
                "first, and push again."
            )
        return program


class UnknownProgramError(InvalidArgumentError):
    """A request names a program that the server does not have, or no longer has."""


def to_device(array: Array) -> jax.Array:
    """Return a copy of an array that JAX owns, of the same dtype, on the host's CPU.

    >>> to_device(np.zeros(1, "float64")).dtype
    dtype('float64')
    """
    with jax.enable_x64(True) if array.dtype.name in _WIDE else contextlib.nullcontext():
        # A copy of NumPy's: JAX may use an aligned array's own memory, or read it later.
        copied: jax.Array = jax.device_put(np.array(array), local_devices("cpu")[0])
    return copied
