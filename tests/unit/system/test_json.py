"""Whatever is wrong with JSON from outside is a `ValueError`."""

import pytest

from unisono._system._json import parse_json


@pytest.mark.parametrize("text", ["[" * 201 + "]" * 201, '{"a":' * 300 + "1" + "}" * 300, "[" * 100_000])
def test_what_lies_too_deep_is_an_error(text):
    with pytest.raises(ValueError, match="deep in each other"):
        parse_json(text)


@pytest.mark.parametrize("text", [b"\xff\xfe\xfd", "", "{", "1" * 5000, b"\x80"])
def test_what_is_no_json_is_an_error(text):
    with pytest.raises(ValueError):
        parse_json(text)


def test_the_rest_is_read():
    assert parse_json("[" * 200 + "]" * 200)
    assert parse_json(b'{"a": [1, 2.5, null, "x"]}') == {"a": [1, 2.5, None, "x"]}
