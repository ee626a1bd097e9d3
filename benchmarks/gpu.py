"""ResNet-50, a transformer of GPT-2's size and small models on GPUs: Unisono's `fit` and its peers.

    python benchmarks/gpu.py --write                   # `make gpu` does this: the table goes into docs/gpu.md
    python benchmarks/gpu.py --quick --only small      # two rounds of the small models, as five minutes allow
    python benchmarks/gpu.py --platform cpu --quick    # the same program with less deep models on CPU devices

With a budget, rows are measured in the order of their importance, and the rest is named.
The processes of a model share the GPU's memory and take turns; all see the same GPUs. On n GPUs the peer of
plain Keras is `keras.distribution.DataParallel`.
"""

import argparse
import functools
import json
import math
import os
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import _pages
import _report
import _small_models
from _harness import Budget, measure
from _rows import FIRST_COLD, PARALLEL, PEAK, PLAIN, Case, Claim, Point, Row

from tests.gpu import machine

HAND = "JAX by hand with Keras' model"
TITLES = {"resnet50": "ResNet-50", "gpt2": "GPT-2"}
#: At most 2% more time for a step than by hand, and 15% more for the first one.
SPEED, FIRST = 0.98, 1.15
#: MiB of a training, and of each row in float32, with room to spare; and the most rows.
SIZES = {"resnet50": (1500, 130, 256), "gpt2": (2600, 3600, 32)}
#: What a row takes in bfloat16 and 16 bits, of that.
HALF = 0.6
#: The part of a GPU that the three processes of a model get; the rest is CUDA's own.
SHARE = 0.29
#: Seconds of a quick run.
QUICK_SECONDS = 300
#: The two parts of the suite.
LARGE, SMALL = "large", "small"
#: Rows with which small models run on CPU devices.
QUICK = {"resnet50": 8, "gpt2": 4}


def rows_for(workload, memory, is_half):
    """Rows of a batch on each GPU: the power of two that fits a process' share of its memory.

    Args:
        memory: of the GPU, in MiB; 0 where the driver does not say.
        is_half: whether activations have 16 bits.
    """
    fixed, each, most = SIZES[workload]
    room = (SHARE * (memory or 16384) - fixed) / (each * (HALF if is_half else 1.0))
    return min(most, 2 ** max(0, int(room).bit_length() - 1))


def rows_of(devices, platform, sizes, policy, small):
    """The rows of the suite for a number of devices.

    Args:
        sizes: by workload, the rows of a batch on each device.
        small: whether the small models run.
    """
    keras_peer = PLAIN if devices == 1 else PARALLEL
    measures = {"": ("fit", SPEED), "-first-step": (FIRST_COLD, FIRST), "-memory": (PEAK, None)}
    for name, rows in sizes.items():
        workload = f"{name}-small" if small else name
        ours, hand, keras = (
            Case(peer, workload, devices, 1, platform, rows, policy) for peer in ("unisono", HAND, keras_peer)
        )
        for suffix, (what, limit) in measures.items():
            claims = tuple(
                Claim(Point(ours, what), Point(theirs, what), limit if theirs is hand else None)
                for theirs in (hand, keras)
            )
            place = f"{devices}-device{'s' if devices > 1 else ''}"
            yield Row(f"{workload}{suffix}-{place}", f"{what}, {title_of(ours)}", claims)


def title_of(case):
    """The model of a case, and what it is trained with."""
    name, _, small = case.workload.partition("-")
    where = f"{case.devices} device{'s' if case.devices > 1 else ''}"
    kind = ", ".join([TITLES[name], *filter(None, [small]), where])
    return f"{kind}, {case.rows} rows each, {case.policy}"


def cases_table(measured, rows):
    """Milliseconds of a step, seconds of the first one and peak memory of each case, as a Markdown table."""
    lines = [["model", "who", "ms/step", "first step", "peak memory"]]
    points = [point for row in rows for claim in row.claims for point in (claim.ours, claim.theirs)]
    for case in dict.fromkeys(point.case for point in points):
        if why := measured.missing.get(case):
            lines.append([title_of(case), case.peer, why, "", ""])
            continue
        medians = [measured.values.get(Point(case, m), [math.nan]) for m in ("fit", FIRST_COLD, PEAK)]
        speed, first, peak = map(statistics.median, medians)
        step = f"{1000 * case.rows * case.devices / speed:.2f}"
        lines.append([title_of(case), case.peer, step, f"{first:.1f} s", f"{peak / 2**20:,.0f} MiB"])
    return _report.markdown(lines)


def of_gpus(cuda):
    """The GPUs that processes may see, what the report says of them, the least memory, and the precision."""
    places = machine.visible()
    found = machine.of_places(places, machine.gpus())
    facts = {"gpus": [machine.description(found, places)], "versions": machine.versions(cuda)}
    has_bfloat16 = min(gpu.capability for gpu in found) >= (8, 0)
    memory = min(gpu.memory for gpu in found)
    return places, facts, memory, "mixed_bfloat16" if has_bfloat16 else "float32"


def parts_of(only, platform, places, memory, policy):
    """For each part, the most important first: the places of its GPUs, its rows, and its table's writer."""
    small = platform == "cpu"
    sizes = QUICK if small else {name: rows_for(name, memory, policy != "float32") for name in SIZES}
    if only != SMALL:
        for count in sorted({1, len(places)}):
            rows = list(rows_of(count, platform, sizes, policy, small))
            yield places[:count], rows, functools.partial(cases_table, rows=rows)
    if only != LARGE:
        rows = list(_small_models.rows_of(platform))
        yield places[:1], rows, functools.partial(_small_models.table, platform=platform)


def run(platform, quick, cuda, tell, budget=None, only=None):
    """Measure on one device and on all, and the small models; return the report and its tables."""
    if platform == "gpu":
        places, facts, memory, policy = of_gpus(cuda)
        os.environ |= {"XLA_CLIENT_MEM_FRACTION": str(SHARE), "XLA_PYTHON_CLIENT_PREALLOCATE": "true"}
    else:
        places, facts, memory, policy = ["", ""], {}, 0, "float32"
    report, tables = None, []
    for seen, rows, table in parts_of(only, platform, places, memory, policy):
        if platform == "gpu":
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(seen)
        measured = measure(rows, 2 if quick else None, 1, tell, budget=budget)
        found = _report.report(rows, measured)
        if rows[0].name.startswith(SMALL):
            found["results"] += _small_models.step_results(measured, platform, found["date"])
        tables.append(table(measured))
        if report is not None:
            found["results"] = report["results"] + found["results"]
        report = found
    report["machine"] |= facts
    return report, "\n\n".join(tables)


def left_out(found, budget):
    """The names of rows that a budget had no time for, or not for all of their peers."""
    reason = None if budget.seconds is None else budget.reason()
    return list(dict.fromkeys(f"`{r['row']}`" for r in found if r["verdict"] == reason))


def paragraphs(report, cases, budget=None):
    """The report in Markdown."""
    found = report["results"]
    names = left_out(found, budget) if budget else ()
    shown = [r for r in found if not names or r["verdict"] != budget.reason()]
    parts = [_report.heading(report), cases, _report.table(shown), f"{_report.summary(found)}."]
    return [*parts, f"{budget.reason().capitalize()}: {', '.join(names)}."] if names else parts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--platform", choices=("gpu", "cpu"), default="gpu")
    parser.add_argument("--cuda", choices=machine.CUDA, default="13", help="whose versions are printed")
    parser.add_argument("--quick", action="store_true", help="two rounds instead of five, in five minutes")
    parser.add_argument("--budget", type=float, metavar="SECONDS", help="of the whole run; 300 with --quick")
    parser.add_argument("--only", choices=(LARGE, SMALL), help="large models or small ones alone")
    parser.add_argument("--json", metavar="FILE", help="write all values to a file")
    parser.add_argument("--write", action="store_true", help="put the tables into docs/gpu.md")
    given = parser.parse_args()
    if given.write and given.platform == "cpu":
        parser.error("--write is for numbers of GPUs")
    if given.write and given.only:
        parser.error("--write is for all models")
    budget = Budget(given.budget or (QUICK_SECONDS if given.quick else None))
    tell = functools.partial(print, file=sys.stderr, flush=True)
    try:
        report, cases = run(given.platform, given.quick, given.cuda, tell, budget, given.only)
    except machine.MissingError as error:
        sys.exit(f"gpu.py: {error}")
    if given.json:
        Path(given.json).write_text(json.dumps(report, indent=1))
    text = paragraphs(report, cases, budget)
    if given.write:
        _pages.replace(_pages.ROOT / "docs" / "gpu.md", text)
    print("\n\n".join(text))


if __name__ == "__main__":
    main()
