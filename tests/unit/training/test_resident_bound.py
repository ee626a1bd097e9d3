"""How much of the devices' memory arrays may take, and where they stay by default."""

import pytest

from unisono import InvalidArgumentError
from unisono.training._model_calls import keeps_data
from unisono.training.resident._bound import SWITCH, most_bytes, rows_on_device


@pytest.mark.parametrize(
    ("switch", "platform", "keeps"),
    [
        ("", "gpu", True),
        ("", "tpu", True),
        ("", "cpu", False),
        ("0", "gpu", False),
        ("1", "cpu", True),
        ("4096", "cpu", True),
    ],
)
def test_arrays_stay_where_devices_have_memory_of_their_own(monkeypatch, switch, platform, keeps):
    monkeypatch.setenv(SWITCH, switch)
    assert keeps_data(platform) is keeps
    monkeypatch.delenv(SWITCH)
    assert keeps_data(platform) is (platform != "cpu")


def test_the_bound_is_a_quarter_of_the_least_free_memory():
    stats = [{"bytes_limit": 4000, "bytes_in_use": 0}, {"bytes_limit": 4000, "bytes_in_use": 3000}]
    assert most_bytes("", stats) == most_bytes("1", stats) == 250
    assert most_bytes("", [{"bytes_limit": 100, "bytes_in_use": 300}]) == 0
    assert most_bytes("", [None]) == 256 << 20
    assert most_bytes("77", stats) == 77


@pytest.mark.parametrize("switch", ["lots", "-1", "1.5", "1G"])
def test_another_value_of_the_switch_is_an_error(switch):
    with pytest.raises(InvalidArgumentError, match=f"{SWITCH} must be 0, 1 or a number of bytes"):
        most_bytes(switch, [None])


def test_arrays_of_similar_sizes_have_one_number_of_rows():
    for rows in range(1, 5000):
        filled = rows_on_device(rows, 100)
        assert rows <= filled <= max(rows, rows * 9 // 8 + 1)
    assert len({rows_on_device(rows, 100) for rows in range(4096, 8192)}) <= 10
