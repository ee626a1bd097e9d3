"""Two workers: one writes, prints and decides for both, and both end with the same weights."""

import json
import re
import signal
from pathlib import Path

import pytest

from tests import forked
from tests.cluster._workers import Workers

PROGRAM = str(Path(__file__).parent / "programs" / "chief.py")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """One run of all checks: its folder, each worker's results, each worker's log."""
    folder = tmp_path_factory.mktemp("chief")
    workers = Workers(folder, [PROGRAM, str(folder)])
    assert workers.wait(500) == [0, 0], workers.text()
    results = [json.loads((folder / f"worker-{i}.json").read_text()) for i in range(2)]
    return folder, results, [log.read_text() for log in workers.logs]


def both(run, check):
    return [result[check] for result in run[1]]


def test_callbacks_write_on_the_chief_and_once(run):
    folder = run[0]
    own, shared = folder / "own-0", folder / "both"
    assert not (folder / "own-1").exists()
    assert sorted(p.name for p in own.glob("*.h5")) == ["1.weights.h5", "2.weights.h5"]
    assert list(own.glob("tensorboard/train/events*"))
    # At the ends of two epochs, of validation in both, and of `evaluate`.
    assert len((own / "logger").read_text().splitlines()) == 5
    assert sorted(p.name for p in shared.iterdir()) == ["1.keras", "2.keras", "log.csv"]
    assert len((shared / "log.csv").read_text().splitlines()) == 3


def test_progress_is_printed_on_the_chief_alone(run):
    chief, other = run[2]
    assert "Epoch 2/2" in chief
    begin = (
        "unisono: fit on 2 replicas: 2 workers, each with 1 cpu device\n  global batch  10 rows, 5 for each"
    )
    # Other calls of `fit` are silent.
    assert chief.count(begin) == chief.count("unisono: fit on") == 1
    assert re.search(r"  checkpoints   ModelCheckpoint: .*both/\{epoch\}.keras, every epoch\n", chief)
    assert "unisono: fit on" not in other
    # Of `fit`, `evaluate` and `predict`.
    assert chief.count("━") > 0
    assert "Epoch" not in other
    assert "━" not in other


def test_logs_and_predictions_are_those_of_all_workers(run):
    first, second = both(run, "writing")
    assert first == second
    assert (first["batches"], first["rows"], first["epochs"], first["steps"]) == (6, 40, 2, 3)
    assert set(first["history"]) == {"loss", "mae", "val_loss", "val_mae"}


def test_decisions_from_logs_are_alike(run):
    first, second = both(run, "deciding")
    assert first == second
    assert 4 <= len(first["history"]["loss"]) < 40
    assert len(set(first["history"]["learning_rate"])) > 2


@pytest.mark.parametrize(
    ("case", "epochs", "rate"),
    [
        ("rate at the end", 4, 0.01),
        ("rate at the beginning", 4, 0.04),
        ("stop", 3, 0.01),
        ("stop in the middle", 1, 0.01),
        ("only worker 1 stops", 4, 0.01),
    ],
)
def test_decisions_that_differ_are_the_chiefs(run, case, epochs, rate):
    first, second = (found[case] for found in both(run, "differing"))
    assert first == second
    # Four batches each: a stop in the middle of an epoch waits for its end.
    assert (first["epochs"], first["batches"]) == (epochs, 4 * epochs)
    assert first["rate"] == pytest.approx(rate)


def test_the_chiefs_initial_weights_give_the_result_of_one_device(run):
    first, second = both(run, "beginning")
    assert first["start"] != second["start"]
    assert (first["hash"], first["shuffled"]) == (second["hash"], second["shuffled"])
    # Float sums in another order, through twelve steps of Adam; worker 1 began with other weights.
    assert first["difference"] < 1e-5
    assert second["difference"] > 1e-2
    assert first["losses"][0] == pytest.approx(first["losses"][1], rel=1e-5)


def test_sums_travel_as_the_options_say_and_are_the_same(run):
    first, second = both(run, "travelling")
    # Bit for bit: each sum has two terms.
    assert first == second
    assert first["AUTO"] == first["RING"] == first["NCCL"]
    assert "NCCL needs GPUs, but the devices are of the platform 'cpu': Gloo" in run[2][0]


def test_saving_on_all_workers_writes_once_and_whole(run):
    for differences in both(run, "saving"):
        assert max(differences.values()) < 1e-5, differences
    endings = [".keras", "-folder", ".weights.h5", ".stablehlo", "-exported.keras", "-saved-model"]
    endings += ["-function.keras", "-function.weights.h5"]
    found = sorted(p.name for p in (run[0] / "saved").iterdir())
    assert found == sorted(name + ending for name in ("all", "own-0") for ending in endings)


def test_checkpoints_of_all_workers_are_written_once_by_the_first_and_read_by_all(run):
    first, second = both(run, "committing")
    assert first == second | {"commits-own": first["commits-own"]}
    names = ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-30", "ckpt-31"]
    written = {"paths": names, "exists": True, "restored": "ckpt-31", "same": True}
    assert first["commits"] == first["commits-own"] == second["commits"] == written
    # A directory that the first worker does not write to stays empty.
    assert second["commits-own"] == {"paths": names, "exists": False, "restored": "none", "same": False}
    assert first["one"]
    folder = run[0]
    assert sorted(p.name for p in (folder / "commits").iterdir()) == ["ckpt-30", "ckpt-31"]
    assert not any((folder / "commits-1").glob("*"))
    assert [p.name for p in (folder / "chief's").iterdir()] == ["ckpt-1"]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("trainable", ["layers, line 3", "trainable: False", " not trainable' on process 1"]),
        ("eager", ["run_eagerly is 'False' on process 0, but 'True' on process 1"]),
        ("activation", ["layers, line 3, is ", "relu", "tanh"]),
        ("loss", ["loss is 'mismatches.<locals>.<lambda> "]),
        ("optimizer", ["optimizer is ", "clipnorm: 1.0", "clipnorm: 2.0"]),
        ("batch_size", ["batch_size", "10", "11"]),
        ("epochs", ["epochs", "2", "3"]),
        ("shapes", ["(40, 6)", "(39, 6)"]),
        ("model", ["model", "dense", "(6, 6)"]),
        ("callbacks", ["callbacks", "Steps"]),
        ("backups", ["callbacks", "BackupAndRestore save_freq=2", "BackupAndRestore save_freq=3"]),
        ("evaluate", ["batch_size is '10' on process 0, but '11' on process 1"]),
        ("predict", ["x is 'ndarray (40, 6)' on process 0, but 'ndarray (39, 6)' on process 1"]),
        ("steps", ["steps is '2' on process 0, but '3' on process 1"]),
        ("batches", ["x is 'Batches 4 batches' on process 0, but 'Batches 5 batches' on process 1"]),
        ("method", ["method is 'evaluate' on process 0, but 'predict' on process 1"]),
    ],
)
def test_a_call_that_differs_is_refused_by_all(run, case, words):
    name = {"evaluate": "evaluate", "predict": "predict", "steps": "predict", "batches": "predict"}.get(case)
    for worker, found in enumerate(both(run, "mismatches")):
        called = name or (["evaluate", "predict"][worker] if case == "method" else "fit")
        assert found[case].startswith(f"A call of `{called}` must be the same on all processes. Received: ")
        assert all(word in found[case] for word in words), found[case]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("rate", ["at the end of an epoch, variable 'adam/learning_rate' of process 1 differs", " 0.49"]),
        ("weights", ["bias' of process 1 differs"]),
        ("data", ["other values in the batch of process 1 than in that of process 0"]),
        ("order", ["other values in the batch of process 1"]),
        ("loop", ["after about 4 steps, variable 'dense", "kernel' of process 1 differs"]),
    ],
)
def test_what_one_worker_changes_by_itself_ends_in_an_error_on_all(run, case, words):
    for found in both(run, "diverging"):
        assert all(word in found[case] for word in words), found[case]


def test_workers_go_on_after_a_refused_call(run):
    first, second = both(run, "mismatches")
    assert first["after"] == second["after"]


def test_host_collectives_do_not_grow_with_the_model_or_the_steps(run):
    for found in both(run, "collectives"):
        small, large = found.pop("fit")
        assert 0 < small == large
        assert found == {
            "evaluate": [1, 1],
            "predict": [1, 1],
            "train_on_batch": [0, 0],
            "test_on_batch": [0, 0],
            "predict_on_batch": [0, 0],
        }


def test_what_all_workers_hold_already_is_not_sent_again(run):
    first, second = both(run, "again")
    assert first == second
    undisturbed = first["none"]
    # Whether the call, the callbacks and the random state are alike; whether the variables are; the
    # decisions at each of three epochs' ends.
    assert undisturbed[0] == 5
    # And the chief's state, to a worker that has another.
    assert first["weights"] == [7, undisturbed[1]]
    assert first["rate"] == [7, undisturbed[1]]
    assert first["random"] == [8, undisturbed[1]]


def test_decisions_are_shared_where_a_callback_may_have_made_one(run):
    for found in both(run, "again"):
        assert {name: found[name] for name in ("scheduler", "stopping", "lambda", "one")} == {
            "scheduler": 5 + 3,
            "stopping": 5,
            "lambda": 5 + 1,
            "one": 5 + 3,
        }


def test_how_often_backups_are_made_needs_no_messages_between_workers(run):
    """Never, after each batch, and as often as was measured; the chief alone decides and writes."""
    first, second = both(run, "backing_up")
    assert len({count for count, _ in (*first, *second)}) == 1
    assert [saved > 0 for _, saved in first] == [False, True, True]
    assert [saved for _, saved in second] == [0, 0, 0]


def test_a_killed_worker_is_started_again_and_the_result_is_the_same(run, tmp_path):
    command = ["-m", "unisono", "launch", "-n", "2", "--max-restarts", "1", "--spares", "0"]
    command += ["--log-dir", str(tmp_path / "logs"), PROGRAM, str(tmp_path), "killed"]
    # Programs that tests compile are ready within the launcher's own tenth of a second.
    environ = forked.environment(JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0")
    done = forked.run(command, tmp_path, 400, environ)
    logs = "\n".join(log.read_text() for log in (tmp_path / "logs").glob("*.log"))
    assert done.returncode == 0, done.stdout + done.stderr + logs
    assert "was killed by SIGKILL" in done.stderr
    # The kill may come while the chief writes its second backup.
    assert assert_went_on(tmp_path, both(run, "killed")) in (2, 3)
    # Each worker's: on CPUs they are not the same. The second generation has found them.
    cached = [path.name for path in (tmp_path / "logs" / "compilation_cache").glob("jit_with_token*")]
    assert len(cached) == 2, cached


def test_without_the_launcher_whatever_starts_them_again_is_enough(run, tmp_path):
    """As Kubernetes does: each by itself, when it has failed, with the same TF_CONFIG."""
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path), "killed", "3"])
    codes = workers.wait_with_restarts(400, most=5)
    assert all(found[-1:] == [0] for found in codes), f"{codes}\n{workers.text()}"
    # The first lost the second, which was killed.
    assert codes[0][0] > 0, workers.text()
    assert codes[1][0] == -signal.SIGKILL
    assert "lost worker 1" in workers.logs[0].read_text()
    # Of sixteen batches eight were done, and six saved.
    assert assert_went_on(tmp_path, both(run, "killed")) == 3, f"{codes}\n{workers.text()}"


def assert_went_on(folder, expected):
    """Returns how many backups the chief has made since."""
    found = [json.loads((folder / f"worker-{i}.json").read_text()) for i in range(2)]
    # Bit for bit; the chief alone wrote.
    assert [f["hash"] for f in found] == [e["hash"] for e in expected]
    assert [e["saved"] for e in expected] == [4, 0]
    assert found[1]["saved"] == 0
    assert not (folder / "backup").exists()
    return found[0]["saved"]


def test_a_backup_that_only_the_chief_restores_moves_all(run):
    first, second = both(run, "resuming")
    assert first == second
    assert first["epochs"] == 2


def test_nobody_waits_for_a_worker_that_failed(tmp_path):
    workers = Workers(tmp_path, [PROGRAM, str(tmp_path), "raises"])
    codes = workers.wait(300)
    chief, failed = (log.read_text() for log in workers.logs)
    assert codes[1] == 1, workers.text()
    assert "RuntimeError: this callback fails" in failed
    # Its own traceback, before its end, and no kill by this test.
    assert codes[0] > 0, workers.text()
    assert "Traceback" in chief, workers.text()
