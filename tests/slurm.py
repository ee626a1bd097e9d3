"""A real Slurm on this machine: a controller and nodes, each a host with an address of its own.

`python -m tests.slurm` starts one with two nodes, prints how to use it, and ends it on Ctrl-C.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests import hosts

#: Seconds for anything that a cluster does while it starts; the machine may be busy.
_SECONDS = 120.0
_CONF = """\
ClusterName=unisono
SlurmctldHost=h0({controller})
AuthType=auth/munge
# A job is started again when its credential of the last time has expired: by default 121 s later, here 6.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
GresTypes=gpu
SelectTypeParameters=CR_Core
MpiDefault=none
ReturnToService=2
KillWait=5
SlurmdTimeout=6
MessageTimeout=5
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_min_interval=0,bf_interval=1
SchedulerTimeSlice=5
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=main Nodes=ALL Default=YES State=UP PriorityTier=1 GraceTime=30
PartitionName=urgent Nodes=ALL State=UP PriorityTier=10 PreemptMode=OFF
"""


def require_slurm():
    """Skip a test where this machine cannot have a Slurm of its own."""
    if reason := why_not():
        pytest.skip(reason)


@functools.cache
def why_not():
    """Return why this machine cannot have a Slurm, None where it can."""
    missing = [name for name in ("slurmctld", "slurmd", "munged", "mungekey") if not shutil.which(name)]
    if missing:
        return f"a Slurm needs the packages slurm-wlm and munge; missing: {', '.join(missing)}"
    if os.geteuid() != 0:
        return "a Slurm's daemons need root"
    return hosts.why_not()


class Slurm:
    """A controller on host h0, and nodes h1, h2, …, with the partitions `main` and `urgent`.

    A job in `urgent` preempts those in `main`, which are requeued after 30 s of SIGTERM.

    Args:
        nodes: how many.
        cpus: of each node, as Slurm counts them.
    """

    def __init__(self, nodes=2, cpus=4):
        self._numbers = range(1, nodes + 1)
        with contextlib.ExitStack() as stack:
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-slurm-")))
            names = [f"10.88.0.{n + 1} h{n}" for n in (0, *self._numbers)]
            etc_hosts = "127.0.0.1 localhost\n" + "".join(f"{line}\n" for line in names)
            self.hosts = stack.enter_context(hosts.Hosts(nodes + 1, etc_hosts=etc_hosts))
            self._daemons = {}
            # First ended, before their hosts.
            stack.callback(self._end)
            self._start_munge()
            self._configure(cpus)
            self._start("slurmctld", 0, "slurmctld", "-D", "-i")
            for n in self._numbers:
                self.start_node(n)
            self._wait_for_nodes()
            self._stack = stack.pop_all()

    def _start_munge(self):
        key = self.folder / "munge.key"
        subprocess.run(["mungekey", "-c", "-k", key], check=True, timeout=_SECONDS)
        self.folder.chmod(0o755)
        files = [f"--{name}={self.folder / f'munge.{name}'}" for name in ("socket",)]
        files += [f"--{name}-file={self.folder / f'munge.{name}'}" for name in ("key", "pid", "log", "seed")]
        self._start("munged", 0, "munged", "--foreground", "--force", *files)
        # The controller ends where it gets no answer at its start.
        ask = ("munge", "--no-input", f"--socket={self.folder / 'munge.socket'}")
        self._wait_for(
            lambda: not subprocess.run(ask, capture_output=True, timeout=_SECONDS, check=False).returncode,
            "munged does not answer",
        )

    def _configure(self, cpus):
        nodes = [
            f"NodeName=h{n} NodeAddr={self.hosts.address(n)} CPUs={cpus} RealMemory=4000 Gres=gpu:2"
            for n in self._numbers
        ]
        text = _CONF.format(folder=self.folder, controller=self.hosts.address(0), nodes="\n".join(nodes))
        # What counts as GPUs, and sets their variables, without any device behind it.
        (self.folder / "gres.conf").write_text(f"Name=gpu File={self.folder}/gpu[0-1]\n")
        for number in range(2):
            (self.folder / f"gpu{number}").touch()
        self.conf = self.folder / "slurm.conf"
        self.conf.write_text(text)
        for name in ("state", *(f"spool.h{n}" for n in self._numbers)):
            (self.folder / name).mkdir()

    def _start(self, name, host, *words):
        with (self.folder / f"{name}.out").open("ab") as out:
            options = {"stdout": out, "stderr": out, "env": self.environ if name != "munged" else None}
            self._daemons[name] = self.hosts.start(host, *words, **options)

    @property
    def environ(self):
        """The variables of this process, with the one that Slurm's commands need."""
        return {**os.environ, "SLURM_CONF": str(self.conf)}

    def start_node(self, n):
        """Start the daemon of node h<n>; its cable is in the switch, also after `kill_node`."""
        self.hosts.plug(n)
        self._start(f"h{n}", n, "slurmd", "-D", "-N", f"h{n}")

    def kill_node(self, n):
        """Kill the daemon of a node and the job's processes on it, and pull its cable: its power is gone."""
        self.hosts.unplug(n)
        # More than once: a process may start another one meanwhile.
        while self.hosts.processes(n):
            self.hosts.kill(n)
            self._daemons[f"h{n}"].poll()
        self._daemons.pop(f"h{n}").wait(_SECONDS)

    def run(self, *words, check=True):
        """Run a command of Slurm on h0; return what it writes."""
        done = subprocess.run(
            self.hosts.command(0, *words), env=self.environ, capture_output=True, text=True, timeout=_SECONDS,
            check=False,
        )  # fmt: skip
        assert not check or done.returncode == 0, f"{words}: {done.stderr}"
        return done.stdout

    def start(self, *words, **options):
        """Start a command on h0, as `subprocess.Popen` does."""
        return self.hosts.start(0, *words, **{"env": self.environ, **options})

    def _wait_for_nodes(self):
        idle = ("sinfo", "-h", "-N", "-p", "main", "-t", "idle")
        self._wait_for(
            lambda: len(self.run(*idle, check=False).splitlines()) == len(self._numbers),
            "the nodes have not started",
        )

    def _wait_for(self, condition, what):
        deadline = time.monotonic() + _SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"{what}: {self.logs()}"
            time.sleep(0.1)

    def logs(self):
        """What the daemons have written."""
        files = [*self.folder.glob("*.log"), *self.folder.glob("*.out")]
        return "\n".join(f"== {f.name}\n{f.read_text(errors='replace')[-3000:]}" for f in files)

    def _end(self):
        for process in self._daemons.values():
            process.terminate()
        for process in self._daemons.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(10)

    def close(self):
        """End the jobs, the daemons and the hosts."""
        self._stack.close()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(reason)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt), Slurm() as slurm:
        enter = " ".join(slurm.hosts.command(0)[:-4])
        print(f"export SLURM_CONF={slurm.conf}\n{enter} bash   # on h0, with the nodes h1 and h2", flush=True)
        signal.pause()
