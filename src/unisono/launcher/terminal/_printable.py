r"""The bytes of a task as a terminal may get them; pure.

A terminal obeys escape sequences: they set the clipboard and the title, clear the screen, move the cursor to
other lines, or make it send text as if it were typed. The output of a task may hold any of them, with a line
of its data, and so may the text of an exception. Colours stay, and in the output the moves of progress bars:
`Lines` carries them out itself, within the rows of the task. All other control characters are shown as text,
and so are those by which Unicode turns the order of a line or ends it.

Tests: tests/unit/launcher/terminal/test_hostile_output.py.
"""

from __future__ import annotations

import re

from unisono.cluster_resolver._spec import Task

#: The cursor goes up one row; the only move that `with_moves` leaves, beside carriage returns and backspaces.
UP = "\x1b[A"
COLOURS_OFF = "\x1b[0m"
#: A sequence that selects a colour or a style (SGR). Longer ones than any program needs are text.
COLOUR = r"\x1b\[[0-9;:]{0,64}m"
#: An escape sequence whose end has not been read yet.
CUT_ESCAPE = re.compile(r"\x1b(\[[0-9;:?]{0,64})?\Z")

_RESET = re.compile(r"\x1b\[[0:;]*m")
_MOVE = r"\x1b\[(?P<count>[0-9]{0,4})(?P<move>[ADFGK])"
#: Progress bars hide the cursor, and show it at their end.
_CURSOR = r"\x1b\[\?25[hl]"
#: Besides the control characters: what ends a line for some programs, and what makes a terminal show the rest
#: of a line in another order (Unicode's bidirectional algorithm, UAX #9), so that it reads as what it is not.
_CONTROLS = r"\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069"
_IN_OUTPUT = re.compile(
    rf"(?P<kept>{COLOUR}|[\r\b]+)|{_MOVE}|(?P<cursor>{_CURSOR})|(?P<control>[{_CONTROLS}])"
)
_IN_MESSAGE = re.compile(rf"(?P<kept>{COLOUR})|(?P<control>[{_CONTROLS}])")
#: Rows and columns of one move: more than a progress bar has.
_MOST_ROWS, _MOST_COLUMNS = 16, 1000


def with_moves(text: str) -> str:
    r"""Return the output of a task with its colours, and with the moves of progress bars in a simple form.

    These are carriage returns, backspaces and `UP`.

    >>> with_moves("\x1b[1m1/9\x1b[0m\x1b[2K\r\x1b[2A\x1b[3D"), with_moves("\x1b]0;title\x07\x9b2J")
    ('\x1b[1m1/9\x1b[0m\r \r\r\x1b[A\x1b[A\x08\x08\x08', '\\x1b]0;title\\x07\\x9b2J')
    """
    return _IN_OUTPUT.sub(_simplest, text)


def _simplest(match: re.Match[str]) -> str:
    groups = match.groupdict()
    if groups["kept"] is not None:
        return groups["kept"]
    if groups["control"] is not None:
        return _as_text(groups["control"])
    if groups["cursor"] is not None:
        return ""
    count, move = groups["count"], groups["move"]
    times = max(1, int(count or 1))
    if move == "A":
        return UP * min(times, _MOST_ROWS)
    if move == "F":
        return UP * min(times, _MOST_ROWS) + "\r"
    if move == "D":
        return "\b" * min(times, _MOST_COLUMNS)
    if move == "K":
        # The rest of the row, which has been written over, or all of it.
        return "\r \r" if times == 2 else ""
    return "\r" if times == 1 else _as_text(match[0][0]) + match[0][1:]


def as_message(text: str) -> str:
    r"""Return a text of several lines for a terminal, with its colours.

    >>> as_message("\x1b[31mred\nHello\x1b]0;title\x07 \r1")
    '\x1b[31mred\x1b[0m\nHello\\x1b]0;title\\x07 \\x0d1'
    """
    tame = _IN_MESSAGE.sub(lambda match: match["kept"] or _as_text(match["control"]), text)
    return "\n".join(map(closed, tame.split("\n")))


def one_line(text: str) -> str:
    r"""Return a text in one line, without colours.

    >>> one_line("ValueError: a\nb\x1b[1m\x1b[2J")
    'ValueError: a b\\x1b[2J'
    """
    return plain(as_message(" ".join(text.splitlines())))


def prefixed(name: Task | str, text: str) -> str:
    r"""Return the lines of a text each behind the name of its source: none can be taken for the launcher's.

    >>> prefixed(Task("worker", 0), "Traceback\nunisono: done")
    '[worker:0] Traceback\n[worker:0] unisono: done'
    """
    return "\n".join(f"[{name}] {line}" for line in as_message(text).splitlines())


def plain(text: str) -> str:
    r"""Return a text without colours.

    >>> plain("\x1b[1m1/9\x1b[0m loss")
    '1/9 loss'
    """
    return re.sub(COLOUR, "", text)


def open_colours(line: str) -> str:
    r"""Return the colours that hold on behind a line; none where there are more than a program needs.

    >>> open_colours("\x1b[31mred \x1b[0m\x1b[1mbold"), open_colours("\x1b[1mbold\x1b[m")
    ('\x1b[1m', '')
    """
    colours = "".join(re.findall(COLOUR, line))
    opened = _RESET.split(colours)[-1]
    return opened if len(opened) <= 64 else ""


def closed(line: str) -> str:
    """Return a line behind which no colours hold on: the next line may be the launcher's."""
    opened = re.search(COLOUR, _RESET.split(line)[-1])
    return line + COLOURS_OFF if opened else line


def _as_text(control: str) -> str:
    code = ord(control)
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
