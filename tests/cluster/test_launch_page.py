"""`unisono launch --web`: the page is served as long as the launch runs, and kept."""

import json
import re

from tests.cluster.launch_support import launched
from tests.unit.watch.test_page import data_in

#: A task that looks at the page of its own launch, as people do beside it.
SCRIPT = r"""
import urllib.request
deadline = time.monotonic() + 200
while not (found := re.search(r"http://\S+/", open(sys.argv[1]).read())):
    assert time.monotonic() < deadline
    time.sleep(0.02)
with urllib.request.urlopen(found[0] + "events", timeout=100) as events:
    lines = [events.readline().decode().strip() for _ in range(5)]
print("seen", lines[2], json.loads(lines[4].removeprefix("data: "))["tasks"][0]["name"])
"""


def test_the_page_is_served_during_the_launch_and_kept(tmp_path):
    with launched(
        tmp_path, "import re\n" + SCRIPT, "--web", args=(str(tmp_path / "err"),), forks=True
    ) as run:
        assert run.end() == 0
        assert "seen event: full worker:0" in run.log("worker:0")
        assert len(re.findall("http://", run.err)) == 1
        assert f"unisono: the page is kept in {run.logs}/timeline.html" in run.err.split("\n")
        page = data_in((run.logs / "timeline.html").read_text())
    assert page["job"]["title"] == "train.py"
    assert page["job"]["state"] == "ended"
    assert "seen event: full" in page["logs"]["worker:0"]
    assert "traceEvents" in json.loads((run.logs / "timeline.json").read_text())
