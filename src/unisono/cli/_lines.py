"""What a task prints, as lines: whole ones, and one that is still being written or rewritten; pure."""

from __future__ import annotations

import dataclasses
import re
import unicodedata

#: Characters of a line that are kept together; a longer one is shown in pieces.
_LONGEST = 1 << 16
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?")
_CUT_ESCAPE = re.compile(r"\x1b(\[[0-?]*[ -/]*)?$")
_COLOURS_OFF = "\x1b[0m"
#: What libraries print on standard output for their authors; it is in the log.
_CHATTER = re.compile(r"\[Gloo\] Rank \d+ is connected to \d+ peer ranks\. Expected number .*")


@dataclasses.dataclass
class Lines:
    r"""Divides what a task prints into lines.

    A carriage return begins the line anew, as progress bars do many times a second: only what it
    holds at its end is one of the lines.

    >>> lines = Lines()
    >>> lines.feed("Epoch 1\n\r1/9 loss 2\b\b\r9/9 lo"), lines.feed("ss 1\nEpoch"), lines.pending
    (['Epoch 1'], ['9/9 loss 1'], 'Epoch')
    """

    _text: str = ""

    @property
    def pending(self) -> str:
        """The line that is not complete, as it is now."""
        return _CUT_ESCAPE.sub("", rewritten(self._text))

    def feed(self, text: str) -> list[str]:
        """Return the lines that are complete with `text`, without their ends."""
        *ended, self._text = (self._text + text).split("\n")
        lines = [line for line in map(rewritten, ended) if not _CHATTER.fullmatch(line)]
        begin = self._text.rstrip("\r").rfind("\r")
        self._text = self._text[max(begin, 0) :]
        while len(self._text) > _LONGEST:
            lines.append(rewritten(self._text[:_LONGEST]))
            self._text = self._text[_LONGEST:]
        return lines

    def end(self) -> list[str]:
        """Return what is left as a line, if anything is."""
        left, self._text = rewritten(self._text), ""
        return [left] if left else []


def rewritten(line: str) -> str:
    r"""Return a line as a terminal shows it after its carriage returns and backspaces.

    >>> rewritten("\r1/9\b\b\b\b\r2/9"), rewritten("|\b/"), rewritten("text\r")
    ('2/9', '/', 'text')
    """
    line = line.rstrip("\r")
    begin = line.rfind("\r")
    # What a program writes over a longer line it fills up with spaces.
    line = line[begin + 1 :].rstrip(" ") if begin >= 0 else line
    return _typed_over(plain(line)) if "\b" in line else line


def _typed_over(line: str) -> str:
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
    r"""Return the columns of a text without escape sequences.

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


def cut(text: str, columns: int) -> str:
    r"""Return the part of a text that a terminal shows in so many columns.

    >>> cut("\x1b[1m1/9\x1b[0m loss", 5), cut("abc", 3)
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
