"""Hosts whose links fail, that freeze, and whose clocks differ."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from tests.cluster.host_tasks import LIMIT, PORT, PROGRAM, Tasks, single_device_weights, weights
from tests.cluster.standalone_support import KEY, until
from tests.hosts import DEBIAN, Hosts, require_hosts

#: The backups of the steps before a fault.
EARLY = {"backup-1", "backup-2"}

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def hosts():
    require_hosts()
    with Hosts(3, etc_hosts=DEBIAN) as found:
        yield found


class Job:
    """Workers, one on each host, whose chief waits after 20 steps; all hosts share the folder of backups.

    The chief alone cannot take the steps until the third backup, of step 30.
    """

    def __init__(self, hosts, root, count, flags=(), own=None):
        self.backups, self._pause = root / "backups", root / "pause"
        self._pause.mkdir()
        cluster = {"worker": [f"{hosts.address(i)}:{PORT + i}" for i in range(count)]}
        flags = [*flags, "--pause", self._pause, "--backup", self.backups]
        self.tasks = Tasks(hosts, root, cluster, flags, own)

    def wait_for_pause(self):
        # Backups are written beside the steps.
        until(lambda: self.has_ended() or ((self._pause / "waits").exists() and self.saved()), LIMIT)
        assert not self.has_ended(), self.tasks.text

    def has_ended(self):
        return any(process.poll() is not None for process in self.tasks.processes.values())

    def go_on(self):
        (self._pause / "go").touch()

    def saved(self):
        """The complete backups: each has another number."""
        return sorted(path.parent.name for path in self.backups.glob("backup-*/MANIFEST.json"))

    def restart(self):
        for job, index in list(self.tasks.processes):
            self.tasks.start(job, index)


@pytest.fixture
def begun(hosts, tmp_path):
    """Starts a `Job`, whose tasks end with the test."""
    jobs = []

    def begin(*args, **options):
        jobs.append(Job(hosts, tmp_path, *args, **options))
        jobs[-1].wait_for_pause()
        return jobs[-1]

    yield begin
    for job in jobs:
        for process in job.tasks.processes.values():
            process.kill()


def test_a_link_that_is_lost_for_three_seconds_changes_nothing(hosts, begun):
    """The clock of one host is ten minutes ahead."""
    job = begun(2, own={("worker", 1): {"clock": 600.0}})
    with hosts.unplugged(1):
        job.go_on()
        time.sleep(3.0)
        assert not job.has_ended(), job.tasks.text
    assert job.tasks.wait() == [0, 0], job.tasks.text
    assert weights(job.tasks.text) == pytest.approx([single_device_weights()] * 2, rel=1e-5)


@pytest.mark.exhaustive
def test_a_link_that_is_lost_in_one_direction_ends_all_workers(hosts, begun):
    """All name it; none trains on or writes backups, also when all are started again, before it is mended."""
    job = begun(3, ["--heartbeat", 2])
    with hosts.dropped(1, 2):
        job.go_on()
        assert job.tasks.wait() == [1, 1, 1], job.tasks.text
        for log in job.tasks.logs.values():
            named = r"worker (1 of 3 lost worker 2|2 of 3 lost worker 1) at .*its machine cannot be reached"
            assert re.search(named, log.read_text()), job.tasks.text
        saved = job.saved()
        assert set(saved) <= EARLY
        job.restart()
        assert job.tasks.wait() == [1, 1, 1], job.tasks.text
        assert re.search(r"worker [12] at .* does not reach .*worker [12] at", job.tasks.log("worker", 0))
        assert job.saved() == saved
    job.restart()
    assert job.tasks.wait() == [0, 0, 0], job.tasks.text
    assert weights(job.tasks.text) == pytest.approx([single_device_weights()] * 3, rel=1e-5)


@pytest.mark.exhaustive
def test_a_chief_that_freezes_is_named_and_writes_nothing_when_it_thaws(hosts, begun):
    job = begun(2, ["--collective", 10, "--heartbeat", 2])
    hosts.kill(0, signal.SIGSTOP)
    try:
        job.go_on()
        assert job.tasks.processes["worker", 1].wait(LIMIT) == 1
        assert re.search(r"lost worker 0 at .*its process is stopped", job.tasks.log("worker", 1)), (
            job.tasks.text
        )
    finally:
        hosts.kill(0, signal.SIGCONT)
    assert job.tasks.wait() == [1, 1], job.tasks.text
    assert "lost worker 1" in job.tasks.log("worker", 0)
    assert set(job.saved()) <= EARLY
    assert not weights(job.tasks.text)


@pytest.mark.exhaustive
def test_a_server_that_is_cut_off_ends_its_tasks_and_the_client_continues(hosts, tmp_path):
    """The client continues on the other host, from the last backup of the first generation."""
    environ, unisono = {**os.environ, "UNISONO_CLUSTER_KEY": KEY}, [sys.executable, "-m", "unisono"]
    options = {"cwd": tmp_path, "env": environ, "stderr": subprocess.STDOUT, "text": True}
    pause, every, started = tmp_path / "pause", [f"{hosts.address(i)}:{PORT + 10}" for i in range(2)], []
    pause.mkdir()
    try:
        for i, address in enumerate(every):
            command = [
                *unisono,
                "serve",
                "--spares",
                0,
                "--dir",
                tmp_path / f"files-{i}",
                "--address",
                address,
            ]
            with (tmp_path / f"server-{i}").open("w") as log:
                started.append(hosts.start(i, *command, stdout=log, **options))
        until(lambda: all("serving at" in (tmp_path / f"server-{i}").read_text() for i in range(2)), LIMIT)
        command = [*unisono, "launch", "--cluster", ",".join(every), "--elastic", "1:2"]
        command += [PROGRAM, "--pause", pause, "--backup", tmp_path / "backups"]
        with (tmp_path / "client").open("w") as log:
            started.append(hosts.start(2, *command, stdout=log, **options))
        until(lambda: (pause / "waits").exists(), LIMIT)
        hosts.unplug(0)
        (pause / "go").touch()
        assert started[2].wait(LIMIT) == 0, (tmp_path / "client").read_text()
    finally:
        hosts.plug(0)
        for process in reversed(started):
            process.terminate()
            process.wait(LIMIT)
    text = (tmp_path / "client").read_text()
    assert weights(text) == pytest.approx([single_device_weights()], rel=1e-5), text
    assert "silent for" in (tmp_path / "server-0").read_text()


@pytest.mark.exhaustive
def test_every_worker_says_within_ten_seconds_what_it_waits_for(hosts, tmp_path):
    """A third one on a host whose name is not known; and a chief that packets do not reach."""
    started = [f"{hosts.address(i)}:{PORT + i}" for i in (0, 1)]
    whole = {"worker": [*started, f"no-such-host.invalid:{PORT}"]}
    own = {("worker", i): {"cluster": whole} for i in (0, 1)}
    tasks = Tasks(hosts, tmp_path, {"worker": started}, own=own)
    lone = {"worker": [f"{hosts.address(0)}:{PORT + 5}", f"{hosts.address(2)}:{PORT + 6}"]}
    (tmp_path / "lone").mkdir()
    apart = Tasks(hosts, tmp_path / "lone", {})
    apart.cluster, logs = lone, [*tasks.logs.values()]
    try:
        with hosts.dropped(2, 0):
            apart.start("worker", 1)
            logs += apart.logs.values()
            until(lambda: all(re.search("[Ww]ait(s|ing) for", log.read_text()) for log in logs), LIMIT)
    finally:
        for process in [*tasks.processes.values(), *apart.processes.values()]:
            process.kill()
    texts = [log.read_text() for log in logs]
    assert "The name 'no-such-host.invalid' of a host of the cluster is not known" in texts[0]
    missing = f"missing: process 2 at no-such-host.invalid:{PORT}, a name that the machine of process 0"
    for i in (0, 1):
        assert f"Process {i} waits for all processes to connect; {missing}" in texts[i]
    assert f"the first task of the cluster: {lone['worker'][0]} cannot be reached (timed out)" in texts[2]
