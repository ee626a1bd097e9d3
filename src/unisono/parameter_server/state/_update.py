"""Checking a push against the variables of a server, and computing what it changes.

Nothing is written to a variable here: the outcome is applied after it was logged.

Tests: tests/unit/parameter_server/test_store.py.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from unisono._errors import ClusterError, InvalidArgumentError
from unisono.parameter_server.server._programs import ProgramStore, to_device
from unisono.parameter_server.state._push import Array, ProgramCall, Push, RowWrite
from unisono.parameter_server.state._variables import DenseVariable, Table, combine_rows

#: The variables of a server by number.
Variables = Mapping[int, DenseVariable | Table]

#: Calls with rows are padded to powers of two of at least this many, so that few programs are compiled.
_FEWEST_ROWS = 8


class StateLostError(ClusterError):
    """A program failed after it had used up the memory of its arguments: the server must start again."""


@dataclasses.dataclass
class PushOutcome:
    """What a push changes.

    Args:
        logged: the push with the results of calls with `indices`, as it is logged.
    """

    dense: dict[int, Array | jax.Array]
    rows: list[RowWrite]
    logged: Push

    def apply(self, variables: Variables) -> None:
        """Write the changes to the variables."""
        for number, value in self.dense.items():
            variables[number].replace(value)  # type: ignore[union-attr]
        for write in self.rows:
            for number, rows in zip(write.tables, write.rows, strict=True):
                variables[number].write(rows, write.indices)


def check_push(push: Push, variables: Variables, programs: ProgramStore) -> None:
    """Raise an error unless all of a push can be applied.

    Raises:
        InvalidArgumentError: a variable does not exist, or an array has the wrong shape or dtype.
        UnknownProgramError: a program must be sent first.
    """
    tables: set[int] = set()
    for update in push.updates:
        ids = update.ids
        found = [find(variables, number) for number in ids]
        if len(set(ids)) < len(ids):
            twice = [i for i, n in collections.Counter(ids).items() if n > 1]
            raise InvalidArgumentError(f"An update writes a variable once. Received: {twice} twice.")
        touched = {i for i, variable in zip(ids, found, strict=True) if isinstance(variable, Table)}
        if touched & tables:
            raise InvalidArgumentError(
                f"One update of a push may change a table. Received: two for {sorted(touched & tables)}. "
                "Put all indices and gradients into one."
            )
        tables |= touched
        if isinstance(update, RowWrite):
            _check_row_write(update, variables)
        else:
            _check_call(update, variables, programs)
    for what, pairs in (("adds", push.adds), ("assigns", push.assigns)):
        for number, array in pairs:
            check_value(find(variables, number, DenseVariable), array, what)


def find(variables: Variables, number: int, kind: type[Any] | None = None) -> Any:
    """Return a variable."""
    variable = variables.get(number)
    if variable is None:
        raise InvalidArgumentError(
            f"A request must name variables of this server by number. Received: {number}; there are "
            f"{len(variables)}. Create it with CREATE first."
        )
    if kind is not None and not isinstance(variable, kind):
        raise InvalidArgumentError(
            f"This request needs a {'table' if kind is Table else 'dense variable'}. Received: "
            f"{variable.spec.name!r}, which is {variable.spec.kind}."
        )
    return variable


def check_value(variable: DenseVariable | Table, array: Array, what: str) -> None:
    """Raise an error unless an array has the shape and dtype of a variable."""
    if tuple(array.shape) != tuple(variable.shape) or array.dtype != variable.dtype:
        raise InvalidArgumentError(
            f"An array of `{what}` must have the shape and dtype of {variable.spec.name!r}, "
            f"{variable.shape} and {variable.dtype}. Received: {tuple(array.shape)}, {array.dtype}."
        )


def check_rows(table: Table, indices: Array, rows: Array, what: str) -> Array:
    """Return the indices as NumPy uses them, or raise an error unless there is one row for each."""
    checked = table.check_rows(indices)
    if tuple(rows.shape) != (len(checked), *table.shape[1:]) or rows.dtype != table.dtype:
        raise InvalidArgumentError(
            f"The {what} of {table.spec.name!r} must have one row for each of {len(checked)} indices, shape "
            f"{table.shape[1:]} and dtype {table.dtype}. Received: {tuple(rows.shape)}, {rows.dtype}."
        )
    return checked


def _check_row_write(write: RowWrite, variables: Variables) -> None:
    for number, rows in zip(write.tables, write.rows, strict=True):
        indices = check_rows(find(variables, number, Table), write.indices, rows, "new rows")
        if len(np.unique(indices)) < len(indices):
            raise InvalidArgumentError("New rows name each row once. Received: an index several times.")
    for number, value in zip(write.dense, write.values, strict=True):
        check_value(find(variables, number, DenseVariable), value, "values")


def _check_call(call: ProgramCall, variables: Variables, programs: ProgramStore) -> None:
    program = programs[call.program]
    found = [variables[i] for i in call.ids]
    tables = [v for v in found if isinstance(v, Table)]
    if call.indices is None:
        if tables:
            raise InvalidArgumentError(
                f"A table is updated by rows. Received: an update of {tables[0].spec.name!r} without indices."
            )
        shapes: list[Any] = found
        gradients: list[Any] = list(call.gradients)
    else:
        if not tables:
            raise InvalidArgumentError("An update with indices must name a table. Received: none.")
        for table in tables:
            table.check_rows(call.indices)
        count = len(call.indices)
        for gradient in call.gradients:
            if gradient.ndim < 1 or gradient.shape[0] != count:
                raise InvalidArgumentError(
                    f"A gradient of rows must have one row for each of {count} indices. Received: shape "
                    f"{tuple(gradient.shape)}."
                )
        rows = padded_rows(count)
        shapes = [_rows_spec(v, rows) if isinstance(v, Table) else v for v in found]
        gradients = [_rows_spec(g, rows) for g in call.gradients]
    split = len(call.values)
    program.check(shapes[:split], shapes[split:], gradients)


def _rows_spec(array: Any, rows: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows, *array.shape[1:]), array.dtype)


def padded_rows(count: int) -> int:
    """Return the number of rows that a program gets for `count` of them: a power of two.

    >>> [padded_rows(n) for n in (0, 8, 9, 1000)]
    [8, 8, 16, 1024]
    """
    return max(_FEWEST_ROWS, 1 << (count - 1).bit_length() if count else 0)


def run_push(
    push: Push,
    variables: Variables,
    programs: ProgramStore,
    stage: Callable[[Sequence[Array]], list[Array]],
) -> PushOutcome:
    """Compute what a push that was checked changes.

    Args:
        variables: are read; memory of those that programs write may be used up.
        stage: takes arrays into the log, in order; returns where programs can read them.

    Raises:
        StateLostError: a program failed, and variables are gone.
    """
    outcome = PushOutcome({}, [], push)
    logged: list[ProgramCall | RowWrite] = []
    for update in push.updates:
        if isinstance(update, ProgramCall) and update.indices is None:
            gradients = stage(update.gradients)
            logged.append(update)
            results = _call(update, outcome.dense, variables, programs, list(gradients), None)
            outcome.dense.update(zip(update.ids, results, strict=True))
            continue
        if isinstance(update, ProgramCall):
            write = _call_with_rows(update, outcome.dense, variables, programs)
        else:
            # What is applied must not lie in the memory of a message.
            write = dataclasses.replace(update, values=tuple(np.array(v) for v in update.values))
        stage([write.indices, *write.rows, *write.values])
        logged.append(write)
        outcome.rows.append(write)
        outcome.dense.update(zip(write.dense, write.values, strict=True))
    stage([a for _, a in push.adds])
    for number, array in push.adds:
        outcome.dense[number] = np.asarray(np.add(_current(number, outcome.dense, variables), array))
    stage([a for _, a in push.assigns])
    outcome.dense.update({number: np.array(array) for number, array in push.assigns})
    outcome.logged = dataclasses.replace(push, updates=tuple(logged))
    return outcome


def _current(number: int, dense: Mapping[int, Any], variables: Variables) -> Any:
    if number in dense:
        return np.asarray(dense[number])
    variable = variables[number]
    return variable.host()


def _call(
    call: ProgramCall,
    dense: Mapping[int, Any],
    variables: Variables,
    programs: ProgramStore,
    gradients: list[Array],
    rows: Mapping[int, Array] | None,
) -> list[jax.Array]:
    """Run a program and wait for it; return all results, values first."""
    args: list[Any] = []
    for number in call.ids:
        variable = variables[number]
        if rows is not None and number in rows:
            args.append(rows[number])
        elif number in dense:
            value = dense[number]
            args.append(value if isinstance(value, jax.Array) else to_device(value))
        elif isinstance(variable, DenseVariable):
            args.append(variable.device())
    split = len(call.values)
    try:
        values, slots = programs[call.program](args[:split], args[split:], gradients)
        results: list[jax.Array] = jax.block_until_ready([*values, *slots])
    except Exception as error:
        # A program that could not be compiled has taken nothing.
        gone = [i for i, a in zip(call.ids, args, strict=True) if isinstance(a, jax.Array) and a.is_deleted()]
        if gone or dense:
            raise StateLostError(
                f"The program {call.program} failed when it had used up its arguments ({error}). The server "
                "must start again, from its snapshot and log."
            ) from error
        raise InvalidArgumentError(f"The program {call.program} cannot be run: {error}") from error
    return results


def _call_with_rows(
    call: ProgramCall, dense: Mapping[int, Any], variables: Variables, programs: ProgramStore
) -> RowWrite:
    """Run a program on the rows that a call names; return the new rows."""
    found = {i: v for i in call.ids if isinstance(v := variables[i], Table)}
    first = next(iter(found.values()))
    indices, gradients = combine_rows(first.check_rows(np.asarray(call.indices)), list(call.gradients))
    # The combined rows are fewer; the size is that of the check, which the program was checked for.
    size = padded_rows(len(np.asarray(call.indices)))
    rows = {i: _padded(t.rows(indices), size) for i, t in found.items()}
    results = dict(
        zip(
            call.ids,
            _call(call, dense, variables, programs, [_padded(g, size) for g in gradients], rows),
            strict=True,
        )
    )
    others = tuple(i for i in call.ids if i not in found)
    return RowWrite(
        tables=tuple(found),
        indices=indices.astype(np.int64, copy=False),
        rows=tuple(np.asarray(results[i])[: len(indices)] for i in found),
        dense=others,
        values=tuple(np.asarray(results[i]) for i in others),
    )


def _padded(rows: Array, size: int) -> Array:
    if len(rows) == size:
        return rows
    padded = np.zeros((size, *rows.shape[1:]), rows.dtype)
    padded[: len(rows)] = rows
    return padded
