"""Containers that say when something is added to them, for values that wait to be restored.

Tests: tests/virtual/checkpoint/test_deferred.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterable
from typing import Any

from unisono._types import Trackable


class GrowthNotifier:
    """A holder that objects can be added to after a checkpoint was restored into it."""

    def __init__(self) -> None:
        self._on_growth: list[Callable[[], None]] = []

    def watch(self, on_growth: Callable[[], None]) -> None:
        """Call a function after each addition."""
        # A restoration watches again after each step of its own, and must be called once.
        if on_growth not in self._on_growth:
            self._on_growth.append(on_growth)

    def _has_grown(self) -> None:
        # A copy: what is restored may itself be watched from then on.
        for call in tuple(self._on_growth):
            call()


def _reporting(method: Any) -> Any:
    """Return a method of `list` or `dict` that reports an addition."""

    @functools.wraps(method)
    def reporting(self: GrowthNotifier, *args: Any, **kwargs: Any) -> Any:
        result = method(self, *args, **kwargs)
        self._has_grown()
        return result

    return reporting


class TrackedList(list[Trackable], GrowthNotifier):
    """A list whose additions are restored.

    >>> TrackedList([1]) == [1]
    True
    """

    def __init__(self, items: Iterable[Trackable] = ()) -> None:
        list.__init__(self, items)
        GrowthNotifier.__init__(self)

    append, extend, insert = map(_reporting, (list.append, list.extend, list.insert))
    __iadd__, __setitem__ = map(_reporting, (list.__iadd__, list.__setitem__))


class TrackedDict(dict[Hashable, Trackable], GrowthNotifier):
    """A dict whose additions are restored.

    >>> TrackedDict(a=1) == {"a": 1}
    True
    """

    def __init__(self, *args: Trackable, **kwargs: Trackable) -> None:
        dict.__init__(self, *args, **kwargs)
        GrowthNotifier.__init__(self)

    # None of them calls another one.
    update, setdefault = map(_reporting, (dict.update, dict.setdefault))
    __setitem__, __ior__ = map(_reporting, (dict.__setitem__, dict.__ior__))


class Holder(GrowthNotifier):
    """An object that holds others by name, such as a `Checkpoint`.

    >>> Holder().objects
    {}
    """

    def __init__(self) -> None:
        super().__init__()
        self._objects: dict[str, Trackable] = {}

    @property
    def objects(self) -> dict[str, Trackable]:
        """The saved and restored objects, by name."""
        return self._objects
