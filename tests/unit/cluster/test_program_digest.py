"""Programs that differ in their place in the cluster alone are one program."""

import pytest

from unisono.cluster._program_digest import program_digest

FIRST = """
import json, os
# In worker 0.
os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": "worker", "index": 0}})
tf_config = {"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 0}}
train(rate=0.1)
"""


@pytest.fixture
def digest(tmp_path):
    def of(text):
        path = tmp_path / "program.py"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return program_digest(path)

    return of


def test_the_task_comments_and_layout_do_not_count(digest):
    second = FIRST.replace('"index": 0', '"index": 1').replace("worker 0.", "worker 1.")
    assert digest(second) == digest(FIRST)
    assert digest(
        FIRST.replace('{"type": "worker"', '{"type": "chief"').replace(", rate", ",\n  rate")
    ) == digest(FIRST)
    as_text = FIRST.replace('json.dumps({"cluster"', '\'{"cluster"').replace("}})", "}}'")
    assert digest(as_text) == digest(FIRST)


@pytest.mark.parametrize("change", [("0.1", "0.2"), ("train(", "test("), ('"x": 1', '"x": 2')])
def test_everything_else_counts(digest, change):
    old, new = change
    text = FIRST + '\nother = {"type": "worker", "index": 0, "a": ["b:1"], "x": 1}'
    assert old in text
    assert digest(text.replace(old, new)) != digest(text)


def test_of_what_is_no_program_each_byte_counts(digest):
    for first, second in (
        (b"PK\x03\x00a", b"PK\x03\x00b"),
        (b"\xff\xfe# a", b"\xff\xfe# b"),
        (b"( #a", b"( #b"),
    ):
        assert digest(first) != digest(second)
