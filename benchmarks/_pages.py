"""Put the results of a run into docs/performance.md, README.md and the chart."""

import re
from pathlib import Path

import _report

ROOT = Path(__file__).parents[1]
#: The rows that README.md shows.
SHOWN = (
    "mlp-1-device",
    "mlp-2-devices",
    "mlp-2-processes",
    "mlp-callback-2-devices",
    "mlp-loop",
    "mlp-batch-127",
    "cnn-1-device",
    "cnn-2-devices",
    "cnn-2-processes",
    "cnn-evaluate-2-devices",
    "cnn3-1-device",
    "cnn3-2-devices",
    "resnet-1-device",
    "resnet-2-devices",
    "resnet-2-processes",
    "transformer-1-device",
    "transformer-2-devices",
    "transformer-2-processes",
    "lstm-2-devices",
)


def write(report, root=ROOT):
    """Write a report's tables between the markers of both pages, and its chart beside the first.

    Args:
        report: what `run.py --json` writes.
        root: the repository's folder.
    """
    found = report["results"]
    whole = [_report.heading(report), _report.table(found), f"{_report.summary(found)}.", CHART]
    replace(root / "docs" / "performance.md", whole)
    replace(root / "README.md", [_report.heading(report), short_table(found)])
    draw(found, root / "docs" / "performance.svg")


CHART = "![Each ratio with its spread, and the claim](performance.svg)"


def replace(page, parts):
    """Put paragraphs between the markers of a page.

    Raises:
        ValueError: If the page does not have both markers once.
    """
    begin, end = "<!-- benchmarks: begin -->", "<!-- benchmarks: end -->"
    pattern = re.compile(f"{begin}\n.*?{end}", re.DOTALL)
    text, count = pattern.subn(lambda found: "\n\n".join([begin, *parts, end]), page.read_text())
    if count != 1:
        raise ValueError(f"{page} must have the lines {begin!r} and {end!r} once")
    page.write_text(text)


def short_table(found):
    """The table of README.md: what, against, ratio."""
    lines = [["measured", "against", "ratio"]]
    for r in found:
        if r["row"] in SHOWN:
            lines.append([r["what"], r["against"], f"{r['ratio']:.2f}" if "ratio" in r else r["verdict"]])
    return _report.markdown(lines)


def advantages(result):
    """The ratio, its spread and the claim, all turned so that more is better."""
    numbers = [result[key] for key in ("ratio", "low", "high")]
    limit = result["limit"]
    if result["at_most"]:
        ratio, low, high = [1 / n for n in numbers]
        return ratio, high, low, limit and 1 / limit
    return *numbers, limit


def draw(found, path):
    """Draw all ratios, with their spread and the claim, on one logarithmic axis.

    Args:
        found: results; those that were not measured are left out.
        path: of an SVG file.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "unisono", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot as plt

    shown = [r for r in found if "ratio" in r]
    figure, axes = plt.subplots(figsize=(9, 0.6 + 0.17 * len(shown)), layout="constrained")
    colors = {_report.REACHED: "tab:green", _report.MISSED: "tab:red", _report.NO_CLAIM: "tab:gray"}
    for position, result in enumerate(shown):
        ratio, low, high, limit = advantages(result)
        axes.plot([low, high], [position, position], color=colors[result["verdict"]], linewidth=1.5)
        axes.plot(ratio, position, "o", color=colors[result["verdict"]], markersize=4)
        if limit:
            axes.plot(limit, position, "|", color="black", markersize=8)
    axes.set_yticks(range(len(shown)), [f"{r['row']} / {r['against']}" for r in shown])
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.axvline(1, color="gray", linewidth=0.5)
    axes.set_xscale("log")
    ticks = [0.5, 0.7, 1, 1.5, 2, 3, 5, 8]
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    axes.set_title("How many times better than the peer (dot: median, line: spread, mark: claim)")
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)
