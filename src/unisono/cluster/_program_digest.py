"""A number for the program of a process, by which a cluster notices that processes run different ones.

Tests: tests/unit/cluster/test_program_digest.py.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
from pathlib import Path

#: The keys of a task in TF_CONFIG.
_TASK = {"type", "index"}


def program_digest(path: Path) -> str:
    """Return a digest of what a program does: without comments, layout and its own place in the cluster.

    TensorFlow's documents write TF_CONFIG into the program of each worker, with another index in each.
    """
    data = path.read_bytes()
    # What is no Python, such as an archive, is compared byte by byte.
    with contextlib.suppress(SyntaxError, ValueError, RecursionError):
        data = ast.dump(_WithoutTask().visit(ast.parse(data))).encode()
    return hashlib.sha256(data).hexdigest()[:16]


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
