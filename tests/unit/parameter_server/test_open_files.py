"""The limit of open files, in a process of its own: it is the whole process's."""

import subprocess
import sys

from unisono.parameter_server.server._open_files import allow_open_files

PROGRAM = """
import resource
from unisono.parameter_server.server._open_files import allow_open_files

hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
most = min(hard, 1 << 16) if hard != resource.RLIM_INFINITY else 1 << 16
resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
assert allow_open_files() == most
assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, hard)
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 300))
assert [allow_open_files(), allow_open_files()] == [300, 300]
"""


def test_a_task_may_open_as_many_files_as_the_system_allows():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
    limit = allow_open_files()
    assert allow_open_files() == limit > 0
