"""Mistakes in how tasks find each other, watch each other, and end."""

from tests.simulation import _mistakes
from tests.simulation._planted import Mistake

_RENDEZVOUS = "unisono.cluster.rendezvous"
_LIVENESS = "unisono.cluster.liveness"
_CLIENT = "cluster.rendezvous._client:RendezvousClient"


def _of_rendezvous(name, place, old, new):
    return Mistake(name, f"{_RENDEZVOUS}.{place}", old, new, "rendezvous")


def _of_peers(name, place, old, new):
    return Mistake(name, f"{_LIVENESS}.{place}", old, new, "peers")


MISTAKES = (
    _of_rendezvous(
        "a process of an older generation is admitted",
        "_protocol:admit",
        "if newest is not None and own is not None and own < newest:",
        "if False:",
    ),
    _of_rendezvous(
        "older processes stay when a newer generation connects",
        "_protocol:admit",
        "state.connected.items() if is_newer else ()",
        "()",
    ),
    _of_rendezvous(
        "a second process of a number takes the place of the first",
        "_protocol:admit",
        "if first is not None and first.token != member.token:",
        "if False:",
    ),
    _of_rendezvous(
        "a process whose connection is lost counts as connected",
        "_server:RendezvousServer._disconnect",
        "self._state = _protocol.disconnect(self._state, peer.process_id)",
        "pass",
    ),
    _of_rendezvous(
        "a message is thought to arrive whole",
        "_protocol:take_frame",
        "if len(inbox) < _HEADER.size + length:",
        "if False:",
    ),
    _of_rendezvous(
        "the socket of a failed attempt stays open",
        "_client:RendezvousClient._connect",
        "if sock is not None:",
        "if False:",
    ),
    _of_rendezvous(
        "another program at the address ends a process",
        "_client:RendezvousClient._receive",
        'raise _RetryError(f"another program answers there: {problem}") from problem',
        "raise ClusterError(str(problem)) from problem",
    ),
    _of_rendezvous(
        "a process that waits is not answered when time is over",
        "_protocol:outcome",
        "late = now >= state.began_at + state.start_up",
        "late = False",
    ),
    _of_rendezvous(
        "a process gives up at the first attempt",
        "_client:RendezvousClient.run",
        "if remaining <= 0:",
        "if True:",
    ),
    _of_rendezvous(
        "an older process 0 is not told why it ends",
        "_server:RendezvousServer._admit",
        "self._eviction = admission.evicted.get(0, self._eviction)",
        "pass",
    ),
    _mistakes.Mistake(
        "the time of a rendezvous is measured by the wall clock",
        ("rendezvous",),
        f"{_CLIENT}.__init__",
        "self._began_at = began_at",
        "self._began_at = time.time()",
        more=(
            (f"{_CLIENT}._remaining", "grace - time.monotonic()", "grace - time.time()"),
            (
                f"{_CLIENT}._until_reminder",
                "REMIND_SECONDS - time.monotonic()",
                "REMIND_SECONDS - time.time()",
            ),
        ),
    ),
    _of_rendezvous(
        "a silent process 0 is called a missing process",
        "_protocol:overdue_text",
        'if any(line.startswith("missing") for line in lines):',
        "if True:",
    ),
    _of_peers(
        "a process that is stopped counts as a lost machine",
        "_watchdog:PeerWatchdog._find_lost",
        "if isinstance(error, UnreachableError)}",
        "if isinstance(error, AbsentError)}",
    ),
    _of_peers(
        "one look without an answer is enough",
        "_watchdog:PeerWatchdog._find_lost",
        "limit = _PERIODS * self._period",
        "limit = 0.0",
    ),
    _of_peers(
        "a connection that is reset counts as an end",
        "_status_server:_PeerRequest.advance",
        "except ConnectionRefusedError:",
        "except ConnectionError:",
    ),
    _of_peers(
        "others are not told who is lost",
        "_peer_monitor:PeerMonitor.broadcast_lost",
        "remaining = [p for p in self._peers.others if p not in lost]",
        "remaining = []",
    ),
    _of_peers(
        "a wait for the next worker is not watched",
        "_peer_monitor:PeerMonitor.begin",
        "with self.status.in_flight.collective():",
        "if True:",
    ),
    # That a worker asks on which was told to end is harmless: while it asks, a collective counts as in
    # flight, so that the watchdog ends it, after 5 s at most. So the mistake is another one.
    _of_peers(
        "steps are compared with those of the worker after the next",
        "_peer_monitor:PeerMonitor._compare_with_next",
        "(self._peers.own + 1)",
        "(self._peers.own + 2)",
    ),
    _of_peers(
        "a file counts as written before it is",
        "_status:WorkerStatus.answer",
        '"done": written or self._has_passed(question)}',
        '"done": True}',
    ),
    _of_peers(
        "a file that the first worker could not write is waited for",
        "_status:WorkerStatus._has_passed",
        "(isinstance(at, int) and self.collectives_begun > at)",
        "False",
    ),
    _of_peers(
        "each worker numbers checkpoints itself",
        "_peer_monitor:PeerMonitor.agree_on_number",
        'number = int(answer["number"])',
        "pass",
    ),
    _of_peers(
        "an older file of the same name counts as the next one",
        "_peer_monitor:PeerMonitor.agree_on_number",
        "index = self.status.num_checkpoints(series)",
        "index = max(0, self.status.num_checkpoints(series) - 1)",
    ),
    _of_peers(
        "a process is ready before it has met its cluster",
        "_health:HealthServer._status_of",
        "is_well = self.is_ready or line[1] == LIVE.encode()",
        "is_well = True",
    ),
    _of_peers(
        "a request without an end is kept",
        "_health:HealthServer._answer",
        "if len(inbox) > _REQUEST_BYTES:",
        "if False:",
    ),
    _of_peers(
        "the end of programs is sent once",
        "_peer_monitor:PeerMonitor._end_all",
        "deadline = time.monotonic() + seconds",
        "deadline = 0.0",
    ),
    _of_peers(
        "a lost question is not asked again",
        "_status_server:_PeerRequest.connect",
        'self._retry(f"no connection can be opened to it ({_describe(error)})")',
        "self.answer = EndedError()",
    ),
    _of_peers(
        "a question without the secret is answered",
        "_status_server:StatusServer._answer",
        " or not hmac.compare_digest(_encoded(secret), self._secret)",
        "",
    ),
    _of_peers(
        "who ends early is not noticed",
        "_peer_monitor:PeerMonitor._blocked",
        'and s["collectives_begun"] > self.status.collectives_begun',
        "and False",
    ),
    _of_peers(
        "a blocked process does not end when all must",
        "_watchdog:PeerWatchdog._run",
        "if now - aborted_since >= min(_GRACE, self._period):",
        "if False:",
    ),
)
