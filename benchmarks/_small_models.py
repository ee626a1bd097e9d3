"""Rows of `gpu.py` for models whose step a GPU computes in less time than Python needs to start it.

Each claim is for GPUs alone: at most so many milliseconds for a step of `fit` of 64 rows, and so many times
the speed of plain Keras and torch. On CPU devices the same rows have no claims.
"""

import statistics

import _report
from _rows import FIRST_COLD, PEAK, PLAIN, STEP, Case, Claim, Point, Row

EAGER, COMPILED = "torch eager", "torch.compile"
#: By model: its title, and the most milliseconds of a step.
MODELS = {
    "mlp": ("MLP", 0.15),
    "transformer": ("transformer of 3 layers", 0.4),
    "cnn": ("CNN of one convolution", 0.2),
    "lstm": ("LSTM of 48 tokens", 1.0),
}
#: Plain Keras trains with these `steps_per_execution` besides its default of 1.
TOGETHER = (10, 32)
#: The least ratios of speeds of `fit`: to plain Keras, to plain Keras with its best steps, to torch eager.
PLAIN_LIMIT, BEST_LIMIT, EAGER_LIMIT = 5.0, 1.5, 5.0
EVALUATE = "evaluate, same batch"


def case(peer, model, platform):
    """A peer that trains one of the models on one device."""
    return Case(peer, f"small-{model}{'' if platform == 'gpu' else '-short'}", 1, 1, platform)


def speed_claims(model, platform, limits):
    """The claims about `fit` against all peers, `limits` for plain Keras, its best steps and torch eager."""
    ours = Point(case("unisono", model, platform), "fit")
    plain, best, eager = limits
    peers = [(PLAIN, "fit", plain)]
    peers += [(PLAIN, action_of(count), best) for count in TOGETHER]
    peers += [(EAGER, "fit", eager), (COMPILED, "fit", None)]
    for peer, action, limit in peers:
        yield Claim(ours, Point(case(peer, model, platform), action), limit)


def rows_of(platform):
    """The rows of all models, the most important first."""
    limits = (PLAIN_LIMIT, BEST_LIMIT, EAGER_LIMIT) if platform == "gpu" else (None,) * 3
    for model, (title, _) in MODELS.items():
        yield Row(f"small-{model}", f"fit, {title}", tuple(speed_claims(model, platform, limits)))
        ours = case("unisono", model, platform)
        for name, measure in (("evaluate", EVALUATE), ("first-step", FIRST_COLD), ("memory", PEAK)):
            claims = tuple(
                Claim(Point(ours, measure), Point(case(peer, model, platform), measure), None)
                for peer in (PLAIN, EAGER, COMPILED)
            )
            yield Row(f"small-{model}-{name}", title_of(measure, title), claims)


def title_of(measure, title):
    """A measure of a model, in words."""
    return f"{measure.partition(', same')[0]}, {title}"


def milliseconds(measured, point):
    """The time of a step in each round; nothing where it was not measured."""
    return [1000 * point.case.rows / speed for speed in measured.values.get(point, [])]


def step_results(measured, platform, now):
    """A result for each model: its milliseconds of a step, with a verdict on GPUs."""
    for model, (title, most) in MODELS.items():
        point = Point(case("unisono", model, platform), "fit")
        result = {"row": f"small-{model}-step", "what": f"fit, {title}", "measure": STEP, "against": ""}
        result |= {"limit": most if platform == "gpu" else None, "at_most": True, "measured_at": now}
        ours = milliseconds(measured, point)
        if why := measured.missing.get(point.case):
            result["verdict"] = why
        elif not ours:
            result["verdict"] = "not measured"
        else:
            claim = Claim(Point(point.case, FIRST_COLD), point, result["limit"])  # less is better
            result |= {"ours": ours, "verdict": _report.verdict(statistics.median(ours), claim)}
        yield result


def table(measured, platform):
    """Milliseconds of a step, seconds of the first one and peak memory of all peers, as a Markdown table."""
    lines = [["model, 64 rows", "who", "fit, ms/step", "evaluate, ms/step", "first step", "peak memory"]]
    for model, (title, _) in MODELS.items():
        for peer in ("unisono", PLAIN, EAGER, COMPILED):
            lines.append([title, peer, *numbers(measured, case(peer, model, platform))])
            if peer == PLAIN and (best := best_of(measured, case(peer, model, platform))):
                lines.append([title, *best, "", "", ""])
    return _report.markdown(lines)


def numbers(measured, of):
    """The cells of a peer, or the reason why it has none."""
    if why := measured.missing.get(of):
        return [why, "", "", ""]
    points = [Point(of, measure) for measure in ("fit", EVALUATE, FIRST_COLD, PEAK)]
    medians = [statistics.median(v) if (v := measured.values.get(point)) else None for point in points]
    texts = ["{:.3f}".format, "{:.3f}".format, "{:.1f} s".format, "{:,.0f} MiB".format]
    fit, evaluate, first, peak = medians
    steps = [speed and 1000 * of.rows / speed for speed in (fit, evaluate)]
    values = [*steps, first, peak and peak / 2**20]
    return [text(value) if value else "" for text, value in zip(texts, values, strict=True)]


def best_of(measured, of):
    """The best number of steps in an execution and its milliseconds, as two cells; None without values."""
    speeds = {
        count: statistics.median(values)
        for count in (1, *TOGETHER)
        if (values := measured.values.get(Point(of, action_of(count))))
    }
    if not speeds:
        return None
    count = max(speeds, key=speeds.get)
    return f"{PLAIN}, steps_per_execution={count}, its best", f"{1000 * of.rows / speeds[count]:.3f}"


def action_of(count):
    """The action of `fit` with a number of steps in an execution."""
    return "fit" if count == 1 else f"fit, {count} steps per execution"
