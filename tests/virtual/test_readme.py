"""The programs of the README run as they stand there, and print what it shows."""

import re
from pathlib import Path

import pytest

from tests import forked

README = Path(__file__).parents[2] / "README.md"
EPOCH = r"epoch (\d): loss (\d\.\d\d), accuracy (\d\.\d\d)"


def epochs(text):
    return [tuple(map(float, found)) for found in re.findall(EPOCH, text)]


def test_readme_programs(tmp_path):
    # The workers' program is one of its own, which tests/cluster/test_examples.py runs.
    sections = re.split(r"^## ", README.read_text(), flags=re.MULTILINE)
    text = "".join(section for section in sections if not section.startswith("Many workers"))
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    assert len(code.splitlines()) > 50
    (tmp_path / "readme.py").write_text(code)
    done = forked.run(["readme.py"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Replicas: 2" in done.stdout
    (shown,) = re.findall(r"```text\n(.*?)```", README.read_text(), re.DOTALL)
    expected = epochs(shown)
    assert [number for number, _, _ in expected] == [1, 2, 3, 4, 5]
    # Other CPUs round differently; the seed is the README's.
    assert epochs(done.stdout) == [pytest.approx(line, abs=0.02) for line in expected]
    assert expected[-1][2] > 0.9, "the loop must learn"
    assert re.search(r"steps: 40, loss \d\.\d{4}", done.stdout), done.stdout
    assert not (tmp_path / "backup").exists(), "`fit` ended well, and its backups are deleted"
