"""docs/migrating.md, made from the table of names.

Tests: tests/unit/tf/test_names.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib import resources

from unisono.tf._entries import Entry, Missing
from unisono.tf._table import TABLE

#: Where the table of names stands in the text of the page.
_PLACE = "{names}"

_AREAS = {
    "tf.distribute": ("distribute.",),
    "tf.keras, where it differs from Keras 3": ("keras.",),
    "tf.data": ("data.",),
    "tf.train, tf.saved_model, tf.summary, tf.io": ("train.", "saved_model.", "summary.", "io.", "gfile."),
    "tf.config, tf.tpu, tf.random, tf.image": (
        "config.", "tpu.", "random.", "image.", "test.", "debugging.", "logging.",
    ),
    "tf.nn, tf.math, tf.linalg": ("nn.", "math.", "linalg.", "bitwise."),
    "TensorFlow 1": ("contrib.", "compat.", "layers.", "losses.", "metrics.", "estimator."),
}  # fmt: skip


def page() -> str:
    """Return the text of docs/migrating.md."""
    text = resources.files("unisono.tf").joinpath("migrating.md").read_text(encoding="utf-8")
    return text.replace(_PLACE, "\n\n".join(_tables()))


def _tables() -> Iterator[str]:
    rest = dict(TABLE.entries)
    for title, prefixes in _AREAS.items():
        chosen = {name: entry for name, entry in rest.items() if name.startswith(prefixes)}
        rest = {name: entry for name, entry in rest.items() if name not in chosen}
        if chosen:
            yield _table(title, chosen)
    yield _table("Other names", rest)


def _table(title: str, entries: dict[str, Entry]) -> str:
    rows = [f"| `tf.{name}` | {_here(entry)} |" for name, entry in sorted(entries.items())]
    return "\n".join([f"### {title}", "", "| TensorFlow | here |", "|---|---|", *rows])


def _here(entry: Entry) -> str:
    if isinstance(entry, Missing):
        return f"{entry.why}: write {entry.write}"
    shown = "as in TensorFlow" if "._" in entry.path else f"`{entry.path}`"
    return f"{shown}; {entry.note}" if entry.note else shown
