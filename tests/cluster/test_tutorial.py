"""docs/tutorial.md: its programs and commands run as they stand there, and print what it shows."""

import re
import shlex
from pathlib import Path

import pytest

from tests import forked

PAGE = (Path(__file__).parents[2] / "docs" / "tutorial.md").read_text()
BLOCK = re.compile(r"(?:<!-- (file|change): (\S+) -->\n)?```(\w+)\n(.*?)```", re.DOTALL)
NUMBER = r"\d+\.\d+"
VALUE = rf"{NUMBER}|(?<=weights: )[0-9a-f]+"


def sections():
    """The headings of the page, each with its blocks."""
    parts = re.split(r"^## ", PAGE, flags=re.MULTILINE)
    return {part.partition("\n")[0]: BLOCK.findall(part) for part in parts[1:]}


def run(line, folder):
    """Run a command of the page, and return what it prints."""
    line, _, comment = line.partition("  # ends with code ")
    words = shlex.split(line)
    env = dict(word.split("=") for word in words if re.match("[A-Z]+=", word))
    words = words[len(env) :]
    command = words[1:] if words[0] == "python" else ["-m", *words]
    done = forked.run(command, folder, env=forked.environment(**env))
    # A shell adds 128 to the number of the signal.
    assert done.returncode == (128 - int(comment) if comment else 0), done
    return done.stdout


def write(folder, kind, name, code):
    path = folder / name
    if kind == "file":
        path.write_text(code)
    else:
        text, count = re.subn(r"^strategy = .*\n", code, path.read_text(), flags=re.MULTILINE)
        assert count == 1, "the page changes the line of the strategy"
        path.write_text(text)


@pytest.fixture(scope="module")
def printed(tmp_path_factory):
    """For each section what it shows and what its commands print."""
    folder = tmp_path_factory.mktemp("tutorial")
    found = {}
    for title, blocks in sections().items():
        shown, output = "", ""
        for kind, name, language, text in blocks:
            if language == "python":
                write(folder, kind, name, text)
            elif language == "sh":
                output += "".join(run(line, folder) for line in text.splitlines())
            else:
                shown += text
        found[title] = shown, output
    return found


@pytest.mark.parametrize("title", [title for title in sections() if title[0].isdigit()])
def test_what_the_page_shows_is_printed(printed, title):
    """Other processors round differently, and print other digits."""
    shown, output = printed[title]
    assert re.sub(VALUE, "", output) == re.sub(VALUE, "", shown) != ""
    numbers, expected = ([float(n) for n in re.findall(NUMBER, text)] for text in (output, shown))
    assert numbers == pytest.approx(expected, abs=2e-3)


def losses(printed, step):
    (output,) = (output for title, (_, output) in printed.items() if title.startswith(step))
    return re.findall(r"losses: (.*)", output)


def test_what_the_page_says_of_its_numbers(printed):
    one, two, processes, servers = (losses(printed, step)[0] for step in "1256")
    for other in (two, processes, servers):
        assert list(map(float, other.split())) == pytest.approx(list(map(float, one.split())), abs=2e-4)
    undisturbed, resumed = losses(printed, "4")
    assert undisturbed == resumed
    (output,) = (output for title, (_, output) in printed.items() if title.startswith("4"))
    first, second = re.findall("weights: (.*)", output)
    assert first == second
