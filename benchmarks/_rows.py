"""What the suite measures: rows, each with the claims that it checks."""

import dataclasses
import fnmatch

from workloads import BATCH

#: Measures of a process that are no action of its peer.
FIRST_COLD, FIRST_WARM, PEAK = "first step, cold cache", "first step, warm cache", "peak memory"
#: Of `fit`, in place of its rows per second where a claim is no ratio.
STEP = "milliseconds of a step"


@dataclasses.dataclass(frozen=True)
class Case:
    """One peer with one workload: a process, or several that train together.

    Args:
        platform: of the devices.
        rows: of a batch on each replica.
        policy: Keras' name of the precision.
        compress: see `peers.Place`.
    """

    peer: str
    workload: str
    devices: int = 1
    processes: int = 1
    platform: str = "cpu"
    rows: int = BATCH
    policy: str = "float32"
    compress: str | None = None

    def __str__(self):
        number, what = (self.processes, "process") if self.processes > 1 else (self.devices, "device")
        plural = ("es" if what == "process" else "s") if number > 1 else ""
        return f"{self.peer}, {self.workload}, {number} {what}{plural}"


@dataclasses.dataclass(frozen=True)
class Point:
    """What is measured of a case: an action of its peer, or one of the measures above."""

    case: Case
    measure: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A ratio that must be reached.

    Args:
        ours: what counts.
        theirs: what it is divided by.
        limit: the least ratio, or the largest where less is better; None: only reported.
    """

    ours: Point
    theirs: Point
    limit: float | None

    @property
    def at_most(self):
        """Whether less is better: seconds and bytes, where actions have rows per second."""
        return self.ours.measure in (FIRST_COLD, FIRST_WARM, PEAK)


@dataclasses.dataclass(frozen=True)
class Row:
    """Claims that are named together.

    Args:
        name: for the command line.
        what: for readers.
        claims: at least one.
        by_name_only: whether it is left out unless it is named.
    """

    name: str
    what: str
    claims: tuple[Claim, ...]
    by_name_only: bool = False


PLAIN, PARALLEL, TORCH, HAND, TENSORFLOW = (
    "plain Keras",
    "DataParallel",
    "torch DDP",
    "JAX by hand",
    "TF MirroredStrategy",
)
TITLES = {
    "mlp": "MLP",
    "cnn": "CNN of one convolution",
    "cnn3": "CNN of three convolutions",
    "cnn-no-pooling": "CNN of one convolution without pooling",
    "cnn3-no-pooling": "CNN of three convolutions without pooling",
    "resnet": "ResNet of 20 layers",
    "transformer": "transformer",
    "lstm": "LSTM",
    "deep50": "50 dense layers",
    "deep150": "150 dense layers",
    "deep300": "300 dense layers",
}
PLACES = {"1-device": (1, 1), "2-devices": (2, 1), "2-processes": (1, 2)}
SPOKEN = {"1-device": "1 device", "2-devices": "2 devices", "2-processes": "2 processes"}
#: The usual peer at each place.
RIVALS = {"1-device": PLAIN, "2-devices": PARALLEL, "2-processes": TORCH}
#: The models whose first step and memory are measured.
ALL = ("mlp", "cnn", "cnn3", "resnet", "transformer", "lstm")
#: The rows of `--quick`.
QUICK = (
    *(f"{workload}-{place}" for workload in ("mlp", "cnn") for place in PLACES),
    *(f"{workload}-memory-1-device" for workload in ("mlp", "cnn")),
    "mlp-callback-2-devices",
    "mlp-batch-127",
    "mlp-loop",
    "cnn-evaluate-2-devices",
)


def against(workload, place, limits, measure="fit", theirs=None):
    """Claims at a place: `limits` by peer, of a measure of both."""
    ours = Point(Case("unisono", workload, *PLACES[place]), measure)
    return tuple(
        Claim(ours, Point(Case(peer, workload, *PLACES[where]), theirs or measure), limit)
        for (peer, where), limit in limits.items()
    )


def fit_rows():
    """`fit` at each place, against its usual peer, and for CNNs against TensorFlow."""
    table = {
        "mlp": (1.2, 1.7, 1.7),
        "cnn": (3.0, 3.0, 1.2),
        "cnn3": (3.0, 3.0, 1.2),
        "cnn-no-pooling": (1.0,),
        "cnn3-no-pooling": (1.0,),
        "resnet": (1.0, 1.2, 1.0),
        "transformer": (1.0, 1.2, 1.2),
        "lstm": (1.0, 1.2, None),
    }
    for workload, limits in table.items():
        for place, limit in zip(PLACES, limits, strict=False):
            peers = {(RIVALS[place], place): limit}
            if workload in ("cnn", "cnn3") and place == "2-devices":
                peers[TENSORFLOW, place] = 2.0
            what = f"fit, {TITLES[workload]}, {SPOKEN[place]}"
            claims = against(workload, place, peers)
            name = f"{workload}-{place}"
            yield Row(name, what, claims, by_name_only=limit is None)


def callback_rows():
    """`fit` of the MLP with a callback that sees batches, and with backups."""
    for name, action, words in (
        ("callback", "fit, callback", "a callback sees batches"),
        ("backup", "fit, backup", "BackupAndRestore"),
    ):
        for place, limit in zip(PLACES, (1.0, 1.2, 1.2), strict=True):
            what = f"fit, MLP, {words}, {SPOKEN[place]}"
            claims = against("mlp", place, {(RIVALS[place], place): limit}, action)
            yield Row(f"mlp-{name}-{place}", what, claims)


def test_rows():
    """`evaluate` and `predict` of the MLP and the CNN, in batches of 128."""
    for workload in ("mlp", "cnn"):
        for action in ("evaluate", "predict"):
            for place in ("2-devices", "2-processes"):
                peers = {(PARALLEL, "2-devices"): 1.5, (PLAIN, "1-device"): 1.0}
                what = f"{action}, {TITLES[workload]}, {SPOKEN[place]}"
                claims = against(workload, place, peers, action)
                yield Row(f"{workload}-{action}-{place}", what, claims)


def loop_rows():
    """Custom loops, and what a loop by hand makes of `fit`."""
    for workload in ("mlp", "cnn"):
        ours = Point(Case("unisono loop", workload, 2), "loop")
        claims = tuple(
            Claim(ours, Point(Case(peer, workload, 2), "loop"), limit)
            for peer, limit in (("TF loop", 4.0), (HAND, 0.95))
        )
        what = f"loop with GradientTape, {TITLES[workload]}, 2 devices"
        yield Row(f"{workload}-loop", what, claims)
    by_hand = against("mlp", "2-devices", {(HAND, "2-devices"): 0.95})
    yield Row("mlp-by-hand-2-devices", "fit, MLP, 2 devices", by_hand)
    by_hand = against("mlp", "2-processes", {(HAND, "2-processes"): 0.95})
    yield Row("mlp-by-hand-2-processes", "fit, MLP, 2 processes", by_hand)


def own_step_rows():
    """`fit` with a `train_step(self, data)` written with a tape, against Keras' own step and TensorFlow."""
    for workload in ("mlp", "cnn", "transformer"):
        for place in ("1-device", "2-devices"):
            ours = Point(Case("unisono", workload, *PLACES[place]), "fit, own step")
            claims = [Claim(ours, Point(ours.case, "fit"), 0.9)]
            if place == "2-devices":
                rival = Case(TENSORFLOW, workload, *PLACES[place])
                claims.append(Claim(ours, Point(rival, "fit, own step"), 1.0))
            what = f"fit, {TITLES[workload]}, train_step with a tape, {SPOKEN[place]}"
            yield Row(f"{workload}-own-step-{place}", what, tuple(claims))


def batch_rows():
    """Batches that do not divide, and several steps in one call."""
    for workload in ("mlp", "cnn"):
        case = Case("unisono", workload, 2)
        claim = Claim(Point(case, "fit, odd batch"), Point(case, "fit"), 0.85)
        yield Row(f"{workload}-batch-127", f"fit, {TITLES[workload]}, batch 127 on 2 devices", (claim,))
    claims = against("mlp", "2-devices", {(PARALLEL, "2-devices"): 1.5}, "fit, 40 steps per execution")
    yield Row("mlp-40-steps", "fit, MLP, steps_per_execution=40, 2 devices", claims)


def start_rows():
    """From the program's start to the end of the first step, and the peak of memory in `fit`."""
    for workload in ALL:
        for place in ("1-device", "2-devices"):
            claims = []
            for measure in (FIRST_COLD, FIRST_WARM):
                claims += against(workload, place, {(PLAIN, "1-device"): 1.15}, measure)
            if place == "2-devices":
                claims += against(workload, place, {(PARALLEL, place): None}, FIRST_COLD)
            what = f"first step, {TITLES[workload]}, {SPOKEN[place]}"
            yield Row(f"{workload}-first-step-{place}", what, tuple(claims))
        for place in ("1-device", "2-devices"):
            claims = against(workload, place, {(RIVALS[place], place): 1.2}, PEAK)
            what = f"peak memory of fit, {TITLES[workload]}, {SPOKEN[place]}"
            yield Row(f"{workload}-memory-{place}", what, claims)


def deep_rows():
    """The first step and the peak of memory of deep models on 2 devices: what compilation costs."""
    for workload in ("deep50", "deep150", "deep300"):
        for name, measure, limit in (("first-step", FIRST_COLD, 1.15), ("memory", PEAK, 1.2)):
            claims = against(workload, "2-devices", {(PARALLEL, "2-devices"): limit}, measure)
            what = f"{measure}, {TITLES[workload]}, 2 devices"
            yield Row(f"{workload}-{name}-2-devices", what, claims, by_name_only=workload == "deep300")


def layout_rows():
    """`fit` of two processes that hold weights in parts, against the same in torch."""
    for workload in ("mlp", "cnn3", "resnet", "transformer"):
        ours, theirs = (
            Point(Case(peer, workload, processes=2), "fit")
            for peer in ("unisono, fully sharded", "torch FSDP2")
        )
        what = f"fit, {TITLES[workload]}, fully sharded, 2 processes"
        yield Row(f"{workload}-fully-sharded-2-processes", what, (Claim(ours, theirs, 0.91),), True)


ROWS = [
    *fit_rows(),
    *callback_rows(),
    *test_rows(),
    *loop_rows(),
    *own_step_rows(),
    *batch_rows(),
    *start_rows(),
    *deep_rows(),
    *layout_rows(),
]


def selected(names=(), quick=False):
    """The rows of some names or patterns such as `mlp-*`, in the table's order.

    Raises:
        ValueError: If a name fits no row.
    """
    if not names:
        return [row for row in ROWS if not row.by_name_only and (row.name in QUICK or not quick)]
    for name in names:
        if not any(fnmatch.fnmatch(row.name, name) for row in ROWS):
            raise ValueError(f"a row's name or a pattern such as 'mlp-*'; see --list. Received: {name!r}")
    return [row for row in ROWS if any(fnmatch.fnmatch(row.name, name) for name in names)]
