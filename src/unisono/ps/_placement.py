"""Which variable lies on which parameter server: a pure function of sizes in the order of creation."""

from __future__ import annotations

from unisono._errors import InvalidArgumentError


class Placement:
    """Servers and the bytes that each of them holds.

    A variable goes to the server that holds the fewest bytes at that moment, among several of them to the
    one with the lowest index. Variables of equal sizes are thus placed round-robin in the order of their
    creation, as in TensorFlow, and a large one is followed by several small ones on the other servers. What
    belongs to a variable (an optimizer's slots) lies beside it. The shards of a partitioned variable are
    placed one by one.

    Args:
        servers: how many there are.

    Raises:
        InvalidArgumentError: there is no server.

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

    def place(self, nbytes: int) -> int:
        """Return the index of the server for the next variable, and count its bytes there.

        Args:
            nbytes: of the variable's value.

        >>> [Placement(3).place(0) for _ in range(2)]
        [0, 0]
        """
        if nbytes < 0:
            raise InvalidArgumentError(f"A variable has no negative size. Received: {nbytes} bytes.")
        server = min(range(len(self._nbytes)), key=self._nbytes.__getitem__)
        # A variable without elements counts, so that many of them do not meet on one server.
        self._nbytes[server] += max(nbytes, 1)
        return server
