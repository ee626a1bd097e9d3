"""The suite of benchmarks: every claim of docs/performance.md, measured and judged in one run.

    python benchmarks/run.py                            # all rows, about twelve minutes on two cores
    python benchmarks/run.py --quick                    # about two minutes
    python benchmarks/run.py cnn-2-processes 'mlp-*'    # rows by name
    python benchmarks/run.py --list
    python benchmarks/run.py --json now.json --write    # also into docs/performance.md and README.md
    python benchmarks/run.py --from a.json b.json --write   # the same from runs of single rows

Peers whose packages are missing are reported as not measured: pip install 'unisono[bench]' has them all.
"""

import argparse
import functools
import json
import sys
from pathlib import Path

import _pages
import _report
from _harness import measure
from _rows import selected


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="names or patterns of rows; see --list")
    parser.add_argument("--quick", action="store_true", help="a few rows of the MLP and of the CNN")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and their claims")
    parser.add_argument(
        "--rounds", type=int, help="how often each case takes its turn (5, or 3 where turns are long)"
    )
    parser.add_argument("--starts", type=int, default=1, help="starts of a program for its first step (1)")
    parser.add_argument("--json", metavar="FILE", help="write all values to a file")
    parser.add_argument(
        "--from", dest="files", nargs="+", metavar="FILE", help="read files instead of measuring"
    )
    parser.add_argument("--write", action="store_true", help="put tables and chart into the documents")
    return parser.parse_args()


def print_rows(rows):
    for row in rows:
        for claim in row.claims:
            limit = _report.limit_text({"limit": claim.limit, "at_most": claim.at_most}) or "no claim"
            print(f"{row.name:28} {row.what:55} {limit:14} {_report.against(claim)}")


def main():
    options = arguments()
    try:
        rows = selected(options.rows, options.quick)
    except ValueError as error:
        sys.exit(f"run.py: {error}")
    if options.list:
        print_rows(rows)
        return
    if options.files:
        report = _report.merged([json.loads(Path(file).read_text()) for file in options.files])
    else:
        tell = functools.partial(print, file=sys.stderr, flush=True)
        measured = measure(rows, options.rounds, options.starts, tell)
        report = _report.report(rows, measured)
    if options.json:
        Path(options.json).write_text(json.dumps(report, indent=1))
    if options.write:
        _pages.write(report)
    print(_report.heading(report), end="\n\n")
    print(_report.table(report["results"]), end="\n\n")
    print(_report.summary(report["results"]))


if __name__ == "__main__":
    main()
