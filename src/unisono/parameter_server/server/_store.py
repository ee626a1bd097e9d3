"""The variables of a parameter server: created, pulled, written, and updated by pushes that count once.

All of it is called with plain objects and arrays; sockets and messages are elsewhere.
"""

from __future__ import annotations

import dataclasses
import re
import secrets
import threading
from collections.abc import Mapping, Sequence

import numpy as np

from unisono._errors import ClusterError, InvalidArgumentError
from unisono._types import Json
from unisono.parameter_server.server._programs import ProgramStore
from unisono.parameter_server.state._acknowledged import LogPosition, describe_loss
from unisono.parameter_server.state._create import NewVariable, decode_news, encode_news
from unisono.parameter_server.state._journal import Journal
from unisono.parameter_server.state._push import Array, Push, UsedBatches
from unisono.parameter_server.state._request_dedup import RequestDedup
from unisono.parameter_server.state._update import (
    StateLostError,
    check_push,
    check_rows,
    check_value,
    find,
    run_push,
)
from unisono.parameter_server.state._variables import TABLE, DenseVariable, StoredSpec, Table, rounded
from unisono.rpc._calls import StaleValuesError
from unisono.rpc._fields import ints, listed, mapping, text, whole


class VariableStore:
    """The variables of one server.

    Args:
        journal: where changes are noted before they are applied; None keeps them in memory alone.

    >>> store = VariableStore()
    >>> store.create([NewVariable(StoredSpec("w", (2,), "float32"), np.ones(2, "float32"))])
    [0]
    >>> store.push(Push(1, adds=((0, np.ones(2, "float32")),)))
    True
    >>> store.push(Push(1, adds=((0, np.ones(2, "float32")),)))
    False
    >>> store.read(0)
    array([2., 2.], dtype=float32)
    """

    def __init__(self, journal: Journal | None = None) -> None:
        #: Held while state is read or changed.
        self.lock = threading.RLock()
        self.journal = journal or Journal()
        self.programs = ProgramStore()
        self._request_dedup = RequestDedup()
        self.clear()
        self.generation = 0
        #: The name of the chief that has taken this generation; empty after a restart, when a chief that asks
        #: for the same generation takes a higher one.
        self.chief = ""

    def clear(self) -> None:
        """Drop all variables without a trace in the journal."""
        #: Changes where versions may have gone back: versions of another lineage mean nothing.
        self.lineage = new_lineage()
        self.variables: dict[int, DenseVariable | Table] = {}
        self._numbers: dict[str, int] = {}
        self._next = 0
        #: How often variables were dropped: clients then forget what they have kept of any.
        self.dropped_count = 0
        #: The pushes that were applied.
        self.applied_count = 0
        #: Closures with lower numbers are complete.
        self.watermark = 0
        self._applied: set[int] = set()
        #: Which batches of workers' datasets the applied pushes have used, by name of an iterator.
        self.used: dict[str, UsedBatches] = {}
        #: Why the state is lost; every request fails then, until the server has started again.
        self.lost: str | None = None
        #: What is damaged or missing of the state; every request fails then, until a new job begins.
        self.damage: str | None = None

    # programs

    def add_program(self, blob: bytes) -> str:
        """Keep a program, and return its digest."""
        with self.lock:
            digest = self.programs.add(blob)
            self.journal.keep_program(digest, blob)
        return digest

    # reading

    def pull(
        self,
        numbers: Sequence[int],
        versions: Sequence[int] | None = None,
        types: Mapping[int, str] | None = None,
    ) -> list[tuple[int, int, Array]]:
        """Return number, version and value of each variable that is newer than a client's copy.

        The values do not change; those of tables are copied.

        Args:
            versions: those of the client's copies, of this lineage; -1 for none, None for none at all.
            types: by number, to which values are rounded.
        """
        if versions is not None and len(versions) != len(numbers):
            raise InvalidArgumentError(
                f"A pull must have one version for each variable. Received: {len(numbers)} variables, "
                f"{len(versions)} versions."
            )
        with self.lock:
            self._check_state()
            found = [find(self.variables, n) for n in numbers]
            return [
                (n, v.version, v.sent((types or {}).get(n)))
                for i, (n, v) in enumerate(zip(numbers, found, strict=True))
                if versions is None or versions[i] != v.version
            ]

    def read(self, number: int, begin: int = 0, end: int | None = None) -> Array:
        """Return the value of a variable, or a part of it."""
        with self.lock:
            self._check_state()
            variable: DenseVariable | Table = find(self.variables, number)
            rows = variable.shape[0] if variable.shape else 0
            end = rows if end is None else end
            if not 0 <= begin <= end <= rows:
                raise InvalidArgumentError(
                    f"A part of {variable.spec.name!r} must lie within its {rows} rows. Received: from "
                    f"{begin} to {end}."
                )
            part = variable.host()[begin:end] if variable.shape else variable.host()
            return part if isinstance(variable, DenseVariable) else part.copy()

    def rows(self, number: int, indices: Array, dtype: str | None = None) -> Array:
        """Return a copy of some rows."""
        with self.lock:
            self._check_state()
            variable: DenseVariable | Table = find(self.variables, number)
            if isinstance(variable, DenseVariable):
                variable = Table(variable.spec, np.atleast_1d(variable.host()))
            rows = variable.rows(variable.check_rows(indices))
            return rows if dtype is None else rounded(rows, dtype)

    # changes

    def raise_generation(self, generation: int, chief: str = "") -> bool:
        """Note that a newer chief is there; return False where another one has taken its generation."""
        with self.lock:
            if generation < self.generation:
                raise InvalidArgumentError(
                    f"The chief of generation {self.generation} has taken over. Received: a chief of "
                    f"generation {generation}, which must end."
                )
            if generation > self.generation:
                # What is lost belongs to the job before.
                self.damage = None
                self._commit("generation", {"generation": generation}, ())
                self.generation, self.chief = generation, chief
            return chief == self.chief

    def reset(self, lineage: str | None = None, request: int = 0) -> None:
        """Drop all variables, as a new job does; programs stay."""
        with self.lock:
            if request in self._request_dedup:
                return
            lineage = lineage or new_lineage()
            self._commit("reset", {"lineage": lineage, "request": request}, ())
            self.clear()
            self._request_dedup.note(request)
            self.lineage = lineage

    def create(self, news: Sequence[NewVariable], request: int = 0) -> list[int]:
        """Create variables, all or none, and return their numbers.

        A variable that exists, with the same shape and dtype, keeps its value.

        Raises:
            InvalidArgumentError: a variable exists with another shape, dtype, kind or role, or an initial
                value does not fit.
        """
        with self.lock:
            self._check_state()
            missing = self._missing(news)
            numbers = dict(zip(missing, range(self._next, self._next + len(missing)), strict=True))
            made = {
                n: missing[name].make(self._key(n), self.programs, self.journal)
                for name, n in numbers.items()
            }
            if made and request in self._request_dedup:
                raise InvalidArgumentError(
                    f"A request must be sent soon after it was made. Received: number {request:#x} again, "
                    "and its variables were dropped since."
                )
            if made:
                # A table's rows lie in a file of its own.
                logged = [
                    dataclasses.replace(new, value=None) if new.spec.kind == TABLE else new
                    for new in missing.values()
                ]
                meta, values = encode_news(logged)
                self._commit("create", {"variables": meta, "request": request}, values)
            for number, variable in made.items():
                self.variables[number] = variable
                self._numbers[variable.spec.name] = number
            self._next += len(made)
            self._request_dedup.note(request)
            return [self._numbers[new.spec.name] for new in news]

    def _missing(self, news: Sequence[NewVariable]) -> dict[str, NewVariable]:
        missing: dict[str, NewVariable] = {}
        for new in news:
            number = self._numbers.get(new.spec.name)
            known = missing.get(new.spec.name)
            there = self.variables[number].spec if number is not None else known and known.spec
            if there is not None and there != new.spec:
                raise InvalidArgumentError(
                    f"A variable's name is unique on a server. Received: {new.spec}, where there is {there}."
                )
            if there is None:
                missing[new.spec.name] = new
        return missing

    def write(
        self,
        number: int,
        value: Array,
        begin: int = 0,
        indices: Array | None = None,
        request: int = 0,
    ) -> bool:
        """Replace the value of a variable, or some of its rows.

        Args:
            value: the new value, or the new rows.
            begin: where the new rows begin.
            indices: the rows to replace, each once; None for those from `begin` on.
            request: its number, by which a repetition is recognized; 0 for none.

        Returns:
            Whether it was written now; False for one that was written before.
        """
        with self.lock:
            self._check_state()
            if request in self._request_dedup:
                return False
            variable = find(self.variables, number)
            if indices is None and value.shape == variable.shape and not begin:
                check_value(variable, value, "value")
            else:
                if not variable.shape:
                    check_value(variable, value, "value")
                if indices is None:
                    indices = np.arange(begin, begin + (len(value) if value.ndim else 0))
                as_table = Table(variable.spec, variable.host())
                indices = check_rows(as_table, indices, value, "new rows").astype(np.int64, copy=False)
            meta = {"number": number, "request": request, "rows": indices is not None}
            self._commit("write", meta, [value] if indices is None else [value, indices])
            variable.write(value, indices)
            self._request_dedup.note(request)
            return True

    def drop(self, numbers: Sequence[int], request: int = 0) -> None:
        """Drop variables, all or none; their numbers are not given again."""
        with self.lock:
            self._check_state()
            if request in self._request_dedup:
                return
            names = [find(self.variables, number).spec.name for number in numbers]
            self._commit("drop", {"numbers": list(numbers), "request": request}, ())
            for number, name in zip(numbers, names, strict=True):
                self.variables.pop(number, None)
                self._numbers.pop(name, None)
            self.dropped_count += 1
            self._request_dedup.note(request)

    def push(self, push: Push, is_replayed: bool = False) -> bool:
        """Apply what a closure has pushed: once, and as a whole or not at all.

        Args:
            is_replayed: whether it comes from a log: its batches were accepted when it came first.

        Raises:
            InvalidArgumentError: something in it does not fit; nothing is applied.
            UnknownProgramError: it needs a program that must be sent first; nothing is applied.
            StaleValuesError: another closure has used a batch of it; nothing is applied.
            StateLostError: the server must start again.
        """
        with self.lock:
            self._check_state()
            if self._is_applied(push.closure):
                self._move_watermark(push.watermark)
                return False
            check_push(push, self.variables, self.programs)
            if push.used and not is_replayed:
                self._check_batches(push)
            self.journal.begin(push.room, recurs=True)
            try:
                outcome = run_push(push, self.variables, self.programs, self.journal.stage)
                # The log's order is that of `encode`: the arrays are staged already.
                self.journal.commit("push", outcome.logged.encode()[0])
            except BaseException as error:
                self.journal.abort()
                if any(isinstance(v, DenseVariable) and v.is_gone for v in self.variables.values()):
                    self.lost = (
                        f"A push failed when a program had used up the memory of variables ({error}). The "
                        "server must start again, from its snapshot and log."
                    )
                    raise StateLostError(self.lost) from error
                raise
            outcome.apply(self.variables)
            self.applied_count += 1
            self._applied.add(push.closure)
            for name, number in push.used:
                self.used.setdefault(name, UsedBatches()).add(number)
            self._move_watermark(push.watermark)
            return True

    def _check_batches(self, push: Push) -> None:
        # What a killed worker had pushed may arrive after the next one has begun where this server was.
        for name, number in push.used:
            if name in self.used and number in self.used[name]:
                raise StaleValuesError(f"Batch {number} of {name} is in the updates of another closure.")

    def _commit(self, kind: str, meta: dict[str, Json], arrays: Sequence[Array]) -> None:
        self.journal.begin(sum(a.nbytes for a in arrays))
        try:
            self.journal.stage(arrays)
            self.journal.commit(kind, meta)
        except BaseException:
            self.journal.abort()
            raise

    def _key(self, number: int) -> str:
        return f"{self.lineage}-{number}"

    def table_keys(self) -> set[str]:
        """Return the keys by which the journal knows the tables."""
        return {self._key(n) for n, v in self.variables.items() if isinstance(v, Table)}

    def _check_state(self) -> None:
        if self.lost is not None:
            raise StateLostError(self.lost)
        if self.damage is not None:
            raise ClusterError(self.damage)

    def check_count(self, count: int) -> None:
        """Raise an error where a client knows of more updates than there are."""
        if count > self.applied_count:
            known = LogPosition(updates=count, generation=self.generation)
            found = dataclasses.replace(known, updates=self.applied_count)
            self.damage = describe_loss(known, found, "the files are those of an earlier time", is_last=False)
        self._check_state()

    # closures

    def _is_applied(self, closure: int) -> bool:
        return closure < self.watermark or closure in self._applied

    def _move_watermark(self, watermark: int) -> None:
        if watermark > self.watermark:
            self.watermark = watermark
            self._applied = {c for c in self._applied if c >= watermark}

    # snapshots and logs

    def state(self) -> tuple[dict[str, Json], list[Array]]:
        """Return all but the rows of tables: something that JSON can hold, and dense values, not copied."""
        with self.lock:
            self._check_state()
            variables = [
                v.spec.encode() | {"number": n, "version": v.version} for n, v in self.variables.items()
            ]
            meta = {
                "lineage": self.lineage,
                "generation": self.generation,
                "next": self._next,
                "dropped_count": self.dropped_count,
                "applied_count": self.applied_count,
                "watermark": self.watermark,
                "applied": sorted(self._applied),
                "answered": self._request_dedup.encode(),
                "used": {name: used.encode() for name, used in self.used.items()},
                "variables": variables,
            }
            return meta, [v.host() for v in self.variables.values() if isinstance(v, DenseVariable)]

    def load(self, meta: dict[str, Json], arrays: Sequence[Array]) -> None:
        """Take over what `state` has returned; the rows of tables come from the journal."""
        with self.lock:
            self.clear()
            left = list(arrays)
            self.lineage, self.generation = checked_lineage(meta), whole(meta, "generation")
            self.chief = ""
            for entry in listed(meta, "variables"):
                spec = StoredSpec.decode(entry)
                number, version = whole(entry, "number"), whole(entry, "version")
                if spec.kind == TABLE:
                    memory = self.journal.table(self._key(number), spec)
                    variable: DenseVariable | Table = Table(spec, memory.rows, version, memory.checksums)
                else:
                    variable = DenseVariable(spec, np.array(left.pop(0)), version)
                    check_value(variable, np.broadcast_to(np.zeros((), spec.dtype), spec.shape), "value")
                self.variables[number] = variable
                self._numbers[spec.name] = number
            self._next, self.applied_count = whole(meta, "next"), whole(meta, "applied_count")
            self.dropped_count = whole(meta, "dropped_count")
            self.watermark, self._applied = whole(meta, "watermark"), set(ints(meta, "applied"))
            self._request_dedup = RequestDedup(*listed(meta, "answered"))
            used = mapping(meta, "used")
            self.used = {name: UsedBatches.decode(used, name) for name in used}

    def replay(self, kind: str, meta: dict[str, Json], arrays: Sequence[Array]) -> None:
        """Apply a change from a log again."""
        if kind == "push":
            self.push(Push.decode(meta, arrays), is_replayed=True)
        elif kind == "write":
            indices = arrays[1] if meta["rows"] else None
            self.write(meta["number"], arrays[0], indices=indices, request=meta["request"])
        elif kind == "create":
            self.create(decode_news(meta["variables"], arrays), meta["request"])
        elif kind == "drop":
            self.drop(meta["numbers"], meta["request"])
        elif kind == "generation":
            self.raise_generation(whole(meta, "generation"))
        else:
            self.reset(checked_lineage(meta), meta["request"])


def checked_lineage(meta: Mapping[str, Json]) -> str:
    """Return the lineage that a file names: names of tables' files begin with it.

    >>> checked_lineage({"lineage": "../x"})
    Traceback (most recent call last):
        ...
    unisono.InvalidArgumentError: A lineage must be a hexadecimal number. Received: '../x'.
    """
    lineage = text(meta, "lineage", 100)
    if not re.fullmatch("[0-9a-f]+", lineage):
        raise InvalidArgumentError(f"A lineage must be a hexadecimal number. Received: {lineage!r}.")
    return lineage


def new_lineage() -> str:
    """Return a random name for a history of changes, within which versions can be compared."""
    return secrets.token_hex(8)
