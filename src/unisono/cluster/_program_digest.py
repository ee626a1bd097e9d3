"""Texts of a process' program and cluster, by which processes notice that they run different ones."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

#: The keys of a task in TF_CONFIG.
_TASK = {"type", "index"}
#: Parts of a cluster that are compared; one with more tasks is sent as their digests.
_PARTS = 16


def program_digest(path: Path) -> str:
    """Return a digest of what a program does: without comments, layout and its own place in the cluster.

    TensorFlow's documents write TF_CONFIG into the program of each worker, with another index in each.
    """
    data = path.read_bytes()
    # What is no Python, such as an archive, is compared byte by byte.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        data = ast.dump(_WithoutTask().visit(ast.parse(data))).encode()
    return hashlib.sha256(data).hexdigest()[:16]


def cluster_text(jobs: Mapping[str, Sequence[str] | Mapping[int, str]]) -> str:
    """Return the addresses of all tasks as a text of bounded length, whose lines differ where they do.

    Process 0 gets one from each process: a thousand times a thousand addresses would be 20 MB.

    >>> cluster_text({"worker": ["a:1", "b:1"]})
    "{'worker': ['a:1', 'b:1']}"
    """
    every = [
        (f"{job}:{index}", address)
        for job, tasks in jobs.items()
        for index, address in (tasks.items() if isinstance(tasks, Mapping) else enumerate(tasks))
    ]
    if len(every) <= _PARTS:
        return str(jobs)
    size = math.ceil(len(every) / _PARTS)
    parts = [every[i : i + size] for i in range(0, len(every), size)]
    digests = [hashlib.sha256(str(part).encode()).hexdigest()[:8] for part in parts]
    return "\n".join(
        f"{part[0][0]} to {part[-1][0]}: addresses of digest {digest}"
        for part, digest in zip(parts, digests, strict=True)
    )


class _WithoutTask(ast.NodeTransformer):
    """Removes which task of its cluster a program is. The clusters themselves are compared elsewhere."""

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        """Remove the value of `os.environ["TF_CONFIG"]`."""
        if any(isinstance(t, ast.Subscript) and _text(t.slice) == "TF_CONFIG" for t in node.targets):
            node.value = ast.Constant(None)
        return self.generic_visit(node)

    def visit_Dict(self, node: ast.Dict) -> ast.AST:
        """Remove the values of `{"type": "worker", "index": 0}`."""
        if {_text(key) for key in node.keys} == _TASK:
            return ast.Constant(None)
        return self.generic_visit(node)


def _text(node: ast.expr | None) -> object:
    return node.value if isinstance(node, ast.Constant) else None
