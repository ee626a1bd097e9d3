"""Run the project's protocols in a simulated world.

python -m tests.simulation --minutes 3 --seed 0 --jobs 2     # all protocols, as many schedules as that allows
python -m tests.simulation --protocol pushes --schedules 1000
python -m tests.simulation --protocol restarts --seed 17 --show   # one schedule: who sent what when
python -m tests.simulation --mistakes                        # which planted mistakes are found, and how soon
python -m tests.simulation --mistakes --tables               # the same as tables of Markdown
python -m tests.simulation --mutants 20 --seed 1             # random small mistakes, judged by schedules
python -m tests.simulation --speed                           # schedules in a second of CPU, as a table
python -m tests.simulation --reach --minutes 4               # which branches of the code they reach
python -m tests.simulation --reach --missing launcher        # and which of the launcher they do not
"""

import argparse
import concurrent.futures
import contextlib
import multiprocessing
import os
import sys
import time

#: What differs between two processes would make a seed give another run.
_HASH_SEED = "0"


def main(argv=None):
    """Run what the command line asks for; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule")
    parser.add_argument("--schedules", type=int, default=10**9, help="of each protocol at most")
    parser.add_argument("--jobs", type=int, default=_cores(), help="processes; by default one for each core")
    parser.add_argument("--protocol", action="append", help="its name; several times for several")
    parser.add_argument(
        "--show", action="store_true", help="print the schedule of the seed, also if all holds"
    )
    parser.add_argument("--mistakes", action="store_true")
    parser.add_argument("--mutants", type=int, help="how many; --only: of packages with this in their name")
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--reach", action="store_true")
    parser.add_argument("--missing", help="a part of the names of modules: list their branches, too")
    parser.add_argument("--only", help="a part of the name of the mistakes to plant")
    parser.add_argument("--tables", action="store_true", help="of the mistakes, for docs")
    arguments = parser.parse_args(argv)
    if os.environ.get("PYTHONHASHSEED") != _HASH_SEED:
        os.environ["PYTHONHASHSEED"] = _HASH_SEED
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *(argv or sys.argv[1:])])
    os.environ.setdefault("KERAS_BACKEND", "jax")
    if arguments.speed:
        return _measure(arguments)
    if arguments.reach:
        return _reach(arguments)
    if arguments.mutants:
        return _try_mutants(arguments)
    if arguments.mistakes:
        return _try_mistakes(arguments)
    if arguments.show:
        return _show(arguments)
    return _search(arguments)


def _cores():
    return len(os.sched_getaffinity(0))


def _chosen(arguments):
    from tests.simulation.protocols import protocols

    unknown = set(arguments.protocol or ()) - set(protocols())
    if unknown:
        sys.exit(f"A protocol must be one of {', '.join(protocols())}. Received: {', '.join(unknown)}.")
    return {name: fn for name, fn in protocols().items() if name in (arguments.protocol or protocols())}


# --- speed -------------------------------------------------------------------------------------------------

#: Schedules of each protocol that are timed, of which the first ones warm it up.
_TIMED, _WARM = 300, 20


def _measure(arguments):
    """Print what a schedule costs: CPU time, so that other programs on the machine count little."""
    from tests.simulation._primitives import simulated
    from tests.simulation._runner import run_many

    chosen = _chosen(arguments)
    most = min(arguments.schedules, _TIMED)
    print("| protocol | schedules a CPU second | on all cores | switches | messages |\n|---|---|---|---|---|")
    with simulated() as look:
        for name, protocol in chosen.items():
            run_many(protocol, range(_WARM), look)
            tally, _ = run_many(protocol, range(arguments.seed, arguments.seed + most), look)
            rate = tally.schedules / tally.spent
            switches, messages = tally.switches / tally.schedules, tally.messages / tally.schedules
            row = f"{rate:.0f} | {rate * _cores():.0f} | {switches:.0f} | {messages:.0f}"
            print(f"| `{name}` | {row} |", flush=True)
    load, date = os.getloadavg()[0], time.strftime("%Y-%m-%d")
    busy = ", busy machine" if load > _cores() / 2 else ""
    print(f"\n{date}, {_cores()} cores, load {load:.1f}{busy}")
    return 0


# --- branches ----------------------------------------------------------------------------------------------


def _reach(arguments):
    """Print which branches schedules reach. Protocols are imported in other processes, which count that."""
    from tests.simulation import _reached

    names = arguments.protocol or _reached.names()
    jobs = max(1, arguments.jobs)
    seconds = 60 * arguments.minutes * jobs / len(names)
    found, failed = _reached.measure(names, arguments.seed, arguments.schedules, seconds, jobs)
    if arguments.missing is not None:
        print(_reached.missing(found, arguments.missing) + "\n")
    print(_reached.table(found))
    print(f"\n{time.strftime('%Y-%m-%d')}, {len(names)} protocols, {seconds:.0f} s of each")
    if failed:
        print(f"A schedule failed in {', '.join(failed)}: --protocol finds it.")
    return int(bool(failed))


# --- many schedules ----------------------------------------------------------------------------------------


def _search(arguments):
    from tests.simulation._runner import Tally

    chosen = _chosen(arguments)
    began = time.monotonic()
    share = 60 * arguments.minutes / len(chosen)
    total = Tally()
    code = 0
    print(f"{'protocol':24}{'schedules':>10}{'faults':>9}{'switches':>10}{'messages':>10}{'a second':>10}")
    for name in chosen:
        tally, failed, seconds = _in_jobs(name, arguments, share)
        total.join(tally)
        _print_row(name, tally, seconds)
        if failed:
            code = 1
            print(_failure(name, min(failed)))
            break
    _print_row("all", total, time.monotonic() - began)
    kinds = {}
    for kind, count in total.faults.items():
        plain = " ".join(word.rstrip("0123456789") for word in kind.split())
        kinds[plain] = kinds.get(plain, 0) + count
    print("faults: " + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items())))
    print(f"{total.seconds / 3600:.1f} simulated hours in {(time.monotonic() - began) / 60:.1f} minutes")
    return code


def _print_row(name, tally, seconds):
    numbers = tally.schedules, sum(tally.faults.values()), tally.switches, tally.messages
    rate = tally.schedules / max(seconds, 1e-9)
    print(f"{name:24}{numbers[0]:10}{numbers[1]:9}{numbers[2]:10}{numbers[3]:10}{rate:10.0f}", flush=True)


#: Seeds that a process takes at a time, and those of a protocol that traces and compiles programs.
_CHUNK, _SLOW_CHUNK = 32, 4


def _in_jobs(name, arguments, share):
    """Run a protocol in several processes; return the tally, the seeds that failed, and the seconds.

    They take seeds in turns from one counter. Where a seed fails, those below it are run to their end: the
    lowest one is the same, whichever process is faster.
    """
    from jax._src import xla_bridge

    from tests.simulation._runner import Tally

    began = time.monotonic()
    jobs, is_slow = max(1, arguments.jobs), _runs_jax(name)
    if xla_bridge.backends_are_initialized():
        # What is forked from a process that has started JAX waits for its threads for ever.
        jobs = 1
    context = multiprocessing.get_context("fork")
    # The next chunk of seeds, and the lowest seed that has failed.
    shared = context.Value("q", 0), context.Value("q", 2**62)
    task = name, arguments.seed, arguments.schedules, share, shared
    if jobs == 1:
        results = [_job(task)]
    else:
        if not is_slow:
            # Forked: protocols and what they test are imported once.
            _warm(name)
        with concurrent.futures.ProcessPoolExecutor(jobs, context, _keep, (task,)) as pool:
            results = list(pool.map(_kept_job, range(jobs)))
    tally, failed = Tally(), []
    for found, seeds in results:
        tally.join(found)
        failed += seeds
    return tally, failed, time.monotonic() - began


def _runs_jax(name):
    from tests.simulation.protocols import protocols

    return getattr(protocols()[name], "runs_jax", False)


def _warm(name):
    from tests.simulation._primitives import simulated
    from tests.simulation._runner import run_one
    from tests.simulation.protocols import protocols

    protocol = protocols()[name]
    with simulated():
        run_one(protocol, 0)


class _Kept:
    task = None


def _keep(task):
    _Kept.task = task


def _kept_job(_):
    return _job(_Kept.task)


def _job(task):
    from tests.simulation._primitives import simulated
    from tests.simulation._runner import Tally, run_many
    from tests.simulation.protocols import protocols

    name, first, most, seconds, (counter, lowest) = task
    protocol = protocols()[name]
    total, failed = Tally(), []
    chunk = _SLOW_CHUNK if _runs_jax(name) else _CHUNK
    until = time.monotonic() + seconds
    with simulated() as look:
        while time.monotonic() < until:
            with counter.get_lock():
                begin = counter.value
                counter.value += chunk
            seeds = range(first + begin, first + min(begin + chunk, most))
            if not seeds or seeds[0] > lowest.value:
                break
            tally, failures = run_many(protocol, seeds, look)
            total.join(tally)
            if failures:
                failed += [failure.seed for failure in failures]
                with lowest.get_lock():
                    lowest.value = min(lowest.value, failed[-1])
                break
    return total, failed


def _failure(name, seed):
    from tests.simulation._primitives import simulated
    from tests.simulation._runner import report, run_one, shrink
    from tests.simulation.protocols import protocols

    protocol = protocols()[name]
    with simulated() as look:
        run_one(protocol, seed)
        look()
        first = run_one(protocol, seed, is_recorded=True)
        if first.error is None:
            return f"{name}, seed {seed} fails in a row of schedules, and not alone."
        best = shrink(protocol, seed)
    command = f"python -m tests.simulation --protocol {name} --seed {seed} --show"
    return (
        f"\n{report(name, best)}\nShrunk from {sum(first.world.faults.values())} faults and "
        f"{first.world.switches} switches. The whole schedule: {command}\n"
    )


def _show(arguments):
    from tests.simulation._primitives import simulated
    from tests.simulation._runner import report, run_one

    code = 0
    for name, protocol in _chosen(arguments).items():
        with simulated() as look:
            run_one(protocol, arguments.seed)
            look()
            outcome = run_one(protocol, arguments.seed, is_recorded=True)
        print(report(name, outcome))
        code = max(code, int(outcome.error is not None))
    return code


# --- mistakes ----------------------------------------------------------------------------------------------


def _try_mistakes(arguments):
    from tests.simulation import _tables
    from tests.simulation.protocols import mistakes

    most = min(arguments.schedules, 10_000)
    chosen = [
        m
        for m in mistakes()
        if (not arguments.only or arguments.only in m.name)
        and (not arguments.protocol or {*m.protocols} & {*arguments.protocol})
    ]
    tasks = [(index, arguments.seed, most) for index, m in enumerate(mistakes()) if m in chosen]
    trials = []
    with contextlib.ExitStack() as stack:
        if arguments.jobs > 1:
            pool = stack.enter_context(multiprocessing.get_context("fork").Pool(arguments.jobs))
            results = pool.imap_unordered(_try_mistake, tasks)
        else:
            results = map(_try_mistake, tasks)
        for trial in results:
            trials.append(trial)
            print(trial.line(), flush=True)
    found = sum(trial.what is not None for trial in trials)
    if arguments.tables:
        print(f"\n{_tables.by_protocol(trials)}\n\n{_tables.of_all(trials)}\n")
    print(f"{found} of {len(chosen)} mistakes were found within {most} schedules")
    return int(found < len(chosen))


#: Seconds of CPU for the schedules of one mutant, and how many schedules of each protocol there are.
_MUTANT_SECONDS, _MUTANT_SCHEDULES = 20.0, 300


def _try_mutants(arguments):
    """Judge random mutants by schedules whose seeds are others than those of `make simulate`."""
    from tests.simulation import _mutants
    from tests.simulation.protocols import protocols

    # Each is tried in a forked process, which need not import them again.
    protocols()
    packages = [each for each in _mutants.PROTOCOLS if not arguments.only or arguments.only in each]
    mutants = _mutants.drawn(arguments.mutants, arguments.seed, packages)
    most = min(arguments.schedules, _MUTANT_SCHEDULES)
    print(f"\n{_mutants.report(mutants, 1000, most, _MUTANT_SECONDS)}")
    return 0


def _try_mistake(task):
    """Return after how many schedules of which protocol a mistake has shown itself, and how."""
    from tests.simulation._primitives import simulated
    from tests.simulation._runner import run_many, run_one
    from tests.simulation._tables import Trial
    from tests.simulation.protocols import mistakes, protocols

    index, seed, most = task
    mistake = mistakes()[index]
    # What they import is looked after by `simulated`.
    protocols()
    count = 0
    with simulated() as look:
        # All protocols in turns: the seed that shows it may be another one's.
        size = 20
        while count < most:
            for name in mistake.protocols:
                first = seed + count // len(mistake.protocols)
                with mistake.planted():
                    tally, failures = run_many(protocols()[name], range(first, first + size), look)
                count += tally.schedules
                # What fails without it, too, does not show it.
                if failures and run_one(protocols()[name], failures[0].seed).error is None:
                    others = (other for other in mistake.protocols if other != name)
                    return Trial(mistake.name, (name, *others), count, failures[0].what)
            size = min(size * 2, 200)
    return Trial(mistake.name, mistake.protocols, count, None)


if __name__ == "__main__":
    sys.exit(main())
