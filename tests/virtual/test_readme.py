"""The programs of the README run as they stand there."""

import os
import re
import subprocess
import sys
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_readme_programs(tmp_path):
    code = "\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
    env = {k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS", "KERAS_BACKEND")}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path, env=env, capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Replicas: 2" in done.stdout
    assert re.search(r"steps: 40, loss \d\.\d{4}", done.stdout), done.stdout
    assert not (tmp_path / "backup").exists(), "`fit` ended well, and its backups are deleted"
    assert re.search(r"loss \d\.\d{4}, accuracy 0\.\d{4}", done.stdout), done.stdout
