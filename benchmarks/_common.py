"""What the benchmarks share: how an epoch is timed, a baseline's model, and tables of results."""

import importlib.util
import time

EPOCHS = 5


def best(epoch, count):
    """Units per second in the best of several epochs, after one that compiles.

    Args:
        epoch: runs one epoch.
        count: how many units an epoch has, such as images.
    """
    epoch()
    times = []
    for _ in range(EPOCHS):
        start = time.perf_counter()
        epoch()
        times.append(time.perf_counter() - start)
    return count / min(times)


def optax_mlp(sizes):
    """An MLP without Keras: its parameters, its optimizer, and its loss with the accuracy."""
    import jax
    import jax.numpy as jnp
    import optax

    keys = jax.random.split(jax.random.key(0), len(sizes) - 1)
    params = [
        (jax.random.normal(k, (a, b)) / a**0.5, jnp.zeros(b))
        for k, a, b in zip(keys, sizes[:-1], sizes[1:], strict=True)
    ]

    def loss_of(params, x, y):
        for w, b in params[:-1]:
            x = jax.nn.relu(x @ w + b)
        w, b = params[-1]
        logits = x @ w + b
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()
        return loss, jnp.mean(logits.argmax(-1) == y)

    return params, optax.adam(1e-3), loss_of


def installed(package):
    """Whether a package that only a baseline needs can be imported."""
    return importlib.util.find_spec(package) is not None


def best_of_rounds(rounds, cases, run, needs):
    """The best rate of each case, over rounds in which all cases take turns.

    Args:
        rounds: how many.
        cases: their names.
        run: runs a case and returns its rate.
        needs: the package that a case needs besides the library, for those that need one.

    Returns:
        Rates by case; None where its package is not installed.
    """
    found = {case: 0 if installed(needs.get(case, "jax")) else None for case in cases}
    for _ in range(rounds):
        for case in cases:
            if found[case] is not None:
                found[case] = max(found[case], run(case))
    return found


def report(found, claims, needs):
    """Print the rates, and the ratios that the library claims.

    Args:
        found: what `best_of_rounds` returned.
        claims: `(what, case, baseline, at least)`; printed where both were measured.
        needs: as for `best_of_rounds`.
    """
    print(f"| {'case':34} | {'images/s':>9} |\n|{'-' * 36}|{'-' * 11}|")
    for case, rate in found.items():
        cell = f"not measured: pip install {needs[case]}" if rate is None else f"{rate:9,.0f}"
        print(f"| {case:34} | {cell} |")
    print(f"\n| {'ratio':34} | {'measured':>9} | {'aim':>6} |\n|{'-' * 36}|{'-' * 11}|{'-' * 8}|")
    for what, case, baseline, least in claims:
        if found.get(case) and found.get(baseline):
            print(f"| {what:34} | {found[case] / found[baseline]:9.2f} | {least:6.2f} |")
