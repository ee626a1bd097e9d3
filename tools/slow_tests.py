"""Write which tests `make test` leaves to `make test-all`: the slow ones, but for the quickest of each file.

    python tools/slow_tests.py build/times/*.xml

The reports are pytest's (`--junitxml`) of whole runs, in which `make test-all` leaves what each test took.
"""

import argparse
import collections
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Mapping
from pathlib import Path

LIST = Path(__file__).parents[1] / "tests" / "slow_tests.txt"
#: Seconds from which a test is slow: with it `make test` takes about 12 minutes on 2 cores.
SLOW = 2.0


def times_in(reports: Iterable[Path]) -> dict[str, float]:
    """Return how many seconds each test took, by its id; of a test in several reports, the last one's."""
    times = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("skipped") is None:
                times[f"{case.get('file')}::{case.get('name')}"] = float(case.get("time", 0))
    return times


def slow_tests(times: Mapping[str, float], least: float = SLOW) -> list[str]:
    """Return the ids of slow tests; that of a function where all its cases are slow.

    >>> slow_tests({"a.py::f[1]": 1.0, "a.py::f[2]": 4.0, "a.py::g[1]": 3.0, "b.py::h": 5.0})
    ['a.py::f[2]', 'a.py::g']
    """
    files, functions = collections.defaultdict(list), collections.defaultdict(set)
    for test, seconds in times.items():
        files[test.partition("::")[0]].append((seconds, test))
        functions[test.partition("[")[0]].add(test)
    slow = {test for cases in files.values() for seconds, test in sorted(cases)[1:] if seconds >= least}
    entries = ({name} if cases <= slow else cases & slow for name, cases in functions.items())
    return sorted(test for entry in entries for test in entry)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("reports", nargs="+", type=Path, help="written by `make test-all`")
    tests = slow_tests(times_in(parser.parse_args().reports))
    LIST.write_text("".join(f"{test}\n" for test in tests))
    print(f"{len(tests)} tests or functions are slow: {LIST}")


if __name__ == "__main__":
    main()
