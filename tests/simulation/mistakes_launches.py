"""Mistakes in how a launch is watched, ended and started again."""

from tests.simulation._planted import Mistake

_POLICY = "unisono.launcher._restart_policy"
_SUPERVISOR = "unisono.launcher._supervisor"
_GENERATION = "unisono.launcher._generation"
_HEART = "unisono.cluster.liveness._heartbeat_file"
_WRITER = "unisono.checkpoint._writer"
_CONSENSUS = "unisono.checkpoint.preemption._save_consensus"
_STALLS = "unisono.launcher._stall_detector"
_PROCESSES = "unisono.launcher._processes"
_LEASE = "unisono._system._lease"
_BOOK = "unisono.standalone._lease_book"
_AGENT = "unisono.standalone._agent"


def _mistake(name, place, old, new, protocol="generations"):
    return Mistake(name, place, old, new, protocol)


MISTAKES = (
    _mistake("the fence is not read", f"{_HEART}:HeartbeatFile.beat", "self._exit_if_replaced()", "pass"),
    _mistake("the fence is not raised", f"{_SUPERVISOR}:Supervisor._plan", "self._raise_fence(plan)", "pass"),
    _mistake(
        "a restart is counted by the wall clock",
        f"{_SUPERVISOR}:Supervisor._sleep",
        "time.monotonic() + seconds",
        "time.time() + seconds",
    ),
    _mistake("the last failure counts", f"{_POLICY}:root_cause", "return min(", "return max("),
    _mistake(
        "a consequence counts as the cause",
        f"{_POLICY}:_rank",
        "return 2 if _LOST_PEER.search(failure.detail) else 0",
        "return 0",
    ),
    _mistake(
        "a stopped task is not killed",
        f"{_POLICY}:next_action",
        "now >= _kill_time(state, state.ending)",
        "False",
    ),
    _mistake(
        "a failure ends the launch",
        f"{_POLICY}:next_generation",
        "if len(recent) > options.restarts:",
        "if len(recent) >= options.restarts:",
    ),
    _mistake(
        "a stall is not noticed", f"{_STALLS}:find_stall", "if not timeout or not any", "if True or not any"
    ),
    _mistake("a task that ended is waited for", f"{_POLICY}:_all_ended", "t.code is not None", "t.code == 0"),
    _mistake(
        "the end is not signalled", f"{_WRITER}:BackgroundWriter._work", "self._idle.notify_all()", "pass"
    ),
    _mistake(
        "unfinished work is counted late",
        f"{_WRITER}:BackgroundWriter.submit",
        "self._unfinished += 1",
        "pass",
    ),
    _mistake(
        "each worker plans by its own pace",
        f"{_CONSENSUS}:PeriodicConsensus.agree",
        "max(seconds for _, seconds in answers)",
        "taken / steps",
    ),
    _mistake(
        "restarts have no limit",
        f"{_POLICY}:next_generation",
        "if len(recent) > options.restarts:",
        "if False:",
    ),
    _mistake(
        "a task that saved has failed",
        f"{_GENERATION}:TaskGroup._note_end",
        "code not in (0, RESTART_WANTED)",
        "code != 0",
        "preemptions",
    ),
    _mistake(
        "the tasks are not asked to save",
        f"{_GENERATION}:TaskGroup._ask_to_end",
        "process.send(signal.SIGTERM)",
        "process.kill()",
        "preemptions",
    ),
    _mistake(
        "the number of workers is not that of the machines",
        f"{_POLICY}:worker_target",
        "return min(most - dropped, room)",
        "return most - dropped",
        "preemptions",
    ),
    _mistake(
        "a single failure takes a worker away",
        f"{_POLICY}:worker_target",
        "failed.count(task) // 2",
        "failed.count(task)",
    ),
    _mistake(
        "a launch grows and does not shrink",
        f"{_POLICY}:wants_resize",
        "target != workers",
        "target > workers",
        "preemptions",
    ),
    _mistake(
        "a launch shrinks and does not grow",
        f"{_POLICY}:wants_resize",
        "target != workers",
        "target < workers",
        "preemptions",
    ),
    _mistake(
        "a launch that was stopped goes on",
        f"{_POLICY}:_ending_now",
        "if state.signals:",
        "if False:",
        "preemptions",
    ),
    _mistake(
        "a stopped launch always asks for another",
        f"{_POLICY}:stopped_code",
        "RESTART_WANTED in codes and set(codes) <= {0, RESTART_WANTED}",
        "True",
    ),
    _mistake(
        "a stopped launch never asks for another",
        f"{_POLICY}:stopped_code",
        "RESTART_WANTED if saved and number != signal.SIGINT else 128 + number",
        "128 + number",
        "preemptions",
    ),
    _mistake(
        "each worker saves after its own step",
        f"{_CONSENSUS}:PeriodicConsensus.agree",
        "any(wants for wants, _ in answers)",
        "wanted",
        "preemptions",
    ),
    _mistake(
        "all workers must want to save",
        f"{_CONSENSUS}:PeriodicConsensus.agree",
        "any(wants for wants, _ in answers)",
        "all(wants for wants, _ in answers)",
        "preemptions",
    ),
    _mistake(
        "a worker ends while another saves",
        f"{_CONSENSUS}:PeriodicConsensus.finish",
        'self._gather(b"")',
        "pass",
        "preemptions",
    ),
    _mistake(
        "a restart after a save counts as a failure",
        f"{_POLICY}:next_generation",
        "if ending.first is None and not options.restarts:",
        "if ending.first is None:",
        "preemptions",
    ),
    _mistake(
        "spares outlive the launch",
        f"{_PROCESSES}:SparePool.close",
        "kill_all(self._waiting)",
        "pass",
        "preemptions",
    ),
    _mistake(
        "there are more and more spares",
        f"{_PROCESSES}:SparePool.fill",
        "len(self._waiting) >= self._count or now < self._next",
        "now < self._next",
        "preemptions",
    ),
    _mistake(
        "a lease does not end", f"{_LEASE}:Lease.is_over", "self.silence > self.seconds", "False", "leases"
    ),
    _mistake(
        "a lease is not renewed by requests",
        f"{_BOOK}:LeaseBook.check",
        "held.lease.renew()",
        "pass",
        "leases",
    ),
    _mistake(
        "time in which a server is stopped counts",
        f"{_LEASE}:ActiveClock.now",
        "min(now - self._last, self._gap)",
        "now - self._last",
        "leases",
    ),
    _mistake(
        "the clock of leases stands still", f"{_LEASE}:ActiveClock.now", "self._last = now", "pass", "leases"
    ),
    _mistake(
        "a second client takes the server",
        f"{_BOOK}:LeaseBook.claim",
        "if held is None:",
        "if True:",
        "leases",
    ),
    _mistake(
        "a job begins again after its END",
        f"{_BOOK}:LeaseBook.end",
        "self._ended.append(self.held.job)",
        "pass",
        "leases",
    ),
    _mistake(
        "any job may ask",
        f"{_BOOK}:LeaseBook.check",
        "held is None or held.job != job or held.ends",
        "held is None",
        "leases",
    ),
    _mistake(
        "requests are answered while a job is being ended",
        f"{_BOOK}:LeaseBook.check",
        " or held.ends",
        "",
        "leases",
    ),
    _mistake(
        "the server is free before its processes have ended",
        f"{_AGENT}:Agent._end_in_thread",
        "self._kill(job)",
        "pass",
        "leases",
    ),
    _mistake(
        "a silent client's processes are only asked to end",
        f"{_AGENT}:Agent._end_silent",
        "self._kill(job)",
        "pass",
        "leases",
    ),
    _mistake(
        "processes of a silent client run on",
        f"{_AGENT}:Agent._end_silent",
        "if held.is_over:",
        "if False:",
        "leases",
    ),
    _mistake(
        "an END is not answered",
        f"{_AGENT}:Agent._end_in_thread",
        "threading.Thread(target=run",
        "threading.Thread(target=lambda: None",
        "leases",
    ),
    # when a launch is asked to stop
    _mistake(
        "the tasks are not asked to save",
        f"{_GENERATION}:TaskGroup._ask_to_end",
        "process.send(signal.SIGTERM)",
        "process.kill()",
    ),
)
