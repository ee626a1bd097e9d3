"""Which tests a change needs: `python -m tests.needed src/unisono/_mesh.py` prints their paths.

- A module needs its doctests and its tests: `test_<name>.py`, and those that the last line of its docstring
  names. It needs the tests that import it, too, and the tests of the modules that import it.
- A file that tests import needs those tests; any other file needs the tests in whose text its name stands, or
  that of its folder: `"docs"`.
"""

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
#: What every change of a module needs.
ALWAYS = "tests/unit/test_architecture.py"
#: What a stub needs: it loads each name of each stub.
OF_STUBS = "tests/unit/test_public_names.py"


class Tree:
    """The files of a repository.

    Args:
        root: its directory, with `src` and `tests`.
    """

    def __init__(self, root=ROOT):
        files = [path for folder in ("src", "tests") for path in sorted((root / folder).rglob("*.py"))]
        self._texts = {str(path.relative_to(root)): path.read_text() for path in files}
        self._imports = functools.cache(lambda path: imports_of(self._texts[path]))

    def needed(self, changed):
        """The paths of the tests that changed files need, relative to the root as those are."""
        found = {test for path in changed for test in self._of(path)}
        return sorted(found | {ALWAYS} if any(path.startswith("src/") for path in changed) else found)

    def _of(self, path):
        if is_test(path):
            return {path}
        if path.endswith(".pyi"):
            return {OF_STUBS}
        if path.startswith("src/") and path in self._texts:
            importers = {test for other in self._importers(path) for test in self._own_or_users(other)}
            return {path} | self.own(path) | importers
        return self._users(path)

    def _own_or_users(self, path):
        return self.own(path) if path.startswith("src/") else self._users(path)

    def own(self, path):
        """The tests of a module: of its name, and those that its docstring names."""
        name = f"test_{Path(path).stem.strip('_')}.py"
        last = (ast.get_docstring(ast.parse(self._texts[path])) or "").rpartition("\n\n")[2]
        named = re.findall(r"tests/[\w/]+\.py", last) if last.startswith("Tests: ") else []
        return {test for test in self._texts if is_test(test) and Path(test).name == name} | set(named)

    def _users(self, path, seen=()):
        """The tests that need a file of the tests, or of no package."""
        if is_test(path):
            return {path}
        others = self._importers(path) - {*seen, path}
        found = {test for other in others for test in self._users(other, (*seen, path))}
        name, folder = Path(path).name, f'"{Path(path).parts[0]}"'
        words = {name} if folder == '"tests"' else {name, folder}
        tests = {test: text for test, text in self._texts.items() if is_test(test)}
        return found | {test for test, text in tests.items() if any(word in text for word in words)}

    def _importers(self, path):
        module = ".".join(Path(path).with_suffix("").parts).removeprefix("src.").removesuffix(".__init__")
        word = module.rpartition(".")[2]
        maybe = [other for other, text in self._texts.items() if word in text]
        return {other for other in maybe if module in self._imports(other)}


def imports_of(text):
    """The modules and names that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


def is_test(path):
    """Whether pytest collects a file of the tests."""
    return path.startswith("tests/") and Path(path).name.startswith("test_")


if __name__ == "__main__":
    print(*Tree().needed(sys.argv[1:]) or sys.exit(f"No test needs {sys.argv[1:]}."), sep="\n")
