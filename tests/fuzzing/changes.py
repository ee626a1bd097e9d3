"""What is done to a text, to JSON and to bytes; and the strategies that draw it."""

import json

from hypothesis import strategies as st

#: Names that lead elsewhere, halves of surrogate pairs, and what other places take for numbers.
TEXTS = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["../../../escaped", "/escaped", "a/../../escaped", "\ud800", "a\0b", "x" * 300, "²", "٣"]
    ),
    st.sampled_from(["", " ", "0", "-1", "1e400", "9" * 5000, "worker:0", "__kind__", "float32", "O", "nan"]),
)
NUMBERS = st.one_of(
    st.integers(-3, 9), st.sampled_from([2**31, 2**63, 2**64, -(2**63), 10**30, 10**400]), st.floats()
)
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS)
DEEP = st.integers(2, 1500).map(lambda depth: json.loads("[" * min(depth, 900) + "]" * min(depth, 900)))
VALUES = st.one_of(
    SCALARS,
    st.lists(SCALARS, max_size=3),
    st.dictionaries(TEXTS, SCALARS, max_size=3),
    st.just([[{"a": []}]]),
    DEEP,
)
#: Where: the numbers choose a child of each level, as far as there are levels.
PLACES = st.lists(st.integers(0, 50), max_size=6)
STEPS = st.one_of(
    st.tuples(st.just("replace"), PLACES, VALUES),
    st.tuples(st.just("remove"), PLACES),
    st.tuples(st.just("add"), PLACES, TEXTS, VALUES),
    st.tuples(st.just("rename"), PLACES, TEXTS),
    st.tuples(st.just("copy"), PLACES, PLACES),
)
#: Changes of JSON.
JSON_CHANGES = st.lists(STEPS, min_size=1, max_size=3)
#: Changes of bytes: places are fractions of their number.
FRACTIONS = st.floats(0, 1, exclude_max=True)
BYTE_CHANGES = st.lists(
    st.one_of(
        st.tuples(st.just("flip"), FRACTIONS, st.integers(0, 7)),
        st.tuples(st.just("cut"), FRACTIONS),
        st.tuples(st.just("insert"), FRACTIONS, st.binary(min_size=1, max_size=9)),
        st.tuples(st.just("write"), FRACTIONS, st.binary(min_size=1, max_size=9)),
        st.tuples(st.just("drop"), FRACTIONS, st.integers(1, 40)),
    ),
    min_size=1,
    max_size=3,
)


def changed_json(value, changes):
    """Return a copy of a value of JSON with some changes."""
    root = [_copied(value)]
    for kind, place, *rest in changes:
        parent, key = _found(root, place)
        if kind == "replace":
            parent[key] = _copied(rest[0])
        elif kind == "remove" and parent is not root:
            del parent[key]
        elif kind == "add" and isinstance(parent[key], dict):
            parent[key][rest[0]] = _copied(rest[1])
        elif kind == "add" and isinstance(parent[key], list):
            parent[key].append(_copied(rest[1]))
        elif kind == "rename" and isinstance(parent, dict):
            parent[rest[0]] = parent.pop(key)
        elif kind == "copy":
            other, at = _found(root, rest[0])
            parent[key] = _copied(other[at])
    return root[0]


def _copied(value):
    return json.loads(json.dumps(value))


def _found(root, place):
    """The container and the key of a place."""
    parent, key = root, 0
    for number in place:
        below = parent[key]
        if not isinstance(below, (list, dict)) or not below:
            break
        parent = below
        key = number % len(below) if isinstance(below, list) else list(below)[number % len(below)]
    return parent, key


def changed_bytes(data, changes):
    """Return bytes with some changes."""
    data = bytearray(data)
    for kind, place, *rest in changes:
        at = int(place * len(data))
        if kind == "flip" and data:
            data[at] ^= 1 << rest[0]
        elif kind == "cut":
            del data[at:]
        elif kind == "insert":
            data[at:at] = rest[0]
        elif kind == "write":
            data[at : at + len(rest[0])] = rest[0]
        elif kind == "drop":
            del data[at : at + rest[0]]
    return bytes(data)


def changed_text(text, change):
    """Return JSON as a text of bytes with a change of either kind: its kind, and what `changed_…` takes."""
    kind, changes = change
    if kind == "json":
        return json.dumps(changed_json(json.loads(text), changes)).encode()
    return changed_bytes(text if isinstance(text, bytes) else text.encode(), changes)


#: No change, for `changed_text`.
SAME = ("json", [])
#: For `changed_text`.
TEXT_CHANGES = st.one_of(
    st.tuples(st.just("json"), JSON_CHANGES),
    st.tuples(st.just("json"), JSON_CHANGES),
    st.tuples(st.just("bytes"), BYTE_CHANGES),
)
