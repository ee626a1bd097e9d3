"""The command `unisono timeline`: one file of HTML with a picture, which needs no network and no scripts.

Tests: tests/cluster/test_timeline.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

from unisono._errors import InvalidArgumentError
from unisono.cli._timeline import KINDS, Span, Timeline, read, trace_of

#: The size of the picture and of its rows, in pixels.
_LEFT, _WIDTH, _ROW, _BAR = 110, 1200, 44, 28
#: Of the time for data and for exchange, drawn within steps.
_SHARES = {"data": "#facc15", "exchange": "#1e3a8a"}
_STYLE = """
body { font: 14px system-ui, sans-serif; margin: 2em; color: #18181b; }
svg text { font: 12px system-ui, sans-serif; } table { border-collapse: collapse; }
td, th { padding: 0.2em 1em 0.2em 0; text-align: left; } i { display: inline-block; width: 1em; height: 1em; }
"""


def main(folder: Path) -> str:
    """Write `timeline.html` and `timeline.json` into the log folder; return what to say."""
    timeline = read(folder)
    paths = [folder / "timeline.html", folder / "timeline.json"]
    try:
        paths[0].write_text(page(timeline, str(folder)), encoding="utf-8", errors="replace")
        paths[1].write_text(json.dumps(trace_of(timeline)))
    except OSError as error:
        raise InvalidArgumentError(
            f"The log folder must be writable. Received: {str(folder)!r} ({error.strerror}). Write "
            "`unisono timeline` with the path of a copy."
        ) from None
    return f"{paths[0]}: open it in a browser\n{paths[1]}: open it at https://ui.perfetto.dev"


def page(timeline: Timeline, title: str) -> str:
    """Return the page."""
    colours = {**KINDS, **{f"{name} (share of steps)": colour for name, colour in _SHARES.items()}}
    legend = " &nbsp; ".join(
        f'<i style="background:{colour}"></i> {escape(name)}' for name, colour in colours.items()
    )
    height = _ROW * len(timeline.rows) + 30
    picture = "\n".join([*_axis(timeline, height), *_rows(timeline), *_faults(timeline, height)])
    return f"""<!DOCTYPE html>
<html lang="en">
<head><meta charset="utf-8"/><title>{escape(title)}</title><style>{_STYLE}</style></head>
<body>
<h1>{escape(title)}</h1>
<p>{len(timeline.rows) - 1} tasks, {timeline.seconds:.1f} s. Point at a bar to see what it is.</p>
<p>{legend}</p>
<svg width="{_LEFT + _WIDTH + 20}" height="{height}" xmlns="http://www.w3.org/2000/svg">
{picture}
</svg>
{_failures(timeline)}
</body></html>
"""


def _x(timeline: Timeline, seconds: float) -> float:
    return round(_LEFT + _WIDTH * seconds / max(timeline.seconds, 1e-3), 2)


def _axis(timeline: Timeline, height: int) -> Iterator[str]:
    for i in range(11):
        seconds = timeline.seconds * i / 10
        x = _x(timeline, seconds)
        yield f'<line x1="{x}" x2="{x}" y1="0" y2="{height - 20}" stroke="#f4f4f5"/>'
        yield f'<text x="{x}" y="{height - 5}" text-anchor="middle">{seconds:.3g} s</text>'


def _rows(timeline: Timeline) -> Iterator[str]:
    for i, row in enumerate(timeline.rows):
        top = _ROW * i + 8
        yield f'<text x="0" y="{top + _BAR / 2 + 4}">{escape(row)}</text>'
        for kind in KINDS:
            for span in timeline.spans:
                if span.row == row and span.name == kind:
                    yield from _bar(timeline, span, top)


def _bar(timeline: Timeline, span: Span, top: float) -> Iterator[str]:
    """Draw a span; within steps, the shares of data from above and of exchange from below."""
    x = _x(timeline, span.began)
    width = max(1.0, round(_x(timeline, span.ended) - x, 2))
    # What lies in a process is lower than it, so that both can be pointed at.
    inset = 0 if span.name in ("process", "detection", "recovery") else 5
    y, height = top + inset, _BAR - 2 * inset
    at = f'x="{x}" width="{width}"'
    text = f"{span.name}, generation {span.generation}, {span.began:.2f} to {span.ended:.2f} s"
    parts = [f"{name} {100 * s:.0f} %" for name, s in zip(_SHARES, span.shares, strict=True) if s is not None]
    title = escape("; ".join([text, *([span.text] if span.text else []), *parts]))
    yield f'<g data-kind="{span.name}"><title>{title}</title>'
    yield f'<rect {at} y="{y}" height="{height}" fill="{KINDS[span.name]}"/>'
    data, exchange = (height * (share or 0.0) for share in span.shares)
    if data:
        yield f'<rect {at} y="{y}" height="{data:.2f}" fill="{_SHARES["data"]}"/>'
    if exchange:
        low = y + height - exchange
        yield f'<rect {at} y="{low:.2f}" height="{exchange:.2f}" fill="{_SHARES["exchange"]}"/>'
    yield "</g>"


def _faults(timeline: Timeline, height: int) -> Iterator[str]:
    for each in timeline.outages:
        x = _x(timeline, each.fault)
        text = escape(f"{each.task} {each.text}")
        yield f'<g data-kind="fault"><title>{text}</title>'
        yield f'<line x1="{x}" x2="{x}" y1="0" y2="{height - 20}" stroke="#b91c1c" stroke-width="2"/></g>'


def _failures(timeline: Timeline) -> str:
    if not timeline.outages:
        return "<p>No task failed.</p>"
    rows = "".join(
        f"<tr><td>{each.generation}</td><td>{escape(each.task)}</td><td>{escape(each.text)}</td>"
        f"<td>{each.fault:.2f} s</td><td>{each.noticed - each.fault:.2f} s</td>"
        f"<td>{'-' if each.first_step is None else f'{each.first_step - each.fault:.2f} s'}</td></tr>"
        for each in timeline.outages
    )
    heads = ("generation", "task", "fault", "at", "noticed after", "next step after")
    return f"<table><tr>{''.join(f'<th>{head}</th>' for head in heads)}</tr>{rows}</table>"
