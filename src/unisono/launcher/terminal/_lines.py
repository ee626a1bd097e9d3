"""Divide a task's output into complete lines and the one still being written or rewritten; pure."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

#: The most characters that are buffered of one line; a longer one is shown in pieces, so that a task that
#: never prints a line break does not fill the launcher's memory.
_LONGEST = 1 << 16
#: ANSI escape sequences: CSI (colours, cursor) and OSC (titles, links), which ends with BEL or ST.
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
#: An escape sequence whose end has not been read yet.
_CUT_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*)?$")
_COLOURS_OFF = "\x1b[0m"
#: Messages that libraries print on standard output for their developers: left out on the terminal, kept in
#: the log.
_CHATTER = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number .*")


@dataclasses.dataclass
class Lines:
    r"""Divides a task's output into lines.

    A carriage return starts the line over, as progress bars do many times a second: only its final content is
    returned as a line.

    >>> lines = Lines()
    >>> lines.feed("Epoch 1\n\r1/9 loss 2\b\b\r9/9 lo"), lines.feed("ss 1\nEpoch"), lines.pending
    (['Epoch 1'], ['9/9 loss 1'], 'Epoch')
    """

    _text: str = ""

    @property
    def pending(self) -> str:
        """The current content of the incomplete line."""
        return _CUT_ESCAPE.sub("", render_line(self._text))

    def feed(self, text: str) -> list[str]:
        """Append `text` and return the lines that it completes, without their line breaks."""
        *ended, self._text = (self._text + text).split("\n")
        lines = [line for line in map(render_line, ended) if not _CHATTER.fullmatch(line)]
        # What precedes the last carriage return was overwritten; drop it, or a long epoch's bar grows without
        # limit.
        begin = self._text.rstrip("\r").rfind("\r")
        self._text = self._text[max(begin, 0) :]
        while len(self._text) > _LONGEST:
            lines.append(render_line(self._text[:_LONGEST]))
            self._text = self._text[_LONGEST:]
        return lines

    def end(self) -> list[str]:
        """Return the incomplete line as a line, if there is one."""
        left, self._text = render_line(self._text), ""
        return [left] if left else []


def render_line(line: str) -> str:
    r"""Return a line as a terminal shows it, with its carriage returns and backspaces applied.

    >>> render_line("\r1/9\b\b\b\b\r2/9"), render_line("|\b/"), render_line("text\r")
    ('2/9', '/', 'text')
    """
    line = line.rstrip("\r")
    begin = line.rfind("\r")
    # A program that overwrites a longer line pads the new one with spaces.
    line = line[begin + 1 :].rstrip(" ") if begin >= 0 else line
    return _apply_backspaces(plain(line)) if "\b" in line else line


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


def plain(text: str) -> str:
    r"""Return a text without escape sequences.

    >>> plain("\x1b[1m1/9\x1b[0m loss")
    '1/9 loss'
    """
    return _ESCAPE.sub("", text)


def fit_row(text: str, columns: int) -> str:
    r"""Return a progress bar in one row: without its line where room is short, and cut where it still is.

    >>> fit_row("2/2 ━━━━ 1s - loss: 0.5", 20), fit_row("2/2 ━━━━ 1s - loss: 0.5", 12), fit_row("abc", 2)
    ('2/2 1s - loss: 0.5', '2/2 1s - lo…\x1b[0m', 'a…\x1b[0m')
    """
    if width_of(plain(text)) > columns:
        text = re.sub("━+ ?", "", re.sub(rf"{_ESCAPE.pattern}(?=━)", "", text))
    cut = truncate(text, columns)
    return (
        text if cut == text else truncate(text, columns - 1).removesuffix(_COLOURS_OFF) + "…" + _COLOURS_OFF
    )


def truncate(text: str, columns: int) -> str:
    r"""Return the part of a text that fits into a number of terminal columns.

    >>> truncate("\x1b[1m1/9\x1b[0m loss", 5), truncate("abc", 3)
    ('\x1b[1m1/9\x1b[0m l\x1b[0m', 'abc')
    """
    text = text.replace("\t", " ")
    if width_of(plain(text)) <= columns:
        return text
    kept, used = [], 0
    for piece in re.split(f"({_ESCAPE.pattern})", text):
        if _ESCAPE.fullmatch(piece):
            kept.append(piece)
            continue
        for character in piece:
            used += _columns(character)
            if used > columns:
                return "".join([*kept, _COLOURS_OFF])
            kept.append(character)
    return "".join(kept)
