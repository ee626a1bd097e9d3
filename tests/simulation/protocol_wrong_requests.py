"""A wrong program among the clients of parameter servers: what it asks is refused, and changes nothing.

Real: all of `protocol_servers`, and the checks of requests. The program knows the job, and each of its
requests has one thing wrong: a variable, a shape, a row, a number, a field. Promised, and checked:

- a request that is wrong is answered with an error, and the server goes on;
- nothing of it is applied: the job's values are as without it, as `protocol_servers` checks them;
- the chief's requests need its generation.

Tests: tests/unit/test_simulation.py.
"""

import numpy as np

from tests.simulation._world import SETTING
from tests.simulation.protocol_servers import COUNTS, REGISTER, ROWS, Plan, Servers, run_servers
from unisono._errors import ClusterError
from unisono.cluster_resolver._spec import Task
from unisono.parameter_server.state._push import COUNTER_BITS, Push, RowWrite
from unisono.rpc._calls import RequestNumbers
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op

#: No variable has this number.
_UNKNOWN = 77
#: Closures of the wrong program begin so far behind the job's own.
_FAR = 1000
_FLOAT = np.float32


def _row_write(indices, values=((9.0,),), dtype="float32"):
    return RowWrite((ROWS,), np.asarray(indices), (np.array(values, dtype),))


def _wrong_pushes(job, cells, closure):
    """Return pushes of which one part is wrong, and would be seen if the rest was applied."""
    counts = np.full(cells, 5.0, "float32")
    good = (COUNTS, counts)

    def push(adds=(good,), assigns=(), updates=(), number=closure, watermark=0):
        return Push(number, watermark, updates, adds, assigns)

    return (
        push((good, (_UNKNOWN, counts))),
        push((good, (ROWS, np.ones((2, 1), "float32")))),
        push((good, (REGISTER, np.ones(1, "float32")))),
        push(((COUNTS, _FLOAT(5)),)),
        push(((COUNTS, counts.astype("float64")),)),
        push(assigns=((REGISTER, np.ones(2, "float32")),)),
        push(assigns=((_UNKNOWN, _FLOAT(5)),)),
        push(updates=(_row_write([2]),)),
        push(updates=(_row_write([-1]),)),
        push(updates=(_row_write([0.0]),)),
        push(updates=(_row_write([[0]]),)),
        push(updates=(_row_write([0, 0], ((9.0,), (8.0,))),)),
        push(updates=(_row_write([0, 1]),)),
        push(updates=(_row_write([0], dtype="float64"),)),
        push(updates=(_row_write([0]), _row_write([1]))),
        push(updates=(RowWrite((ROWS, ROWS), np.array([0]), (np.ones((1, 1), "float32"),) * 2),)),
        push(updates=(RowWrite((), np.array([0]), (), (REGISTER,), (np.ones(3, "float32"),)),)),
        push(watermark=closure + 1),
        push(number=closure + (1 << COUNTER_BITS)),
        push(number=max(0, closure - (1 << COUNTER_BITS))),
    )


def _wrong_fields(meta):
    """Return fields of a push of which one is wrong."""
    return (
        {**meta, "closure": str(meta["closure"])},
        {**meta, "closure": -1},
        {**meta, "watermark": 0.5},
        {**meta, "adds": [False]},
        {**meta, "adds": "0"},
        {**meta, "adds": [0, 1, 1]},
        {**meta, "adds": []},
        {**meta, "updates": [5]},
        {**meta, "updates": [{"tables": [ROWS], "dense": [REGISTER]}]},
        {**meta, "updates": [{"program": "", "values": [], "slots": [], "gradients": 0}]},
        {**meta, "updates": [{"program": "absent", "values": [COUNTS], "slots": [], "gradients": 0}]},
        {**meta, "used": [1]},
        {**meta, "lineage": "0"},
        {**meta, "pull": [COUNTS]},
        {key: value for key, value in meta.items() if key != "closure"},
    )


def _new(**fields):
    return {"name": "new", "shape": [2], "dtype": "float32", **fields}


def _wrong_requests(job, cells):
    """Return other requests of which one part is wrong, as pairs of `meta` and arrays, by operation."""
    counts = np.full(cells, 5.0, "float32")
    own = job.generation
    reads = (
        (Op.PULL, 0, {"ids": [COUNTS, _UNKNOWN]}, []),
        (Op.PULL, 0, {"ids": COUNTS}, []),
        (Op.PULL, 0, {"ids": [COUNTS], "rounded": [COUNTS], "dtype": "int8"}, []),
        (Op.PULL, 0, {"ids": [COUNTS], "rounded": [COUNTS]}, []),
        (Op.READ, 0, {"id": _UNKNOWN}, []),
        (Op.READ, 0, {"id": COUNTS, "begin": 1, "end": 0}, []),
        (Op.READ, 0, {"id": COUNTS, "begin": 0, "end": cells + 1}, []),
        (Op.ROWS, 0, {"ids": [ROWS]}, []),
        (Op.ROWS, 0, {"ids": [ROWS]}, [np.array([2])]),
        (Op.ROWS, 0, {"ids": [ROWS]}, [np.array([-1])]),
        (Op.ROWS, 0, {"ids": [ROWS], "rounded": [ROWS], "dtype": "float32"}, [np.array([0])]),
        (Op.RUN, 0, {}, []),
        (Op.POLL, 0, {"job": "a"}, []),
    )
    writes = (
        (Op.WRITE, 0, {"ids": [REGISTER]}, [_FLOAT(5)]),
        (Op.WRITE, own + 1, {"ids": [REGISTER]}, [_FLOAT(5)]),
        (Op.WRITE, own, {"ids": [REGISTER, COUNTS]}, [_FLOAT(5)]),
        (Op.WRITE, own, {"ids": [REGISTER]}, []),
        (Op.WRITE, own, {"ids": [REGISTER]}, [np.ones(2, "float32")]),
        (Op.WRITE, own, {"ids": [COUNTS], "begin": 1}, [counts]),
        (Op.WRITE, own, {"ids": [COUNTS]}, [counts.astype("int32")]),
        (Op.WRITE, own, {"ids": [ROWS], "rows": True}, [np.ones((1, 1), "float32"), np.array([-1])]),
        (Op.WRITE, own, {"ids": [ROWS], "rows": True}, [np.ones((2, 1), "float32"), np.array([0])]),
        (Op.DROP, 0, {"ids": [COUNTS]}, []),
        (Op.DROP, own, {"ids": [COUNTS, _UNKNOWN]}, []),
        (Op.DROP, own, {"ids": {"0": 1}}, []),
        (Op.HELLO, 0, {"reset": True}, []),
        (Op.PROGRAM, own, {}, [np.frombuffer(b"no program", np.uint8)]),
        (Op.PROGRAM, own, {}, []),
        (Op.END, 0, {"code": 0}, []),
    )
    creates = (
        _new(name="counts", shape=[cells + 1]),
        _new(name=""),
        _new(shape=[-1]),
        _new(shape=[1] * 17),
        _new(dtype="object"),
        _new(dtype="nothing"),
        _new(kind="sparse"),
        _new(kind="table", shape=[]),
        _new(fill="x"),
        _new(has_array=True),
        _new(initializer="absent"),
        "new",
    )
    # A good one before it: all are created, or none.
    made = [(Op.CREATE, own, {"variables": [_new(name="before"), each]}, []) for each in creates]
    made.append((Op.CREATE, own, {"variables": [_new()]}, [counts]))
    made.append((Op.CREATE, own, {"variables": [_new(has_array=True)]}, [counts.astype("float64")]))
    return (*reads, *writes, *made)


class WrongRequests(Servers):
    """A cluster, and a program that asks what is wrong."""

    def run(self):
        """Run the job to its end."""
        self.world.process("stranger", self.ask)
        super().run()

    def ask(self):
        """Be the wrong program."""
        world = self.world
        clients = [
            self.network.rpc_client(Task("ps", i), f"ps{i}", Task("worker", 9))
            for i in range(self.plan.servers)
        ]
        numbers = RequestNumbers()
        while not self.is_over:
            world.sleep(world.uniform(0.05, 0.5))
            job = self.job
            if job is None:
                continue
            op, generation, meta, arrays = self.draw(job)
            frame = Frame(op, numbers.next(), generation, meta, arrays)
            try:
                answer = world.pick(clients).call(frame, 5.0)
            except ClusterError:
                continue
            # A push of a closure that is complete, or of an older job, is no matter.
            is_nothing = op is Op.PUSH and answer.op is Op.OK and not answer.meta["applied"]
            world.check(
                answer.op is Op.ERROR or is_nothing,
                lambda op=op, meta=meta, answer=answer: f"{op.name} {meta} is wrong; answered {answer.meta}.",
            )

    def judge(self, job, client):
        """Check what a job has left: its values, and no variable more."""
        super().judge(job, client)
        counts = [answer.meta["variables"] for answer in client.on_all(Op.STATUS)]
        self.world.check(set(counts) == {3}, lambda: f"Servers have the job's variables: {counts}.")

    def draw(self, job):
        """Return a request that is wrong: operation, generation, fields and arrays."""
        world, cells = self.world, self.plan.cells
        kind = world.choose(3)
        if kind == 2:
            return world.pick(_wrong_requests(job, cells))
        closure = job.first + _FAR + world.choose(_FAR)
        if kind == 0:
            meta, arrays = world.pick(_wrong_pushes(job, cells, closure)).encode()
        else:
            meta, arrays = Push(closure, adds=((COUNTS, np.full(cells, 5.0, "float32")),)).encode()
            meta = world.pick(_wrong_fields(meta))
        return Op.PUSH, 0, meta, [np.asarray(array) for array in arrays]


def wrong_requests(world):
    """Servers, in memory or with a log, are asked what is wrong while a job runs."""
    durable = world.choose(3, SETTING) == 2
    plan = Plan(servers=1 + world.choose(2, SETTING), workers=2, closures=3, reads=2, durable=durable)
    run_servers(world, plan, WrongRequests)


PROTOCOLS = {"wrong_requests": wrong_requests}
