"""Every all-reduce algorithm against NumPy, on 2 to 8 devices, and what it compiles to."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import unisono
from unisono import ReduceOp
from unisono._mesh import ReplicaMesh
from unisono.collectives import _reduce
from unisono.collectives._cross_device import CrossDeviceOps

pytestmark = pytest.mark.numbers

AXIS = "replica"


def on_replicas(fn, n):
    """`fn` of each replica's row, jitted."""
    mesh = ReplicaMesh(tuple(jax.devices()[:n]))
    body = jax.shard_map(
        lambda v: jax.tree.map(lambda x: x[None], fn(jax.tree.map(lambda x: x[0], v))),
        mesh=mesh.mesh,
        in_specs=P(AXIS),
        out_specs=P(AXIS),
        check_vma=False,
    )
    return jax.jit(body)


def rows(n):
    rng = np.random.default_rng(n)
    return {"a": rng.normal(size=(n, 7)).astype("f4"), "b": rng.integers(0, 9, (n, 2, 3)), "c": None}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("algorithm", _reduce.ALGORITHMS)
@pytest.mark.parametrize("packing", [{}, {"num_packs": 1}])
def test_sum(n, algorithm, packing):
    def body(tree):
        return _reduce.all_reduce(
            tree, ReduceOp.SUM, axis_name=AXIS, axis_size=n, algorithm=algorithm, **packing
        )

    tree = rows(n)
    out = on_replicas(body, n)(tree)
    for key in ("a", "b"):
        expected = np.broadcast_to(tree[key].sum(0), tree[key].shape)
        # Algorithms add in different orders.
        np.testing.assert_allclose(out[key], expected, rtol=1e-6, atol=1e-6)
    assert out["c"] is None


@pytest.mark.parametrize("n", [4, 8])
def test_large_buckets_are_sent_in_halves(n, monkeypatch):
    """As large ones are, but of few numbers; 13 of them do not divide."""
    values = np.random.default_rng(n).normal(size=(n, 13)).astype("f4")

    def body(x):
        return _reduce.all_reduce(x, ReduceOp.SUM, axis_name=AXIS, axis_size=n, algorithm="exchange")

    whole = on_replicas(body, n)(values)
    monkeypatch.setattr(_reduce, "_WHOLE", 0)
    halves = on_replicas(body, n)
    assert str(jax.make_jaxpr(halves)(values)).count("ppermute") == 2 * int(np.log2(n))
    np.testing.assert_allclose(halves(values), np.broadcast_to(values.sum(0), (n, 13)), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(halves(values), whole, rtol=1e-5, atol=1e-6)


def test_between_hosts_large_buckets_are_summed_by_xla_and_small_ones_exchanged():
    tree = {"large": np.ones((2, _reduce._QUICK // 4), "f4"), "small": np.ones((2, 8), "f4")}

    def body(x):
        return _reduce.all_reduce(x, ReduceOp.SUM, axis_name=AXIS, axis_size=2, algorithm="across_hosts")

    program = str(jax.make_jaxpr(on_replicas(body, 2))(tree))
    assert (program.count("psum"), program.count("ppermute")) == (1, 1)


@pytest.mark.parametrize("algorithm", _reduce.ALGORITHMS)
@pytest.mark.parametrize(("op", "value", "grads"), [("SUM", 20, [8, 16]), ("MEAN", 10, [4, 8])])
def test_gradient_of_an_all_reduce_is_the_all_reduce_of_the_gradients(algorithm, op, value, grads):
    def body(x):
        def loss(x):
            return _reduce.all_reduce(x**2, ReduceOp[op], axis_name=AXIS, axis_size=2, algorithm=algorithm)

        return loss(x), jax.grad(loss)(x)

    y, g = on_replicas(body, 2)(np.array([2.0, 4.0], "f4"))
    np.testing.assert_array_equal(y, [value, value])
    np.testing.assert_array_equal(g, grads)


@pytest.mark.parametrize("n", [3, 4, 5, 7])
@pytest.mark.parametrize("algorithm", _reduce.ALGORITHMS)
def test_gradients_on_odd_numbers_of_devices(n, algorithm):
    """With scalars, empty arrays and integers beside, and more devices than elements."""

    def body(tree):
        def loss(x):
            reduced = _reduce.all_reduce(
                {**tree, "x": x}, "sum", axis_name=AXIS, axis_size=n, algorithm=algorithm, num_packs=1
            )
            return reduced["x"] ** 2, reduced

        (_, reduced), grad = jax.value_and_grad(loss, has_aux=True)(tree["x"])
        return reduced, grad

    x = np.arange(1, n + 1, dtype="f4")
    tree = {"x": x, "empty": np.ones((n, 0), "f4"), "small": np.ones((n, 3), "i1")}
    reduced, grad = on_replicas(body, n)(tree)
    np.testing.assert_array_equal(reduced["x"], np.full(n, x.sum()))
    np.testing.assert_array_equal(reduced["small"], np.full((n, 3), n, "i1"))
    assert reduced["empty"].shape == (n, 0)
    assert reduced["small"].dtype == "i1"
    np.testing.assert_array_equal(grad, np.full(n, 2 * x.sum() * n))


@pytest.mark.parametrize("dtype", ["float16", "int8"])
def test_data_types_stay(dtype):
    def body(x):
        kwargs = {"axis_name": AXIS, "axis_size": 2}
        return (
            _reduce.all_reduce(x, ReduceOp.SUM, **kwargs),
            _reduce.all_gather(x, 0, **kwargs),
        )

    assert {out.dtype for out in on_replicas(body, 2)(np.ones((2, 4), dtype))} == {np.dtype(dtype)}


@pytest.mark.parametrize("n", [2, 3, 8])
def test_gather(n):
    def body(x):
        kwargs = {"axis_name": AXIS, "axis_size": n}
        return (
            _reduce.all_gather(x, 0, **kwargs),
            jax.grad(lambda x: jnp.sum(_reduce.all_gather(x, 0, **kwargs) ** 2))(x),
        )

    x = np.random.default_rng(0).normal(size=(n, n, 2)).astype("f4")
    gathered, grad = on_replicas(body, n)(x)
    for i in range(n):
        np.testing.assert_array_equal(gathered[i], x.reshape(n * n, 2))
    np.testing.assert_allclose(grad, 2 * n * x, rtol=1e-6)


def collectives_in(ops, n=4):
    """How often each collective stands in the compiled program of an all-reduce."""

    def body(tree):
        return ops.all_reduce(ReduceOp.SUM, tree, axis_name=AXIS, axis_size=n)

    tree = [np.ones((n, 3), "f4"), np.ones((n, 5), "f4")]
    return compiled_collectives(body, tree, n)


def compiled_collectives(fn, tree, n):
    text = on_replicas(fn, n).lower(tree).compile().as_text()
    names = ("all-reduce", "collective-permute", "all-gather", "all-to-all", "reduce-scatter")
    return {k: len(re.findall(rf" {k}(?:-start)?\(", text)) for k in names}


@pytest.mark.parametrize(
    ("ops", "expected"),
    [
        (CrossDeviceOps(), {"all-reduce": 1}),
        (unisono.NcclAllReduce(), {"all-reduce": 1}),
        (unisono.RingAllReduce(), {"collective-permute": 6}),
        (unisono.HierarchicalCopyAllReduce(), {"collective-permute": 4}),
        (unisono.ReductionToOneDevice(), {"collective-permute": 6}),
        (unisono.RingAllReduce(num_packs=0), {"collective-permute": 12}),
    ],
    ids=repr,
)
def test_each_is_another_program(ops, expected):
    """On four devices: a ring takes 2(n-1) steps, a tree 2 log2(n), one device n-1 each way."""
    found = collectives_in(ops)
    assert {k: v for k, v in found.items() if v} == expected


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, kw: _reduce.all_gather(x, 0, **kw), {"all-gather": 1, "all-reduce": 1}),
        *(
            (
                lambda x, kw, a=algorithm: _reduce.all_reduce(x, ReduceOp.SUM, algorithm=a, **kw),
                {"all-reduce": 2} if algorithm == "xla" else {"collective-permute": permutes},
            )
            for algorithm, permutes in [("xla", 0), ("ring", 12), ("hierarchical", 8), ("one_device", 12)]
        ),
    ],
    ids=["all_gather", "xla", "ring", "hierarchical", "one_device"],
)
def test_no_derivative_is_a_reduce_scatter(fn, expected):
    """It returns wrong numbers over Gloo: https://github.com/jax-ml/jax/issues/40830."""

    def body(x):
        return jax.grad(lambda x: jnp.sum(fn(x, {"axis_name": AXIS, "axis_size": 4}) ** 2))(x)

    found = compiled_collectives(body, np.ones((4, 8), "f4"), 4)
    assert {k: v for k, v in found.items() if v} == expected


def test_one_replica_needs_no_collective():
    def body(x):
        kwargs = {"axis_name": AXIS, "axis_size": 1}
        every = [_reduce.all_reduce(x, "mean", algorithm=a, **kwargs) for a in _reduce.ALGORITHMS]
        return [*every, _reduce.all_gather(x, 0, **kwargs)]

    assert not any(compiled_collectives(body, np.ones((1, 8), "f4"), 1).values())


def test_nccl_without_a_gpu_says_so_once(caplog):
    unisono.collectives._cross_device._warn_without_nccl.cache_clear()
    with caplog.at_level("WARNING", logger="unisono"):
        collectives_in(unisono.NcclAllReduce(), 2)
        collectives_in(unisono.NcclAllReduce(), 3)
    assert [r.message for r in caplog.records] == [
        "NCCL needs GPUs, but the devices are of the platform 'cpu': XLA's all-reduce is used instead."
    ]


@pytest.mark.parametrize(
    ("value", "op", "message"),
    [
        (np.ones((2,), bool), "SUM", "must be numbers"),
        (np.ones((2,), "i4"), "MEAN", "mean of integers"),
    ],
)
def test_types(value, op, message):
    with pytest.raises(TypeError, match=message):
        on_replicas(lambda x: _reduce.all_reduce(x, ReduceOp[op], axis_name=AXIS, axis_size=2), 2)(value)


@pytest.mark.parametrize(
    ("fn", "message"),
    [
        (lambda x, kw: _reduce.all_reduce(x, "max", **kw), "reduce_op"),
        (lambda x, kw: _reduce.all_reduce(x, "sum", algorithm="tree", **kw), "algorithm"),
        (lambda x, kw: _reduce.all_gather(x, 1, **kw), "`axis` must be"),
        (lambda x, kw: _reduce.all_gather(x[0], 0, **kw), "rank 1"),
    ],
)
def test_bad_arguments(fn, message):
    with pytest.raises(ValueError, match=message):
        on_replicas(lambda x: fn(x, {"axis_name": AXIS, "axis_size": 2}), 2)(np.ones((2, 3), "f4"))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: unisono.NcclAllReduce(num_packs=-1), "num_packs"),
        (lambda: unisono.ReductionToOneDevice(accumulation_fn=sum), "accumulation_fn"),
        (lambda: unisono.RingAllReduce(num_packs=True), "num_packs"),
        (lambda: unisono.CommunicationOptions(bytes_per_pack=-1), "bytes_per_pack"),
        (lambda: unisono.CommunicationOptions(bytes_per_pack="1"), "bytes_per_pack"),
        (lambda: unisono.CommunicationOptions(timeout_seconds="1"), "timeout_seconds"),
        (lambda: unisono.CommunicationOptions(timeout_seconds=0), "timeout_seconds"),
        (lambda: unisono.CommunicationOptions(implementation="MPI"), "implementation"),
    ],
)
def test_bad_options(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_implementation_by_name():
    options = unisono.CommunicationOptions(implementation="nccl")
    assert options.implementation is unisono.CommunicationImplementation.NCCL


def fusions(text):
    """The distinct computations of a compiled program's fusions: XLA:CPU compiles each of them once."""
    without = re.sub(r"metadata=\{[^}]*\}|[%\w.-]+(?= =)|%?param[\w.]*|%[\w.-]+", "", text)
    return set(re.findall(r"^ \(.*?^\}", without, re.MULTILINE | re.DOTALL))


def test_equal_updates_of_packed_arrays_are_compiled_once():
    """A start in the bucket that the compiler knew made each array's update a kernel of its own."""

    def kernels(count):
        def update(values):
            total = _reduce.all_reduce(values, ReduceOp.SUM, axis_name=AXIS, axis_size=2, num_packs=1)
            return [jnp.tanh(x * 0.5) + v for x, v in zip(total, values, strict=True)]

        values = [np.full((2, 3, 5), i, "f4") for i in range(count)]
        program = on_replicas(update, 2).lower(values).compile()
        for i, new in enumerate(program(values)):
            np.testing.assert_allclose(new[0], np.tanh(i) + np.full((3, 5), i), rtol=1e-6)
        return sum("tanh" in body for body in fusions(program.as_text()))

    assert kernels(12) == kernels(4) == 1
