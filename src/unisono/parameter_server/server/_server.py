"""A parameter server without sockets: requests of the chief and of workers, and their answers.

The fields of `meta`; what is in brackets may be left out:

========  =======================================================  ==========================================
request   fields and arrays                                        answer
========  =======================================================  ==========================================
HELLO     [`reset`]: drops all variables                           as STATUS
CREATE    `variables`: see `StoredSpec`, with [`has_array`,        `ids`
          `fill`, `initializer`]; the arrays of those that have
          one
DROP      `ids`                                                    nothing
PROGRAM   its bytes                                                `digest`
PULL      `ids`, [`versions`, `lineage`, `count`; `rounded`:       `lineage`, `versions` of all, `changed`:
          those of `ids` that are sent in `dtype`, 16 bits]        positions; the values of these; `count`
                                                                   of pushes, `dropped`: how many DROPs
PUSH      see `Push`, [`lineage`; `pull`: as of PULL]              `applied`: whether now, `count` of pushes
                                                                   [`pulled`, and values: as of PULL]
READ      `id`, [`begin`, `end`]                                   `version`; the value or its rows
ROWS      `ids`, [`rounded`, `dtype`: as of PULL]; for each an     the rows of each
          array of indices
WRITE     `ids`: one, [`begin`]; the value or the rows from there, `applied`
          or with `rows`: new rows and an array of indices
STATUS    [`variables`, `used`]                                    numbers about the state
END       `code`                                                   nothing
HEARTBEAT nothing                                                  nothing
========  =======================================================  ==========================================

HELLO, CREATE, DROP, PROGRAM, WRITE and END are the chief's alone, with the generation of its HELLO.
A request that is wrong is answered with ERROR, and changes nothing.
"""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from unisono._errors import ContextError, InvalidArgumentError, UnisonoError
from unisono._types import Json
from unisono.parameter_server.server._chief_presence import chief_lease
from unisono.parameter_server.server._durable import DurableStore
from unisono.parameter_server.server._store import VariableStore
from unisono.parameter_server.state._create import decode_news
from unisono.parameter_server.state._push import COUNTER_BITS, Push
from unisono.parameter_server.state._update import StateLostError
from unisono.rpc._calls import ClientId, StaleValuesError, error_answer
from unisono.rpc._fields import ints, listed, mapping, text, whole
from unisono.rpc._frames import Frame
from unisono.rpc._ops import Op
from unisono.rpc._versions import check_versions

_LOG = logging.getLogger("unisono")

_OF_CHIEF = frozenset({Op.HELLO, Op.CREATE, Op.DROP, Op.PROGRAM, Op.WRITE, Op.END})


class VariableServer:
    """Answers the requests to one parameter server.

    Args:
        durable: keeps the store; None where nothing does.
        is_chief: whether a client may act as the chief; by default all may.

    >>> server = VariableServer(VariableStore())
    >>> server.handle(ClientId(b"1"), Frame(Op.PULL, 5, meta={"ids": [3]})).op.name
    'ERROR'
    """

    def __init__(
        self,
        store: VariableStore,
        durable: DurableStore | None = None,
        is_chief: Callable[[ClientId], bool] = lambda client: True,
    ) -> None:
        self.store = store
        self._durable, self._is_chief = durable, is_chief
        #: Set when the chief has ended the job, or the state is lost.
        self.ended = threading.Event()
        #: For the process, once `ended` is set.
        self.exit_code = 0
        #: Requests by name, bytes of arrays received and sent, and errors.
        self.counts: collections.Counter[str] = collections.Counter()
        #: Renewed by what the chief sends.
        self.chief_lease = chief_lease()
        self._handlers: dict[Op, Callable[[Frame], Frame]] = {
            Op.HELLO: self._hello,
            Op.CREATE: self._create,
            Op.DROP: self._drop,
            Op.PROGRAM: self._program,
            Op.PULL: self._pull,
            Op.PUSH: self._push,
            Op.READ: self._read,
            Op.ROWS: self._rows,
            Op.WRITE: self._write,
            Op.STATUS: self._status,
            Op.END: self._end,
            Op.HEARTBEAT: lambda frame: frame.answer(Op.OK),
        }

    def handle(self, client: ClientId, frame: Frame) -> Frame:
        """Answer a request."""
        self.counts[frame.op.name] += 1
        self.counts["bytes received"] += sum(a.nbytes for a in frame.arrays)
        answer = self._answer(client, frame)
        self.counts["bytes sent"] += sum(a.nbytes for a in answer.arrays)
        return answer

    def _answer(self, client: ClientId, frame: Frame) -> Frame:
        try:
            self._check(client, frame)
            return self._handlers[frame.op](frame)
        except StateLostError as error:
            _LOG.error("%s", error)
            self.exit_code = 1
            self.ended.set()
            return error_answer(frame, error)
        except Exception as error:
            # Whatever a client sends, the server goes on.
            self.counts["errors"] += 1
            if not isinstance(error, UnisonoError):
                _LOG.warning("A parameter server could not answer %s.", frame, exc_info=True)
            return error_answer(frame, error)

    def _check(self, client: ClientId, frame: Frame) -> None:
        if frame.op not in self._handlers:
            raise InvalidArgumentError(
                f"A parameter server answers {', '.join(op.name for op in self._handlers)}. Received: "
                f"{frame.op.name}."
            )
        if frame.op is Op.HEARTBEAT and frame.generation == self.store.generation:
            self.chief_lease.renew()
        if frame.op is not Op.HELLO and 0 < frame.generation < self.store.generation:
            # Also where it reads: a chief that was stopped and replaced would end with another job's values.
            raise self._replaced(frame)
        if frame.op not in _OF_CHIEF:
            return
        if not self._is_chief(client):
            raise ContextError(f"{frame.op.name} is for the chief alone. Received: one of {client.task}.")
        if frame.op is not Op.HELLO and frame.generation > self.store.generation:
            raise self._lost_state(f"{frame.op.name} of generation {frame.generation}")
        if frame.generation < self.store.generation:
            raise self._replaced(frame)
        self.chief_lease.renew()

    def _replaced(self, frame: Frame) -> ContextError:
        return ContextError(
            f"The chief of generation {self.store.generation} leads the job. Received: {frame.op.name} "
            f"of generation {frame.generation}. An older chief must end; a newer one sends HELLO first."
        )

    def _lost_state(self, what: str) -> ContextError:
        kept = "has another job's" if self.store.generation else "was started again without its"
        return ContextError(
            f"A parameter server must have the variables of the job. Received: {what}, and this server "
            f"{kept} state (generation {self.store.generation}). Start the chief again, which restores its "
            "checkpoint, and keep servers' state with UNISONO_PS_DIRECTORY."
        )

    # the chief's

    def _hello(self, frame: Frame) -> Frame:
        leads = self.store.raise_generation(frame.generation, str(frame.meta.get("chief", "")))
        # After that, or the chief whose versions are others could not end this task.
        check_versions(frame.meta.get("versions"))
        # The status names the chief that leads: another one begins again, with a higher generation.
        if leads and frame.meta.get("reset"):
            self.store.reset(request=frame.request)
        return self._status(frame)

    def _create(self, frame: Frame) -> Frame:
        news = decode_news(listed(frame.meta, "variables"), frame.arrays)
        numbers = self.store.create(news, request=frame.request)
        if self._durable is not None and not self._durable.has_log:
            # A server that loses the variables themselves could not go on.
            self._durable.snapshot()
        return frame.answer(Op.OK, {"ids": numbers})

    def _drop(self, frame: Frame) -> Frame:
        self.store.drop(ints(frame.meta, "ids"), request=frame.request)
        return frame.answer(Op.OK)

    def _program(self, frame: Frame) -> Frame:
        (blob,) = _arrays(frame, 1)
        return frame.answer(Op.OK, {"digest": self.store.add_program(blob.tobytes())})

    def _write(self, frame: Frame) -> Frame:
        meta = frame.meta
        numbers = ints(meta, "ids")
        if len(numbers) != 1:
            raise InvalidArgumentError(f"A WRITE names one variable. Received: {numbers}.")
        value, *indices = _arrays(frame, 2 if meta.get("rows") else 1)
        applied = self.store.write(
            numbers[0],
            value,
            begin=whole(meta, "begin", 0),
            indices=indices[0] if indices else None,
            request=frame.request,
        )
        return frame.answer(Op.OK, {"applied": applied})

    def _end(self, frame: Frame) -> Frame:
        self.exit_code = whole(frame.meta, "code", 0)
        self.ended.set()
        return frame.answer(Op.OK)

    # the workers'

    def _pull(self, frame: Frame) -> Frame:
        return frame.answer(Op.OK, *self._pulled(frame.meta))

    def _pulled(self, meta: Mapping[str, Json]) -> tuple[dict[str, Json], list[Any]]:
        numbers, versions = ints(meta, "ids"), list(ints(meta, "versions"))
        with self.store.lock:
            lineage = self.store.lineage
            # Of another lineage, as after a reset, versions mean nothing.
            is_known = meta.get("lineage") == lineage
            known = versions if "versions" in meta and is_known else [-1] * len(numbers)
            if is_known:
                self.store.check_count(whole(meta, "count", 0))
            count, dropped = self.store.applied_count, self.store.dropped_count
            pulled = {n: (v, array) for n, v, array in self.store.pull(numbers, known, _rounded(meta))}
        changed = [i for i, number in enumerate(numbers) if number in pulled]
        versions = [pulled[n][0] if n in pulled else v for n, v in zip(numbers, known, strict=True)]
        answer = {
            "lineage": lineage, "versions": versions, "changed": changed, "count": count, "dropped": dropped
        }  # fmt: skip
        return answer, [pulled[numbers[i]][1] for i in changed]

    def _push(self, frame: Frame) -> Frame:
        meta = frame.meta
        push = Push.decode(meta, frame.arrays)
        with self.store.lock:
            generation = push.closure >> COUNTER_BITS
            if generation > self.store.generation:
                raise self._lost_state(f"a closure of generation {generation}")
            if generation < self.store.generation:
                raise ContextError(
                    f"The chief of generation {self.store.generation} leads the job. Received: a closure of "
                    f"generation {generation}. A newer chief sends HELLO first."
                )
            if push.watermark > push.closure:
                # All later pushes would count as repetitions.
                raise InvalidArgumentError(
                    f"A closure is not complete while it pushes. Received: closure {push.closure} with the "
                    f"watermark {push.watermark}."
                )
            if meta.get("lineage", self.store.lineage) != self.store.lineage:
                raise StaleValuesError("The server begins another job, or has lost changes: pull again.")
            asked = mapping(meta, "pull") if "pull" in meta else None
            applied = self.store.push(push)
            answer = {"applied": applied, "count": self.store.applied_count}
            if asked is None:
                return frame.answer(Op.OK, answer)
            pulled, values = self._pulled(asked)
            return frame.answer(Op.OK, {**answer, "pulled": pulled}, values)

    def _read(self, frame: Frame) -> Frame:
        meta = frame.meta
        number = whole(meta, "id")
        end = None if meta.get("end") is None else whole(meta, "end")
        with self.store.lock:
            value = self.store.read(number, whole(meta, "begin", 0), end)
            version = self.store.variables[number].version
        return frame.answer(Op.OK, {"version": version}, [value])

    def _rows(self, frame: Frame) -> Frame:
        meta = frame.meta
        numbers, types = ints(meta, "ids"), _rounded(meta)
        indices = _arrays(frame, len(numbers))
        with self.store.lock:
            rows = [self.store.rows(n, i, types.get(n)) for n, i in zip(numbers, indices, strict=True)]
        return frame.answer(Op.OK, {}, rows)

    def _status(self, frame: Frame) -> Frame:
        store = self.store
        with store.lock:
            meta: dict[str, Json] = {
                "generation": store.generation,
                "chief": store.chief,
                "lineage": store.lineage,
                "count": store.applied_count,
                "watermark": store.watermark,
                "variables": len(store.variables),
                "bytes": sum(v.spec.nbytes for v in store.variables.values()),
                "programs": len(list(store.programs)),
                "counts": dict(self.counts),
            }
            if self._durable is not None:
                meta["changes"] = self._durable.number
                meta["snapshot"] = self._durable.snapshot_number
                meta["recovered_from"] = self._durable.recovery.source
            if frame.meta.get("used"):
                meta["used"] = {name: used.encode() for name, used in store.used.items()}
            if frame.meta.get("variables"):
                meta["list"] = [
                    v.spec.encode() | {"id": n, "version": v.version} for n, v in store.variables.items()
                ]
        return frame.answer(Op.OK, meta)


def _rounded(meta: Mapping[str, Json]) -> dict[int, str]:
    """Return the types to which the values of a request are rounded, by number of a variable."""
    numbers = ints(meta, "rounded")
    return dict.fromkeys(numbers, text(meta, "dtype")) if numbers else {}


def _arrays(frame: Frame, count: int) -> list[Any]:
    if len(frame.arrays) != count:
        raise InvalidArgumentError(
            f"{frame.op.name} must bring the arrays that it needs. Received: {len(frame.arrays)} instead of "
            f"{count}."
        )
    return list(frame.arrays)
