"""The recording of a worker that is killed: how frames become a picture, and the picture of the README."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pyte
import pytest
from tools.recording import COLUMNS, LAST, ROWS, Frame, Run, faster, intervals, runs_of, svg

PICTURE = Path(__file__).parents[2] / "docs" / "kill.svg"


def row(text, color="default"):
    return (Run(0, text, color, False),) if text else ()


def frames(*texts):
    """A frame a second, each with one row of its own."""
    return [Frame(float(at), (row("$ train"), row(text))) for at, text in enumerate(texts)]


def test_a_row_of_the_terminal_is_cut_where_its_style_changes():
    screen = pyte.Screen(COLUMNS, ROWS)
    pyte.Stream(screen).feed("a \x1b[1;32mb<c\x1b[0m  d   ")
    first, *others = runs_of(screen.buffer[0])
    assert first == (0, "a", "default", False)
    assert others == [(2, "b<c", "green", True), (7, "d", "default", False)]
    assert runs_of(screen.buffer[1]) == ()


def test_what_stays_is_drawn_once():
    shown = intervals(frames("1", "2", "2", "1", ""), 9.0)
    assert shown == {
        (0, row("$ train")): [(0.0, 9.0)],
        (1, row("1")): [(0.0, 1.0), (3.0, 4.0)],
        (1, row("2")): [(1.0, 3.0)],
    }


def test_the_picture_shows_each_row_in_its_time():
    text = svg(frames("1", "a < b", "3"), "& so on")
    root = ET.fromstring(text)
    texts = {"".join(t.itertext()): t for t in root.iter("{http://www.w3.org/2000/svg}text")}
    assert set(texts) == {"$ train", "1", "a < b", "3", "& so on"}
    assert "class" not in texts["$ train"].attrib
    (rule,) = re.findall(rf"@keyframes {texts['a < b'].get('class')}{{(.*?}})}}", text)
    end = 2 + LAST
    assert rule == f"0%{{opacity:0}}{100 / end:.2f}%{{opacity:1}}{200 / end:.2f}%{{opacity:0}}"
    # Where nothing moves, the last frame is shown.
    assert [name for name, t in texts.items() if (t.get("class") or "").endswith(" z")] == ["3"]


def test_the_picture_begins_with_the_last_frame():
    text = svg(frames("1", "2"), "so on")
    (start,) = re.findall(r"step-end -([\d.]+)s infinite", text)
    assert 1 < float(start) < 1 + LAST
    assert "@media(prefers-reduced-motion:reduce){[class]{animation:none}}" in text


def test_the_first_thing_that_the_readmes_picture_shows_is_the_failure_and_the_resumption():
    text = PICTURE.read_text()
    seconds, start = map(float, re.findall(r"animation:([\d.]+)s step-end -([\d.]+)s infinite", text)[0])
    rules = dict(re.findall(r"@keyframes (k\d+)\{(.*?\})\}", text))
    shown = []
    for element in ET.fromstring(text).iter("{http://www.w3.org/2000/svg}text"):
        steps = (
            re.findall(r"([\d.]+)%\{opacity:(\d)\}", rules[element.get("class", "").split()[0]])
            if element.get("class")
            else []
        )
        before = [opacity for at, opacity in steps if float(at) <= 100 * start / seconds]
        if not steps or before[-1] == "1":
            shown.append("".join(element.itertext()))
    assert any("was killed by SIGKILL" in line for line in shown)
    assert any("resumed at step" in line for line in shown)


def test_a_long_run_plays_faster():
    found, factor = faster(frames("1", "2", "3"), 0.5)
    assert (factor, [frame.at for frame in found]) == (4.0, [0.0, 0.25, 0.5])
    assert faster(frames("1", "2"), 9.0)[1] == 1.0


@pytest.fixture(scope="module")
def picture():
    return PICTURE.read_text()


def test_the_pictures_run_was_killed_and_went_on(picture):
    root = ET.fromstring(picture)
    rows = ["".join(t.itertext()) for t in root.iter("{http://www.w3.org/2000/svg}text")]
    for pattern in (
        "^. unisono launch -n 2",
        "worker:1 .*runs",
        "killed by SIGKILL",
        "resumed at step",
        "Epoch 12/12",
    ):
        assert any(re.search(pattern, text) for text in rows), pattern
    assert len(picture) < 150_000
    # Nothing is loaded from elsewhere.
    assert "://" not in picture.replace("http://www.w3.org/2000/svg", "")
