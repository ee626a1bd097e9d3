"""Containers that say when something is added to them, for values that wait to be restored.

Tests: tests/virtual/checkpoint/test_deferred.py.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any, Self, SupportsIndex

from unisono._types import Trackable


class GrowthNotifier:
    """What objects can be added to after a checkpoint was restored into it."""

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


class TrackedList(list[Trackable], GrowthNotifier):
    """A list whose additions are restored.

    >>> TrackedList([1]) == [1]
    True
    """

    def __init__(self, items: Iterable[Trackable] = ()) -> None:
        list.__init__(self, items)
        GrowthNotifier.__init__(self)

    def append(self, item: Trackable) -> None:
        """As of a list."""
        super().append(item)
        self._has_grown()

    def extend(self, items: Iterable[Trackable]) -> None:
        """As of a list."""
        super().extend(items)
        self._has_grown()

    def insert(self, index: SupportsIndex, item: Trackable) -> None:
        """As of a list."""
        super().insert(index, item)
        self._has_grown()

    def __iadd__(self, items: Iterable[Trackable]) -> Self:  # type: ignore[misc]
        self.extend(items)
        return self

    def __setitem__(self, index: Any, item: Trackable) -> None:
        super().__setitem__(index, item)
        self._has_grown()


class TrackedDict(dict[Hashable, Trackable], GrowthNotifier):
    """A dict whose additions are restored.

    >>> TrackedDict(a=1) == {"a": 1}
    True
    """

    def __init__(self, *args: Trackable, **kwargs: Trackable) -> None:
        dict.__init__(self, *args, **kwargs)
        GrowthNotifier.__init__(self)

    def __setitem__(self, key: Hashable, item: Trackable) -> None:
        super().__setitem__(key, item)
        self._has_grown()

    def update(self, *args: Trackable, **kwargs: Trackable) -> None:
        """As of a dict."""
        # `dict.update` and `setdefault` do not call `__setitem__`; each must report by itself.
        super().update(*args, **kwargs)
        self._has_grown()

    def setdefault(self, key: Hashable, default: Trackable = None) -> Trackable:
        """As of a dict."""
        found = super().setdefault(key, default)
        self._has_grown()
        return found

    def __ior__(self, items: Any) -> Self:  # type: ignore[misc]
        self.update(items)
        return self


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
        """What is saved and restored, by name."""
        return self._objects
