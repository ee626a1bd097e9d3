"""What needs an extra says so, and the rest does without: in environments of some packages alone.

`make extras` does the same in environments that pip makes.
"""

import ast
import re
import sys

import pytest
from packaging.utils import canonicalize_name
from tests import few_packages

from unisono import _errors
from unisono._errors import MissingPackageError
from unisono._system._packages import require_packages

DOORS = few_packages.ROOT / "tests" / "doors.py"
README = (few_packages.ROOT / "README.md").read_text()


def test_a_missing_package_names_the_line_that_installs_it():
    with pytest.raises(ImportError, match=r"pip install 'unisono\[onnx\]'") as caught:
        require_packages("An ONNX file", "onnx", "json", "package_that_is_not_there")
    assert isinstance(caught.value, MissingPackageError)
    assert isinstance(caught.value, _errors.UnisonoError)
    assert caught.value.name == "package_that_is_not_there"
    assert "json" not in str(caught.value)


def test_the_extra_of_a_message_installs_the_package_that_is_missing():
    calls = [
        [argument.value for argument in call.args[1:] if isinstance(argument, ast.Constant)]
        for path in (few_packages.ROOT / "src").rglob("*.py")
        if "require_packages(" in (text := path.read_text())
        for call in ast.walk(ast.parse(text))
        if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "require_packages"
    ]
    assert ["cluster", "zmq"] in calls
    owners, _ = few_packages.owned()
    for extra, *modules in filter(None, calls):
        asked = {canonicalize_name(needed.name) for needed in few_packages.requirements([extra])}
        installs = asked | few_packages.packages([extra])
        for module in modules:
            # What this environment lacks has the name of its module.
            assert installs & (owners.get(module) or {canonicalize_name(module)}), (extra, module)


@pytest.fixture(scope="module")
def required(tmp_path_factory):
    return few_packages.linked(tmp_path_factory.mktemp("required") / "site")


def test_every_door_opens_with_the_required_packages_or_names_its_extra(required):
    printed = few_packages.run(required, DOORS).splitlines()
    assert set(printed) == few_packages.closed_doors()


@pytest.mark.exhaustive
@pytest.mark.parametrize("extra", few_packages.features())
def test_every_door_opens_with_one_extra_or_names_another(extra, tmp_path):
    if not few_packages.is_complete(extra):
        pytest.skip("not all packages of the extra are installed")
    folder = few_packages.linked(tmp_path / "site", [extra])
    # A package of another extra may be there for the packages of this one.
    assert set(few_packages.run(folder, DOORS).splitlines()) <= few_packages.closed_doors([extra])


def test_programs_of_the_readme_name_the_package_that_they_need(required):
    lines = re.findall(r"^(?:from|import) (\w+).*", README, re.MULTILINE)
    assert "keras" in lines, "the pattern finds imports"
    for line in re.findall(r"^(?:from|import) \w+.*", README, re.MULTILINE):
        module = line.split()[1].partition(".")[0]
        if module in sys.stdlib_module_names or (required / module).exists():
            continue
        (package,) = re.findall(r"# pip install ([\w-]+)$", line)
        assert package in few_packages.owned()[0][module], line


@pytest.mark.exhaustive
def test_programs_of_the_readme_run_with_that_package(tmp_path):
    sections = re.split(r"^## ", README, flags=re.MULTILINE)
    text = "".join(section for section in sections if not section.startswith("Many workers"))
    code = "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL))
    (tmp_path / "readme.py").write_text(code)
    printed = few_packages.run(few_packages.linked(tmp_path / "site", more=["scikit-learn"]), "readme.py")
    assert "Replicas: 2" in printed
