"""A change, applied to the old value, gives the new one, and is short where little has changed."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from unisono.watch.web._json_changes import change_of

VALUES = st.recursive(
    st.none() | st.integers(0, 3) | st.text("ab", max_size=2),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.text("ab", max_size=1), inner, max_size=3).map(lambda d: dict(sorted(d.items())))
    ),
    max_leaves=12,
)


def patched(old, change):
    """What the page's script does (`page/6_page.js`); `test_page_in_browser.py` compares the two."""
    if "v" in change:
        return change["v"]
    if "k" in change:
        return [*old[: change["k"]], *change["a"]]
    if "i" in change:
        return [
            patched(item, change["i"][str(i)]) if str(i) in change["i"] else item
            for i, item in enumerate(old)
        ]
    fields = {name: value for name, value in old.items() if name not in change.get("x", ())}
    for name, inner in change["d"].items():
        fields[name] = patched(fields.get(name), inner)
    return fields


@given(VALUES, VALUES)
def test_a_change_applied_to_the_old_value_gives_the_new_one(old, new):
    change = change_of(old, new)
    assert (change is None) == (old == new)
    assert change is None or patched(old, json.loads(json.dumps(change))) == new


def test_rows_in_another_order_are_another_value():
    old, new = {"worker:1": {}, "worker:0": {}}, {"worker:0": {}, "worker:1": {}}
    assert list(patched(old, change_of(old, new))) == ["worker:0", "worker:1"]
    assert list(patched({"b": 1}, change_of({"b": 1}, {"a": 0, "b": 1}))) == ["a", "b"]


@pytest.mark.parametrize(
    ("old", "new", "change"),
    [
        ([[0, 2.0], [1, 1.0]], [[0, 2.0], [1, 1.0], [2, 0.5]], {"k": 2, "a": [[2, 0.5]]}),
        ({"steps": [[0, 1], [1, 2]]}, {"steps": [[0, 1], [1, 3]]}, {"d": {"steps": {"k": 1, "a": [[1, 3]]}}}),
        ([{"step": 1}, {"step": 1}], [{"step": 1}, {"step": 2}], {"i": {"1": {"d": {"step": {"v": 2}}}}}),
        ({"left_s": 3, "step": 1}, {"step": 1}, {"d": {}, "x": ["left_s"]}),
    ],
    ids=["a curve grows", "a bar grows", "a task's number", "a field is gone"],
)
def test_what_has_not_changed_is_not_sent(old, new, change):
    assert change_of(old, new) == change
