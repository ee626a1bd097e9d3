"""The suite of benchmarks: every claim of docs/performance.md, measured and judged in one run.

    python benchmarks/run.py                            # all rows, about ten minutes on two cores
    python benchmarks/run.py --quick                    # about two minutes
    python benchmarks/run.py cnn-2-processes 'mlp-*'    # rows by name
    python benchmarks/run.py --list

Peers whose packages are missing are reported as not measured: pip install 'unisono[bench]' has them all.
"""

import argparse
import datetime
import json
import sys

import _report
from _harness import measure
from _rows import selected


def arguments():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rows", nargs="*", help="names or patterns of rows; see --list")
    parser.add_argument("--quick", action="store_true", help="a few rows of the MLP and of the CNN")
    parser.add_argument("--list", action="store_true", help="print the names of the rows and their claims")
    parser.add_argument("--rounds", type=int, help="how often each case takes its turn (5; 3 with --quick)")
    parser.add_argument("--starts", type=int, default=1, help="starts of a program for its first step (1)")
    parser.add_argument("--json", metavar="FILE", help="write all values to a file")
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
    rounds = options.rounds or (3 if options.quick else 5)
    tell = lambda text: print(text, file=sys.stderr, flush=True)  # noqa: E731
    measured = measure(rows, rounds, options.starts, tell)
    report = {
        "date": datetime.datetime.now().strftime("%Y-%m-%d %H:%M"),
        "machine": _report.machine(),
        "rounds": rounds,
        "results": _report.results(rows, measured),
    }
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    print(_report.heading(report), end="\n\n")
    print(_report.table(report["results"]), end="\n\n")
    print(_report.summary(report["results"]))


if __name__ == "__main__":
    main()
