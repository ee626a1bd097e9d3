"""The clusters of the documents: each task sets its own TF_CONFIG, as they say, and runs the same text."""

import re
import time

import pytest

from tests import forked
from tests.cluster._workers import free_ports
from tests.cluster.launch_support import LIMIT
from tests.virtual.seeds import documents
from tests.virtual.seeds import strategies_tutorial as tutorial
from tests.virtual.seeds.programs import changed
from unisono.checkpoint import load_checkpoint

pytestmark = pytest.mark.timeout(600)

#: As `tf.keras.datasets.mnist` in the other tests of the documents.
DATA = f"""
import keras, sys
sys.path.insert(0, {str(forked.REPOSITORY)!r})
from tests.virtual.seeds.programs import digits
keras.datasets.mnist.load_data = digits
"""


class Tasks:
    """Tasks of a cluster, each with a program of its own; they are killed at the end of a `with` block."""

    def __init__(self, root):
        self.root, self.processes = root, {}

    def start(self, name, program, **environ):
        """Run a program that imports TensorFlow, in a directory with spaces that is not the script's."""
        place = self.root / "a place" / name
        place.mkdir(parents=True)
        (place / "train it.py").write_text(program)
        command = ["-m", "unisono.tf", f"a place/{name}/train it.py"]
        log = self.root / f"{name}.log"
        self.processes[name] = forked.Program(command, self.root, log, env=forked.environment(**environ))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            process.kill()
            process.wait(LIMIT)

    def wait(self):
        """Wait until all have succeeded, and return what each wrote."""
        deadline = time.monotonic() + LIMIT
        while running := [p for p in self.processes.values() if p.poll() is None]:
            if time.monotonic() > deadline or any(p.poll() for p in self.processes.values()):
                break
            time.sleep(0.05)
        texts = {name: (self.root / f"{name}.log").read_text() for name in self.processes}
        codes = {name: process.poll() for name, process in self.processes.items()}
        assert not running, (codes, texts)
        assert set(codes.values()) == {0}, (codes, texts)
        return texts


def as_task(program, job, index, hosts):
    """The program of one task: as in the document, with its own index and addresses of this machine."""
    pattern = r"""(['"]task['"]: {['"]type['"]: )['"]worker['"], (['"]index['"]: )\d"""
    program, count = re.subn(pattern, rf"\g<1>'{job}', \g<2>{index}", program)
    assert count
    return changed(program, hosts)


def addresses(names):
    """The addresses of a document, and free ones of this machine."""
    ports = free_ports(len(names))
    return {name: f"localhost:{port}" for name, port in zip(names, ports, strict=True)}


def test_three_workers_train_and_evaluate(tmp_path):
    """Document 001, "Multi-worker Training": the example with 3 workers, which has no `model_dir`."""
    program = documents.WORKERS + documents.MODEL_FN + documents.MODEL_MAIN
    program += """
if estimator.config.is_chief:
  print('trained', [float(estimator.get_variable_value(name).sum()) for name in
                    ('global_step', 'dense/kernel', 'dense/bias')])

# MirroredStrategy, and what it does "if auto_shard_dataset is set to True".
distribution = tf.contrib.distribute.MirroredStrategy(num_gpus_per_worker=2, auto_shard_dataset=True)
config = tf.estimator.RunConfig(train_distribute=distribution)
sharded = tf.estimator.Estimator(model_fn=model_fn, config=config).train(input_fn)
if config.is_chief:
  print('sharded', sharded.get_variable_value('global_step'))
"""
    hosts = addresses([f"host{i}:port" for i in (1, 2, 3)])
    with Tasks(tmp_path) as tasks:
        for i in range(3):
            text = as_task(program, "worker", i, hosts)
            tasks.start(f"worker-{i}", text, XLA_FLAGS="--xla_force_host_platform_device_count=2")
        texts = tasks.wait()
    # Each of 3 workers gives 100 elements to its two devices.
    step, kernel, bias = map(float, re.search(r"trained \[(.*)\]", texts["worker-0"])[1].split(", "))
    assert step == 50
    assert kernel + bias == pytest.approx(1.0, abs=1e-4)
    # Six devices share 100 elements.
    assert "sharded 16" in texts["worker-0"]
    assert "Saving checkpoints" not in texts["worker-1"] + texts["worker-2"]


def test_three_workers_two_servers_and_an_evaluator(tmp_path):
    """Document 001: "the same model code for all tasks in your cluster", and its example of TF_CONFIG."""
    servers = {
        "CollectiveAllReduceStrategy(\n      num_gpus_per_worker=2)": "ParameterServerStrategy()",
        "RunConfig(train": f"RunConfig(model_dir={str(tmp_path / 'model')!r}, train",
    }
    program = documents.WITH_SERVERS + documents.MODEL_FN + changed(documents.MODEL_MAIN, servers)
    hosts = addresses([f"host{i}:port" for i in (1, 2, 3, 4, 5)])
    tasks_of = [*(("worker", i) for i in range(3)), ("ps", 0), ("ps", 1), ("evaluator", 0)]
    with Tasks(tmp_path) as tasks:
        for job, index in tasks_of:
            tasks.start(f"{job}-{index}", as_task(program, job, index, hosts))
        texts = tasks.wait()
    values = load_checkpoint(f"{tmp_path}/model")
    # Each of three workers trains 100 elements, in steps of its own.
    assert values.get_tensor("global_step") == 300
    total = values.get_tensor("dense/kernel") + values.get_tensor("dense/bias")
    assert total.item() == pytest.approx(1.0, abs=1e-3)
    assert "global_step = 300, loss = 0.0" in texts["evaluator-0"]


def test_two_workers_fit_run_a_loop_of_their_own_and_know_their_task(tmp_path):
    """Document 004, "Implementing a Full MultiWorkerMirroredStrategy Example", exercise 2; the end of 003."""
    sizes = {
        "epochs=5": "epochs=2",
        "epochs = 5": "epochs = 2",
        "'ps': [\"localhost:34567\"]": "'ps': ['ps:1']",
    }
    texts = (DATA, tutorial.WORKERS, tutorial.MODEL, tutorial.FIT, tutorial.CUSTOM_LOOP)
    program = changed("".join([*texts, documents.TASK_OF_THE_CLUSTER]), sizes)
    program += """
print('ends', seen, strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync,
      round(eval_loss, 6), round(float(total_loss / num_batches), 6), model.layers[0].kernel.numpy().sum())
"""
    hosts = addresses(["worker0.example.com:12345", "worker1.example.com:12345"])
    hosts |= dict(zip(("localhost:12345", "localhost:23456"), hosts.values(), strict=True))
    with Tasks(tmp_path) as tasks:
        for i in range(2):
            tasks.start(f"worker-{i}", as_task(program, "worker", i, hosts))
        texts = tasks.wait()
    ends = [re.search(r"ends \['worker'\] (\d) 2 (.*)", texts[f"worker-{i}"]).groups() for i in range(2)]
    assert [index for index, _ in ends] == ["0", "1"]
    assert ends[0][1] == ends[1][1]
    (accuracy,) = re.findall(r"Evaluation accuracy: (\S+)", texts["worker-0"])
    assert float(accuracy) > 0.5
    # The first worker draws the progress bar.
    assert "Epoch 2/2" in texts["worker-0"]
    assert "Epoch 2/2" not in texts["worker-1"]


def test_two_workers_and_two_servers(tmp_path):
    """Document 004, "ParameterServerStrategy: Asynchronous Training"."""
    program = DATA + tutorial.SERVERS + tutorial.MODEL + tutorial.FIT
    program = changed(program, {"epochs=5": "epochs=2"})
    jobs = [(job, i) for job in ("worker", "ps") for i in (0, 1)]
    hosts = addresses([f"{job}{i}.example.com:12345" for job, i in jobs])
    with Tasks(tmp_path) as tasks:
        for job, index in jobs:
            tasks.start(f"{job}-{index}", as_task(program, job, index, hosts))
        texts = tasks.wait()
    (accuracy,) = re.findall(r"Evaluation accuracy: (\S+)", texts.pop("worker-0"))
    assert float(accuracy) > 0.4
    assert not any("Evaluation" in text for text in texts.values())
