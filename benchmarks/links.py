"""Training between hosts on links of several rates: Unisono's `fit` and torch's DDP over Gloo.

    python benchmarks/links.py [--rates 100mbit 1gbit 10gbit] [--workloads mlp] [--rounds 3] [--compress int8]

The hosts are network namespaces of this machine, which root can make. The bound is the time of the bytes of
the gradients over a link that carries them in both directions at once: 2 (n-1)/n of them each way.
"""

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from _harness import Running
from _rows import Case
from peers.torch_ddp import KINDS

from tests.hosts import Hosts, why_not
from workloads import workload

PEERS = ("unisono", "torch DDP")
BITS = {"mbit": 1e6, "gbit": 1e9}


def seconds_of(nbytes, rate, hosts):
    """The time of an all-reduce on a link, in seconds."""
    return 2 * (hosts - 1) / hosts * nbytes * 8 / (float(rate[:-4]) * BITS[rate[-4:]])


def measured(peer, name, rate, hosts, rounds, compress=None):
    """The milliseconds of a step, the median of some epochs, and the bytes that host 0 sends in one."""
    steps = workload(name).steps
    with Hosts(hosts, rate) as machines, tempfile.TemporaryDirectory(prefix="unisono-links-") as folder:
        running = Running(Case(peer, name, processes=hosts, compress=compress), folder, hosts=machines)
        try:
            running.first_step()
            running.turn("fit")  # warms up
            before = machines.traffic(0)[1]
            seconds = [running.turn("fit")["seconds"] for _ in range(rounds)]
            sent = (machines.traffic(0)[1] - before) / rounds / steps
        finally:
            running.close()
    return 1000 * statistics.median(seconds) / steps, sent


def gradients_of(name):
    """The bytes of a model's gradients."""
    return sum(4 * p.numel() for p in workload(name).torch_model().parameters())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit", "10gbit"])
    parser.add_argument("--workloads", nargs="+", default=["mlp"])
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compress", nargs="+", default=[], help="kinds besides exact gradients")
    given = parser.parse_args()
    if reason := why_not():
        sys.exit(reason)
    print(
        f"{'workload':12} {'link':8} {'gradients':10} {'bound ms':>9} "
        + "".join(f"{p + ' ms':>14} {'MB':>6}" for p in PEERS)
        + "  ratio"
    )
    for name in given.workloads:
        for rate in given.rates:
            bound = 1000 * seconds_of(gradients_of(name), rate, given.hosts)
            for kind in (None, *given.compress):
                # torch has fewer kinds.
                peers = [p for p in PEERS if p == "unisono" or kind is None or kind in KINDS]
                found = [measured(p, name, rate, given.hosts, given.rounds, kind) for p in peers]
                cells = "".join(f"{ms:14.1f} {sent / 1e6:6.3f}" for ms, sent in found)
                ratio = f"{found[0][0] / found[1][0]:6.2f}" if len(found) > 1 else ""
                print(f"{name:12} {rate:8} {kind or 'exact':10} {bound:9.1f} {cells} {ratio}", flush=True)


if __name__ == "__main__":
    main()
