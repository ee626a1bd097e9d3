"""Which rows of a variable lie on which parameter server, by sizes in the order of creation; pure."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from unisono._errors import InvalidArgumentError
from unisono.parameter_server.chief._partition import shard_bounds


@dataclasses.dataclass(frozen=True)
class VariablePart:
    """What one server has of a variable.

    Args:
        rows: the first row, and one past the last; None for all of the variable.
    """

    server: int
    rows: tuple[int, int] | None = None

    def shape(self, whole: Sequence[int]) -> tuple[int, ...]:
        """Return the part's shape.

        >>> VariablePart(1, (3, 5)).shape((8, 2))
        (2, 2)
        """
        return tuple(whole) if self.rows is None else (self.rows[1] - self.rows[0], *whole[1:])

    def of(self, value: Any) -> Any:
        """Return the rows of this part."""
        return value if self.rows is None else value[self.rows[0] : self.rows[1]]

    def __str__(self) -> str:
        return "" if self.rows is None else f"[{self.rows[0]}:{self.rows[1]}]"


@dataclasses.dataclass(frozen=True)
class Division:
    """Where a variable lies: whole on one server, a copy on each of several, or rows in parts.

    Args:
        parts: in the order of rows; a server may have several of them.

    >>> Division((VariablePart(0, (0, 3)), VariablePart(1, (3, 5)))).servers
    (0, 1)
    """

    parts: tuple[VariablePart, ...]

    @classmethod
    def copies(cls, servers: Sequence[int]) -> Division:
        """Return the division of a variable that lies whole on each of some servers."""
        return cls(tuple(map(VariablePart, servers)))

    @property
    def is_divided(self) -> bool:
        """Whether no server has the whole."""
        return self.parts[0].rows is not None

    @property
    def servers(self) -> tuple[int, ...]:
        """The servers, each once."""
        return tuple(dict.fromkeys(part.server for part in self.parts))

    @property
    def pulled(self) -> tuple[VariablePart, ...]:
        """The parts that make the whole: all, or one of the copies."""
        return self.parts if self.is_divided else self.parts[:1]

    def on(self, server: int) -> list[VariablePart]:
        """Return what a server has."""
        return [part for part in self.parts if part.server == server]

    def spans(self, begin: int, end: int) -> list[tuple[VariablePart, int, int]]:
        """Return the parts that have some of these rows, and which of their own rows these are.

        >>> division = Division((VariablePart(0, (0, 3)), VariablePart(1, (3, 5))))
        >>> [(part.server, *own) for part, *own in division.spans(2, 4)]
        [(0, 2, 3), (1, 0, 1)]
        """
        found = []
        for part in self.pulled:
            first, last = part.rows or (begin, end)
            if max(begin, first) < min(end, last):
                offset = first if part.rows else 0
                found.append((part, max(begin, first) - offset, min(end, last) - offset))
        return found

    def located(self, rows: np.ndarray[Any, Any]) -> list[tuple[VariablePart, Any, np.ndarray[Any, Any]]]:
        """Return the parts that have some of these rows: the places in `rows`, and the rows' numbers there.

        >>> division = Division((VariablePart(0, (0, 3)), VariablePart(1, (3, 5))))
        >>> [(at.tolist(), own.tolist()) for _, at, own in division.located(np.array([4, 1, 3]))]
        [([1], [1]), ([0, 2], [1, 0])]
        """
        found = []
        for part in self.pulled:
            begin, end = part.rows or (0, np.inf)
            at = np.flatnonzero((rows >= begin) & (rows < end))
            if at.size:
                found.append((part, at, rows[at] - begin))
        return found

    def joined(self, values: Sequence[Any]) -> np.ndarray[Any, Any]:
        """Return the whole value.

        >>> Division((VariablePart(0, (0, 1)), VariablePart(1, (1, 3)))).joined([np.ones(1), np.zeros(2)])
        array([1., 0., 0.])
        """
        return np.concatenate(values) if self.is_divided else np.asarray(values[0])


class Placement:
    """Servers and the bytes that each of them holds.

    A variable goes to the server that holds the fewest bytes at that moment, among several of them to the
    one with the lowest index. Variables of equal sizes are thus placed round-robin in the order of their
    creation, as in TensorFlow, and a large one is followed by several small ones on the other servers. What
    belongs to a variable (an optimizer's slots) lies beside it. The shards of a partitioned variable are
    placed one by one.

    >>> placement = Placement(2)
    >>> [placement.place(nbytes) for nbytes in (400, 40, 40, 40)]
    [0, 1, 1, 1]
    >>> placement.nbytes
    (400, 120)
    """

    def __init__(self, servers: int) -> None:
        if servers < 1:
            raise InvalidArgumentError(
                f"Variables need at least one parameter server. Received: {servers} servers. Add a job `ps` "
                "to the cluster, as `unisono launch --ps 1` does."
            )
        self._nbytes = [0] * servers

    @property
    def nbytes(self) -> tuple[int, ...]:
        """The bytes of the variables on each server, without what lies beside them."""
        return tuple(self._nbytes)

    def restore(self, nbytes: Sequence[int]) -> None:
        """Forget what was placed since then."""
        self._nbytes[:] = nbytes

    def place(self, nbytes: int) -> int:
        """Return the index of the server for the next variable, and count its bytes there.

        >>> [Placement(3).place(0) for _ in range(2)]
        [0, 0]
        """
        if nbytes < 0:
            raise InvalidArgumentError(f"A variable has no negative size. Received: {nbytes} bytes.")
        server = min(range(len(self._nbytes)), key=self._nbytes.__getitem__)
        # A variable without elements counts, so that many of them do not meet on one server.
        self._nbytes[server] += max(nbytes, 1)
        return server

    def remove(self, division: Division, shape: Sequence[int], nbytes: int) -> None:
        """Count a variable no more that `divide` has placed."""
        for part in division.parts:
            own = nbytes if part.rows is None else (part.rows[1] - part.rows[0]) * (nbytes // shape[0])
            self._nbytes[part.server] -= max(own, 1)

    def divide(self, shape: Sequence[int], nbytes: int, shards: int) -> Division:
        """Place a variable, whole or in parts of equal numbers of rows, and return where it lies.

        >>> [(part.server, part.rows) for part in Placement(2).divide((5, 1), 20, 2).parts]
        [(0, (0, 3)), (1, (3, 5))]
        """
        if shards == 1:
            return Division.copies([self.place(nbytes)])
        bounds = shard_bounds(shape[0], shards)
        sizes = [(end - begin) * (nbytes // shape[0]) for begin, end in bounds]
        return Division(
            tuple(VariablePart(self.place(n), rows) for n, rows in zip(sizes, bounds, strict=True))
        )
