"""Code of README and docs: Python blocks run, commands have flags, targets and extras that exist.

A block that is part of a program is marked by a line `<!-- fragment -->` above it. Other tests run the blocks
of the README, the tutorial, architecture.md and migrating.md.
"""

import re
import shlex
import tomllib
from pathlib import Path

import keras
import numpy as np
import pandas
import pytest
import typer
import yaml
from typer.testing import CliRunner

import unisono
from unisono.checkpoint import Checkpoint, CheckpointManager, PreemptionCheckpointHandler
from unisono.cli import _app

ROOT = Path(__file__).parents[2]
PAGES = {path.name: path.read_text() for path in (*ROOT.glob("docs/*.md"), *ROOT.glob("*.md"))}
BLOCK = re.compile(r"^(<!-- .* -->\n)?( *)```(\w*)\n(.*?)^ *```", re.DOTALL | re.MULTILINE)
#: Their own tests run them.
ELSEWHERE = {"README.md", "tutorial.md", "architecture.md", "migrating.md"}


def blocks(page, language):
    """The blocks of a page that are no fragments, without the indentation of a list."""
    return [
        re.sub(f"^{indent}", "", text, flags=re.MULTILINE)
        for mark, indent, kind, text in BLOCK.findall(PAGES[page])
        if kind == language and "fragment" not in mark
    ]


# --- Python ------------------------------------------------------------------------------------------------


class Rows(list):
    """A Hugging Face dataset, as far as the page uses it."""

    def with_format(self, name):
        assert name == "numpy"
        return self

    def iter(self, size):
        for begin in range(0, len(self), size):
            rows = self[begin : begin + size]
            yield {key: np.stack([row[key] for row in rows]) for key in rows[0]}


def people():
    features = {"age": [20.0, 50.0] * 16, "education": ["HS-grad", "Masters"] * 16}
    return unisono.data.Dataset.from_tensor_slices((features, ["<=50K", ">50K"] * 16)).batch(8)


def names(page):
    """What the blocks of a page use and do not define."""
    x = np.random.default_rng(0).normal(size=(26, 3)).astype("float32")
    y = x.sum(axis=1, keepdims=True)
    dataset = unisono.data.Dataset.from_tensor_slices((x, y)).batch(2)
    strategy = unisono.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    digits = unisono.data.Dataset.from_tensor_slices((x, np.arange(26) % 10)).batch(13)
    always = {
        "unisono": unisono,
        "keras": keras,
        "np": np,
        "x": x,
        "y": y,
        "model": model,
        "strategy": strategy,
    }
    return always | {
        "checkpoints.md": {
            "Checkpoint": Checkpoint, "CheckpointManager": CheckpointManager, "STEPS": 2,
            "PreemptionCheckpointHandler": PreemptionCheckpointHandler,
            "iterator": iter(strategy.distribute_dataset(dataset)), "step": keras.Variable(0),
        },
        "data.md": {"data": Rows({"image": i, "label": j} for i, j in zip(x, y, strict=True))},
        "estimator.md": {"input_fn": lambda: digits, "test_input_fn": lambda: digits},
        "feature_columns.md": {"input_fn": people},
        "multi_worker.md": {
            "dataset": dataset, "files": dataset.unbatch(), "step": lambda batch: None, "data": dataset,
        },
        "tensorboard.md": {"data": [x], "train": lambda batch: batch.mean()},
    }.get(page, {})  # fmt: skip


# Keras' word for data whose number of batches is not known before.
@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")
@pytest.mark.parametrize("page", [page for page in PAGES if page not in ELSEWHERE and blocks(page, "python")])
def test_python_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if page == "data.md":
        columns = {name: np.arange(26, dtype="float32") for name in ("a", "b", "c", "label")}
        pandas.DataFrame(columns).to_parquet("train.parquet")
    if page == "clusters.md":
        (config,) = re.findall(r"TF_CONFIG='(.*?)'", PAGES[page], re.DOTALL)
        monkeypatch.setenv("TF_CONFIG", config)
    found = names(page)
    for block in blocks(page, "python"):
        exec(block, found)
        if page == "checkpoints.md":
            found["step"] = lambda: None


def test_the_lines_that_a_program_needs_run():
    """The first block of the README, with its added lines, is a program; the first page has the same."""
    readme, first = (
        re.findall(r"```diff\n(.*?)```", PAGES[page], re.DOTALL) for page in ("README.md", "index.md")
    )
    assert readme == first
    assert len(re.findall(r"^\+", readme[0], re.MULTILINE)) == 3
    assert not re.findall(r"^[^ +\n]", readme[0], re.MULTILINE), "nothing is taken away"
    found = {"x": np.ones((16, 4), "float32"), "y": np.arange(16) % 10}
    exec(
        re.sub(r"^[ +]", "", readme[0], flags=re.MULTILINE).replace(
            "MirroredStrategy()", 'MirroredStrategy(["cpu:0", "cpu:1"])'
        ),
        found,
    )
    assert found["model"].optimizer.iterations == 5


# --- commands ----------------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
COMMANDS = typer.main.get_command(_app.app).commands
#: Of others, with the user's own files.
OTHERS = {
    "aws",
    "docker",
    "export",
    "gcloud",
    "mpirun",
    "pip",
    "python",
    "sky",
    "source",
    "srun",
    "tensorboard",
}


def lines(text):
    """The commands of a block, each in its words."""
    for line in re.sub(r"\\\n\s*", "", text).splitlines():
        words = shlex.split(line, comments=True)
        while words and re.match(r"\w+=", words[0]):
            words = words[1:]
        if words:
            yield words


def check(words):
    if "unisono" in words:
        # Also behind `srun`, `mpirun` and the like.
        name, *args = words[words.index("unisono") + 1 :]
        COMMANDS[name].make_context(name, args)
    elif words[0] == "make":
        assert {word for word in words[1:] if "=" not in word} <= TARGETS, words
    elif words[0].startswith(".venv/bin/"):
        assert all((ROOT / word).exists() for word in words if "/" in word and ".venv" not in word), words
    else:
        assert words[0] in OTHERS, f"mark it as a fragment, or check it here: {words}"
    if words[:2] == ["pip", "install"]:
        extras = re.findall(r"(?:unisono|\.)\[([\w,-]+)\]", " ".join(words))
        assert set(",".join(extras).split(",")) - {""} <= set(PROJECT["optional-dependencies"]), words


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "sh")])
def test_commands_are_known(page):
    text = "\n".join(blocks(page, "sh"))
    # A value of several lines stands in one command.
    for words in lines(re.sub(r"'[^']*'", lambda quoted: quoted[0].replace("\n", " "), text)):
        check(words)


@pytest.mark.parametrize("name", COMMANDS)
def test_the_help_of_each_command_has_examples(name):
    head, examples, *rest = COMMANDS[name].epilog.splitlines()
    assert (head, examples) == ("\b", "Examples:")
    assert name in {words[words.index("unisono") + 1] for words in map(shlex.split, rest)}
    for words in lines("\n".join(rest)):
        check(words)


def test_shells_complete_commands_and_flags():
    answer = CliRunner().invoke(
        _app.app,
        env={"_UNISONO_COMPLETE": "complete_bash", "COMP_WORDS": "unisono launch --max-r", "COMP_CWORD": "2"},
        prog_name="unisono",
    )
    assert answer.stdout.split() == ["--max-restarts"]


@pytest.mark.parametrize("page", PAGES)
def test_files_of_other_formats_can_be_read(page):
    # YAML contains JSON.
    for text in (*blocks(page, "yaml"), *blocks(page, "json")):
        assert yaml.safe_load(text)
