"""A job as JSON."""

import json

from unisono.watch._job import WatchedBackup, WatchedCurve, WatchedFault, WatchedJob, WatchedSpan, WatchedTask


def test_a_job_is_json_of_the_documented_form():
    job = WatchedJob(
        title="train.py",
        config=[("optimizer", "SGD")],
        left_s=float("inf"),
        backup=WatchedBackup(3, 0.5),
        tasks=[WatchedTask("worker:0", data=float("nan"))],
        curves=[WatchedCurve("loss", [(1, 2.0), (2, float("nan"))])],
        faults=[WatchedFault(1.0, None, "failure", "worker:0", "killed by SIGKILL")],
        timeline=[WatchedSpan("worker:0", "train", 1.0, 2.0, 0)],
    )
    read = json.loads(json.dumps(job.to_json(), allow_nan=False))
    assert set(read) == {
        "title", "command", "started", "now", "state", "exit_code", "generation", "restarts", "restarts_left",
        "config", "epoch", "epochs", "step", "steps", "left_s", "backup", "tasks",
        "curves", "faults", "timeline",
    }  # fmt: skip
    assert set(read["tasks"][0]) == {
        "name", "host", "pid", "state", "epoch", "epochs", "step", "steps_per_s", "rows_per_s",
        "tokens_per_s", "data",
        "compute", "exchange", "flops_per_s", "mfu", "host_bytes", "device_bytes", "heartbeat_s",
        "generation", "log",
    }  # fmt: skip
    assert read["config"] == [["optimizer", "SGD"]]
    assert read["left_s"] is read["tasks"][0]["data"] is read["curves"][0]["points"][1][1] is None
    assert read["curves"] == [{"name": "loss", "points": [[1, 2.0], [2, None]]}]
    assert set(read["faults"][0]) == {"time", "step", "kind", "task", "text", "reached"}
    assert set(read["timeline"][0]) == {"task", "name", "begin", "end", "generation"}
