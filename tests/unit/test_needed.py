"""Which tests a change needs, in a small tree and in this one."""

import pytest
from tests.needed import ALWAYS, ROOT, Tree

FILES = {
    "src/a/__init__.py": "",
    "src/a/_low.py": '"""Low."""',
    "src/a/_middle.py": '"""Middle.\n\nTests: tests/test_further.py.\n"""\nfrom a import _low',
    "src/a/_high.py": "import a._middle",
    "tests/__init__.py": "",
    "tests/test_low.py": "",
    "tests/test_further.py": "",
    "tests/unit/test_high.py": "",
    "tests/test_reads.py": "from a._low import x\nwords = 'page.md', 'program.py'",
    "tests/helper.py": "from a import _low",
    "tests/helped.py": "def later():\n    from tests.helper import y",
    "tests/test_helped.py": "import tests.helped",
    "tests/programs/program.py": "",
}


@pytest.fixture
def tree(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return Tree(tmp_path)


@pytest.mark.parametrize(
    ("changed", "needed"),
    [
        ("tests/test_low.py", ["test_low"]),
        ("tests/helper.py", ["test_helped"]),
        ("tests/programs/program.py", ["test_reads"]),
        ("docs/page.md", ["test_reads"]),
        ("docs/other.md", []),
        ("src/a/__init__.pyi", ["test_public_names"]),
        ("src/a/_high.py", ["high", "test_high"]),
        ("src/a/_middle.py", ["middle", "test_further", "test_high"]),
        # Not those of `_high`, which imports it by way of another module.
        ("src/a/_low.py", ["low", "test_further", "test_helped", "test_low", "test_reads"]),
    ],
)
def test_by_name_docstring_and_imports(tree, changed, needed):
    found = set(tree.needed([changed]))
    assert (ALWAYS in found) is changed.startswith("src/")
    assert sorted(path.split("/")[-1].strip("_")[:-3] for path in found - {ALWAYS}) == needed


def test_the_files_of_a_change_are_one_list(tree):
    both = tree.needed(["src/a/_high.py", "tests/test_low.py"])
    assert both == ["src/a/_high.py", "tests/test_low.py", ALWAYS, "tests/unit/test_high.py"]


def test_of_this_repository():
    tree = Tree()
    found = tree.needed(["src/unisono/_lowering/_compiler_options.py"])
    assert {"tests/unit/test_compiler_options.py", "tests/unit/step/eager/test_backward.py"} <= set(found)
    assert all((ROOT / path).exists() for path in found)
    assert "tests/cluster/test_chief.py" in tree.needed(["tests/cluster/_workers.py"])
