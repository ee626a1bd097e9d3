"""The variables of a server: exact updates, once, as a whole or not at all."""

import numpy as np
import pytest
from tests import exported_updates as exported

from unisono import InvalidArgumentError
from unisono.parameter_server.server._programs import UnknownProgramError
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.state._create import NewVariable, decode_news, encode_news
from unisono.parameter_server.state._push import ProgramCall, Push, RowWrite
from unisono.parameter_server.state._update import StateLostError, padded_rows
from unisono.parameter_server.state._variables import StoredSpec, combine_rows

SHAPES = ((3, 2), (2,))


def new(name, shape, dtype="float32", kind="dense", role="value", **source):
    return NewVariable(StoredSpec(name, shape, dtype, kind, role), **source)


def ones(*shape):
    return np.ones(shape, "float32")


def make_store(journal=None):
    """Two values 0, 1; the rate 2, a counter 3, and velocities 4, 5; and the program of all."""
    store = VariableStore(journal)
    slots = [new("rate", (), fill=0.1, role="slot"), new("count", (), "int32", role="slot")]
    slots += [new(f"velocity{i}", s, role="slot") for i, s in enumerate(SHAPES)]
    values = [new("kernel", SHAPES[0], value=ones(3, 2)), new("bias", SHAPES[1])]
    assert store.create(values + slots) == [0, 1, 2, 3, 4, 5]
    return store, store.add_program(exported.momentum_blob(*SHAPES))


def gradients(seed=0):
    draw = np.random.default_rng(seed)
    return tuple(draw.normal(size=s).astype("float32") for s in SHAPES)


def push_of(closure, program, seed=0, **more):
    return Push(closure, updates=(ProgramCall(program, (0, 1), (2, 3, 4, 5), gradients(seed)),), **more)


def everything(store):
    return {n: (v.version, v.host().copy()) for n, v in store.variables.items()}


def assert_unchanged(store, before):
    for number, (version, value) in everything(store).items():
        assert version == before[number][0]
        np.testing.assert_array_equal(value, before[number][1])


def test_updates_are_those_of_the_program():
    store, program = make_store()
    values, velocities = [ones(3, 2), np.zeros(2, "float32")], [np.zeros(s, "float32") for s in SHAPES]
    for closure in range(3):
        assert store.push(push_of(closure, program, closure))
        exported.by_hand(values, velocities, gradients(closure))
    for number, expected in zip((0, 1, 4, 5), values + velocities, strict=True):
        np.testing.assert_allclose(store.read(number), expected, rtol=1e-6)
    assert store.read(3) == 3
    assert store.applied_count == 3
    assert [v.version for v in store.variables.values()] == [3] * 6


def test_a_program_is_compiled_once_and_writes_in_place():
    store, program = make_store()
    store.push(push_of(0, program))
    address = store.variables[0].device().unsafe_buffer_pointer()
    for closure in range(1, 5):
        store.push(push_of(closure, program))
        # Views that were dropped do not count.
        store.pull([0, 1])
    assert store.programs[program].compiled_count == 1
    assert store.variables[0].device().unsafe_buffer_pointer() == address


def test_a_value_that_is_being_sent_does_not_change():
    store, program = make_store()
    store.push(push_of(0, program))
    ((_, version, sent),) = store.pull([0])
    before = sent.copy()
    for closure in range(1, 4):
        store.push(push_of(closure, program))
    np.testing.assert_array_equal(sent, before)
    assert (store.read(0) != before).all()
    assert store.variables[0].version == version + 3


def test_a_pull_brings_what_changed():
    store, _ = make_store()
    first = store.pull([0, 1, 2], [-1, -1, -1])
    assert [n for n, _, _ in first] == [0, 1, 2]
    assert store.pull([0, 1, 2], [v for _, v, _ in first]) == []
    store.push(Push(1, adds=((1, ones(2)),)))
    ((number, version, value),) = store.pull([0, 1, 2], [v for _, v, _ in first])
    assert (number, version, value.tolist()) == (1, 1, [1.0, 1.0])


def test_a_push_counts_once():
    store, program = make_store()
    assert store.push(push_of(5, program))
    before = everything(store)
    # Another content under the same number is still the same closure, as from its second run.
    assert not store.push(push_of(5, program, seed=3))
    assert not store.push(push_of(5, program, watermark=9))
    # Below the watermark everything is complete.
    assert not store.push(push_of(8, program))
    assert_unchanged(store, before)
    assert store.push(push_of(9, program))
    assert store.applied_count == 2


def test_adds_and_assigns_follow_updates():
    store, program = make_store()
    more = {"adds": ((1, ones(2)), (1, ones(2))), "assigns": ((3, np.int32(40)[...]),)}
    plain, _ = make_store()
    plain.push(push_of(1, program))
    store.push(push_of(1, program, **more))
    np.testing.assert_array_equal(store.read(1), plain.read(1) + 2)
    assert store.read(3) == 40
    assert store.variables[1].version == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64", "int64", "bool", "uint8"])
def test_adds_of_every_dtype(dtype):
    store = VariableStore()
    store.create([new("x", (2,), dtype, value=np.array([1, 0], dtype))])
    store.push(Push(1, adds=((0, np.array([1, 1], dtype)),)))
    np.testing.assert_array_equal(store.read(0), np.array([1, 0], dtype) + np.array([1, 1], dtype))
    assert store.read(0).dtype == np.dtype(dtype)


def bad_pushes(program):
    good = ProgramCall(program, (0, 1), (2, 3, 4, 5), gradients())
    first = {"updates": (good,)}
    yield "There are|there are", Push(1, (0), (good,), adds=((17, ones(2)),))
    yield "must have the shape and dtype of 'bias'", Push(1, **first, adds=((1, ones(3)),))
    yield "must have the shape and dtype of 'bias'", Push(1, **first, assigns=((1, np.ones(2)),))
    yield "PROGRAM first", Push(1, updates=(good, ProgramCall("ab", (0,), (), ())))
    swapped = ProgramCall(program, (1, 0), (2, 3, 4, 5), gradients())
    yield r"exported for, float32\[3,2\]", Push(1, updates=(good, swapped))
    yield "as many arrays", Push(1, updates=(ProgramCall(program, (0, 1), (2, 3, 4), gradients()),))
    wide = tuple(g.astype("float64") for g in gradients())
    yield "gradient must have", Push(1, updates=(ProgramCall(program, (0, 1), (2, 3, 4, 5), wide),))
    yield "writes a variable once", Push(1, updates=(ProgramCall(program, (0, 0), (2, 3, 4, 5), ()),))
    indices = ProgramCall(program, (0, 1), (2, 3, 4, 5), gradients(), np.arange(2))
    yield "must name a table", Push(1, updates=(indices,))
    yield "needs a table", Push(1, updates=(RowWrite((0,), np.arange(1), (ones(1, 2),)),))


@pytest.mark.parametrize("case", range(10))
def test_a_bad_push_changes_nothing(case):
    store, program = make_store()
    store.push(push_of(0, program))
    before = everything(store)
    said, push = list(bad_pushes(program))[case]
    with pytest.raises(InvalidArgumentError, match=said):
        store.push(push)
    assert_unchanged(store, before)
    # The number of a rejected closure is free.
    assert store.push(push_of(1, program))


def test_unknown_programs_have_an_error_of_their_own():
    store, _ = make_store()
    with pytest.raises(UnknownProgramError, match="Send it with PROGRAM"):
        store.push(push_of(1, "0" * 32))


def test_a_program_that_fails_after_it_took_its_arguments_is_no_half_push(monkeypatch):
    store, program = make_store()

    def fail(*args):
        for array in args[0]:
            array.delete()
        raise RuntimeError("out of memory")

    def refuse(*args):
        raise RuntimeError("not compiled")

    monkeypatch.setattr(store.programs[program], "_call", refuse)
    with pytest.raises(InvalidArgumentError, match="cannot be run: not compiled"):
        store.push(push_of(1, program))
    assert store.read(1).tolist() == [0, 0]
    monkeypatch.setattr(store.programs[program], "_call", fail)
    with pytest.raises(StateLostError, match="out of memory"):
        store.push(push_of(1, program))
    for call in (lambda: store.pull([1]), lambda: store.read(1), lambda: store.push(push_of(2, program))):
        with pytest.raises(StateLostError, match="must start again"):
            call()


def test_create_is_all_or_nothing_and_can_be_repeated():
    store, _ = make_store()
    assert store.create([new("bias", (2,), fill=3.0), new("other", (1,))]) == [1, 6]
    assert store.read(1).tolist() == [0, 0]
    with pytest.raises(InvalidArgumentError, match="unique on a server"):
        store.create([new("fresh", (1,)), new("bias", (3,))])
    with pytest.raises(InvalidArgumentError, match="initial value must have"):
        store.create([new("fresh", (1,), value=ones(2))])
    assert "fresh" not in store._numbers


@pytest.mark.parametrize("shape", [[-1], [2.0], [True], ["2"], [[2]], [1] * 17])
def test_a_shape_that_a_client_sends_is_a_list_of_sizes(shape):
    meta = {"name": "w", "shape": shape, "dtype": "float32"}
    with pytest.raises(InvalidArgumentError, match=r"must be a list of sizes. Received: .* for 'w'"):
        StoredSpec.decode(meta)


def test_initializers_and_their_errors():
    store = VariableStore()
    ramp = store.add_program(exported.ramp_blob(4, 2))
    whole = store.add_program(exported.blob(lambda: exported.jnp.arange(3.0)))
    numbers = store.create(
        [
            new("table", (10, 2), kind="table", initializer=ramp),
            new("dense", (3,), initializer=whole),
        ]
    )
    np.testing.assert_array_equal(store.read(numbers[0])[:, 1], np.arange(10))
    np.testing.assert_array_equal(store.read(numbers[1]), np.arange(3))
    for bad in (new("a", (10, 3), kind="table", initializer=ramp), new("b", (4,), initializer=whole)):
        with pytest.raises(InvalidArgumentError, match="initializer must return"):
            store.create([bad])
    with pytest.raises(UnknownProgramError):
        store.create([new("c", (4,), initializer="00")])


def test_news_survive_encoding():
    news = [new("a", (2, 3), value=ones(2, 3)), new("b", (4, 1), "bfloat16", kind="table", fill=2.0)]
    again = decode_news(*encode_news(news))
    assert [n.spec for n in again] == [n.spec for n in news]
    assert again[0].value is news[0].value
    assert again[1].fill == 2.0


def test_reads_and_writes_of_parts():
    store, _ = make_store()
    np.testing.assert_array_equal(store.read(0, 1, 2), ones(1, 2))
    assert store.write(0, 2 * ones(3, 2))
    assert store.write(0, 3 * ones(1, 2), begin=1)
    assert store.write(0, 4 * ones(1, 2), indices=np.array([2]))
    np.testing.assert_array_equal(store.read(0)[:, 0], [2, 3, 4])
    assert store.variables[0].version == 3
    assert store.write(2, np.float32(0.5)[...], request=1)
    assert not store.write(2, np.float32(0.7)[...], request=1)
    assert store.read(2) == 0.5
    for bad in (
        lambda: store.read(0, 2, 4),
        lambda: store.read(9),
        lambda: store.write(0, ones(3, 3)),
        lambda: store.write(0, ones(1, 2), begin=3),
        lambda: store.write(2, ones(1)),
        lambda: store.write(0, ones(1, 2), indices=np.array([-1])),
        lambda: store.pull([0], [1, 2]),
        lambda: store.rows(0, np.array([0.5])),
    ):
        with pytest.raises(InvalidArgumentError):
            bad()


def test_generations():
    store, _ = make_store()
    store.raise_generation(3)
    store.raise_generation(3)
    with pytest.raises(InvalidArgumentError, match="generation 3 has taken over"):
        store.raise_generation(2)


# Tables.


def make_table(rows=20, width=3):
    store = VariableStore()
    news = [new("table", (rows, width), kind="table", value=ones(rows, width))]
    news += [new("rate", (), fill=0.1, role="slot"), new("count", (), "int32", role="slot")]
    news += [new("velocity", (rows, width), kind="table", role="slot")]
    assert store.create(news) == [0, 1, 2, 3]
    return store, store.add_program(exported.momentum_rows_blob(width))


def rows_push(closure, program, indices, seed=0, width=3):
    indices = np.asarray(indices) if len(indices) else np.zeros(0, int)
    gradient = np.random.default_rng(seed).normal(size=(len(indices), width)).astype("float32")
    return Push(closure, updates=(ProgramCall(program, (0,), (1, 2, 3), (gradient,), indices),))


@pytest.mark.parametrize("indices", [[], [4], [2, 5, 7], [7, 2, 5], [3, 3, 3], [9, 1, 9, 0, 1] * 5])
def test_rows_are_updated_like_a_dense_variable_of_the_touched_rows(indices):
    store, program = make_table()
    push = rows_push(1, program, indices)
    assert store.push(push)
    table, velocity = ones(20, 3), np.zeros((20, 3), "float32")
    gradient = np.zeros((20, 3), "float32")
    np.add.at(gradient, indices, push.updates[0].gradients[0])
    touched = np.unique(np.array(indices, int))
    values, velocities = [table[touched]], [velocity[touched]]
    exported.by_hand(values, velocities, [gradient[touched]])
    table[touched], velocity[touched] = values[0], velocities[0]
    np.testing.assert_allclose(store.read(0), table, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(store.read(3), velocity, rtol=1e-6, atol=1e-6)
    # To the bit: other rows are not computed at all.
    others = np.setdiff1d(np.arange(20), touched)
    np.testing.assert_array_equal(store.read(0)[others], ones(len(others), 3))
    assert store.read(2) == 1


def test_few_programs_serve_all_numbers_of_rows():
    store, program = make_table()
    for closure, count in enumerate((1, 5, 8, 9, 16, 12, 3)):
        store.push(rows_push(closure, program, np.arange(count)))
    assert [padded_rows(n) for n in (1, 8, 9, 16)] == [8, 8, 16, 16]
    assert store.programs[program].compiled_count == 2


def test_rows_are_pulled_as_copies():
    store, program = make_table()
    pulled = store.rows(0, np.array([3, 3, 19]))
    store.push(rows_push(1, program, [3]))
    np.testing.assert_array_equal(pulled, ones(3, 3))
    assert (store.rows(0, np.array([3])) != 1).all()


def test_bad_pushes_of_rows_change_nothing():
    store, program = make_table()
    before = everything(store)
    good = rows_push(1, program, [1]).updates[0]
    for said, push in (
        ("numbered from 0 to 19", rows_push(1, program, [3, 20])),
        ("numbered from 0 to 19", rows_push(1, program, [-1])),
        ("list of whole numbers", rows_push(1, program, [0.5])),
        (
            "one row for each",
            Push(1, updates=(ProgramCall(program, (0,), (1, 2, 3), (ones(2, 3),), np.arange(3)),)),
        ),
        (
            "exported for",
            Push(1, updates=(ProgramCall(program, (0,), (1, 2, 3), (ones(3, 2),), np.arange(3)),)),
        ),
        ("without indices", Push(1, updates=(ProgramCall(program, (0,), (1, 2, 3), (ones(20, 3),)),))),
        ("may change a table", Push(1, updates=(good, good))),
        ("names? each row once", Push(1, updates=(RowWrite((0,), np.array([1, 1]), (ones(2, 3),)),))),
        ("dense variable", Push(1, adds=((0, ones(20, 3)),))),
    ):
        with pytest.raises(InvalidArgumentError, match=said):
            store.push(push)
    assert_unchanged(store, before)


def test_a_pull_of_a_whole_table_is_a_copy():
    store, program = make_table()
    ((_, _, before),) = store.pull([0])
    store.push(rows_push(1, program, [3]))
    ((_, _, after),) = store.pull([0])
    np.testing.assert_array_equal(before, ones(20, 3))
    assert not np.array_equal(after, before)


def test_rows_in_16_bits_are_summed_in_32():
    # In float16 a sum of ones stays at 2,048.
    ones = np.ones((4096, 1), "float16")
    _, (rows,) = combine_rows(np.zeros(4096, int), [ones])
    assert (rows.dtype, rows.tolist()) == (np.float16, [[4096.0]])


def test_combined_rows_keep_the_dtype_and_the_order_of_the_batch():
    indices, (rows,) = combine_rows(np.array([5, 1, 5, 5]), [np.array([[1], [2], [4], [8]], "bfloat16")])
    assert indices.tolist() == [1, 5]
    assert rows.dtype == np.dtype("bfloat16")
    assert rows.astype(int).tolist() == [[2], [13]]
    unique = np.array([1, 4])
    assert combine_rows(unique, [])[0] is unique


def test_a_push_survives_encoding():
    rows = RowWrite((0,), np.arange(2), (ones(2, 3),), (2,), (np.int32(4)[...],))
    call = ProgramCall("p", (1,), (2,), (ones(1),), np.arange(1))
    push = Push(3, 2, (rows, call, ProgramCall("q", (1,), (), ())), ((1, ones(2)),), ((5, ones(1)),))
    meta, arrays = push.encode()
    again, arrays_again = Push.decode(meta, arrays).encode()
    assert again == meta
    assert [id(a) for a in arrays_again] == [id(a) for a in arrays]
    for bad in (
        {"closure": "1"},
        {"closure": True},
        {"adds": [1.5]},
        {"updates": [3]},
        {"updates": 3},
        {"adds": [1] * 3},
    ):
        with pytest.raises(InvalidArgumentError):
            Push.decode(meta | bad, arrays)
    with pytest.raises(InvalidArgumentError, match="the arrays that it names"):
        Push.decode(meta, arrays[:2])
