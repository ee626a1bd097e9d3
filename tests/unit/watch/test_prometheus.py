"""The numbers of a job for Prometheus, as a scrape gets them, and the example of a dashboard of them."""

import json
import re
import urllib.request
from pathlib import Path

import pytest
from tests.unit.watch.test_screen import JOB

from unisono._errors import InvalidArgumentError
from unisono.watch._prometheus import MetricsServer, families_of

DASHBOARD = Path(__file__).parents[3] / "examples" / "grafana_dashboard.json"


class Source:
    name = "logs"

    def refresh(self, most_bytes=None):
        return JOB


def test_a_scrape_reads_the_job_in_the_text_format():
    server = MetricsServer(Source(), "0")
    try:
        assert server.url.startswith("http://127.0.0.1:")
        with urllib.request.urlopen(server.url, timeout=30) as answer:
            kind, text = answer.headers["Content-Type"], answer.read().decode()
        with pytest.raises(InvalidArgumentError, match="free port of this machine"):
            MetricsServer(Source(), server.url.split(":")[-1].partition("/")[0])
    finally:
        server.close()
    assert kind.startswith("text/plain; version=0.0.4")
    lines = text.splitlines()
    for line in (
        'unisono_job_info{command="",title="train.py"} 1.0',
        'unisono_state{state="runs"} 1.0',
        'unisono_state{state="failed"} 0.0',
        "unisono_step 4230.0",
        "unisono_steps 10000.0",
        "unisono_left_seconds 812.0",
        "unisono_restarts_total 1.0",
        "unisono_restarts_left 2.0",
        "unisono_backup_age_seconds 12.0",
        'unisono_faults_total{kind="failure"} 1.0',
        'unisono_log{name="val_loss"} 0.25',
        'unisono_task_up{host="a",task="worker:3"} 1.0',
        'unisono_task_rows_per_second{host="a",task="worker:0"} 27000.0',
        'unisono_task_exchange_ratio{host="a",task="worker:0"} 0.17',
        "# TYPE unisono_task_host_bytes gauge",
    ):
        assert line in lines, text
    assert "unisono_exit_code" not in text


@pytest.mark.parametrize("address", ["x", "70000", "host:", "-1"])
def test_an_address_is_a_port_or_a_host_with_one(address):
    with pytest.raises(InvalidArgumentError, match=r"PORT or HOST:PORT"):
        MetricsServer(Source(), address)


def test_the_dashboard_shows_numbers_that_there_are():
    dashboard = json.loads(DASHBOARD.read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    asked = {name for query in queries for name in re.findall(r"unisono_\w+", query)}
    suffixes = {"counter": "_total", "info": "_info"}
    made = {family.name + suffixes.get(family.type, "") for family in families_of(JOB)}
    assert asked <= made, asked - made
    assert len(asked) > 10
    places = [panel["gridPos"] for panel in dashboard["panels"]]
    cells = [
        (x, y)
        for place in places
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
