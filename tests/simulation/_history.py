"""Histories of calls, and whether they are linearizable.

A history is linearizable if each call can be given a moment between its begin and its end, such that the
results are those of the calls one after the other. The search is that of Wing and Gong, with the memory of
Lowe ("Testing for linearizability", 2017), as in Porcupine: states that were met are not searched again.

Tests: tests/unit/test_simulation.py.
"""

import dataclasses
import math

from tests.simulation._world import Violation


@dataclasses.dataclass(eq=False)
class Call:
    """A call of a history.

    Args:
        begin, end: the positions in the history; the end is infinite for one that was never answered, which
        may
            have happened at any time since, or not at all.
    """

    who: str
    what: tuple
    begin: int
    end: float = math.inf
    result: object = None

    def __str__(self):
        end = "" if self.end == math.inf else int(self.end)
        return f"{self.begin}..{end} {self.who}: {self.what} -> {self.result}"


class History:
    """The calls on one object."""

    def __init__(self):
        self.calls = []
        self._position = 0

    def begin(self, who, *what):
        """Note the begin of a call."""
        self._position += 1
        call = Call(who, what, self._position)
        self.calls.append(call)
        return call

    def end(self, call, result=None):
        """Note its answer; the first one counts."""
        if call.end == math.inf:
            self._position += 1
            call.end, call.result = self._position, result

    def check(self, step, initial, most=200_000):
        """Raise `Violation` unless the history is linearizable.

        Args:
            step: gets a state, a call and whether it was answered; returns the next state, or None where the
                call cannot have this result. States can be keys of a dictionary.
        """
        calls = sorted(self.calls, key=lambda call: call.begin)
        answered = sum(1 << i for i, call in enumerate(calls) if call.end < math.inf)
        seen = set()
        stack = [(0, initial)]
        furthest = 0
        while stack:
            done, state = stack.pop()
            if done & answered == answered:
                return
            first_end = min(call.end for i, call in enumerate(calls) if not done >> i & 1)
            for i, call in enumerate(calls):
                if call.begin > first_end:
                    break
                if done >> i & 1:
                    continue
                following = step(state, call, call.end < math.inf)
                if following is None:
                    continue
                key = done | 1 << i, following
                if key not in seen:
                    seen.add(key)
                    stack.append(key)
                    furthest = max(furthest, (done | 1 << i).bit_count())
            if len(seen) > most:
                raise RuntimeError(f"The history has too many orders to try: {len(calls)} calls.")
        lines = "\n".join(f"  {call}" for call in calls)
        raise Violation(f"A history must be linearizable; at most {furthest} of these calls were:\n{lines}")
