"""Replicas of several devices against `keras.distribution.ModelParallel` with the same layout.

    python benchmarks/model_parallel.py [--grids 2x4 4x2] [--models mlp transformer] [--rounds 7] [--starts 3]

Each case is a process with eight virtual CPU devices and no compilation cache. First steps are those of
processes that are started one after the other, in turns between the cases; then one process of each case
trains an epoch in each round, in turns, so that a busy moment of the machine meets all. CPU time is that of
the whole process, for all its devices: on a busy machine it says more than the clock. "auto" lets Unisono
choose the layout, and is compared with ModelParallel in the layout that stands here. Programs and their
collectives are those that the process has compiled until its first step is done; messages of replicas are
left out of the number of collectives.
"""

import argparse
import contextlib
import json
import os
import resource
import statistics
import subprocess
import sys
import time

import workloads

OURS, AUTO, THEIRS = "Unisono", "Unisono, auto", "ModelParallel"
#: The most that a step, and a first step, may take of ModelParallel's.
LIMITS = {"step": 1.05, "first": 1.2}
#: Rows of a batch on each replica.
ROWS = 16
#: Seconds for one answer of a process, on however slow a machine.
LIMIT = 300
DEVICES = 8

#: Column, then row; attention by heads; an embedding by its rows.
LAYOUTS = {
    "mlp": {
        ".*dense/kernel": (None, "model"),
        ".*dense/bias": ("model",),
        ".*dense_1/kernel": ("model", None),
    },
    "transformer": {
        "embedding/embeddings": ("model", None),
        ".*(query|key|value)/kernel": (None, "model", None),
        ".*(query|key|value)/bias": ("model", None),
        ".*attention_output/kernel": ("model", None, None),
        # The second product of a block is made first.
        "dense_(1|3|5|7)/kernel": (None, "model"),
        "dense_(1|3|5|7)/bias": ("model",),
        "dense(_2|_4|_6)?/kernel": ("model", None),
    },
}


def spent():
    """Seconds of the clock since the process began, and of the processors."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    with open("/proc/self/stat") as file:
        began = int(file.read().rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began, used.ru_utime + used.ru_stime


def scope_of(who, replicas, size, model):
    """Set up a peer; return the surrounding in which its model is made."""
    layout = LAYOUTS[model]
    if who == THEIRS:
        import keras

        mesh = keras.distribution.DeviceMesh((replicas, size), ["batch", "model"])
        layout_map = keras.distribution.LayoutMap(mesh)
        for pattern, axes in layout.items():
            layout_map[pattern] = axes
        found = keras.distribution.ModelParallel(layout_map=layout_map, batch_dim_name="batch")
        keras.distribution.set_distribution(found)
        return contextlib.nullcontext()
    import unisono

    names = [f"cpu:{i}" for i in range(DEVICES)]
    layout_map = "auto" if who == AUTO else layout
    return unisono.MirroredStrategy(names, devices_per_replica=size, layout_map=layout_map).scope()


def serve(case):
    """Train the first step of a case, then an epoch for each line of input; print what each took."""
    if case["who"] != THEIRS:
        import unisono  # noqa: F401  sets the backend
    import jax
    import keras

    jax.config.update("jax_num_cpu_devices", DEVICES)
    compiled = Compiled()
    replicas, size = case["grid"]
    workload = workloads.workload(case["model"])
    imported = spent()
    with scope_of(case["who"], replicas, size, case["model"]):
        keras.utils.set_random_seed(0)
        model = workload.keras_model()
        model.compile("adam", workload.loss())
    rows = ROWS * replicas
    x, y = workload.data(rows * workload.steps)
    model.fit(x[:rows], y[:rows], batch_size=rows, shuffle=False, verbose=0)
    told = [*(b - a for a, b in zip(imported, spent(), strict=True)), *spent()]
    loss = model.evaluate(x[:rows], y[:rows], batch_size=rows, verbose=0)
    answer({"first": told, "loss": loss, **compiled.numbers(size)})
    for _ in sys.stdin:
        before = spent()
        model.fit(x, y, batch_size=rows, shuffle=False, verbose=0)
        answer({"step": [(b - a) / workload.steps for a, b in zip(before, spent(), strict=True)]})


class Compiled:
    """Counts programs and the seconds of their traces and compilations, from its making on."""

    def __init__(self):
        import jax

        self._seconds = {}
        jax.monitoring.register_event_duration_secs_listener(self._note)

    def _note(self, event, seconds, **_):
        name = event.rpartition("/")[2]
        self._seconds.setdefault(name, []).append(seconds)

    def numbers(self, size):
        """Return numbers and seconds, and the collectives between devices of a replica."""
        import jax

        from unisono.model_parallel._program_messages import messages_of

        programs = [p for p in jax.devices()[0].client.live_executables() if p.hlo_modules()]
        texts = [m.to_string() for p in programs for m in p.hlo_modules()]
        # The step is the program that sends most.
        found = max(([m for m in messages_of(t, size) if m.is_inside] for t in texts), key=len, default=[])
        traced, lowered, built = (
            self._seconds.get(f"{n}_duration", [])
            for n in ("jaxpr_trace", "jaxpr_to_mlir_module", "backend_compile")
        )
        seconds = [sum(traced), sum(lowered), sum(built), max(built, default=0)]
        sent = [len(found), sum(m.kind != "all-reduce" for m in found), sum(m.nbytes for m in found)]
        return {"programs": len(built), "seconds": seconds, "sent": sent}


def answer(value):
    print(json.dumps(value), flush=True)


class Running:
    """The process of a case."""

    def __init__(self, who, model, grid):
        env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
        # With fewer threads than two for each device they hang in a collective.
        env |= {"KERAS_BACKEND": "jax", "PJRT_NPROC": str(2 * DEVICES), "TF_CPP_MIN_LOG_LEVEL": "3"}
        given = json.dumps({"who": who, "model": model, "grid": grid})
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", given],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.first = self._answer()

    def turn(self):
        """Train an epoch; return seconds of a step by the clock and by processors."""
        self._process.stdin.write("epoch\n")
        self._process.stdin.flush()
        return self._answer()["step"]

    def close(self):
        """End the process."""
        self._process.stdin.close()
        try:
            self._process.wait(LIMIT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def _answer(self):
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"A process ended with {self._process.wait(LIMIT)}.")
        return json.loads(line)


def measured(model, grid, peers, rounds, starts):
    """Return by peer what its first steps told, and seconds of a step for each round."""
    firsts, steps = {who: [] for who in peers}, {who: [] for who in peers}
    with contextlib.ExitStack() as stack:
        running = {}
        for number in range(starts):
            # The first to start finds other caches of the system than the last.
            for who in peers if number % 2 else reversed(peers):
                process = Running(who, model, grid)
                firsts[who].append(process.first)
                if number == starts - 1:
                    running[who] = process
                    stack.callback(process.close)
                else:
                    process.close()
        for number in range(rounds + 1):
            for who in peers:
                seconds = running[who].turn()
                if number:
                    steps[who].append(seconds)
    return firsts, steps


def medians(values):
    """The median of each column."""
    return [statistics.median(column) for column in zip(*values, strict=True)]


def ratios(ours, theirs):
    """The medians of the rounds' ratios, as text: by the clock and by processors."""
    pairs = [[a / b for a, b in zip(*both, strict=True)] for both in zip(ours, theirs, strict=True)]
    return " / ".join(f"{ratio:.2f}" for ratio in medians(pairs))


def rows_of(model, grid, peers, firsts, steps):
    """The cells of a model on a grid for both tables, by peer."""
    losses = {who: firsts[who][0]["loss"] for who in peers}
    if max(losses.values()) - min(losses.values()) > 1e-3:
        raise SystemExit(f"The losses differ: {losses}.")
    seen = {
        who: {
            "step": steps[who],
            "first": [f["first"][:2] for f in firsts[who]],
            "start": [f["first"][2:] for f in firsts[who]],
        }
        for who in peers
    }
    for who in peers:
        cells = [model, "x".join(map(str, grid)), who]
        for measure, scale, form in (("step", 1e3, ".1f"), ("first", 1, ".2f"), ("start", 1, ".2f")):
            cells += [f"{scale * value:{form}}" for value in medians(seen[who][measure])]
            is_compared = THEIRS in peers and who != THEIRS
            cells.append(ratios(seen[who][measure], seen[THEIRS][measure]) if is_compared else "")
        told = firsts[who][-1]
        count, others, nbytes = told["sent"]
        cells += [str(told["programs"]), f"{count} ({others})", f"{nbytes / 1e6:.2f}"]
        yield cells, [f"{n:.2f}" for n in told["seconds"]]


HEAD = ["model", "grid", "who", "step, ms", "CPU ms", "ratio", "first step, s", "CPU s", "ratio"]
HEAD += ["since start, s", "CPU s", "ratio", "programs", "collectives (not all-reduce)", "MB a device"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--grids", nargs="+", default=["2x4", "4x2"])
    parser.add_argument("--models", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--peers", nargs="+", default=[OURS, AUTO, THEIRS])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    step, first = LIMITS["step"], LIMITS["first"]
    print(f"Ratios are by the clock / by processors. Wanted: a step {step} at most, a first step {first}.\n")
    print(f"| {' | '.join(HEAD)} |\n|{'---|' * len(HEAD)}")
    seconds = []
    for model in options.models:
        for grid in options.grids:
            replicas, size = map(int, grid.split("x"))
            if replicas * size != DEVICES:
                raise SystemExit(f"A grid must have {DEVICES} devices. Received: {grid}.")
            found = measured(model, [replicas, size], options.peers, options.rounds, options.starts)
            for cells, times in rows_of(model, [replicas, size], options.peers, *found):
                print(f"| {' | '.join(cells)} |", flush=True)
                seconds.append([*cells[:3], *times])
    print("\n| model | grid | who | traced, s | lowered, s | compiled, s | the longest, s |")
    print(f"|{'---|' * 7}")
    for cells in seconds:
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
