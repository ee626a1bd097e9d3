"""Programs that compute with the rows that they look up: the same numbers as with the whole table."""

import jax
import jax.extend.core as jex
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from unisono.parameter_server.tables._row_program import GatheredRows, RowProgram
from unisono.parameter_server.tables._row_values import NotByRowsError, RowGroup

pytestmark = pytest.mark.numbers

SIZE = 50
NONE = np.iinfo(np.int32).max


def by_rows(function, tables, others, in_rows=()):
    """Return the results of a function of tables and other arrays, computed with the rows that it uses."""
    given = [*tables, *others]
    closed = jax.make_jaxpr(lambda *args: jax.tree.leaves(function(*args)))(*given)
    groups = {i: RowGroup(len(t)) for i, t in enumerate(tables)}
    program = RowProgram(closed, groups, {number: groups[table] for number, table in in_rows})
    numbers, used = program.numbers_program()
    found = jex.jaxpr_as_fun(numbers)(*(given[i] for i in used))
    hands, places = {}, []
    roots = {id(g.root): g.root for g in groups.values()}
    for root in roots.values():
        flat = [
            np.asarray(x).reshape(-1)
            for s, x in zip(program.sites, found, strict=True)
            if s.group.root is root
        ]
        every = np.concatenate([np.empty(0, int), *flat])
        rows = np.unique(every[(every >= 0) & (every < root.size)])
        hands[id(root)] = rows, GatheredRows(len(rows) + 3, len(rows))
    for site, given_numbers in zip(program.sites, found, strict=True):
        rows, _ = hands[id(site.group.root)]
        x = np.asarray(given_numbers)
        x = np.clip(x, 0, site.group.size - 1) if site.clamps else x
        place = np.searchsorted(rows, x)
        is_row = (x >= 0) & (x < site.group.size)
        places.append(jnp.asarray(np.where(is_row, place, NONE), "int32"))
    args = list(given)
    for i, group in groups.items():
        rows, _ = hands[id(group.root)]
        # What the places without a row hold must not matter.
        args[i] = np.concatenate(
            [np.asarray(given[i])[rows], np.full((3, *given[i].shape[1:]), np.nan, given[i].dtype)]
        )
    results = jax.jit(lambda *a: program.evaluate(a, lambda g: hands[id(g)][1], places))(*args)
    whole = []
    for number, result in enumerate(results):
        table = dict(in_rows).get(number)
        if table is None:
            whole.append(np.asarray(result))
            continue
        rows, _ = hands[id(groups[table].root)]
        full = np.zeros(given[table].shape, result.dtype)
        full[rows] = np.asarray(result)[: len(rows)]
        whole.append(full)
    return whole


def check(function, tables, others, in_rows=()):
    expected = jax.tree.leaves(jax.jit(function)(*tables, *others))
    found = by_rows(function, tables, others, in_rows)
    for one, two in zip(expected, found, strict=True):
        np.testing.assert_allclose(two, one, rtol=1e-6, atol=1e-7)


def table(seed=0, width=4, size=SIZE, dtype="float32"):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(size, width)), dtype)


IDS = jnp.array([[3, 49, 3], [0, -1, 17]])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_lookup_and_its_gradient(dtype):
    def step(rows, ids):
        return jax.value_and_grad(lambda t: (keras.ops.take(t, ids, axis=0) ** 2).sum().astype("float32"))(
            rows
        )

    expected = jax.jit(step)(table(dtype=dtype), IDS)
    found = by_rows(step, [table(dtype=dtype)], [IDS], [(1, 0)])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-6)
    np.testing.assert_array_equal(found[1], expected[1].astype("float32"))


def test_numbers_that_are_none_of_a_row_are_treated_as_on_one_device():
    ids = jnp.array([0, 49, 50, 1000, -1, -50, -51])
    for mode in ("fill", "clip", "wrap"):
        check(lambda t, i, m=mode: jnp.take(t, i, axis=0, mode=m), [table()], [ids])
    check(lambda t, i: t[i], [table()], [ids])
    check(lambda t, i: jax.grad(lambda t: jnp.take(t, i, axis=0).sum())(t), [table()], [ids], [(0, 0)])


def test_several_lookups_of_one_table_add_up():
    def step(rows, ids):
        def loss(t):
            one, two = keras.ops.take(t, ids, axis=0), keras.ops.take(t, ids[:, 0] % 7, axis=0)
            return (one.sum(1) * two).sum()

        return jax.value_and_grad(loss)(rows)

    check(step, [table()], [IDS], [(1, 0)])


@pytest.mark.parametrize("clip", [{"clipnorm": 0.3}, {"global_clipnorm": 0.3}, {"clipvalue": 0.01}, {}])
def test_clipping_and_norms_of_gradients_are_those_of_all_rows(clip):
    optimizer = keras.optimizers.SGD(0.1, **clip)

    def step(one, two, ids):
        def loss(t, u):
            return (keras.ops.take(t, ids, axis=0) * keras.ops.take(u, ids // 2, axis=0)).sum()

        grads = jax.grad(loss, (0, 1))(one, two)
        return optimizer._clip_gradients(list(grads))

    check(step, [table(), table(1, size=30)], [IDS], [(0, 0), (1, 1)])


def test_numbers_computed_in_the_step_and_in_calls():
    @jax.jit
    def hashed(ids):
        return (ids * 26544357 % 1013) % SIZE

    @jax.checkpoint
    def tower(t, ids):
        return jnp.tanh(keras.ops.take(t, hashed(ids), axis=0)).sum()

    check(lambda t, i: jax.value_and_grad(tower)(t, i), [table()], [IDS], [(1, 0)])


def test_lora_of_a_table():
    keras.utils.set_random_seed(0)
    layer = keras.layers.Embedding(SIZE, 4)
    layer.build()
    layer.enable_lora(2)
    variables = [layer._embeddings, layer.lora_embeddings_a, layer.lora_embeddings_b]
    values = [table(), table(1, 2), table(2, 4, 2)]

    def step(one, two, factor, ids):
        def loss(two, factor):
            pairs = zip(variables, (one, two, factor), strict=True)
            with keras.StatelessScope(pairs):
                return (layer(ids) ** 2).sum()

        return jax.value_and_grad(loss, (0, 1))(two, factor)

    check(step, values[:2], [values[2], IDS], [(1, 1)])


def test_no_lookup_at_all_and_empty_batches():
    check(lambda t, i: (jnp.zeros_like(t), i.sum()), [table()], [IDS], [(0, 0)])
    empty = jnp.zeros((0, 3), "int32")
    check(
        lambda t, i: jax.value_and_grad(lambda t: jnp.take(t, i, axis=0).sum())(t),
        [table()],
        [empty],
        [(1, 0)],
    )


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (lambda t, i: jnp.take(t, i, axis=0).sum() + (t**2).sum(), "`reduce_sum` goes over all of its rows"),
        (lambda t, i: jnp.take(t, i, axis=0) @ t.T, "`transpose` moves its rows"),
        (lambda t, i: jnp.take(t, i, axis=1), "not along its first axis"),
        (lambda t, i: (t, i), "its whole value is a result"),
        (lambda t, i: t[3], "needs all of its rows"),
        (lambda t, i: t + jnp.arange(1.0 * SIZE)[:, None], "combines it with a value for all of its rows"),
        (lambda t, i: jnp.take(t, jnp.take(t, i, axis=0)[:, :, 0].astype("int32"), axis=0), "depend on rows"),
        (lambda t, i: jax.lax.scan(lambda c, j: (c + t[j], None), t[0], i[0])[0], "needs all of its rows"),
    ],
)
def test_what_needs_all_rows_is_found(function, why):
    with pytest.raises(NotByRowsError, match=why):
        by_rows(function, [table()], [IDS])
