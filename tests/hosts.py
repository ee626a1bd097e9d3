"""Several hosts on this machine, as network namespaces: names, addresses, slow, cut and one-way links.

Each host has a network, a host name and an /etc/hosts of its own; files and process ids are shared. Nothing
outside of the namespaces changes, and nothing of them has a name that another run could use, too: they are
held by processes that end with this one, also when it is killed, together with all that runs on the hosts;
the kernel then removes them. Without root they belong to a user namespace, where the system allows that.
"""

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

#: Seconds for a command that sets something up.
_SECONDS = 60.0
#: As Debian and Ubuntu install it: the host's own name is an address that no other host reaches.
DEBIAN = "127.0.0.1 localhost\n127.0.1.1 {name}\n::1 localhost ip6-localhost ip6-loopback\n"
#: Of a shell that holds namespaces until its input ends; with them ends what still uses the network.
_HOLDER = """\
echo ready
cat >/dev/null
while :; do
    left=
    find='find -L /proc/[0-9]*/ns/net -maxdepth 0 -samefile'
    for pid in $($find /proc/$$/ns/net 2>/dev/null | cut -d/ -f3); do
        [ $pid = $$ ] || [ ! -e /proc/$pid ] || left="$left $pid"
    done
    [ -n "$left" ] || exit 0
    kill -9 $left 2>/dev/null
    sleep 0.05
done
"""
#: The kernel asks rules in this order: those that drop, then the one for the host's own addresses.
_DROP, _LOCAL = 10, 100


class HostsError(Exception):
    """A command failed; the text is what it wrote."""


def require_hosts():
    """Skip a test where this machine cannot have hosts."""
    if reason := why_not():
        pytest.skip(reason)


@functools.cache
def why_not():
    """Return why this machine cannot have hosts, None where it can."""
    needed = ("ip", "tc", "unshare", "nsenter", "mount", "hostname")
    missing = [name for name in needed if not shutil.which(name)]
    if missing or not sys.platform.startswith("linux"):
        return f"hosts need Linux with util-linux and iproute2; missing: {', '.join(missing) or 'Linux'}"
    try:
        with Hosts(2, rate="1gbit") as hosts, hosts.dropped(0, 1):
            return None
    except HostsError as error:
        return f"hosts need the right to make network namespaces, which root has: {error}"


class Hosts:
    """Hosts h0, h1, … on one switch, or on several.

    Host i has the addresses 10.88.n.(i+1) and fd88:n::(i+1) on switch n, with the interface `eth<n>`.

    Args:
        count: how many hosts.
        rate: of each host's links, both ways, such as `"100mbit"`; unlimited by default.
        switches: how many; every host is connected to each.
        etc_hosts: the text of /etc/hosts, with `{name}`.
    """

    def __init__(self, count, rate=None, switches=1, etc_hosts=DEBIAN):
        self._switches, self._pids = range(switches), []
        self._user = [] if os.geteuid() == 0 else ["--user"]
        with contextlib.ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="unisono-hosts-")))
            self._switch = _hold(
                stack, "unshare", "--net", *self._user, *("--map-root-user" for _ in self._user)
            )
            self._ip(self._switch, *(f"link add name br{n} up type bridge" for n in self._switches))
            for i in range(count):
                # The user namespace of the switch owns those of the hosts.
                outside = self._inside(self._switch) if self._user else []
                self._pids.append(_hold(stack, *outside, "unshare", "--net", "--uts", "--mount"))
                self._connect(i, rate)
                (folder / f"hosts-{i}").write_text(etc_hosts.format(name=f"h{i}"))
                _run(*self.command(i, "mount", "--bind", folder / f"hosts-{i}", "/etc/hosts"))
                _run(*self.command(i, "hostname", f"h{i}"))
            self._stack = stack.pop_all()

    def _connect(self, i, rate):
        pid = self._pids[i]
        for n in self._switches:
            # Without an IPv6 address of its own, or the port speaks to a host whose cable is out.
            self._ip(
                self._switch,
                f"link add p{n}-{i} type veth peer name eth{n} netns {pid}",
                f"link set p{n}-{i} addrgenmode none master br{n} up",
            )
            self._ip(
                pid,
                f"addr add {self.address(i, n)}/24 dev eth{n}",
                f"addr add {self.address(i, n, version=6)}/64 dev eth{n} nodad",
                f"link set eth{n} up",
            )
            for at, device in ((self._switch, f"p{n}-{i}"), (pid, f"eth{n}")) if rate else ():
                tbf = ("tbf", "rate", rate, "burst", "64kb", "latency", "200ms")
                _run(*self._inside(at), "tc", "qdisc", "add", "dev", device, "root", *tbf)
        self._ip(pid, "link set lo up")
        for version in (4, 6):
            self._ip(pid, f"rule add pref {_LOCAL} lookup local", "rule del pref 0", version=version)
        # The kernel asks no rule about a packet of a socket that it has already found.
        _run(*self._inside(pid), "sh", "-c", "echo 0 >/proc/sys/net/ipv4/tcp_early_demux")

    def _inside(self, pid):
        preserved = ["--preserve-credentials" for _ in self._user]
        return ["nsenter", "--target", str(pid), *self._user, *preserved, "--net", "--"]

    def _ip(self, pid, *commands, version=None):
        family = [f"-{version}"] if version else []
        _run(*self._inside(pid), "ip", *family, "-batch", "-", text="\n".join(commands) + "\n")

    def __len__(self):
        return len(self._pids)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        """Remove the hosts, and end what still runs on them."""
        self._stack.close()

    def address(self, i, switch=0, version=4):
        """The address of a host."""
        return f"10.88.{switch}.{i + 1}" if version == 4 else f"fd88:{switch}::{i + 1}"

    def holder(self, i):
        """The process that holds a host's namespaces, for `setns` and `tests.forked`."""
        return self._pids[i]

    def command(self, i, *words):
        """The command that runs a command on a host, in this process' directory, with the same process id."""
        namespaces = ["--uts", "--mount"]
        enter = [*self._inside(self._pids[i])[:-1], *namespaces, "--"]
        # The directory is one of the other mount namespace.
        return [*enter, "sh", "-c", 'cd "$0" && exec "$@"', os.getcwd(), *map(str, words)]

    def start(self, i, *words, cwd=None, **options):
        """Start a command on a host, as `subprocess.Popen` does."""
        return subprocess.Popen(self.command(i, "env", "-C", cwd or os.getcwd(), *words), **options)

    def run(self, i, *words):
        """Run a short command on a host; return what it writes."""
        return _run(*self.command(i, *words))

    def processes(self, i):
        """The ids of the processes that use a host's network, without the one that holds it."""
        own, found = os.stat(f"/proc/{self._pids[i]}/ns/net").st_ino, set()
        for process in Path("/proc").glob("[0-9]*"):
            # One that has just ended.
            with contextlib.suppress(OSError):
                if (process / "ns/net").stat().st_ino == own:
                    found.add(int(process.name))
        return found - {self._pids[i]}

    def kill(self, i, number=signal.SIGKILL):
        """Send a signal to all processes of a host, such as SIGSTOP, which freezes it."""
        for pid in self.processes(i):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def traffic(self, i, switch=0):
        """The bytes that a host has received and sent."""
        for line in Path(f"/proc/{self._pids[i]}/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == f"eth{switch}":
                return int(numbers.split()[0]), int(numbers.split()[8])
        raise HostsError(f"h{i} has no eth{switch}")

    def unplug(self, i, switch=0):
        """Pull the cable out of the switch: the host is alone, without an error of its own interface."""
        self._ip(self._switch, f"link set p{switch}-{i} nomaster")

    def plug(self, i, switch=0):
        """Put the cable back."""
        self._ip(self._switch, f"link set p{switch}-{i} master br{switch}")

    @contextlib.contextmanager
    def unplugged(self, i, switch=0):
        """A host whose cable is out, for the length of a block."""
        self.unplug(i, switch)
        try:
            yield
        finally:
            self.plug(i, switch)

    def drop(self, i, j, ports=None):
        """Lose the TCP packets from host i to host j: one way, in silence.

        Args:
            i: the sender.
            j: the receiver.
            ports: only those to these ports of the receiver, such as `"32768-60999"`.
        """
        self._change_rules("add", i, j, ports)

    def allow(self, i, j, ports=None):
        """Undo `drop`."""
        self._change_rules("del", i, j, ports)

    @contextlib.contextmanager
    def dropped(self, i, j, ports=None):
        """Packets from host i to host j are lost, for the length of a block."""
        self.drop(i, j, ports)
        try:
            yield
        finally:
            self.allow(i, j, ports)

    def _change_rules(self, verb, i, j, ports):
        # TCP alone: without ARP the sender would get an error in place of silence.
        only = f"pref {_DROP} ipproto tcp{f' dport {ports}' if ports else ''} blackhole"
        for version in (4, 6):
            senders = [self.address(i, n, version) for n in self._switches]
            self._ip(self._pids[j], *(f"rule {verb} from {s} {only}" for s in senders), version=version)


def _hold(stack, *command):
    """Start a process that holds new namespaces until its input ends, at the latest with this process."""
    # In a session of its own: Ctrl-C does not reach it.
    holder = subprocess.Popen(
        [*command, "sh", "-c", _HOLDER], start_new_session=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    stack.callback(holder.wait, _SECONDS)
    for stream in (holder.stdout, holder.stderr, holder.stdin):
        stack.callback(stream.close)
    if holder.stdout.readline() != "ready\n":
        raise HostsError(holder.stderr.read().strip())
    return holder.pid


def _run(*words, text=""):
    done = subprocess.run(
        list(map(str, words)), input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode:
        raise HostsError(f"{' '.join(map(str, words))}: {done.stderr.strip()}")
    return done.stdout
