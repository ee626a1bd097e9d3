from pathlib import Path

from tools.slow_tests import LIST, slow_tests, times_in

ROOT = Path(__file__).parents[2]
REPORT = """<testsuites><testsuite>
<testcase file="a.py" name="f[1]" time="0.5"/><testcase file="a.py" name="g" time="2.5"/>
<testcase file="b.py" name="h" time="0.0"><skipped/></testcase><testcase file="b.py" name="i" time="9"/>
</testsuite></testsuites>"""


def test_the_quickest_test_of_a_file_is_never_slow(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert slow_tests(times_in([report])) == ["a.py::g"]
    times = {"a.py::f[1]": 1.0, "a.py::f[2]": 4.0, "a.py::g[1]": 3.0, "b.py::h": 5.0}
    assert slow_tests(times) == ["a.py::f[2]", "a.py::g"]


def test_the_tests_of_the_list_are_there():
    for test in LIST.read_text().splitlines():
        path, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test
