"""What `unisono plan --devices-per-replica` reads from a compiled program, and how it is printed."""

import pytest

import unisono
from unisono.cli._replica_plan import (
    PlannedMessage,
    PlannedWeight,
    ReplicaPlan,
    ReplicaPlanOptions,
    gathered_parameters,
    messages_of,
    table,
)

PROGRAM = """
  %a = f32[4,8]{1,0} all-reduce(%b), channel_id=1, replica_groups=[2,2]<=[4], to_apply=%c
  %d = (f32[3]{0}, bf16[2,2]{1,0}) all-reduce(%e, %f), replica_groups={{0,2},{1,3}}, to_apply=%c
  %g = s32[16]{0} all-gather(%h), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}
  %i = f32[6]{0} collective-permute(%j), source_target_pairs={{0,1},{2,3}}
  %k = (f32[5]{0}, f32[10]{0}) all-gather-start(%l), replica_groups={{0,1},{2,3}}, dimensions={0}
  %m = f32[10]{0} all-gather-done(%k)
  %n = f32[] add(%o, %p), metadata={op_name="all-reduce"}
"""


def test_messages_are_those_of_the_program():
    assert messages_of(PROGRAM, 2) == [
        PlannedMessage("all-reduce", True, 128),
        PlannedMessage("all-reduce", False, 20),
        PlannedMessage("all-gather", False, 64),
        PlannedMessage("collective-permute", True, 24),
        PlannedMessage("all-gather", True, 40),
    ]


LOOP = """
%body.1 (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %a = f32[4]{0} all-reduce(%x), replica_groups=[1,2]<=[2], to_apply=%add
}

%called (p: f32[4]) -> f32[4] {
  %w = (s32[], f32[4]) while(%t), condition=%c, body=%body.1, backend_config={"known_trip_count":{"n":"6"}}
}

ENTRY %main.9 (p: f32[4]) -> f32[4] {
  %v = (s32[], f32[4]) while(%t), condition=%c, body=%outer, backend_config={"known_trip_count":{"n":"5"}}
  %b = f32[2]{0} all-gather(%x), replica_groups=[1,2]<=[2], dimensions={0}
}

%outer (p: f32[4]) -> f32[4] {
  %k = f32[4]{0} call(%p), to_apply=%called
}
"""


def test_messages_in_loops_count_as_often_as_they_are_sent():
    assert messages_of(LOOP, 2) == [
        PlannedMessage("all-reduce", True, 16, 30, True),
        PlannedMessage("all-gather", True, 8),
    ]


GATHERS = """
ENTRY %main.9 (p: f32[4,8], q: f32[4,8]) -> f32[8,8] {
  %p.1 = f32[4,8]{1,0} parameter(0), metadata={op_name="state"}
  %q.2 = f32[3,8]{1,0} parameter(1)
  %t = f32[8,4]{0,1} transpose(%p.1), dimensions={1,0}
  %g = f32[8,8]{1,0} all-gather(%t), replica_groups=[1,2]<=[2], dimensions={1}
  %s = f32[3,8]{1,0} add(%q.2, %q.2)
  %h = f32[6,8]{1,0} all-gather(%s), replica_groups=[1,2]<=[2], dimensions={0}
  %r = f32[3,8]{1,0} all-reduce(%q.2), replica_groups=[1,2]<=[2], to_apply=%add
}
"""


def test_parameters_that_are_put_together_are_found():
    assert gathered_parameters(GATHERS, 2) == [(4, 8)]


def test_the_choice_is_compared_with_others(options):
    assert [options(layout=text).others for text in ("auto", "auto:3", "auto:x", "mine")] == [0, 3, 0, 0]
    other = ReplicaPlan([], [PlannedMessage("all-reduce", True, 10)], 3000, 0)
    weights = [PlannedWeight("up/kernel", (64, 256), None, 65536, "small")]
    plan = ReplicaPlan(weights, messages_of(LOOP, 2), 1000, 0, 500, ("a",), (("b whole", other),))
    lines = [" ".join(line.split()) for line in table(plan, options()).splitlines()]
    assert lines[3].endswith("small")
    assert "an estimate of 500 B sent in a replica; the program sends 488 B." in lines[-6]
    assert "puts the weight a together" in lines[-5]
    assert lines[-2:] == ["the choice 488 B 31 1 kB", "b whole 10 B 1 3 kB"]


@pytest.fixture
def options(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("def make_model(): pass\n")

    def make(**values):
        defaults = {"devices": 8, "size": 2, "batch": 32, "layout": "auto", "memory": None}
        return ReplicaPlanOptions(str(path), **{**defaults, **values})

    return make


def test_the_table_has_each_weight_and_the_messages_by_who_exchanges(options):
    weights = [PlannedWeight("up/kernel", (64, 256), 1, 32768), PlannedWeight("up/bias", (3,), None, 12)]
    plan = ReplicaPlan(weights, messages_of(PROGRAM, 2), 3 * 10**6, 10**6)
    lines = table(plan, options(memory=5e6)).splitlines()
    assert (
        lines[0] == "4 replicas of 2 devices, 32 rows each; state_layout='mirrored'; compiled for 2 of them"
    )
    assert lines[3].split() == ["up/kernel", "64x256", "1", "32.8", "kB"]
    assert lines[4].split() == ["up/bias", "3", "12", "B"]
    assert "all-reduce in a replica 1 128 B" in [" ".join(line.split()) for line in lines]
    assert "all-gather of replicas 1 64 B" in [" ".join(line.split()) for line in lines]
    assert "4 MB in all" in lines[-2]
    assert "fits: yes" in lines[-2]
    assert "fits: no" in table(plan, options(memory=3e6))
    assert "fits" not in table(ReplicaPlan(weights, [], 1, 1), options())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"devices": 6, "size": 4}, "--devices 8"),
        ({"size": 0}, "2 or more"),
        ({"devices": 1}, "multiple"),
        ({"batch": 0}, "--batch"),
        ({"state_layout": "half"}, "fully_sharded. Received: half"),
    ],
)
def test_what_cannot_be_planned_is_an_error(options, values, message):
    with pytest.raises(unisono.InvalidArgumentError, match=message):
        options(**values)


def test_one_replica_is_compiled_where_there_is_one(options):
    assert options(devices=4, size=4).replicas == 1
    assert options(devices=64, size=4).replicas == 2
