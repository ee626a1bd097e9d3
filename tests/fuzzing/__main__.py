"""Try random changes of every format.

python -m tests.fuzzing                     # 10,000 of each
python -m tests.fuzzing --minutes 1         # as many as a minute allows, alike for each
python -m tests.fuzzing --only Platforms --seed 7
"""

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
import warnings
from fractions import Fraction
from pathlib import Path

os.environ.setdefault("KERAS_BACKEND", "jax")

import hypothesis

from tests.fuzzing import checkpoints, launches, models, servers, texts
from unisono import UnisonoError

#: Cases of each format at most.
CASES = 10_000
#: Of one run of hypothesis, between two looks at the time.
CHUNK = 100

TARGETS = [
    checkpoints.SavedCheckpoints, checkpoints.CheckpointsInStores, checkpoints.SavedBackups,
    checkpoints.Markers, launches.Timelines, launches.SmallFiles, launches.TFConfigs, launches.Platforms,
    launches.Variables, models.ExportedModels, models.SavedModules, models.SavedModels, models.CachedData,
    models.Records, servers.ServerFiles, servers.Messages, texts.Lists, texts.EngineLogs, texts.Examples,
    texts.EventFiles, texts.ArrayRecords,
]  # fmt: skip


def fuzz(target, folder, count, seed=None):
    """Try a number of cases; raise the error of the smallest case that ends in another one than it may.

    Args:
        seed: None for the same cases each time.
    """
    inner = folder / "inner"
    inner.mkdir(parents=True, exist_ok=True)
    reader = target(inner)

    @hypothesis.settings(
        max_examples=count, deadline=None, database=None, derandomize=seed is None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )  # fmt: skip
    @hypothesis.given(target.cases)
    def check(case):
        text = ""
        try:
            reader.run(case)
        except UnisonoError as error:
            text = str(error)
        assert not text or "eceived" in text, f"The error does not say what was received: {text}"
        assert os.listdir(folder) == ["inner"], "A file was written elsewhere."

    if seed is not None:
        check = hypothesis.seed(seed)(check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        check()


def fuzz_until(target, until, seed):
    """Try cases until a moment, or until there are enough; return how many."""
    done = 0
    while done < CASES and (time.monotonic() < until or not done):
        with tempfile.TemporaryDirectory() as folder:
            fuzz(target, Path(folder), CHUNK, seed * CASES + done)
        done += CHUNK
    return done


def main():
    """Try all targets, print how many cases of each were tried, and return whether one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--minutes", type=lambda text: float(Fraction(text)), help="for all together, such as 1 or 1/3"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=[target.__name__ for target in TARGETS])
    arguments = parser.parse_args()
    logging.disable(logging.CRITICAL)
    targets = [target for target in TARGETS if arguments.only in (None, target.__name__)]
    end = float("inf") if arguments.minutes is None else time.monotonic() + 60 * arguments.minutes
    failed = []
    for i, target in enumerate(targets):
        began = time.monotonic()
        try:
            done = fuzz_until(target, began + (end - began) / (len(targets) - i), arguments.seed)
            print(f"{target.__name__}: {done} cases in {time.monotonic() - began:.0f} s", flush=True)
        except Exception:
            traceback.print_exc()
            print(f"{target.__name__} failed: --only {target.__name__} --seed {arguments.seed}", flush=True)
            failed.append(target)
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
