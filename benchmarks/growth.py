"""What more devices, or more processes, cost on one machine: first step, time of a step, and memory.

    python benchmarks/growth.py [--devices 2 4 8 16 32 64] [--processes 2 4 8 16] [--workload mlp]
    python benchmarks/growth.py --json now.json --chart docs/growth.svg
    python benchmarks/growth.py --from now.json --chart docs/growth.svg

All devices share this machine's cores, and a global batch has the same number of rows at each number of
them: what grows is what they cost, not what they compute. The first step begins with the program, its imports
included, with an empty compilation cache. Memory is the peak of resident memory of one process.
"""

import argparse
import functools
import json
import statistics
import sys
from pathlib import Path

import _report
from _harness import measure
from _rows import FIRST_COLD, PEAK, Case, Claim, Point, Row
from workloads import workload

#: Rows of a global batch, which every number of devices divides.
ROWS = 256
#: With whom each way to have more replicas is compared.
PEERS = {"devices": ("unisono", "DataParallel"), "processes": ("unisono", "torch DDP")}
MEASURES = (FIRST_COLD, "fit", PEAK)
TITLES = ("first step, s", "a step, ms", "peak memory of a process, MiB")
COLORS = {"unisono": "tab:green", "DataParallel": "tab:gray", "torch DDP": "tab:gray"}


def measured(kind, number, name, tell):
    """Return by peer the medians of `MEASURES`, in the units of `TITLES`, or why there are none.

    Args:
        kind: `"devices"` or `"processes"`.
        number: of them.
        name: of the workload.
        tell: is called with lines about the progress.
    """
    cases = [Case(p, name, rows=ROWS // number, **{kind: number}) for p in PEERS[kind]]
    claims = [Claim(*(Point(case, m) for case in cases), None) for m in MEASURES]
    found = measure([Row(kind, kind, tuple(claims))], 3, 1, tell)
    told = {}
    for case in cases:
        values = [found.values.get(Point(case, m)) for m in MEASURES]
        if case in found.missing or None in values:
            told[case.peer] = found.missing.get(case, "not measured")
            continue
        first, rows, peak = map(statistics.median, values)
        told[case.peer] = [first, 1e3 * ROWS / rows, peak / 2**20]
    return told


def table(results):
    """The lines of a table of all that was measured."""
    lines = []
    for kind, peers in PEERS.items():
        heads = [f"{title.removesuffix(' of a process, MiB')}: {p}" for title in TITLES for p in peers]
        lines += ["", "| " + " | ".join([kind, *heads]) + " |", "|" + "---|" * (1 + len(heads))]
        for number, told in results[kind].items():
            cells = [cell(told[p], i) for i in range(len(TITLES)) for p in peers]
            lines.append(f"| {number} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(values, place):
    """One number of a peer, or why it has none."""
    if isinstance(values, str):
        return values
    return f"{values[place]:,.1f}" if values[place] < 100 else f"{values[place]:,.0f}"


def draw(results, path):
    """Draw all measures by the number of devices, and of processes.

    Args:
        results: what `main` has measured.
        path: of an SVG file.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "unisono", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot as plt

    figure, all_axes = plt.subplots(2, len(TITLES), figsize=(9, 4.6), layout="constrained")
    for (kind, peers), row in zip(PEERS.items(), all_axes, strict=True):
        for place, (title, axes) in enumerate(zip(TITLES, row, strict=True)):
            for peer in peers:
                told = {int(n): t[peer] for n, t in results[kind].items() if not isinstance(t[peer], str)}
                values = [each[place] for each in told.values()]
                axes.plot(list(told), values, "o-", markersize=3, label=peer, color=COLORS[peer])
            numbers = [int(n) for n in results[kind]]
            axes.set_xscale("log", base=2)
            axes.set_xticks(numbers, numbers)
            axes.set_ylim(0)
            axes.set_xlabel(kind)
            axes.set_title(title)
        row[0].legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--devices", nargs="*", type=int, default=[2, 4, 8, 16, 32, 64])
    parser.add_argument("--processes", nargs="*", type=int, default=[2, 4, 8, 16])
    parser.add_argument("--workload", default="mlp", type=lambda name: workload(name) and name)
    parser.add_argument("--json", metavar="FILE", help="write all values to a file")
    parser.add_argument("--from", dest="file", metavar="FILE", help="read a file instead of measuring")
    parser.add_argument("--chart", metavar="FILE", help="draw an SVG file")
    given = parser.parse_args()
    if given.file:
        results = json.loads(Path(given.file).read_text())
    else:
        tell = functools.partial(print, file=sys.stderr, flush=True)
        results = {"machine": _report.machine(), **{kind: {} for kind in PEERS}}
        for kind in PEERS:
            for number in getattr(given, kind):
                results[kind][str(number)] = measured(kind, number, given.workload, tell)
                if given.json:
                    # After each: the last ones take longest.
                    Path(given.json).write_text(json.dumps(results, indent=1))
    if given.chart:
        draw(results, given.chart)
    machine = results["machine"]
    print(f"{machine['cpu']}, {machine['cores']} cores; {ROWS} rows a step\n{table(results)}")


if __name__ == "__main__":
    main()
