"""Put the results of a run into docs/performance.md, the first page, README.md and the charts."""

import contextlib
import re
from pathlib import Path
from xml.sax.saxutils import escape

import _report

ROOT = Path(__file__).parents[1]
#: The bars of the short chart.
BARS = (
    ("mlp-2-devices", "DataParallel"),
    ("mlp-2-processes", "torch DDP"),
    ("cnn3-2-devices", "TF MirroredStrategy"),
    ("resnet-2-devices", "DataParallel"),
    ("resnet-2-processes", "torch DDP"),
    ("transformer-2-devices", "DataParallel"),
    ("transformer-2-processes", "torch DDP"),
    ("mlp-loop", "JAX by hand"),
)
#: Those that it has as a table, too.
SHOWN = (BARS[0], *BARS[2:6], BARS[7])
#: How the short chart shows it.
SPREAD = "with lines from the lowest to the highest"
#: Of the short chart, in pixels: its width, a ratio of 1, a bar, and a row with its texts.
_WIDTH, _UNIT, _BAR, _ROW, _TOP = 560, 170, 16, 68, 46
#: Readable on white and on black: a picture does not know the page's colours.
_STYLE = """<style>text{font:14px system-ui,sans-serif}.title{font-size:13px;fill:#7b8794}
.what{font-weight:600;fill:#7b8794}.peer{fill:#a8b3c1}.ours{fill:#0d9488}
.peer-text{fill:#7b8794}.ours-text{fill:#0d9488;font-weight:600}.spread{stroke:#64748b;stroke-width:1.5}</style>"""
COLORS = {_report.REACHED: "tab:green", _report.MISSED: "tab:red", _report.NO_CLAIM: "tab:gray"}
CHART = "![Each ratio with its spread, and the claim](performance.svg)"
SHORT_CHART = "![Eight of the ratios as bars](docs/performance_short.svg)"


def write(report, root=ROOT):
    """Write a report's tables between the markers of the pages, and its charts beside the first.

    Args:
        report: what `run.py --json` writes.
        root: the repository's folder.
    """
    found = report["results"]
    whole = [_report.heading(report), _report.table(found), f"{_report.summary(found)}.", CHART]
    replace(root / "docs" / "performance.md", whole)
    heading = _report.heading(report, SPREAD)
    replace(root / "README.md", [heading, SHORT_CHART])
    # The page lies in docs/ itself.
    short = SHORT_CHART.replace("docs/", "")
    replace(root / "docs" / "index.md", [short, heading, short_table(found)])
    draw(found, root / "docs" / "performance.svg")
    draw_bars(found, root / "docs" / "performance_short.svg")


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
    """The table of docs/index.md: what, against, ratio."""
    lines = [["measured", "against", "ratio"]]
    for r in found:
        if (r["row"], r["against"]) in SHOWN:
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


@contextlib.contextmanager
def ratio_axes(path, labels, height, ticks):
    """Axes with a row of some height for each label, from the top, and ratios on a logarithmic axis.

    Args:
        path: the SVG file that is written at the end.
        labels: texts of the rows.
        height: of a row, in inches.
        ticks: ratios that are written at the axis.
    """
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams |= {"svg.hashsalt": "unisono", "svg.fonttype": "none", "font.size": 8}
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 0.6 + height * len(labels)), layout="constrained")
    axes.set_yticks(range(len(labels)), labels)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.axvline(1, color="gray", linewidth=0.5)
    axes.set_xscale("log")
    yield axes
    axes.set_xticks(ticks, [f"{t:g}" for t in ticks])
    axes.xaxis.set_minor_locator(mpl.ticker.NullLocator())
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def draw(found, path):
    """Draw all ratios, with their spread and the claim.

    Args:
        found: results; those that were not measured are left out.
        path: of an SVG file.
    """
    shown = [r for r in found if "ratio" in r]
    labels = [f"{r['row']} / {r['against']}" for r in shown]
    with ratio_axes(path, labels, 0.17, [0.5, 0.7, 1, 1.5, 2, 3, 5, 8]) as axes:
        for position, result in enumerate(shown):
            ratio, low, high, limit = advantages(result)
            color = COLORS[result["verdict"]]
            axes.plot([low, high], [position, position], color=color, linewidth=1.5)
            axes.plot(ratio, position, "o", color=color, markersize=4)
            if limit:
                axes.plot(limit, position, "|", color="black", markersize=8)
        title = "How many times better than the peer (dot: median, line: spread, mark: claim)"
        axes.set_title(title, loc="right")


def draw_bars(found, path):
    """Draw the ratios of `BARS`: a grey bar for the peer, and one in the project's colour for Unisono.

    Claims of the suite are in docs/performance.md: readers of this chart want to know who is faster.

    Args:
        found: results; those that were not measured are left out.
        path: of an SVG file.
    """
    shown = [r for r in found if (r["row"], r["against"]) in BARS and "ratio" in r]
    rows = []
    for position, result in enumerate(shown):
        ratio, low, high, _ = advantages(result)
        top = _TOP + position * _ROW
        what = result["what"].removeprefix("fit, ")
        texts = ((top, result["against"], 1.0, "peer"), (top + _BAR + 3, "Unisono", ratio, "ours"))
        rows.append(f'<text x="0" y="{top - 7}" class="what">{escape(what[0].upper() + what[1:])}</text>')
        for y, who, value, kind in texts:
            width = value * _UNIT
            rows.append(f'<rect x="0" y="{y}" width="{width:.1f}" height="{_BAR}" rx="3" class="{kind}"/>')
            label = escape(f"{who} {value:.2f}" if kind == "ours" else who)
            rows.append(f'<text x="{width + 8:.1f}" y="{y + _BAR - 4}" class="{kind}-text">{label}</text>')
        # The lowest and the highest round.
        line = top + _BAR + 3 + _BAR // 2
        rows.append(f'<path d="M{low * _UNIT:.1f} {line}H{high * _UNIT:.1f}" class="spread"/>')
        # The label stands behind the spread.
        rows[-2] = rows[-2].replace(f'x="{ratio * _UNIT + 8:.1f}"', f'x="{high * _UNIT + 8:.1f}"')
    height = _TOP + len(shown) * _ROW
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}">'
    title = '<text x="0" y="14" class="title">Rows a second, as a multiple of the peer\'s</text>'
    path.write_text("\n".join([f"{head}{_STYLE}", title, *rows, "</svg>", ""]))
