"""What `unisono plan` computes from the sizes of a model, and how it refuses what it cannot plan."""

import dataclasses
import re

import pytest

import unisono
from unisono.cli import _model_plan

MB = 10**6

#: 10 MB of weights, all trained by Adam; a batch of 1 MB.
SIZE = _model_plan.ModelSize(
    weights=10 * MB,
    gradients=10 * MB,
    state=30 * MB,
    batch=1 * MB,
    given={"mirrored": 31 * MB, "sharded": 21 * MB, "fully_sharded": 16 * MB},
    temporary={"one": 5 * MB, "mirrored": 15 * MB, "sharded": 15 * MB, "fully_sharded": 8 * MB},
    step_seconds=0.02,
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def make_model(): pass\ndef other(): pass\n_private = print\n")
    return path


def options(file, **values):
    defaults = {"devices": 8, "batch": 32, "servers": 2, "link": 1.25e9, "memory": None, "step_seconds": None}
    return _model_plan.PlanOptions(str(file), **{**defaults, **values})


def test_state_in_parts_is_divided_and_the_rest_is_not():
    assert SIZE.state_of("mirrored", 8) == 30 * MB
    # Two thirds of the state are slots: of 20 MB an eighth.
    assert SIZE.state_of("sharded", 2) == 20 * MB
    assert SIZE.state_of("sharded", 8) == 12.5 * MB
    assert SIZE.state_of("fully_sharded", 8) == 3.75 * MB


def test_bytes_and_times_of_each_way(file):
    one, mirrored, sharded, fully, ps, server = _model_plan.plan_rows(SIZE, options(file))
    assert (one.sent, one.seconds, one.peak) == (0, 0.02, 36 * MB)
    # A ring: 2 * 7/8 of 10 MB, at 1.25 GB/s.
    assert mirrored.sent == sharded.sent == 17.5 * MB
    assert mirrored.seconds == pytest.approx(0.02 + 0.014)
    # The weights twice, and the gradients.
    assert fully.sent == 26.25 * MB
    assert (mirrored.peak, sharded.peak) == (46 * MB, 28.5 * MB)
    # Eight workers share the links of two servers: 4 * 10 MB each way; one alone pulls, and then pushes.
    assert ps.seconds == pytest.approx(0.02 + 0.032)
    assert (server.state, server.sent) == (15 * MB, 40 * MB)
    alone = _model_plan.plan_rows(SIZE, options(file, devices=1))[-2]
    assert alone.seconds == pytest.approx(0.02 + 0.016)


def test_the_table_says_what_fits(file):
    text = _model_plan.table(SIZE, options(file, memory=40 * MB, step_seconds=0.1, servers=0))
    assert "a step of one device takes 100 ms (given)" in text
    assert "optimizer and metrics 20 MB" in text
    fits = {line.split("  ")[0]: line.split()[-1] for line in text.splitlines() if "ms" in line}
    assert (fits["OneDeviceStrategy"], fits["MirroredStrategy"]) == ("yes", "no")
    assert "ParameterServerStrategy" not in text
    assert "fits" not in _model_plan.table(SIZE, options(file))


def test_operations_of_a_step_and_their_share_of_the_peak(file):
    size = dataclasses.replace(SIZE, flops=494e9, dtype="float32")
    assert "a step of one device computes 494 GFLOP\n" in _model_plan.table(size, options(file))
    size = dataclasses.replace(size, peak=_model_plan.peak_of("NVIDIA H200", "float32"))
    text = _model_plan.table(size, options(file, device_kind="NVIDIA H200", step_seconds=0.002))
    assert "494 GFLOP: 1 ms at the peak of NVIDIA H200 in float32 (494 TFLOP/s), 50 % of it" in text
    with pytest.raises(unisono.InvalidArgumentError, match=r"known peak.*'abacus'"):
        _model_plan.peak_of("abacus", "float32")


def test_a_column_has_one_unit_and_the_time_says_where_it_was_measured(file):
    size = dataclasses.replace(SIZE, step_seconds=0.02)
    lines = _model_plan.table(size, options(file, step_seconds=None, devices=1000)).splitlines()
    assert lines[0].endswith("a step of one device takes 20 ms (measured here, on a CPU)")
    columns = zip(*(re.findall(r"[\d.]+ ([GMk]?B)\b", line) for line in lines[4:10]), strict=True)
    assert [set(column) for column in columns] == [{"MB"}, {"MB"}, {"MB"}, {"GB"}]


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (_model_plan.parse_rate, "100mbit", 12.5e6),
        (_model_plan.parse_rate, "1.6Tbit", 2e11),
        (_model_plan.parse_memory, "16gib", 16 * 2**30),
    ],
)
def test_rates_and_memory(parse, text, value):
    assert parse(text) == value


@pytest.mark.parametrize("text", ["10", "gbit", "0gbit", "10gb", "-1gbit", "1e3gbit"])
def test_a_rate_without_a_unit_of_rates(text):
    with pytest.raises(unisono.InvalidArgumentError, match=r"`--link` must be .* Write `--link 10gbit`"):
        _model_plan.parse_rate(text)


def test_what_cannot_be_planned(file, tmp_path):
    with pytest.raises(unisono.InvalidArgumentError, match=r"`--devices` must be at least 1\. Received: 0"):
        options(file, devices=0)
    with pytest.raises(unisono.InvalidArgumentError, match=r"which is no file\. Write `model\.py`"):
        options(tmp_path / "absent.py")
    with pytest.raises(
        unisono.InvalidArgumentError,
        match=r"`third` .*Received: \['make_model', 'other'\]\. Write `def third\(\)",
    ):
        options(f"{file}:third").load()
    make, batch = options(f"{file}:other").load()
    assert (make.__name__, batch) == ("other", None)
