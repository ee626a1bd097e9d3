"""The difference between two values of JSON, which is less to send than the new one."""

from __future__ import annotations


def change_of(old: object, new: object) -> dict[str, object] | None:
    """Return the change that makes the new value of the old one; None where they are equal.

    The result has `v`, the new value; or for an object `d`, changes by field, and `x`, the fields that are
    gone; or for a list `i`, changes by position, or `k`, how many items stay, and `a`, what follows them.

    >>> change_of({"step": 1, "state": "runs"}, {"step": 2, "state": "runs"})
    {'d': {'step': {'v': 2}}}
    >>> change_of([1, 2, 3], [1, 2, 4, 5])
    {'k': 2, 'a': [4, 5]}
    """
    if isinstance(old, dict) and isinstance(new, dict):
        return _change_of_fields(old, new)
    if old == new:
        return None
    if isinstance(old, list) and isinstance(new, list) and old:
        return _change_of_items(old, new)
    return {"v": new}


def _change_of_fields(old: dict[str, object], new: dict[str, object]) -> dict[str, object] | None:
    kept = [name for name in old if name in new]
    if [*new][: len(kept)] != kept:
        return {"v": new}  # rows and curves are shown in this order
    changes: dict[str, object] = {}
    for name, value in new.items():
        change = change_of(old[name], value) if name in old else {"v": value}
        if change is not None:
            changes[name] = change
    gone = [name for name in old if name not in new]
    if gone:
        return {"d": changes, "x": gone}
    return {"d": changes} if changes else None


def _change_of_items(old: list[object], new: list[object]) -> dict[str, object]:
    pairs = zip(old, new, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(old), len(new)))
    if len(old) == len(new) and all(isinstance(item, dict) for item in new):
        changes = {str(i): change_of(old[i], new[i]) for i in range(same, len(new))}
        return {"i": {i: change for i, change in changes.items() if change is not None}}
    return {"k": same, "a": new[same:]}
