"""A model of the time of a step, beyond the machines that were measured: prints the tables of a page.

    python benchmarks/model_of_scale.py

The page is docs/beyond_these_machines.md, where each constant is explained. The model is four sums:
computation, which is slowed by the slowest of all; bytes over a host's link; latency of each hop of a ring;
and what of the exchange is hidden behind the backward pass. It knows nothing of congestion, of failures and
of input data.
"""

import dataclasses
import math
import sys

#: Seconds for a hop of a message, and the spread of the accelerators' times, as a part of the time: so that
#: the published efficiencies at 512 accelerators are met.
HOP, SPREAD = 8e-6, 0.0315
#: The part of a step's computation that can hide an exchange: the backward pass.
HIDES = 2 / 3
#: Bytes of a message, as Horovod and DDP pack gradients.
MESSAGE = 64 << 20
#: Accelerators of a host, which share its link.
PER_HOST = 8


@dataclasses.dataclass(frozen=True)
class Work:
    """A model in training.

    Args:
        seconds: of computation a step, on one accelerator.
        gradients: bytes.
    """

    name: str
    seconds: float
    gradients: float


@dataclasses.dataclass(frozen=True)
class Place:
    """Accelerators and the links between their hosts.

    Args:
        gbits: of a host's link, per second and direction.
        ring: whether messages go around a ring of all; otherwise by a tree.
    """

    count: int
    gbits: float
    per_host: int = PER_HOST
    ring: bool = True


def exchange(work, place, passes=2):
    """Seconds of an exchange of gradients.

    Args:
        passes: how often all bytes pass a link: 2 for an all-reduce, 3 where weights rest in parts, too.
    """
    hosts = math.ceil(place.count / place.per_host)
    if place.count == 1:
        return 0.0
    link = passes * (hosts - 1) / hosts * work.gradients * 8 / (place.gbits * 1e9)
    hops = place.count - 1 if place.ring else math.log2(place.count)
    return link + passes * hops * HOP * math.ceil(work.gradients / MESSAGE)


def step(work, place, *, hidden=True, passes=2):
    """Seconds of a step; `hidden` where the exchange runs beside the backward pass."""
    slowest = work.seconds * (1 + SPREAD * math.sqrt(2 * math.log(place.count)))
    hides = HIDES * work.seconds if hidden else 0.0
    return slowest + max(0.0, exchange(work, place, passes) - hides)


def efficiency(work, place, **options):
    """The part of an accelerator's time that is computation of its own."""
    return work.seconds / step(work, place, **options)


#: On Pascal P100s with 64 images each: 142 and 154 images/s, and 128 between ResNet-50's and ResNet-152's.
INCEPTION = Work("Inception V3", 64 / 142, 4 * 23.8e6)
RESNET_101 = Work("ResNet-101", 64 / 128, 4 * 44.5e6)
VGG = Work("VGG-16", 64 / 154, 4 * 138.4e6)
#: Published efficiencies of Horovod: hosts of 4 accelerators, 25 Gbit/s.
PUBLISHED = (
    (INCEPTION, 128, 0.90),
    (RESNET_101, 128, 0.90),
    (VGG, 128, 0.79),
    (INCEPTION, 512, 0.90),
    (RESNET_101, 512, 0.90),
    (VGG, 512, 0.68),
)
#: Milliseconds that were measured here between two hosts: at 10 Gbit/s, 1 Gbit/s and 100 Mbit/s.
MEASURED = (("MLP", 0.94e6, (6.9, 11.7, 81.3)), ("CNN", 1.389e6, (15.3, 24.0, 125.4)))
#: ResNet-50 with 256 images at 2,500 a second; a transformer of 1.3 and of 13 billion parameters, 16,384
#: tokens a step, 6 operations for each parameter and token at 400 TFLOP/s, gradients in bfloat16.
RESNET_50 = Work("ResNet-50", 256 / 2500, 4 * 25.6e6)
GPT_1 = Work("transformer, 1.3 billion", 6 * 1.3e9 * 16384 / 400e12, 2 * 1.3e9)
GPT_13 = Work("transformer, 13 billion", 6 * 13e9 * 16384 / 400e12, 2 * 13e9)
COUNTS = (8, 64, 256, 1024, 4096)
GBITS = (1, 10, 25, 100, 400)


def table(head, rows):
    """A table in Markdown."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in (head, *rows)]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def published_table():
    """The model beside what was published."""
    rows = []
    for work, count, found in PUBLISHED:
        place = Place(count, 25, per_host=4)
        ends = f"{efficiency(work, place, hidden=False):.2f}"
        rows.append([work.name, count, f"{found:.2f}", f"{efficiency(work, place):.2f}", ends])
    return table(["model", "accelerators", "published", "the model", "with nothing hidden"], rows)


def measured_table():
    """The model beside the milliseconds that were measured between two hosts, from the fastest link's."""
    rows = []
    for name, size, (fast, *others) in MEASURED:
        computation = fast - size * 8 / 10e9 * 1e3
        for gbits, found in zip((1, 0.1), others, strict=True):
            expected = computation + 1e3 * exchange(Work(name, 0, size), Place(2, gbits, per_host=1))
            rows.append([name, f"{gbits:g} Gbit/s", f"{found:.1f} ms", f"{expected:.1f} ms"])
    return table(["model", "link", "measured", "the model"], rows)


def scale_table(work, **options):
    """Efficiency by number of accelerators and by link."""
    ring = options.pop("ring", True)
    rows = []
    for count in COUNTS:
        found = [efficiency(work, Place(count, gbits, ring=ring), **options) for gbits in GBITS]
        rows.append([f"{count:,}", *(f"{each:.2f}" for each in found)])
    return table([work.name, *(f"{gbits} Gbit/s" for gbits in GBITS)], rows)


def latency_table(work, gbits):
    """Milliseconds of a step by number of accelerators: a ring and a tree."""
    rows = []
    for count in COUNTS:
        seconds = [step(work, Place(count, gbits, ring=ring)) for ring in (True, False)]
        rows.append([f"{count:,}", *(f"{1e3 * each:.0f} ms" for each in seconds)])
    return table([f"{work.name}, {gbits} Gbit/s", "a ring", "a tree"], rows)


def tables():
    """All tables of the page, in its order."""
    return [
        measured_table(),
        published_table(),
        scale_table(RESNET_50),
        scale_table(RESNET_50, hidden=False),
        scale_table(GPT_1),
        scale_table(GPT_13, passes=3),
        latency_table(GPT_1, 400),
    ]


if __name__ == "__main__":
    print("\n\n".join(tables()))
    sys.exit(0)
