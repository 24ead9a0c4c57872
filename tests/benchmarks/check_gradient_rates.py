"""How often gradient checkers find wrong gradients, and blame right ones; prints Markdown.

    PYTHONPATH=. python tests/benchmarks/check_gradient_rates.py > docs/check_gradient_rates.inc

Every function is random and has a gradient known from autodiff, which is embedded as it is and made
wrong in two of ten ways. Takes half an hour.
"""

import collections
import sys

import numpy as np
import tensorflow as tf

import sgtrick

N = 4  # entries of x, a [2, 2] matrix
FUNCTIONS = 20  # of every kind


def network(rng):
    w, v, b = rng.normal(size=(N, 8)), rng.normal(size=8), rng.normal(size=8)
    return lambda x: tf.reduce_sum(tf.tanh(tf.linalg.matvec(w.T, x) + b) * v)


def student(rng):
    a = rng.normal(size=(N, N)) + 2 * np.eye(N)
    dof = rng.uniform(1, 10)
    return lambda x: (
        -(dof + N) / 2 * tf.math.log1p(tf.reduce_sum(tf.linalg.matvec(a, x) ** 2) / dof)
    )


def mixture(rng):
    centres = rng.normal(size=(3, N))
    return lambda x: tf.reduce_logsumexp(-tf.reduce_sum((x - centres) ** 2, -1) / 2)


def waves(rng):
    w = rng.normal(size=N)
    return lambda x: tf.reduce_sum(tf.sin(w * x + 1.0)) + tf.exp(tf.reduce_sum(w * x) / 4)


def smooth(rng):
    return (network, student, mixture, waves)[rng.integers(4)](rng)


def as_drawn(rng):
    return smooth(rng), rng.normal(size=N), 0.0


def tiny_or_huge_values(rng):
    f, scale = smooth(rng), 10.0 ** rng.choice([-12, -9, 9, 12])
    return lambda x: scale * f(x), rng.normal(size=N), 0.0


def entries_of_all_sizes(rng):
    f, sizes = smooth(rng), 10.0 ** rng.uniform(-4, 4, N)
    return lambda x: f(x / sizes), rng.normal(size=N) * sizes, 0.0


def steep(rng):
    f, rate = smooth(rng), 10.0 ** rng.uniform(1, 3)
    return lambda x: f(rate * x), rng.normal(size=N) / rate, 0.0


def fast_beside_x(rng):  # as functions of dates, of metres in a country, of Hz
    f, size = smooth(rng), 10.0 ** rng.uniform(3, 9)
    width = size * 10.0 ** rng.uniform(-6, -5)
    x = size + width * rng.normal(size=N)
    return lambda x: f((x - size) / width), x, 0.0


def flat(rng):  # the second derivative jumps, and x is there
    w, v = rng.normal(size=(2, N))
    x = rng.normal(size=N) * (rng.permutation(N) < N / 2)
    return lambda x: tf.reduce_sum(w * x * tf.abs(x) + v * tf.nn.relu(x) ** 2), x, 0.0


def saturated(rng):
    scale, base = 10.0 ** rng.uniform(-3, 3), rng.choice([0.0, 100.0])
    gaps = rng.uniform(8, 14, 2)

    def cross_entropy(x):  # of two members and two classes
        logits = tf.reshape(x, [2, 2])
        return scale * tf.reduce_sum(
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels=[0, 0], logits=logits)
        )

    def complements(x):
        pairs = tf.reshape(x, [2, 2])
        return scale * tf.reduce_sum(1 - tf.sigmoid(pairs[:, 0] - pairs[:, 1]))

    x = (base + np.stack([gaps, rng.uniform(size=2)], 1)).ravel()
    return (cross_entropy, complements)[rng.integers(2)], x.astype(np.float32), 0.0


def noisy(rng):
    return smooth(rng), rng.normal(size=N), 10.0 ** rng.uniform(-9, -5)


def single_precision(rng):
    f = smooth(rng)

    def narrow(x):  # what f computes inside is rounded to float32
        return tf.cast(f(tf.cast(x, tf.float64)), tf.float32)

    return narrow, rng.normal(size=N).astype(np.float32), 0.0


def offset(rng):
    f, of = smooth(rng), rng.choice([-1, 1]) * 10.0 ** rng.uniform(2, 5)
    return lambda x: tf.cast(tf.cast(f(x) + of, tf.float32), tf.float64), rng.normal(size=N), 0.0


def likelihood(rng):
    in_float32, x, _ = offset(rng)
    return lambda x: in_float32(x) - tf.reduce_sum(x**2) / 2, x, 0.0


def mixed_precision(rng):
    dtype = (tf.float16, tf.bfloat16)[rng.integers(2)]
    w, v = (tf.constant(rng.normal(size=shape) / 2, dtype) for shape in ((8, N), (8, 8)))
    head = tf.constant(rng.normal(size=8), tf.float32)

    def model(x):
        hidden = tf.tanh(tf.linalg.matvec(w, tf.cast(x, dtype)))
        hidden = tf.nn.softplus(tf.linalg.matvec(v, hidden))
        return tf.reduce_sum(tf.cast(hidden, tf.float32) * head)

    return model, rng.normal(size=N).astype(np.float32), 0.0


def normalised(h):
    h -= tf.reduce_mean(h)
    return h * tf.math.rsqrt(tf.reduce_mean(h**2) + 1e-3)


def layers(rng):
    w, v, head = (tf.constant(rng.normal(size=s), tf.float32) for s in ((8, N), (8, 8), 8))

    def model(x):
        hidden = normalised(tf.nn.softplus(tf.linalg.matvec(w, x)))
        return tf.reduce_sum(normalised(tf.nn.softplus(tf.linalg.matvec(v, hidden) / 2)) * head)

    return model, rng.normal(size=N).astype(np.float32), 0.0


BESIDE_LABELS = "beside labels in float32"
KINDS = {
    "as drawn": as_drawn,
    "values of 1e-12 to 1e12": tiny_or_huge_values,
    "entries of 1e-4 to 1e4": entries_of_all_sizes,
    "slopes of 10 to 1000": steep,
    "fast beside `x`": fast_beside_x,
    "flat, and bent at once": flat,
    "noise of 1e-9 to 1e-5": noisy,
    "float32": single_precision,
    "float32, saturated": saturated,
    BESIDE_LABELS: as_drawn,
}
ROUNDED = {  # these may be too inaccurate for any verdict
    "float32 layers": layers,
    "float32 and an offset, as float64": offset,
    "the same and a prior in float64": likelihood,
    "float16 or bfloat16 layers": mixed_precision,
}
# What is wrong by less, relative to the largest entry, is not counted as wrong.
SEEN = collections.defaultdict(lambda: 0.005, {"float16 or bfloat16 layers": 0.1})


def one_entry(g):
    return tf.tensor_scatter_nd_update(g, [[0, 1]], [1.1 * g[0, 1]])


WRONG = {
    "1 % off": lambda gradient, x: 1.01 * gradient(x),
    "sign": lambda gradient, x: -gradient(x),
    "zero": lambda gradient, x: 0 * gradient(x),
    "one entry 10 % off": lambda gradient, x: one_entry(gradient(x)),
    "transposed": lambda gradient, x: tf.transpose(gradient(x)),
    "another point": lambda gradient, x: gradient(0.9 * x),
}
# What rules do to the upstream gradient instead of passing it on.
WRONG_UPSTREAM = {
    "forgotten": tf.ones_like,
    "squared": tf.square,
    "absolute": tf.abs,
    "clipped": lambda u: tf.clip_by_value(u, -1.0, 1.0),
}


def draw(kind, seed):
    """Returns a random function of a [2, 2] matrix, its gradient, and a point."""
    rng = np.random.default_rng(seed)
    f, x, noise = {**KINDS, **ROUNDED}[kind](rng)
    phases = rng.uniform(1e15, 2e15, N)  # rough at every step

    def value(x):
        flat = tf.reshape(x, [N])
        y = f(flat)
        if not noise:
            return y
        return y * (1 + noise * tf.stop_gradient(tf.sin(tf.reduce_sum(phases * flat))))

    def gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(tf.reshape(x, [N]))
        return tape.gradient(y, x)

    return value, gradient, tf.constant(x.reshape(2, 2))


def form(kind, f, name, gradient):
    """Returns the function with a gradient that is right, or wrong by name."""
    if name in WRONG_UPSTREAM:

        def with_rule(x):
            return f(x), lambda u: WRONG_UPSTREAM[name](u) * gradient(x)

        h = sgtrick.custom_vjp(with_rule)
    else:
        h = sgtrick.with_gradient(f, rule(name, gradient))
    if kind != BESIDE_LABELS:
        return tf.function(h)
    labels = tf.constant([0.3, 0.7])
    return tf.function(lambda x: {"loss": h(x), "labels": labels})


def rule(name, gradient):
    return gradient if name == "right" else lambda x: WRONG[name](gradient, x)


def check(mode, **options):
    def verdict(f, x):
        report = sgtrick.check_gradient(f, x, mode=mode, raise_exception=False, **options)
        return "passed" if report.passed else report.worst.verdict

    return verdict


def compute_gradient(close):
    def verdict(f, x):
        def loss(x):  # it takes one output
            y = f(x)
            return y["loss"] if isinstance(y, dict) else y

        (embedded,), (numerical,) = tf.test.compute_gradient(loss, [x])
        return "passed" if close(embedded, numerical) else "wrong"

    return verdict


CHECKERS = {
    "full": check("full"),
    "random": check("random"),
    "`tf.test`, absolute": compute_gradient(lambda a, b: np.abs(a - b).max() < 1e-3),
    "`tf.test`, relative": compute_gradient(lambda a, b: np.allclose(a, b, rtol=1e-3, atol=0)),
}


def rates(functions, kinds=tuple(KINDS), checkers=tuple(CHECKERS)):
    """Counts verdicts by kind, checker and whether the gradient is right."""
    counts = collections.defaultdict(collections.Counter)
    for kind in kinds:
        for seed in range(functions):
            f, gradient, x = draw(kind, seed)
            truth, names = gradient(x).numpy(), [*WRONG, *WRONG_UPSTREAM]
            for name in ["right", *np.random.default_rng(seed).choice(names, 2, replace=False)]:
                if name in WRONG:
                    off = np.abs(rule(name, gradient)(x).numpy() - truth).max()
                    if off < SEEN[kind] * np.abs(truth).max():
                        continue
                h = form(kind, f, name, gradient)
                for checker in checkers:
                    counts[kind, checker, name == "right"][CHECKERS[checker](h, x)] += 1
    return counts


def percent(counter, verdict):
    return f"{100 * counter[verdict] / counter.total():.3g}"


def main(functions):
    counts = rates(functions)
    for kind, checker, right in list(counts):
        counts["all", checker, right] += counts[kind, checker, right]
    wrong = counts["all", "full", False].total()
    print(
        f"{functions * len(KINDS)} random functions, {functions} of every kind, with their right "
        f"gradients and {wrong} wrong ones. TensorFlow {tf.__version__}. The cells are the right "
        "gradients that were called wrong and the wrong ones that passed, in percent:\n"
    )
    print(f"| functions | {' | '.join(CHECKERS)} |")
    print("| --- " * (1 + len(CHECKERS)) + "|")
    for kind in [*KINDS, "all"]:
        cells = [
            f"{percent(counts[kind, checker, True], 'wrong')}&nbsp;/&nbsp;"
            f"{percent(counts[kind, checker, False], 'passed')}"
            for checker in CHECKERS
        ]
        print("|", " | ".join([kind, *cells]), "|")
    undecided = [
        f"{percent(counts['all', mode, right], 'cannot tell')} %"
        for mode in ("full", "random")
        for right in (True, False)
    ]
    print(
        "\nThe verdict was `cannot tell` for {} of the right and {} of the wrong gradients in full "
        "mode, and for {} and {} in random mode.\n".format(*undecided)
    )
    low_precision(functions)
    several_outputs(functions)


def low_precision(functions):
    modes = ["full", "random"]
    counts = rates(functions, ROUNDED, modes)
    print(
        f"Functions that compute in a lower precision, {functions} of every kind. Here the right "
        "gradients that were called wrong and that were `cannot tell`, and the wrong ones that "
        "passed and that were `cannot tell`, in percent:\n"
    )
    print("| functions | full: right | wrong | random: right | wrong |\n" + "| --- " * 5 + "|")
    for kind in ROUNDED:
        cells = [
            f"{percent(counts[kind, mode, right], verdict)}&nbsp;/&nbsp;"
            f"{percent(counts[kind, mode, right], 'cannot tell')}"
            for mode in modes
            for right, verdict in ((True, "wrong"), (False, "passed"))
        ]
        print("|", " | ".join([kind, *cells]), "|")


def jvp_rules(rng):
    """A matrix, and by mistake its transpose, in forward mode."""
    n = rng.integers(2, 5)
    a, x = rng.normal(size=(n, n)), tf.constant(rng.normal(size=n))

    def form(matrix):
        h = sgtrick.custom_vjp(
            lambda x: (tf.linalg.matvec(a, x), lambda u: tf.linalg.matvec(a.T, u))
        )
        h.defjvp(lambda primals, t: (h(*primals), tf.linalg.matvec(matrix, t[0])))
        return h

    return form(a), form(a.T), x, {}


def hessians(rng, sizes):
    """Two outputs, and a mistake in the derivatives of the gradients of both, or of the smaller."""
    q, x = rng.normal(size=(2, N, N)), tf.constant(rng.normal(size=N))
    q += np.swapaxes(q, 1, 2)

    def slope(true, given):
        return sgtrick.with_gradient(
            lambda x: tf.linalg.matvec(true, x), lambda x: tf.constant(given)
        )

    def form(off):
        slopes = [slope(a, a + b) for a, b in zip(q, off, strict=True)]

        def f(x):
            values = [tf.reduce_sum(x * tf.linalg.matvec(a, x)) / 2 for a in q]

            def pull(u):
                return tf.add_n([u[i] * s * slopes[i](x) for i, s in enumerate(sizes)])

            return tf.stack([s * y for s, y in zip(sizes, values, strict=True)]), pull

        return tf.function(sgtrick.custom_vjp(f))

    off = rng.normal(size=(N, N))
    is_shared = sizes[0] == sizes[1]
    return form(np.zeros((2, N, N))), form([off * is_shared, off]), x, {"order": 2}


SEVERAL = {
    "a transposed JVP rule": jvp_rules,
    "a wrong Hessian that two outputs share": lambda rng: hessians(rng, (1.0, 1.0)),
    "that of an output beside one of 1e8": lambda rng: hessians(rng, (1e8, 1.0)),
}


def several_outputs(functions):
    counts = collections.defaultdict(collections.Counter)
    for kind, drawn in SEVERAL.items():
        for seed in range(functions):
            *forms, x, options = drawn(np.random.default_rng(seed))
            for right, h in zip((True, False), forms, strict=True):
                for mode in ("full", "random"):
                    counts[kind, mode, right][check(mode, seed=seed, **options)(h, x)] += 1
    print(
        f"\nRules of functions with several outputs, {functions} of every kind, right and wrong. "
        "Here the right ones that did not pass and the wrong ones that did, in percent:\n"
    )
    print("| wrong | full | random |\n| --- | --- | --- |")
    for kind in SEVERAL:
        cells = [
            f"{100 - float(percent(counts[kind, mode, True], 'passed')):.3g}&nbsp;/&nbsp;"
            f"{percent(counts[kind, mode, False], 'passed')}"
            for mode in ("full", "random")
        ]
        print("|", " | ".join([kind, *cells]), "|")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else FUNCTIONS)
