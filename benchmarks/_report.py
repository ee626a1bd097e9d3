"""Ratios, verdicts and tables of what was measured."""

import datetime
import importlib.metadata
import os
import platform
import statistics
import sys

from _rows import FIRST_COLD, FIRST_WARM, PEAK, ROWS, STEP

PACKAGES = ("jax", "keras", "tensorflow", "torch", "optax", "numpy")
REACHED, MISSED, NO_CLAIM = "reached", "missed", "no claim"


def ratios(ours, theirs):
    """The median, the lowest and the highest of the ratios of each round."""
    each = sorted(a / b for a, b in zip(ours, theirs, strict=False))
    return statistics.median(each), each[0], each[-1]


def verdict(ratio, claim):
    """Whether a ratio is what a claim says."""
    if claim.limit is None:
        return NO_CLAIM
    kept = ratio <= claim.limit if claim.at_most else ratio >= claim.limit
    return REACHED if kept else MISSED


def results(rows, measured, now):
    """A dictionary for each claim of some rows, ready for JSON."""
    found = []
    for row in rows:
        for claim in row.claims:
            result = {
                "row": row.name,
                "what": row.what,
                "measure": claim.ours.measure,
                "against": against(claim),
                "limit": claim.limit,
                "at_most": claim.at_most,
                "measured_at": now,
            }
            ours, theirs = measured.values.get(claim.ours), measured.values.get(claim.theirs)
            missing = measured.missing.get(claim.ours.case) or measured.missing.get(claim.theirs.case)
            if ours and theirs and not missing:
                ratio, low, high = ratios(ours, theirs)
                result |= {"ours": ours, "theirs": theirs, "ratio": ratio, "low": low, "high": high}
                result["verdict"] = verdict(ratio, claim)
            else:
                result["verdict"] = missing or "not measured"
            found.append(result)
    return found


def report(rows, measured):
    """All that is known of a run, ready for JSON."""
    now = datetime.datetime.now().strftime("%Y-%m-%d %H:%M")
    return {"date": now, "machine": machine(), "results": results(rows, measured, now)}


def merged(reports):
    """One report of several, in the order of the table; of two results of a claim the later one counts.

    Raises:
        ValueError: If they come from different machines or versions.
    """
    last = max(reports, key=lambda each: each["date"])
    found = {}
    for each in sorted(reports, key=lambda each: each["date"]):
        if each["machine"] != last["machine"]:
            raise ValueError(f"reports of one machine with the same versions. Received: {each['machine']}")
        found |= {(r["row"], r["measure"], r["against"]): r for r in each["results"]}
    order = {row.name: number for number, row in enumerate(ROWS)}
    results = sorted(found.values(), key=lambda r: order.get(r["row"], len(order)))
    return last | {"results": results}


def against(claim):
    """The peer in words, with its place where that differs, and the cache."""
    ours, theirs = claim.ours, claim.theirs
    if ours.case == theirs.case:
        return "batch 128"
    words = theirs.case.peer
    if (ours.case.devices, ours.case.processes) != (theirs.case.devices, theirs.case.processes):
        words += " on 1 device" if theirs.case.devices == 1 else f" on {theirs.case.devices} devices"
    if claim.ours.measure in (FIRST_COLD, FIRST_WARM):
        words += f", {claim.ours.measure.split(', ')[1]}"
    if theirs.measure.endswith("steps per execution") and ours.measure != theirs.measure:
        words += f", {theirs.measure.split(', ')[1]}"
    return words


def quantity(result, side):
    """A median with its unit."""
    if side not in result:
        return ""
    value = statistics.median(result[side])
    if result["measure"] == PEAK:
        return f"{value / 2**20:,.0f} MiB"
    if result["measure"] in (FIRST_COLD, FIRST_WARM):
        return f"{value:.1f} s"
    return f"{value:.3f} ms" if result["measure"] == STEP else f"{value:,.0f} rows/s"


def ratio_text(result):
    """A ratio with its spread: `1.63 (1.58 to 1.70)`."""
    if "ratio" not in result:
        return ""
    if len(result["ours"]) == 1:
        return f"{result['ratio']:.2f}"
    return f"{result['ratio']:.2f} ({result['low']:.2f} to {result['high']:.2f})"


def limit_text(result):
    """A claim: `at least 1.7`."""
    if result["limit"] is None:
        return ""
    unit = " ms" if result.get("measure") == STEP else ""
    return f"{'at most' if result['at_most'] else 'at least'} {result['limit']:g}{unit}"


def table(found):
    """Results as a Markdown table."""
    # A phone shows the first columns.
    head = ["ratio", "measured", "against", "Unisono", "peer", "claim", "verdict", "row"]
    lines = [head] + [
        [
            ratio_text(r),
            r["what"],
            r["against"],
            quantity(r, "ours"),
            quantity(r, "theirs"),
            limit_text(r),
            r["verdict"],
            f"`{r['row']}`",
        ]
        for r in found
    ]
    return markdown(lines)


def markdown(lines):
    """Lists of cells, the first of which is the head, as an aligned Markdown table."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    text = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in lines]
    text.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(text)


def summary(found):
    """How many claims were reached."""
    verdicts = [r["verdict"] for r in found if r["limit"] is not None]
    kept, missed = verdicts.count(REACHED), verdicts.count(MISSED)
    left = len(verdicts) - kept - missed
    return f"{kept} claims reached, {missed} missed" + (f", {left} not measured" if left else "")


def machine():
    """The machine and the versions that the numbers hold for."""
    versions = {"Python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {"cpu": cpu_name(), "cores": os.cpu_count(), "memory_gib": memory_gib(), "versions": versions}


def cpu_name():
    """The processor's name and its widest vectors, which decide what a core can do."""
    if sys.platform != "linux":
        return platform.processor() or platform.machine()
    with open("/proc/cpuinfo") as lines:
        facts = dict((part.strip() for part in line.split(":", 1)) for line in lines if line.count(":"))
    flags = facts.get("flags", "").split()
    widest = next((f for f in ("amx_tile", "avx512f", "avx2", "avx") if f in flags), "")
    name = facts.get("model name", platform.machine())
    return f"{name} ({widest.removesuffix('_tile').removesuffix('f')})" if widest else name


def memory_gib():
    """Memory of the machine."""
    return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30)


def heading(report, spread="the lowest and the highest in brackets"):
    """One paragraph: when, where, with what.

    Args:
        spread: how the page shows it.
    """
    facts = report["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    dates = sorted({r["measured_at"] for r in report["results"]})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    rounds = max((len(r["ours"]) for r in report["results"] if "ours" in r), default=0)
    where = ", ".join([*facts.get("gpus", []), facts["cpu"]])
    return (
        f"{when}: {where}, {facts['cores']} cores, {facts['memory_gib']} GiB.\n"
        f"{versions}.\nMedians of up to {rounds} rounds, {spread}."
    )
