"""A bound on how far the host runs ahead of the devices."""

from __future__ import annotations

import collections

from unisono._features import load
from unisono._mesh import ReplicaMesh
from unisono.collectives._process_group import ProgramToken

#: How many steps the host may be ahead of the devices. XLA's CPU collectives share one thread
#: pool with dispatch and deadlock when it fills (aborts seen at 40 steps, none at 16).
RUN_AHEAD = 16


class RunAhead:
    """Holds the host back when it is too many steps ahead of the devices."""

    def __init__(self) -> None:
        self._tokens: collections.deque[ProgramToken] = collections.deque()
        #: The token of the last step that was started: ready when all devices of this process are done.
        self.newest: ProgramToken | None = None

    def wait_for_capacity(self, token: ProgramToken) -> None:
        """Note a step by an output that nothing donates; wait for the one `RUN_AHEAD` steps before it."""
        self.newest = token
        self._tokens.append(token)
        if len(self._tokens) > RUN_AHEAD:
            try:
                # Also where it is ready: a step that failed is, and raises its error here.
                self._tokens.popleft().block_until_ready()
            except Exception as error:
                load("failure of a step")(error, self._tokens)


_RUN_AHEAD: dict[ReplicaMesh, RunAhead] = {}


def run_ahead_of(mesh: ReplicaMesh) -> RunAhead:
    """The bound that all programs on the devices of `mesh` share."""
    return _RUN_AHEAD.setdefault(mesh, RunAhead())
