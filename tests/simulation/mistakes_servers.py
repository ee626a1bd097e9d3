"""Mistakes in `rpc` and in the parameter servers: what people get wrong in protocols of this kind."""

from tests.simulation._mistakes import Mistake

_CALLS = "rpc._calls:PendingCalls"
_CLIENT = "parameter_server.server._client"
_SERVER = "parameter_server.server._server:VariableServer"
_STORE = "parameter_server.server._store:VariableStore"
_STATE = "parameter_server.state"
_CHIEF = "parameter_server.chief"
_WORKER = "parameter_server.worker._step_worker:StepWorker"

#: Protocols whose servers live, and those whose servers are killed.
_LIVE, _KILLED = ("pushes",), ("restarts",)
_BOTH = ("pushes", "restarts")
_CLOSURES = ("closures", "closures_and_restarts")

MISTAKES = (
    # --- calls
    Mistake(
        "an answer that nobody waits for any more keeps its bytes",
        ("calls",), f"{_CALLS}.wait", "self.forget(frame.request)", "pass",
    ),
    Mistake(
        "bytes of answered requests are not given back",
        ("calls",), f"{_CALLS}._take", "self.bytes_in_flight -= entry.size", "pass",
    ),
    Mistake(
        "a deadline is compared with the wall clock",
        ("calls",), f"{_CALLS}.add", "now = time.monotonic()\n", "now = time.time()\n",
    ),
    Mistake(
        "after one late request no other is late",
        ("calls",), f"{_CALLS}.expire", "min(others, default=math.inf)", "math.inf",
    ),
    Mistake(
        "an answer goes to the oldest request",
        ("calls",), f"{_CALLS}.settle", "self._take(answer.request)",
        "self._take(min(self._waiting, default=0))",
    ),
    Mistake(
        "a request that is sent again gets another future",
        ("calls",), f"{_CALLS}.add", "if known is not None:", "if known is not None and False:",
    ),
    Mistake(
        "the bytes in flight have no limit",
        ("calls",), f"{_CALLS}.add", "while (\n                may_wait",
        "while (\n                False and may_wait",
    ),
    Mistake(
        "requests wait on after their connection was lost",
        ("calls",), f"{_CALLS}.fail_sent", "if entry.is_sent:", "if not entry.is_sent:",
    ),
    Mistake(
        "a client that was closed takes requests",
        ("calls",), f"{_CALLS}.add", "if self._refusal is not None:", "if False:",
    ),
    # --- clients
    Mistake(
        "a retry has a new number",
        _BOTH, f"{_CLIENT}:_Attempts.begin", "sent = self._client.send(self._frame,",
        "self.retries = getattr(self, 'retries', -1) + 1\n"
        "            n = self._frame.request + 65536 * self.retries\n"
        "            sent = self._client.send(__import__('dataclasses').replace(self._frame, request=n),",
    ),
    Mistake(
        "a request is not sent again",
        _LIVE, f"{_CLIENT}:_Attempts._lost", "if self._is_closed.is_set():", "if True:",
    ),
    Mistake(
        "absence is measured by the wall clock",
        _BOTH, f"{_CLIENT}:_Attempts._lost", "away = time.monotonic() - self._began",
        "away = time.time() - self._began",
    ),
    Mistake(
        "a request is repeated for ever",
        ("absence",), f"{_CLIENT}:_Attempts._lost", "if away >= self._absence_limit:", "if False:",
    ),
    Mistake(
        "an older answer to a pull replaces a newer one",
        ("pulls",), f"{_CLIENT}:ServerClient._note", "or self._known[keys[i]][0] < version", "or True",
    ),
    Mistake(
        "values of a job before are kept",
        ("restarts",), f"{_CLIENT}:ServerClient._note", "if key[0] != server}\n            elif",
        "}\n            elif",
    ),
    Mistake(
        "a pull is done with the first server's answer",
        _BOTH, f"{_CLIENT}:Countdown.one_done", "is_last = self._count == 0", "is_last = self._count <= 1",
    ),
    Mistake(
        "the numbers of all processes' requests begin alike",
        ("restarts", "closures_and_restarts"), "rpc._calls:RequestNumbers.__init__",
        "secrets.randbits(32) if client is None else client", "0",
    ),
    Mistake(
        "values to be rounded are known by their variable alone",
        _BOTH, f"{_CLIENT}:key_of", "else (server, number, dtype)", "else (server, number)",
    ),
    # --- servers
    Mistake(
        "a closure is applied as often as it comes",
        _LIVE, f"{_STORE}._is_applied", "closure < self.watermark or closure in self._applied", "False",
    ),
    Mistake(
        "pushes are told apart by their values",
        _LIVE, f"{_STORE}.push", "if self._is_applied(push.closure):",
        "seen = self.__dict__.setdefault('seen', set())\n"
        "            key = self.lineage, tuple(a.tobytes() for _, a in push.adds)\n"
        "            if key in seen or seen.add(key):",
    ),
    Mistake(
        "a closure's push completes those before it",
        _LIVE, f"{_STORE}.push", "self._applied.add(push.closure)", "self._move_watermark(push.closure + 1)",
    ),
    Mistake(
        "the closure at the watermark counts as ended",
        _BOTH, f"{_STORE}._is_applied", "closure < self.watermark", "closure <= self.watermark",
    ),
    Mistake(
        "the closure at the watermark is forgotten",
        _BOTH, f"{_STORE}._move_watermark", "if c >= watermark", "if c > watermark",
    ),
    Mistake(
        "a write is carried out as often as it comes",
        _BOTH, f"{_STORE}.write", "if request in self._request_dedup:\n                return False", "",
    ),
    Mistake(
        "a repeated HELLO drops the variables again",
        _BOTH, f"{_SERVER}._hello", "self.store.reset(request=frame.request)", "self.store.reset()",
    ),
    Mistake(
        "closures of an older chief are applied",
        _KILLED, f"{_SERVER}._push", "if generation < self.store.generation:", "if False:",
    ),
    Mistake(
        "an older chief may write",
        _KILLED, f"{_SERVER}._check",
        "if frame.op not in self._handlers:",
        "if frame.op is Op.WRITE and frame.generation < self.store.generation:\n            return\n"
        "        if frame.op not in self._handlers:",
    ),
    Mistake(
        "an older chief reads a newer one's values",
        _KILLED, f"{_SERVER}._check",
        "if frame.op is not Op.HELLO and 0 < frame.generation < self.store.generation:", "if False:",
    ),
    Mistake(
        "what a push pulls is from before it",
        _LIVE, f"{_SERVER}._push", "applied = self.store.push(push)",
        "if asked is not None:\n"
        "                pulled, values = self._pulled(asked)\n"
        "                answer = {'applied': self.store.push(push), 'count': self.store.applied_count}\n"
        "                return frame.answer(Op.OK, {**answer, 'pulled': pulled}, values)\n"
        "            applied = self.store.push(push)",
    ),
    Mistake(
        "a value that was rounded once stays",
        _LIVE, f"{_STATE}._variables:DenseVariable.replace", "self._array, self._rounded = value, None",
        "self._array = value",
    ),
    Mistake(
        "an update has no version of its own",
        _LIVE, f"{_STATE}._variables:DenseVariable.replace", "self.version += 1", "pass",
    ),
    # --- files
    Mistake(
        "a change is answered and never logged",
        _KILLED, f"{_STATE}._journal:FileJournal.commit", "self._records.commit(kind, meta)",
        "self._records.abort() if kind == 'push' else self._records.commit(kind, meta)",
    ),
    Mistake(
        "a push is acknowledged before it is logged",
        _KILLED, f"{_STORE}.push",
        "self.journal.commit(\"push\", outcome.logged.encode()[0])",
        "(self.journal.abort() if push.closure % 2 else "
        "self.journal.commit(\"push\", outcome.logged.encode()[0]))",
    ),
    Mistake(
        "the note of what was acknowledged is written before the change",
        _KILLED, f"{_STATE}._journal:FileJournal.commit", "if self.has_log:\n                self._records",
        "self.acknowledged.note(self.position.after(kind, meta))\n            if self.has_log:\n"
        "                self._records",
    ),
    Mistake(
        "a restart forgets which closures were applied",
        _KILLED, f"{_STORE}.load", "set(ints(meta, \"applied\"))", "set()",
    ),
    Mistake(
        "a restart forgets how far closures are complete",
        ("restarts", "logs"), f"{_STORE}.load", "self.watermark, self._applied = whole(meta, \"watermark\"),",
        "self.watermark, self._applied = 0,",
    ),
    Mistake(
        "a restart forgets which writes were carried out",
        ("logs", "restarts"), f"{_STORE}.load", "RequestDedup(*listed(meta, \"answered\"))", "RequestDedup()",
    ),
    Mistake(
        "a restart begins with the older image",
        _KILLED, f"{_STATE}._journal:FileJournal.read_image", "max(found, key=lambda f: f[0])",
        "min(found, key=lambda f: f[0])",
    ),
    Mistake(
        "one image is written over again and again",
        _KILLED, f"{_STATE}._journal:FileJournal.begin_log", "self._turn = 1 - self._turn", "pass",
    ),
    Mistake(
        "the log is emptied before the image is written",
        _KILLED, f"{_STATE}._journal:FileJournal.begin_log",
        "self._images[self._turn].write(self.position.number, state, arrays)",
        "self._records.begin(max(size, self._log_bytes), self.position.number + 1)\n"
        "            self._images[self._turn].write(self.position.number, state, arrays)",
    ),
    Mistake(
        "the log is repeated without its last change",
        _KILLED, "parameter_server.server._durable:DurableStore._replayed", "in changes:", "in changes[:-1]:",
    ),
    Mistake(
        "changes that the image has are repeated",
        ("logs",), f"{_STATE}._journal:FileJournal.changes", "if record[0] > after]", "]",
    ),
    # --- closures
    Mistake(
        "closures of a lost worker are forgotten",
        _CLOSURES, f"{_CHIEF}._closures:lose", "state = put_back(state, running.number)",
        "state = finish(state, running.number)",
    ),
    Mistake(
        "a closure that runs again has a new number",
        _CLOSURES, f"{_CHIEF}._queue:ClosureQueue.worker_lost",
        "self._state = decide.lose(self._state, worker)",
        "lost = [r.number for r in self._state.running if r.worker == worker]\n"
        "            for number in lost:\n"
        "                self._state = decide.finish(self._state, number)\n"
        "                self._state, new = decide.schedule(self._state)\n"
        "                closure = self._closures[new] = self._closures.pop(number)\n"
        "                closure.number = new\n"
        "            self._state = decide.lose(self._state, worker)",
    ),
    # Without the closures that run again the watermark is the same: they are sent before all others, the
    # lowest first, and it is read when one is sent. So the mistake is another one.
    Mistake(
        "the watermark passes closures that are in flight",
        _CLOSURES, f"{_CHIEF}._closures:Closures.watermark", ", *(r.number for r in self.running)", "",
    ),
    Mistake(
        "one update more than the bound is missed",
        _CLOSURES, f"{_CHIEF}._closures:_keeps_bound",
        "len(state.running) <= bound and all(state.others(r) < bound for r in state.running)",
        "len(state.running) <= bound + 1 and all(state.others(r) < bound + 1 for r in state.running)",
    ),
    Mistake(
        "the bound counts closures in flight alone",
        _CLOSURES, f"{_CHIEF}._closures:_keeps_bound",
        " and all(state.others(r) < bound for r in state.running)", "",
    ),
    Mistake(
        "a closure is answered before its updates are acknowledged",
        _CLOSURES, f"{_WORKER}._acknowledge", "if not pushes:", "if True:",
    ),
    Mistake(
        "a worker that was started again runs what the one before was sent",
        _CLOSURES, f"{_WORKER}.handle", "if frame.meta[\"incarnation\"] != self._incarnation:", "if False:",
    ),
    Mistake(
        "a worker that returns gets no programs",
        _CLOSURES, f"{_CHIEF}._workers:WorkerPool._welcome", "for setup in self._setups]",
        "for setup in self._setups if worker not in self._were_lost]",
    ),
    Mistake(
        "a late answer of a lost worker counts",
        _CLOSURES,
        f"{_CHIEF}._queue:ClosureQueue._ended",
        "not any(each is sent for each in self._state.running)", "False",
    ),
    Mistake(
        "the chief does not notice that an idle worker is lost",
        _CLOSURES, f"{_CHIEF}._workers:WorkerPool._on_instructed", "if isinstance(error, PeerLostError):",
        "if False:",
    ),
    Mistake(
        "a worker is taken for present after its connection was lost",
        _CLOSURES, f"{_CHIEF}._workers:WorkerPool._welcome",
        "sent.append(self._send(worker, Op.HEARTBEAT, {}, timeout=_ANSWER_WITHIN))", "pass",
    ),
    Mistake(
        "a worker follows an older chief",
        ("closures_and_restarts",), f"{_WORKER}._answer_hello", " or frame.generation < self._generation", "",
    ),
    Mistake(
        "a worker that is closed runs on",
        _CLOSURES, f"{_CHIEF}._workers:WorkerPool.end",
        "self._send(i, Op.END, {\"code\": code}, timeout=wait)",
        "self._send(i, Op.HEARTBEAT, {\"code\": code}, timeout=wait)",
    ),
    Mistake(
        "a server is not told that the job is over",
        _CLOSURES, f"{_SERVER}._end", "self.ended.set()", "pass",
    ),
    Mistake(
        "messages that hold several closures are answered after the first",
        _CLOSURES, "parameter_server.worker._batched_reply:BatchedReply.add",
        "if len(self._answers) < len(self._numbers):", "if not self._answers:",
    ),
)  # fmt: skip
