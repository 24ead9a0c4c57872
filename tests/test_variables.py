"""Gradient functions that also serve the variables which a function reads."""

import functools
import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sgtrick
from forms import derivative, forward_derivative

RUNS = {
    "eager": lambda run: run,
    "tf.function": tf.function,
    "XLA": lambda run: tf.function(run, jit_compile=True),
}


@pytest.fixture(params=RUNS)
def compiled(request):
    return RUNS[request.param]


def dense(g):
    return tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g


def gradients(compiled, h, args, by, upstream=2.0):
    def run(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = h(*args)
        sources = [*args, *by]
        found = tape.gradient(y, sources, tf.fill(y.shape, upstream))
        return [dense(g) for g in found]

    return [g if g is None else g.numpy() for g in compiled(run)(*args)]


# What reads d, b and then c, of which d was made last.
WAYS_TO_READ = {
    "loop": lambda x, b, c, d: tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, y * d * b), (0, x * c)
    )[1],
    "branch": lambda x, b, c, d: c * tf.cond(x > 0, lambda: x * d * b, lambda: x * d),
    "map": lambda x, b, c, d: c * tf.reduce_sum(tf.map_fn(lambda t: t * d * b, tf.stack([x, x]))),
    "vectorized_map": lambda x, b, c, d: (
        c * tf.reduce_sum(tf.vectorized_map(lambda t: t * d * b, tf.stack([x, x])))
    ),
    "functions of functions": lambda x, b, c, d: (
        tf.function(lambda x: tf.function(lambda: d * x)() * b)(x) * c
    ),
    "recompute_grad": lambda x, b, c, d: tf.recompute_grad(lambda x: x * d * b)(x) * c,
    "Python's loop": lambda x, b, c, d: functools.reduce(lambda y, v: y * v, [d, b, c], x),
    "a form of its own": lambda x, b, c, d: (
        sgtrick.with_gradient(lambda x: x * d * b, lambda x: d * b)(x) * c
    ),
    "operations that read themselves": lambda x, b, c, d: x * tf.maximum(d, b) * tf.exp(c),
}


class TestOrder:
    @pytest.fixture
    def variables(self):
        return [tf.Variable(float(i), name=name) for i, name in enumerate("abcd")]

    @staticmethod
    def given(compiled, f):
        seen = []

        def grad(x, variables):
            seen.append([v.name for v in variables])
            return x, [tf.ones(v.shape) for v in variables]

        gradients(compiled, sgtrick.with_gradient(f, grad), [tf.constant(1.0)], [])
        return seen[-1]

    def test_is_that_of_creation_each_once(self, compiled, variables):
        a, _, c, d = variables
        assert self.given(compiled, lambda x: x * d * c * d * a) == ["a:0", "c:0", "d:0"]

    def test_none_that_is_not_trainable_or_not_read(self, compiled, variables):
        constant = tf.Variable(1.0, trainable=False)
        assert self.given(compiled, lambda x: x * constant * variables[2]) == ["c:0"]

    def test_none_read(self, compiled):
        assert self.given(compiled, lambda x: x) == []

    @pytest.mark.parametrize("read", WAYS_TO_READ.values(), ids=WAYS_TO_READ)
    def test_however_they_are_read(self, variables, read):
        """The same in eager, in the second trace and in the second call as in the first."""
        f = lambda x: read(x, *variables[1:])  # noqa: E731
        assert self.seen_and_counts(RUNS["tf.function"], f) == ({"bcd"}, [1, 1, 1])
        assert self.seen_and_counts(RUNS["eager"], f) == ({"bcd"}, [1, 2, 3])

    @staticmethod
    def seen_and_counts(wrap, f):
        """The variables that the rule was given, and how often `f` had run after each call."""
        seen, calls, counts = set(), [], []

        def counted(x):
            calls.append(1)
            return f(x)

        def grad(x, variables):
            seen.add("".join(v.name[0] for v in variables))
            return x, [tf.ones(v.shape) for v in variables]

        h = sgtrick.with_gradient(counted, grad)

        @wrap
        def run(x):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = h(x)
            return tape.gradient(y, x)

        for x in (1.0, 2.0, 3.0):
            run(tf.constant(x))
            counts.append(len(calls))
        return seen, counts

    def test_a_method_does_not_keep_the_variables_of_its_objects(self):
        class Model:
            def __init__(self):
                self.a, self.b = tf.Variable(1.0), tf.Variable(2.0)

            @sgtrick.custom_vjp
            def __call__(self, x):
                return self.b * self.a * x, lambda u, variables: (u, [u, 2 * u])

        read = []
        for _ in range(50):
            model = Model()
            model(tf.constant(1.0))
            read.append(weakref.ref(model.a))
        del model
        gc.collect()
        assert not any(v() for v in read)

    def test_custom_vjp_has_the_same(self, compiled, variables):
        a, _, c, d = variables
        seen = []

        @sgtrick.custom_vjp
        def f(x):
            def grad_fn(u, variables):
                seen.append([v.name for v in variables])
                return u, [10 * u, 20 * u, 30 * u]

            return x * d * c * d * a, grad_fn

        found = gradients(compiled, f, [tf.constant(1.0)], [a, c, d], 1.0)
        np.testing.assert_allclose(found, [1, 10, 20, 30])
        assert seen[-1] == ["a:0", "c:0", "d:0"]


class TestExactlyWhatIsReturned:
    def test_of_tensorflow_and_keras_variables(self, compiled):
        w = tf.Variable([1.0, 2.0])
        k = keras.Variable([3.0, 4.0])
        h = sgtrick.with_gradient(
            lambda x: tf.reduce_sum(w * x * k.value),
            lambda x, variables: (w * k.value, [tf.constant([5.0, 6.0]), tf.constant([7.0, 8.0])]),
        )
        x, by_w, by_k = gradients(compiled, h, [tf.constant([1.0, 1.0])], [w, k.value])
        np.testing.assert_allclose(x, [6, 16])
        np.testing.assert_allclose(by_w, [10, 12])
        np.testing.assert_allclose(by_k, [14, 16])

    def test_beside_the_autodiff_of_other_arguments(self, compiled):
        w = tf.Variable(3.0)
        h = sgtrick.with_gradient(
            lambda x, y: w * x * y**2, lambda x, y, variables: (100.0, [tf.constant(1000.0)])
        )
        found = gradients(compiled, h, [tf.constant(2.0), tf.constant(5.0)], [w], 1.0)
        np.testing.assert_allclose(found, [100, 2 * 3 * 2 * 5, 1000])

    def test_a_variable_among_the_arguments_keeps_autodiff(self, compiled):
        v, w = tf.Variable(3.0), tf.Variable(5.0)
        h = sgtrick.with_gradient(
            lambda x, v: w * x * v**2, lambda x, v, variables: (x, [1000.0] * len(variables))
        )
        found = gradients(compiled, lambda x: h(x, v), [tf.constant(2.0)], [v, w], 1.0)
        np.testing.assert_allclose(found, [2, 5 * 2 * 2 * 3, 1000])

    @pytest.mark.parametrize("among", ["others", "point"])
    def test_a_variable_that_is_an_argument_and_read_beside(self, compiled, among):
        """Each has its own derivative."""
        v = tf.Variable(3.0)
        f = lambda x, p: v * x * p  # noqa: E731
        h = sgtrick.with_gradient(f, lambda x, p, variables: (10 * v * p, [100 * x * p]))
        run = lambda x: h(x, v) if among == "others" else h(v, x)  # noqa: E731
        by_x, by_v = gradients(compiled, run, [tf.constant(2.0)], [v], 1.0)
        np.testing.assert_allclose(by_x, 90 if among == "others" else 9)
        np.testing.assert_allclose(by_v, 100 * 6 + (6 if among == "others" else 60))

    @pytest.mark.parametrize("around", [False, True])
    def test_beside_the_same_argument_twice(self, compiled, around):
        w, x, b = tf.Variable(5.0), tf.constant(2.0), tf.constant(3.0)
        h = sgtrick.with_gradient(
            lambda x, p, q: w * tf.stop_gradient(x) ** 3 * p * q,
            lambda x, p, q, variables: (3 * w * x**2 * p * q, [x**3 * p * q]),
        )
        twice = lambda x, b: h(x, b, b)  # noqa: E731
        if around:
            found = gradients(RUNS["eager"], compiled(twice), [x, b], [w], 1.0)
        else:
            found = gradients(compiled, twice, [x, b], [w], 1.0)
        np.testing.assert_allclose(found, [3 * 5 * 4 * 9, 5 * 8 * 2 * 3, 8 * 9])

    def test_beside_the_same_variable_twice(self, compiled):
        b = tf.Variable(3.0)
        h = sgtrick.with_gradient(
            lambda x, p, q: x**3 * p * q, lambda x, p, q, variables: (3 * x**2 * p * q, [])
        )
        found = gradients(compiled, lambda x: h(x, b, b), [tf.constant(2.0)], [b], 1.0)
        np.testing.assert_allclose(found, [3 * 4 * 9, 8 * 2 * 3])

    def test_for_each_entry_of_a_batch(self, compiled):
        w = tf.Variable([1.0, 2.0])
        h = sgtrick.with_gradient(
            lambda x: tf.linalg.matvec(x, w),
            lambda x, variables: (tf.broadcast_to(w, x.shape), [x]),
        )
        x = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        by_x, by_w = gradients(compiled, h, [x], [w])
        np.testing.assert_allclose(by_x, 2 * np.tile([1.0, 2.0], (3, 1)))
        np.testing.assert_allclose(by_w, 2 * x.numpy().sum(0))

    @pytest.mark.parametrize("sparse", [False, True])
    def test_of_a_gathered_table(self, compiled, sparse):
        table = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))
        rows = tf.constant([2, 0, 2])

        def grad(x, variables):
            (v,) = variables
            slices = tf.IndexedSlices(tf.fill([3, 2], 7.0), rows, tf.constant([4, 2]))
            return x, [slices if sparse else tf.scatter_nd(rows[:, None], slices.values, v.shape)]

        h = sgtrick.with_gradient(lambda x: x * tf.reduce_sum(tf.gather(table, rows)), grad)
        _, by_table = gradients(compiled, h, [tf.constant(1.0)], [table])
        np.testing.assert_allclose(by_table, 14 * np.array([[1, 1], [0, 0], [2, 2], [0, 0]]))

    def test_of_variables_made_by_the_first_call(self):
        made = []

        def f(x):
            if not made:
                made.append(tf.Variable(3.0))
            return x * made[0]

        h = sgtrick.with_gradient(f, lambda x, variables: (made[0], [10 * x]))
        call = tf.function(h)
        for _ in range(2):
            with tf.GradientTape() as tape:
                y = call(tf.constant(2.0))
            np.testing.assert_allclose(tape.gradient(y, made[0]), 20)

    @pytest.mark.parametrize("form", ["with_gradient", "custom_vjp"])
    def test_under_a_mirrored_strategy(self, form):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            a, b = tf.Variable(2.0, name="a"), tf.Variable(3.0, name="b")
        seen = []

        def grad(x, variables):
            seen.append([v.name for v in variables])
            return a * b, [10 * x, 20 * x]

        def rule(x):
            def grad_fn(u, variables):
                by_x, by_variables = grad(x, variables)
                return u * by_x, [u * g for g in by_variables]

            return b * a * x, grad_fn

        forms = {
            "with_gradient": sgtrick.with_gradient(lambda x: b * a * x, grad),
            "custom_vjp": sgtrick.custom_vjp(rule),
        }
        h = forms[form]

        def replica():
            x = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = h(x + 1)
            return tape.gradient(y, [x, a, b])

        for run in (strategy.run, tf.function(strategy.run)):
            found = [strategy.experimental_local_results(g) for g in run(replica)]
            np.testing.assert_allclose(found, [[6, 6], [10, 20], [20, 40]])
            assert seen[-1] == ["a:0", "b:0"]


class TestSecondDerivatives:
    @pytest.mark.parametrize("by_other", [False, True])
    def test_are_those_of_the_rule(self, compiled, by_other):
        w = tf.Variable([3.0, 4.0])
        h = sgtrick.with_gradient(
            lambda x: tf.stop_gradient(x**3 * tf.reduce_sum(w**2)),
            lambda x, variables: (3 * x**2 * tf.reduce_sum(w**2), [x**3 * 2 * w]),
        )

        def second(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as inner:
                    inner.watch(x)
                    y = h(x) ** 2
                g = inner.gradient(y, w if by_other else x)
            return [dense(g) for g in outer.gradient(g, [x, w])]

        # y = x**6 s**2, s = w[0]**2 + w[1]**2 = 25, with derivatives of s**2: 4 s w.
        by_x, by_w = compiled(second)(tf.constant(2.0))
        v = w.numpy()
        if by_other:  # of the sum of x**6 4 s w
            np.testing.assert_allclose(by_x, 6 * 32 * 4 * 25 * v.sum(), 1e-6)
            np.testing.assert_allclose(by_w, 64 * (8 * v * v.sum() + 4 * 25), 1e-6)
        else:
            np.testing.assert_allclose(by_x, 30 * 16 * 625, 1e-6)
            np.testing.assert_allclose(by_w, 6 * 32 * 4 * 25 * v, 1e-6)

    @pytest.mark.parametrize("by", ["px", "pv", "xp", "vp"])
    def test_mixed_ones_are_those_of_the_function(self, by):
        """Of a rule that is right, in either order."""
        v = tf.Variable(1.5, dtype=tf.float64)
        f = lambda x, p, q: v**2 * x**3 * p**2 * q  # noqa: E731
        h = sgtrick.with_gradient(
            lambda x, p, q: f(tf.stop_gradient(x), p, q),
            lambda x, p, q, variables: (3 * x**2 * p**2 * q * v**2, [2 * v * x**3 * p**2 * q]),
        )

        def derivatives(f, *args, by=by):
            """By every source, after each step."""
            sources = dict(zip("xpq", args, strict=True)) | {"v": v}
            found = []

            def derivative(n):
                with tf.GradientTape() as tape:
                    tape.watch(args)
                    y = derivative(n - 1) if n else f(*args)
                found.append(tape.gradient(y, sources, unconnected_gradients="zero"))
                return found[-1][by[n]]

            derivative(len(by) - 1)
            return [step[name] for step in found for name in sources]

        args = [tf.constant(a, tf.float64) for a in (2.0, 3.0, 5.0)]
        np.testing.assert_allclose(derivatives(h, *args), derivatives(f, *args))
        if by == "px":
            expected = derivatives(f, *args)
            np.testing.assert_allclose(derivatives(tf.function(h), *args), expected)
            np.testing.assert_allclose(tf.function(derivatives)(h, *args), expected)

    @pytest.mark.parametrize("compiled", [RUNS["eager"], RUNS["tf.function"]])
    def test_an_argument_beside_the_point_that_is_closed_over(self, compiled):
        """Its derivative is unknown; that of an argument that the rule covers is known."""
        x, b = tf.constant(2.0, tf.float64), tf.constant(3.0, tf.float64)

        def h(x, b):
            f = lambda x, p: tf.stop_gradient(x) ** 3 * p**2 * b  # noqa: E731
            return sgtrick.with_gradient(f, lambda x, p, variables: (3 * x**2 * p**2 * b, []))(x, b)

        def run(x, b, by):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch([x, b])
                    y = h(x, b)
                first = tape.gradient(y, [x, b][by])
            return first, outer.gradient(first, x)

        # Of x**3 b**3.
        np.testing.assert_allclose(compiled(lambda: run(x, b, 0))(), [3 * 4 * 27, 6 * 2 * 27])
        message = "(?s)a tensor that it closes over.* but its grad only gives"
        with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
            compiled(lambda: run(x, b, 1))()

    def test_what_is_closed_over_and_was_computed_from_the_point(self, compiled):
        """The rule accounts for it."""

        def run(x):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    square = x**2
                    f = lambda x: square * tf.stop_gradient(x)  # noqa: E731
                    y = sgtrick.with_gradient(f, lambda x, variables: (3 * x**2, []))(x)
                first = tape.gradient(y, x)
            return first, outer.gradient(first, x)

        np.testing.assert_allclose(compiled(run)(tf.constant(2.0)), [12, 12])

    def test_mixed_ones_in_forward_mode(self, compiled):
        """The tangent of a gradient by an argument beside the point, along the point."""
        v, x, p = tf.Variable(1.5), tf.constant(2.0), tf.constant(3.0)
        h = sgtrick.with_gradient(
            lambda x, p: v * tf.stop_gradient(x) ** 3 * p**2,
            lambda x, p, variables: (3 * v * x**2 * p**2, [x**3 * p**2]),
        )

        def run(x, p):
            with tf.autodiff.ForwardAccumulator(x, tf.ones_like(x)) as forward:
                with tf.GradientTape() as tape:
                    tape.watch(p)
                    y = h(x, p)
                g = tape.gradient(y, p)
            return g, forward.jvp(g)

        np.testing.assert_allclose(compiled(run)(x, p), [1.5 * 8 * 6, 1.5 * 12 * 6])

    def test_by_what_has_no_rule_where_the_point_has_no_derivatives(self, compiled):
        h = sgtrick.with_gradient(
            lambda n, p: tf.cast(n, p.dtype) * p**2, lambda n, p, variables: (None, [])
        )

        first = derivative(lambda p: h(tf.constant(5), p))
        np.testing.assert_allclose(compiled(first)(tf.constant(3.0)), 30)
        np.testing.assert_allclose(compiled(forward_derivative(first))(tf.constant(3.0)), 10)

    def test_mixed_ones_of_a_map(self):
        v, x, p = tf.Variable(1.5), tf.constant([2.0, 4.0]), tf.constant([3.0, 5.0])
        h = sgtrick.with_gradient(
            lambda x, p: v * tf.stop_gradient(x) ** 3 * p**2,
            lambda x, p, variables: (3 * v * x**2 * p**2, [x**3 * p**2]),
        )

        def run(x, p):
            with tf.GradientTape() as outer:
                outer.watch(x)
                with tf.GradientTape() as tape:
                    tape.watch(p)
                    y = tf.vectorized_map(lambda a: h(*a), (x, p))
                g = tape.gradient(y, p)
            return outer.gradient(g, x)

        np.testing.assert_allclose(tf.function(run)(x, p), 1.5 * 3 * x**2 * 2 * p)


class TestWhereTensorFlowDropsOverrides:
    """They are kept."""

    @pytest.fixture
    def w(self):
        return tf.Variable([3.0, 4.0])

    @pytest.fixture
    def h(self, w):
        return sgtrick.with_gradient(
            lambda x, y: tf.reduce_sum(w * x) * y**2,
            lambda x, y, variables: (tf.fill([2], 100.0), [tf.constant([7.0, 8.0])]),
        )

    @pytest.mark.parametrize("compiled", [RUNS["eager"], RUNS["tf.function"]])
    def test_vectorized_map_under_a_tape(self, compiled, h, w):
        x, y = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([1.0, 2.0, 3.0])
        mapped = lambda x, y: tf.vectorized_map(lambda a: h(*a), (x, y))  # noqa: E731
        by_x, by_y, by_w = gradients(compiled, mapped, [x, y], [w], 1.0)
        np.testing.assert_allclose(by_x, np.full([3, 2], 100))
        np.testing.assert_allclose(by_y, 2 * y * tf.linalg.matvec(x, w.value()))
        np.testing.assert_allclose(by_w, [21, 24])

    @pytest.mark.parametrize("compiled", [RUNS["eager"], RUNS["tf.function"]])
    def test_forward_mode(self, compiled, h, w):
        def run(x, y):
            with tf.autodiff.ForwardAccumulator([x, y], [tf.constant([1.0, 2.0]), 1.0]) as forward:
                z = h(x, y)
            return forward.jvp(z)

        x, y = tf.constant([1.0, 2.0]), tf.constant(3.0)
        np.testing.assert_allclose(compiled(run)(x, y), 300 + 2 * 3 * (3 + 8))


class TestErrors:
    @pytest.fixture
    def v(self):
        return tf.Variable([1.0, 2.0], name="weights")

    @pytest.mark.parametrize(
        ("returned", "message"),
        [
            (lambda x: x, r"takes variables, so it must return \(gradients, variable_gradients\)"),
            (lambda x: (x, []), r"each of the variables \['weights:0'\].* got list of 0"),
            (lambda x: (x, [x, x]), r"each of the variables \['weights:0'\].* got list of 2"),
            (lambda x: (x, tf.ones([2])), r"each of the variables \['weights:0'\]"),
            (lambda x: (x, [None]), r"returned None for \['weights:0'\].*return zeros"),
            (
                lambda x: (x, [tf.ones([3])]),
                r"(?s)the gradient with respect to the variable weights:0.*\[3\].*\[2\]",
            ),
            (
                lambda x: (x, [tf.constant("a")]),
                r"the gradient with respect to the variable weights:0 has dtype string",
            ),
        ],
    )
    def test_a_wrong_return(self, compiled, v, returned, message):
        f = lambda x: x * tf.reduce_sum(v)  # noqa: E731
        h = sgtrick.with_gradient(f, lambda x, variables: returned(x))
        with pytest.raises((TypeError, ValueError), match=message):
            gradients(compiled, h, [tf.constant(1.0)], [v])


def cube(x, v):
    """With the derivative by `v`, of which the function itself has none."""
    return tf.reduce_sum(tf.stop_gradient(x * v) ** 3)


def by_v(x, v):
    return 3 * x**3 * v**2


def jvp_by_v():
    form = sgtrick.custom_jvp(cube)
    form.defjvp(lambda p, t: (None, tf.reduce_sum(by_v(*p) * t[1])))
    return form


@sgtrick.custom_vjp
def vjp_by_v(x, v):
    g = by_v(x, v)  # here, where layers cast their weights
    return cube(x, v), lambda u: (None, u * g)


OF_VARIABLES = {
    "with_gradient": sgtrick.with_gradient(cube, by_v, argnums=1),
    "from_value_and_gradient": sgtrick.from_value_and_gradient(
        lambda x, v: (cube(x, v), by_v(x, v)), argnums=1
    ),
    "custom_jvp": jvp_by_v(),
    "custom_vjp": vjp_by_v,
    "from_numpy": sgtrick.from_numpy(
        lambda x, v: (np.sum((x * v) ** 3), (3 * x**2 * v**3, 3 * x**3 * v**2))
    ),
    "custom_gradient": lambda x, v: sgtrick.custom_gradient(cube(x, v), by_v(x, v), v),
    "implicit_root": lambda x, v: tf.reduce_sum(
        sgtrick.implicit_root(lambda y, v: y - (x * v) ** 3, (x * v) ** 3, v)
    ),
    "clip_gradient": lambda x, v: tf.reduce_sum((x * sgtrick.clip_gradient(v, -1e4, 1e4)) ** 3),
}


@pytest.mark.parametrize("form", OF_VARIABLES.values(), ids=OF_VARIABLES)
@pytest.mark.parametrize("wrap", [RUNS["eager"], RUNS["tf.function"]], ids=["eager", "tf.function"])
class TestAmongTheArguments:
    """They are arguments and nothing that the function reads, whatever wraps them."""

    @pytest.mark.parametrize("policy", ["float32", "mixed_float16"])
    def test_of_tf_keras(self, form, wrap, policy):
        class Layer(tf_keras.layers.Layer):
            def build(self, _):
                self.v = self.add_weight(name="v", shape=[2], initializer="ones")

            def call(self, x):
                return form(x, self.v)

        layer, x = Layer(dtype=policy), tf.constant([1.0, 2.0])
        layer(x)

        @wrap
        def run():
            with tf.GradientTape() as tape:
                y = layer(x)
            return y, tape.gradient(y, layer.trainable_variables)

        y, (g,) = run()
        assert y.dtype == (tf.float16 if policy == "mixed_float16" else tf.float32)
        assert g.dtype == tf.float32
        np.testing.assert_allclose(y, 9)
        np.testing.assert_allclose(g, [3, 24])

    def test_of_keras_layers(self, form, wrap):
        class Layer(keras.layers.Layer):
            def build(self, _):
                self.v = self.add_weight(name="v", shape=[2], initializer="ones")

            def call(self, x):
                return form(x, self.v)

        layer, x = Layer(dtype="mixed_float16"), tf.constant([1.0, 2.0])
        layer(x)

        @wrap
        def run():
            with tf.GradientTape() as tape:
                y = layer(x)
            return tape.gradient(y, layer.v.value)

        np.testing.assert_allclose(run(), [3, 24])

    def test_of_replicas(self, form, wrap):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            v = tf.Variable([1.0, 1.0])

        def replica():
            number = tf.distribute.get_replica_context().replica_id_in_sync_group
            x = (1 + tf.cast(number, tf.float32)) * tf.constant([1.0, 2.0])
            with tf.GradientTape() as tape:
                y = form(x, v)
            return tape.gradient(y, v)

        found = strategy.experimental_local_results(wrap(lambda: strategy.run(replica))())
        np.testing.assert_allclose(found, [[3, 24], [24, 192]])


def test_a_weight_that_is_read_under_mixed_float16():
    """Of which `grad` is given the variable itself."""
    seen = []

    class Layer(tf_keras.layers.Layer):
        def build(self, _):
            self.v = self.add_weight(name="v", shape=[2], initializer="ones")

        def call(self, x):
            def grad(x, variables):
                seen[:] = variables
                return self.v, [x]

            return sgtrick.with_gradient(lambda x: tf.reduce_sum(x * self.v), grad)(x)

    layer, x = Layer(dtype="mixed_float16"), tf.constant([1.0, 2.0])
    for wrap in (RUNS["eager"], RUNS["tf.function"]):

        @wrap
        def run():
            with tf.GradientTape() as tape:
                y = layer(x)
            return tape.gradient(y, layer.trainable_variables)

        np.testing.assert_allclose(run()[0], [1, 2])
        assert len(seen) == 1
        assert seen[0].dtype == tf.float32


def jvp_form(f, slope):
    form = sgtrick.custom_jvp(f)
    form.defjvp(lambda primals, tangents: (None, slope(*primals) * tangents[0]))
    return form


# Of a function `f(x)` and its slope.
FORMS_OF_FUNCTIONS = {
    "with_gradient": sgtrick.with_gradient,
    "with_gradient, variables": lambda f, slope: sgtrick.with_gradient(
        f, lambda x, variables: (slope(x), [x for _ in variables])
    ),
    "from_value_and_gradient": lambda f, slope: sgtrick.from_value_and_gradient(
        lambda x: (f(x), slope(x))
    ),
    "custom_jvp": jvp_form,
    "custom_vjp": lambda f, slope: sgtrick.custom_vjp(lambda x: (f(x), lambda u: u * slope(x))),
    "custom_vjp, variables": lambda f, slope: sgtrick.custom_vjp(
        lambda x: (f(x), lambda u, variables=(): (u * slope(x), [u * x for _ in variables]))
    ),
}


class TestReferenceVariables:
    """Of TensorFlow 1: those of which TensorFlow does not tell that a function reads them."""

    MATCH = (
        "{} is a reference variable of TensorFlow 1, which cannot carry a custom gradient. Create "
        "it with use_resource=True, .* tf.compat.v1.enable_resource_variables"
    )

    @pytest.fixture
    def v(self):
        with tf.Graph().as_default():
            yield tf.compat.v1.get_variable("v", [], use_resource=False)

    @pytest.mark.parametrize("form", FORMS_OF_FUNCTIONS.values(), ids=FORMS_OF_FUNCTIONS)
    def test_as_an_argument(self, v, form):
        with pytest.raises(TypeError, match=self.MATCH.format("x")):
            form(lambda x: x**2, lambda x: 2 * x)(v)

    def test_in_a_structure(self, v):
        with pytest.raises(TypeError, match=self.MATCH.format(r"x\['v'\]")):
            sgtrick.custom_gradient(1.0, {"v": 1.0}, {"v": v})
        form = sgtrick.custom_vjp(lambda x, n: (x["v"] ** n, lambda u: ({"v": u}, None)))
        with pytest.raises(TypeError, match=self.MATCH.format(r"x\['v'\]")):
            form({"v": v}, 2)

    @pytest.mark.parametrize("form", FORMS_OF_FUNCTIONS.values(), ids=FORMS_OF_FUNCTIONS)
    @pytest.mark.parametrize(
        "read",
        [
            lambda v, x: x * v,
            lambda v, x: x * v.value(),
            lambda v, x: tf.cond(x > 0, lambda: x * v, lambda: x),
            lambda v, x: tf.function(lambda x: x * v)(x),
            lambda v, x: v,
            lambda v, x: x * tf.compat.v1.get_variable("v/inside", [], use_resource=False),
        ],
        ids=["read", "value", "branch", "function", "returned", "made"],
    )
    def test_that_the_function_reads(self, v, form, read):
        named = r"(v.*, which the function reads,|the result of <lambda>|<lambda>\(\.\.\.\))"
        h = form(lambda x: read(v, x), lambda x: v)
        with pytest.raises(TypeError, match=self.MATCH.format(named)):
            h(tf.constant(2.0))

    @pytest.mark.parametrize("form", FORMS_OF_FUNCTIONS.values(), ids=FORMS_OF_FUNCTIONS)
    def test_resource_variables_are_not_refused(self, form):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            v = tf.compat.v1.get_variable("v", initializer=5.0, use_resource=True)
            by_argument = form(lambda x: x**2, lambda x: 3 * x)(v)
            y = by_argument + (
                form(lambda x: v * x, lambda x: 7 * v)(tf.constant(2.0))
                if form is not FORMS_OF_FUNCTIONS["custom_vjp"]
                else 2 * v
            )
            (g,) = tf.gradients(y, v)
            session.run(v.initializer)
            assert session.run([y, g]) == [35, 17]


@pytest.mark.parametrize("form", FORMS_OF_FUNCTIONS.values(), ids=FORMS_OF_FUNCTIONS)
def test_placeholders_of_keras_are_refused(form):
    with pytest.raises(
        TypeError, match=r"x is a KerasTensor, .*keras\.layers\.Lambda.*sgtrick\.keras"
    ):
        form(lambda x: x**2, lambda x: 2 * x)(keras.Input([3]))


def test_an_engine_refuses_them():
    engine = sgtrick.from_numpy(lambda x: (x.sum(), np.ones_like(x)))
    with pytest.raises(TypeError, match="x is a KerasTensor"):
        engine(keras.Input([3]))
