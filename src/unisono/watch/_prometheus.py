"""Numbers of a job for Prometheus: read anew at each request, in its text format."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from unisono._errors import InvalidArgumentError, MissingPackageError
from unisono.cluster_resolver._spec import split_address, with_port
from unisono.watch._job import WatchedJob, WatchedTask
from unisono.watch._terminal import JobSource

if TYPE_CHECKING:
    from prometheus_client.core import Metric

#: All states: each has a number, 0 or 1.
_STATES = ("starts", "runs", "restarts", "ended", "failed")
_LOOPBACK = "127.0.0.1"

#: Numbers of the job: names, texts, and where they are.
_OF_JOB: dict[str, tuple[str, Callable[[WatchedJob], float | None]]] = {
    "step": ("Steps of the run so far.", lambda job: job.step),
    "steps": ("Steps of the whole training.", lambda job: job.steps),
    "epoch": ("The running epoch, from 1.", lambda job: job.epoch),
    "epochs": ("Epochs of the training.", lambda job: job.epochs),
    "left_seconds": ("Seconds until the end of the training.", lambda job: job.left_s),
    "started_seconds": ("When the launch began, in seconds since the epoch.", lambda job: job.started),
    "generation": ("Which start of all tasks this is, from 0.", lambda job: job.generation),
    "restarts_left": ("Restarts that are allowed at this moment.", lambda job: job.restarts_left),
    "exit_code": ("The exit code of the launcher.", lambda job: job.exit_code),
    "backup_step": ("The step of the last backup.", lambda job: job.backup.step if job.backup else None),
    "backup_age_seconds": (
        "How old the last backup is.",
        lambda job: job.backup.age_s if job.backup else None,
    ),
}
#: The same of each task.
_OF_TASK: dict[str, tuple[str, Callable[[WatchedTask], float | None]]] = {
    "up": ("Whether the process of the task runs.", lambda task: float(not task.has_ended)),
    "step": ("The last step that the task wrote.", lambda task: task.step),
    "steps_per_second": ("Steps a second.", lambda task: task.steps_per_s),
    "rows_per_second": ("Rows of all replicas a second.", lambda task: task.rows_per_s),
    "tokens_per_second": ("Tokens of all replicas a second.", lambda task: task.tokens_per_s),
    "data_ratio": ("The share of the time in which the host waited for data.", lambda task: task.data),
    "compute_ratio": ("The share of the time in which devices computed.", lambda task: task.compute),
    "exchange_ratio": ("The share of the time in which they only exchanged.", lambda task: task.exchange),
    "flops_per_second": ("Operations of one device a second.", lambda task: task.flops_per_s),
    "mfu_ratio": ("The share of the device's peak of operations.", lambda task: task.mfu),
    "host_bytes": ("The memory of the process.", lambda task: task.host_bytes),
    "device_bytes": ("The most memory in use on one of its devices.", lambda task: task.device_bytes),
    "heartbeat_age_seconds": ("How long ago the task wrote progress.", lambda task: task.heartbeat_s),
    "generation": ("The generation of the process, from 0.", lambda task: task.generation),
}


def families_of(job: WatchedJob) -> Iterator[Metric]:
    """Give the numbers of a job, as Prometheus' client has them."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

    info = InfoMetricFamily("unisono_job", "What runs.")
    info.add_metric([], {"title": job.title, "command": job.command})
    yield info
    state = GaugeMetricFamily("unisono_state", "The state of the job.", labels=["state"])
    for each in _STATES:
        state.add_metric([each], float(job.state == each))
    yield state
    for name, (text, of_job) in _OF_JOB.items():
        if (value := of_job(job)) is not None:
            yield GaugeMetricFamily(f"unisono_{name}", text, value=value)
    yield CounterMetricFamily("unisono_restarts", "Restarts of all tasks, or of one.", value=job.restarts)
    faults = CounterMetricFamily("unisono_faults", "Faults of the job, by their kind.", labels=["kind"])
    for kind in ("failure", "stall", "restart", "recovery", "preemption"):
        faults.add_metric([kind], sum(fault.kind == kind for fault in job.faults))
    yield faults
    logs = GaugeMetricFamily("unisono_log", "The last value of a number in Keras' logs.", labels=["name"])
    for curve in job.curves:
        if curve.points and curve.name not in ("rows_per_s", "tokens_per_s", "host_bytes"):
            logs.add_metric([curve.name], curve.points[-1][1])
    yield logs
    for name, (text, of_task) in _OF_TASK.items():
        family = GaugeMetricFamily(f"unisono_task_{name}", text, labels=["task", "host"])
        for task in job.tasks:
            if (number := of_task(task)) is not None:
                family.add_metric([task.name, task.host], number)
        yield family


class JobCollector:
    """Reads a job where Prometheus asks for its numbers; requests are answered one by one."""

    def __init__(self, source: JobSource) -> None:
        self._source, self._lock = source, threading.Lock()

    def collect(self) -> Iterator[Metric]:
        """Give the numbers of now; see `prometheus_client.registry.Collector`."""
        with self._lock:
            job = self._source.refresh()
        yield from families_of(job)


class MetricsServer:
    """Answers `GET /metrics`.

    Args:
        address: `PORT`, for this machine alone, or `HOST:PORT`; port 0 is a free one.

    Raises:
        InvalidArgumentError: it is no address, or the port is in use.
        MissingPackageError: without the extra `prometheus`.
    """

    def __init__(self, source: JobSource, address: str) -> None:
        try:
            import prometheus_client
        except ImportError:
            raise MissingPackageError(
                "`--metrics` needs the package `prometheus_client`. Received: a Python without it. Write "
                "`pip install 'unisono[prometheus]'`.",
                name="prometheus_client",
            ) from None
        host, port = _parse(address)
        registry = prometheus_client.CollectorRegistry(auto_describe=False)
        registry.register(JobCollector(source))
        try:
            self._server, self._thread = prometheus_client.start_http_server(port, host, registry)
        except OSError as error:
            raise InvalidArgumentError(
                f"`--metrics` must be a free port of this machine. Received: {address!r} "
                f"({error.strerror or error}). Write another one, or 0 for any."
            ) from None
        self.url = f"http://{with_port(host, self._server.server_port)}/metrics"

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _parse(address: str) -> tuple[str, int]:
    try:
        host, port = split_address(with_port(_LOOPBACK, int(address)) if address.isdigit() else address)
    except (InvalidArgumentError, ValueError):
        host, port = "", -1
    if not host or not 0 <= port <= 65535:
        raise InvalidArgumentError(
            f"`--metrics` must be PORT or HOST:PORT. Received: {address!r}. Write `--metrics 9100`, which "
            "other machines do not reach, or `--metrics 0.0.0.0:9100`."
        )
    return host, port


def serve_metrics(source: JobSource, address: str, say: Callable[[str], Any]) -> None:
    """Answer Prometheus until Ctrl-C or SIGTERM.

    Args:
        say: is given the address, for people.
    """
    server = MetricsServer(source, address)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    say(f"unisono: metrics of {source.name} at {server.url}; Ctrl-C ends this")
    try:
        ended.wait()
    except KeyboardInterrupt:
        pass
    finally:
        server.close()
