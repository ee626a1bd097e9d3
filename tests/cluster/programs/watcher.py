"""Watches a job at an address until its end; prints a line of JSON for each state."""

import json
import sys
import time
from pathlib import Path

from unisono.watch._places import find_job

reader, last = find_job(sys.argv[1], Path(sys.argv[2])), None
while True:
    job = reader.refresh(1 << 20)
    shown = {
        "state": job.state,
        "tasks": {task.name: task.state for task in job.tasks},
        "code": job.exit_code,
    }
    shown["faults"] = [fault.kind for fault in job.faults]
    if shown != last:
        print(json.dumps({**shown, "step": job.step, "epoch": job.epoch}), flush=True)
    last = shown
    if job.is_over:
        break
    time.sleep(0.1)
reader.folder.close()
