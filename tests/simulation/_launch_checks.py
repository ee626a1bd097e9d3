"""What a launch promises about sizes, restarts and exit codes, by a record of its own.

Tests: tests/unit/test_simulated_files.py.
"""

import signal
from collections import Counter

from tests.simulation._world import Violation
from unisono._system._signals import RESTART_WANTED
from unisono.launcher import _restart_policy as decide

_STOPPED = 128 + signal.SIGTERM
#: Batches that are trained at most between SIGTERM and the save: two exchanges of the consensus, of which the
#: first are after one batch, and what a task takes to see the signal.
_BATCHES_TO_SAVE = 16
#: Seconds within which a generation of the wrong size is asked to end, from its `cool_down` or the change on.
_RESIZED_WITHIN = 6.0
#: What ends a generation as a failure.
_FAILURES = ("kill", "stall", "lost", "pause", "launcher", "wall")


class LaunchChecks:
    """The checker's record of a job: its generations, the machines that were there, and who was asked."""

    def __init__(self, world, options):
        self.world, self.options = world, options
        #: When each generation began, and with how many workers.
        self.began, self.sizes = {}, {}
        #: The tasks that faults ended, by generation.
        self.failed = {}
        #: Since when how many workers have room.
        self.rooms = [(0.0, None)]
        #: After which batch the tasks of a generation have saved, by generation.
        self.steps = {}
        #: The generations of which a single task was asked to save, long before the end.
        self.asked = []
        self._left = self._running = 0

    # --- what happens ----------------------------------------------------------------------------------

    def begin(self, key, plan, room):
        """Check the size of a generation, and that it may begin."""
        size = sum(task.type == "worker" for task in plan.tasks)
        before = [other for other in self.began if other[0] == key[0]]
        if before:
            self._check_restarts(before)
            self._check_size(size, since=self.began[before[-1]])
        self.began[key], self.sizes[key] = self.world.now, size

    def fail(self, key, task):
        """Note a fault that ends a task."""
        self.failed.setdefault(key, []).append(task)

    def change_capacity(self, room):
        """Note that there is room for another number of workers."""
        self.rooms.append((self.world.now, room))

    def stop(self, left, running):
        """Note that the launch is asked to stop: how many batches are left, and how many tasks run."""
        self._left, self._running = left, len(running)

    def ask(self, key, left):
        """Note that a single task of a generation gets SIGTERM, so many batches before the end."""
        if left > _BATCHES_TO_SAVE:
            self.asked.append(key)

    def saved(self, key, batches, acknowledged):
        """Check that a task ends with 42 after the batch of all others, which is saved."""
        steps = self.steps.setdefault(key, batches)
        self._fail_unless(
            steps == batches, f"All tasks must save after the same batch, not after {steps} and {batches}."
        )
        self._fail_unless(
            acknowledged >= batches,
            f"A task ends with 42 after {batches} batches, of which {acknowledged} are saved.",
        )

    # --- what is promised ------------------------------------------------------------------------------

    def _check_restarts(self, before):
        """A launch restarts `--max-restarts` times within the window, and no more."""
        if any(self.world.faults[kind] for kind in ("stop", "term", "capacity", "pause")):
            return
        count = sum(key in self.failed for key in before)
        self._fail_unless(
            count <= self.options.restarts,
            f"After {count} failures with {self.options.restarts} restarts no generation may begin.",
        )

    def _room_since(self, since):
        """Return the numbers of workers for which there was room at some time since then."""
        most = self.options.worker_range[1]
        rooms = [room for at, room in self.rooms if at >= since]
        rooms.append([room for at, room in self.rooms if at <= since][-1])
        return [most if room is None else min(most, room) for room in rooms]

    def _check_size(self, size, since):
        """A generation has as many workers as there is room for; one less for two failures of an index."""
        least, most = self.options.worker_range
        if least == most:
            self._fail_unless(size == most, f"A launch of {most} workers has {size}.")
            return
        rooms = self._room_since(since)
        counts = Counter(task for tasks in self.failed.values() for task in tasks)
        # A stopped task may count as a failure, or not.
        dropped = 0 if not self.may_drop() else sum(count // 2 for count in counts.values())
        dropped += self.world.faults["pause"] // 2
        self._fail_unless(
            min(most - dropped, *rooms) <= size <= min(most, max(rooms)),
            f"With room for {rooms} and {dropped} that failed twice {size} workers begin, at most {most}.",
        )

    def may_drop(self):
        """Return whether a fault may have ended a task by force."""
        return any(self.world.faults[kind] for kind in _FAILURES)

    def look(self, tasks, processes):
        """Check that a generation of the wrong size is being ended, and how many spares wait."""
        least, most = self.options.worker_range
        spares = sum(each.task is None and not each.process.is_dead for each in processes)
        limit = self.options.spare_count(most)
        # Each process of a generation is one of them until it has got its task.
        starting = self.began and self.world.now == max(self.began.values())
        self._fail_unless(spares <= limit or starting, f"{spares} spares wait, and at most {limit} may.")
        if least == most or not self.began or self.world._stall or self.may_drop() or self._left:
            return
        key = list(self.began)[-1]
        changed, room = self.rooms[-1]
        wanted = most if room is None else min(most, room)
        since = max(changed, self.began[key] + self.options.cool_down)
        running = [t for t in tasks if t.process.own["generation"] == key and not t.process.is_dead]
        late = self.world.now > since + _RESIZED_WITHIN and wanted != self.sizes[key]
        if late and len(running) == self.sizes[key]:
            self._fail_unless(
                all(each.wants_end for each in running),
                f"{self.sizes[key]} workers train, and not {wanted} since {since:.1f} s.",
            )

    def stopped(self, code, tasks):
        """Check the code of a launch that was asked to stop: 42 where its tasks have saved, or else 143."""
        codes = self._last_codes(tasks)
        saved = RESTART_WANTED in codes and codes <= {0, RESTART_WANTED}
        allowed = {RESTART_WANTED, _STOPPED} if not self._running else {_STOPPED}
        if saved:
            allowed = {RESTART_WANTED} if self._running else allowed
        elif codes == {0}:
            allowed = {0, _STOPPED}
        if self.world.faults["stall"] or self.world.faults["pause"]:
            # It was ending its tasks for that reason already.
            allowed = allowed | {decide.STALLED}
        self._fail_unless(
            code in allowed, f"A launch that was asked to stop, with tasks that end with {codes}: {code}."
        )
        if saved and code == RESTART_WANTED:
            self.saved_at_end(tasks)
        is_quiet = not self.world._stall and not self.may_drop()
        if is_quiet and self._running and self._left > _BATCHES_TO_SAVE:
            self._fail_unless(
                code == RESTART_WANTED,
                f"A launch was asked to stop {self._left} batches before its end, and saved nothing: {code}.",
            )

    def saved_at_end(self, tasks):
        """Check that all tasks of the last generation have saved after one batch."""
        key = max(t.process.own["generation"] for t in tasks)
        self._fail_unless(key in self.steps, f"Generation {key} ends with 42 and has saved nothing.")

    def trained(self):
        """Check a launch that has ended with 0: where one task was asked to save, all have done so."""
        if self.world._stall or self.may_drop() or self.world.faults["capacity"] or self.world.faults["stop"]:
            return
        for key in self.asked:
            self._fail_unless(
                key in self.steps, f"A task of generation {key} was asked to save, and none has."
            )

    def _last_codes(self, tasks):
        key = max(t.process.own["generation"] for t in tasks)
        return {t.poll() for t in tasks if t.process.own["generation"] == key}

    def _fail_unless(self, is_right, text):
        """Let the world fail: in a task it would be a failure that the launcher repairs."""
        if is_right:
            return
        error = Violation(text)
        # The checker's own thread ends the world, where it may be the last thing that is done.
        if self.world.current.process.name == "test":
            raise error
        self.world.fail(error)
