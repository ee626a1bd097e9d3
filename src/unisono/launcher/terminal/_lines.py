"""Divide a task's output into complete lines and the one still being written or rewritten; pure."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

from unisono.launcher.terminal._printable import (
    COLOUR,
    COLOURS_OFF,
    CUT_ESCAPE,
    UP,
    closed,
    open_colours,
    plain,
    with_moves,
)

#: The most characters that are buffered of one line; a longer one is shown in pieces, so that a task that
#: never prints a line break does not fill the launcher's memory.
_LONGEST = 1 << 16
#: The most rows of a task that it may write anew: bars below each other.
_MOST_HELD = 16
#: The counts before the numbers in a progress bar of Keras, behind the name of the task.
_COUNTS = re.compile(r"^(\[[a-z]+:\d+\] )? *\d+/\w+ [^-]*?/\w+ - ")
_STEPS = re.compile(f"(\n|{re.escape(UP)})")
#: Messages that libraries print on standard output for their developers: left out on the terminal, kept in
#: the log.
_CHATTER = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number .*")


@dataclasses.dataclass
class Lines:
    r"""Divides a task's output into lines.

    A carriage return starts the line over, as progress bars do many times a second: only its final content is
    returned as a line. Bars below each other go up to the first one again: from then on so many rows are not
    returned before the task prints below them.

    >>> lines = Lines()
    >>> lines.feed("Epoch 1\n\r1/9 loss 2\b\b\r9/9 lo"), lines.feed("ss 1\nEpoch"), lines.pending
    (['Epoch 1'], ['9/9 loss 1'], ['Epoch'])
    >>> lines.feed("\rall 1\n\reach 1\x1b[A"), lines.feed("\rall 2\n\reach 2\x1b[A"), lines.pending
    ([], [], ['all 2', 'each 2'])
    """

    _rows: list[str] = dataclasses.field(default_factory=lambda: [""])
    #: The row in which the task prints.
    _row: int = 0
    #: Rows above it that the task may go up to.
    _held: int = 0
    _cut: str = ""

    @property
    def pending(self) -> list[str]:
        """The current content of the rows that are not complete."""
        rows = list(map(render_line, self._rows))
        while rows and not plain(rows[-1]):
            del rows[-1]
        return rows

    def feed(self, text: str) -> list[str]:
        """Append `text` and return the lines that it completes, without their line breaks."""
        text = self._cut + text
        cut = CUT_ESCAPE.search(text)
        self._cut = cut[0] if cut else ""
        return self._write(with_moves(text[: cut.start()] if cut else text))

    def _write(self, text: str) -> list[str]:
        lines = []
        for piece in _STEPS.split(text):
            if piece == "\n":
                self._go_down()
            elif piece == UP:
                self._go_up()
            elif piece:
                lines += self._append(piece)
        done = max(0, self._row - self._held)
        lines += map(render_line, self._rows[:done])
        del self._rows[:done]
        self._row -= done
        return [line for line in lines if not _CHATTER.fullmatch(line)]

    def _go_down(self) -> None:
        self._row += 1
        if self._row < len(self._rows):
            self._rows[self._row] += "\r"
        else:
            self._rows.append(open_colours(self._rows[-1]))

    def _go_up(self) -> None:
        below = len(self._rows) - self._row
        if self._row and below <= _MOST_HELD:
            self._row -= 1
            self._held = max(self._held, below)
            # Bars write a row anew.
            self._rows[self._row] += "\r"

    def _append(self, piece: str) -> list[str]:
        """Append to the row; return the lines that this ends because the row is too long."""
        row = self._rows[self._row] + piece
        # What precedes the last carriage return was overwritten; drop it, or a long epoch's bar grows without
        # limit.
        row = row[max(row.rstrip("\r").rfind("\r"), 0) :]
        lines = []
        while len(row) > _LONGEST:
            lines.append(render_line(row[:_LONGEST]))
            row = row[_LONGEST:]
        self._rows[self._row] = row
        return lines

    def end(self) -> list[str]:
        """Return the incomplete rows as lines, but for empty ones."""
        lines = self._write(with_moves(self._cut)) + [row for row in self.pending if plain(row)]
        self._rows, self._row, self._held, self._cut = [""], 0, 0, ""
        return lines


def render_line(line: str) -> str:
    r"""Return a line as a terminal shows it, with its carriage returns and backspaces applied.

    >>> render_line("\r1/9\b\b\b\b\r2/9"), render_line("|\b/"), render_line("text\r")
    ('2/9', '/', 'text')
    """
    line = line.rstrip("\r")
    begin = line.rfind("\r")
    # A program that overwrites a longer line pads the new one with spaces.
    line = line[begin + 1 :].rstrip(" ") if begin >= 0 else line
    return _apply_backspaces(plain(line)) if "\b" in line else closed(line)


def _apply_backspaces(line: str) -> str:
    cells: list[str] = []
    cursor = 0
    for character in line:
        if character == "\b":
            cursor = max(0, cursor - 1)
        else:
            cells[cursor : cursor + 1] = character
            cursor += 1
    return "".join(cells)


def width_of(text: str) -> int:
    r"""Return the number of terminal columns of a text without escape sequences.

    >>> width_of("abc"), width_of("\u4e2d"), width_of("e\u0301")
    (3, 2, 1)
    """
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def _columns(character: str) -> int:
    if unicodedata.combining(character):
        return 0
    return 2 if unicodedata.east_asian_width(character) in "WF" else 1


def fit_row(text: str, columns: int) -> str:
    r"""Return a progress bar in one row: without its line where room is short, then without its counts.

    What is too long even so is cut, behind the counts.

    >>> bar = "2/2 ━━━━ 1s 5ms/step - mae: 0.5 - loss: 0.5"
    >>> fit_row(bar, 39), fit_row(bar, 22), fit_row(bar, 17)
    ('2/2 1s 5ms/step - mae: 0.5 - loss: 0.5', 'mae: 0.5 - loss: 0.5', 'mae 0.5  loss 0.5')
    >>> fit_row(bar, 12), fit_row("abc", 2)
    ('2/2 1s 5ms/…\x1b[0m', 'a…\x1b[0m')
    """
    if width_of(plain(text)) > columns:
        text = re.sub("━+ ?", "", plain(text))
        numbers = _COUNTS.sub(r"\1", text)
        for shorter in (text, numbers, numbers.replace(" - ", "  ").replace(": ", " ")):
            if width_of(shorter) <= columns:
                return shorter
    cut = truncate(text, columns)
    return text if cut == text else truncate(text, columns - 1).removesuffix(COLOURS_OFF) + "…" + COLOURS_OFF


def truncate(text: str, columns: int) -> str:
    r"""Return the part of a text that fits into a number of terminal columns.

    >>> truncate("\x1b[1m1/9\x1b[0m loss", 5), truncate("abc", 3)
    ('\x1b[1m1/9\x1b[0m l\x1b[0m', 'abc')
    """
    text = text.replace("\t", " ")
    if width_of(plain(text)) <= columns:
        return text
    kept, used = [], 0
    for piece in re.split(f"({COLOUR})", text):
        if re.fullmatch(COLOUR, piece):
            kept.append(piece)
            continue
        for character in piece:
            used += _columns(character)
            if used > columns:
                return "".join([*kept, COLOURS_OFF])
            kept.append(character)
    return "".join(kept)
