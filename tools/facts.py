"""Print the numbers of the first page of the site: `python -m tools.facts`; `--check` compares the page.

Numbers of tests, mutants, faults and versions, and the steps of an H200. The ratios there are `make bench`'s.
"""

import argparse
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "index.md"
#: The folders of tests of `make test-all`.
TESTS = ("tests/cluster", "tests/unit", "tests/virtual", "src")
#: The rows of the first page, by what they are called in docs/gpu.md.
MODELS = {"ResNet-50": "ResNet-50, 256 rows", "GPT-2": "GPT-2, 16 rows of 1024 tokens"}
PEERS = ("unisono", "plain Keras", "JAX by hand with Keras' model")


def tests():
    """How many tests `make test-all` runs: pytest collects them, within a minute or two."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", "-q", *TESTS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=580, check=False)
    found = re.search(r"^(\d+) tests collected", done.stdout, re.MULTILINE)
    # With `-q` of pyproject.toml, pytest prints a line for each file.
    counts = re.findall(r"^\S+: (\d+)$", done.stdout, re.MULTILINE)
    if done.returncode or not (found or counts):
        raise RuntimeError(
            f"pytest must collect all tests. It ended with {done.returncode}:\n{done.stdout[-2000:]}"
        )
    return int(found[1]) if found else sum(map(int, counts))


def mutants(text=None):
    """Of the last mutants that were judged: how many were found, and how many change something.

    Args:
        text: of CONTRIBUTING.md, which has the table.
    """
    text = (ROOT / "CONTRIBUTING.md").read_text() if text is None else text
    drawn, *_, found = re.search(r"^\| all \|(.*)\|$", text, re.MULTILINE)[1].split("|")
    drawn, found = int(drawn), int(found.split()[0])
    words = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    changes_nothing = words.index(re.search(r"The other (\w+) change nothing", text)[1]) + 1
    return found, drawn - changes_nothing


def faults():
    """The kinds of faults that `make soak` draws."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from soaking import plans

    return {kind for job in plans.JOBS.values() for kind, targets in job.faults.items() if targets}


def versions():
    """From a package to the oldest version that is allowed, and the first that is not."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = {}
    for needed in map(Requirement, project["dependencies"]):
        if needed.name in {"jax", "keras"}:
            bounds = {one.operator: one.version for one in needed.specifier}
            found[needed.name] = bounds[">="], bounds["<"]
    return found


def steps():
    """From the models of the first page to the milliseconds of a step, of Unisono and its peers."""
    text = (ROOT / "docs" / "gpu.md").read_text()
    rows = re.findall(r"^\| ([\w-]+), 1 device, .*? \| (.*?) +\| ([\d.]+) +\|", text, re.MULTILINE)
    measured = {(model, who): ms for model, who, ms in reversed(rows)}
    return {MODELS[model]: [measured[model, peer] for peer in PEERS] for model in MODELS}


def claims(page, count=None):
    """Return what a page says that is not so.

    Args:
        page: its text.
        count: of the tests; None to leave them out.

    Returns:
        A sentence for each number.
    """
    found, judged = mutants()
    (jax, no_jax), (keras, _) = versions()["jax"], versions()["keras"]
    wanted = [f"**{found} of {judged} mutants**", f"**{len(faults())} kinds of faults**"]
    wanted += [f"| {' | '.join([model, *ms])} |" for model, ms in steps().items()]
    missing = [f"The page must say: {text}" for text in wanted if text not in page]
    said = re.search(r"\*\*JAX ([\d.]+) to ([\d.]+), Keras ([\d.]+)\*\*", page)
    if said is None or said[1] != jax or not _is_last(said[2], no_jax) or said[3] != keras:
        missing.append(f"The page must say: **JAX {jax} to the last before {no_jax}, Keras {keras}**")
    least = re.search(r"\*\*More than ([\d,]+) tests\*\*", page)
    if least is None:
        missing.append("The page must say: **More than N tests**")
    elif count is not None and int(least[1].replace(",", "")) >= count:
        missing.append(f"The page says more than {least[1]} tests. There are {count:,}.")
    return missing


def _is_last(version, bound):
    """True for "0.12" and the bound "0.13"."""
    major, minor = map(int, bound.split(".")[:2])
    return version == f"{major}.{minor - 1}"


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--check", action="store_true", help="end with 1 if docs/index.md says something else"
    )
    options = parser.parse_args()
    count, (found, judged) = tests(), mutants()
    print(f"tests that `make test-all` runs: {count:,}")
    print(f"mutants that change something: {judged}, found: {found}")
    print(f"kinds of faults of `make soak`: {len(faults())} ({', '.join(sorted(faults()))})")
    for package, (oldest, bound) in versions().items():
        print(f"{package}: from {oldest} on, before {bound}")
    for model, ms in steps().items():
        print(
            f"{model}, milliseconds a step: {', '.join(f'{a} {b}' for a, b in zip(PEERS, ms, strict=True))}"
        )
    wrong = claims(PAGE.read_text(), count)
    print(*wrong, sep="\n", end="\n" if wrong else "")
    return int(bool(wrong) and options.check)


if __name__ == "__main__":
    sys.exit(main())
