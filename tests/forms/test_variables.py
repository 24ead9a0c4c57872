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
from asinh_forms import jvp_form, vjp_form
from shared import EXECUTED, WRAPS, compiled, derivative, forward_derivative


@pytest.fixture(params=[*EXECUTED.values(), compiled], ids=[*EXECUTED, "XLA"])
def wrap(request):
    return request.param


def dense(g):
    return tf.convert_to_tensor(g) if isinstance(g, tf.IndexedSlices) else g


def gradients(wrap, h, args, by, upstream=2.0):
    def run(*args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = h(*args)
        sources = [*args, *by]
        found = tape.gradient(y, sources, tf.fill(y.shape, upstream))
        return [dense(g) for g in found]

    return [g if g is None else g.numpy() for g in wrap(run)(*args)]


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
    def given(wrap, f):
        seen = []

        def grad(x, variables):
            seen.append([v.name for v in variables])
            return x, [tf.ones(v.shape) for v in variables]

        gradients(wrap, sgtrick.with_gradient(f, grad), [tf.constant(1.0)], [])
        return seen[-1]

    def test_is_that_of_creation_each_once(self, wrap, variables):
        a, _, c, d = variables
        assert self.given(wrap, lambda x: x * d * c * d * a) == ["a:0", "c:0", "d:0"]

    def test_none_that_is_not_trainable_or_not_read(self, wrap, variables):
        constant = tf.Variable(1.0, trainable=False)
        assert self.given(wrap, lambda x: x * constant * variables[2]) == ["c:0"]

    def test_none_read(self, wrap):
        assert self.given(wrap, lambda x: x) == []

    @pytest.mark.parametrize("read", WAYS_TO_READ.values(), ids=WAYS_TO_READ)
    def test_however_they_are_read(self, variables, read):
        """In the second trace and in the second call as in the first, by one call of `f`."""
        seen, calls = set(), []

        def f(x):
            calls.append(1)
            return read(x, *variables[1:])

        def grad(x, variables):
            seen.add("".join(v.name[0] for v in variables))
            return x, [tf.ones(v.shape) for v in variables]

        run = derivative(sgtrick.with_gradient(f, grad))
        in_function = tf.function(run)
        for x in (1.0, 2.0):
            run(tf.constant(x))
            in_function(tf.constant(x))
        assert seen == {"bcd"}
        assert len(calls) == 3

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


class TestExactlyWhatIsReturned:
    def test_of_tensorflow_and_keras_variables(self, wrap):
        w = tf.Variable([1.0, 2.0])
        k = keras.Variable([3.0, 4.0])
        h = sgtrick.with_gradient(
            lambda x: tf.reduce_sum(w * x * k.value),
            lambda x, variables: (w * k.value, [tf.constant([5.0, 6.0]), tf.constant([7.0, 8.0])]),
        )
        x, by_w, by_k = gradients(wrap, h, [tf.constant([1.0, 1.0])], [w, k.value])
        np.testing.assert_allclose(x, [6, 16])
        np.testing.assert_allclose(by_w, [10, 12])
        np.testing.assert_allclose(by_k, [14, 16])

    def test_beside_the_autodiff_of_other_arguments(self, wrap):
        w = tf.Variable(3.0)
        h = sgtrick.with_gradient(
            lambda x, y: w * x * y**2, lambda x, y, variables: (100.0, [tf.constant(1000.0)])
        )
        found = gradients(wrap, h, [tf.constant(2.0), tf.constant(5.0)], [w], 1.0)
        np.testing.assert_allclose(found, [100, 2 * 3 * 2 * 5, 1000])

    @pytest.mark.parametrize("among", ["others", "point"])
    def test_a_variable_that_is_an_argument_and_read_beside(self, wrap, among):
        """Each has its own derivative."""
        v = tf.Variable(3.0)
        f = lambda x, p: v * x * p  # noqa: E731
        h = sgtrick.with_gradient(f, lambda x, p, variables: (10 * v * p, [100 * x * p]))
        run = lambda x: h(x, v) if among == "others" else h(v, x)  # noqa: E731
        by_x, by_v = gradients(wrap, run, [tf.constant(2.0)], [v], 1.0)
        np.testing.assert_allclose(by_x, 90 if among == "others" else 9)
        np.testing.assert_allclose(by_v, 100 * 6 + (6 if among == "others" else 60))

    @pytest.mark.parametrize("around", [False, True])
    def test_beside_the_same_argument_twice(self, wrap, around):
        w, x, b = tf.Variable(5.0), tf.constant(2.0), tf.constant(3.0)
        h = sgtrick.with_gradient(
            lambda x, p, q: w * tf.stop_gradient(x) ** 3 * p * q,
            lambda x, p, q, variables: (3 * w * x**2 * p * q, [x**3 * p * q]),
        )
        twice = lambda x, b: h(x, b, b)  # noqa: E731
        if around:
            found = gradients(EXECUTED["eager"], wrap(twice), [x, b], [w], 1.0)
        else:
            found = gradients(wrap, twice, [x, b], [w], 1.0)
        np.testing.assert_allclose(found, [3 * 5 * 4 * 9, 5 * 8 * 2 * 3, 8 * 9])

    def test_beside_the_same_variable_twice(self, wrap):
        b = tf.Variable(3.0)
        h = sgtrick.with_gradient(
            lambda x, p, q: x**3 * p * q, lambda x, p, q, variables: (3 * x**2 * p * q, [])
        )
        found = gradients(wrap, lambda x: h(x, b, b), [tf.constant(2.0)], [b], 1.0)
        np.testing.assert_allclose(found, [3 * 4 * 9, 8 * 2 * 3])

    def test_for_each_entry_of_a_batch(self, wrap):
        w = tf.Variable([1.0, 2.0])
        h = sgtrick.with_gradient(
            lambda x: tf.linalg.matvec(x, w),
            lambda x, variables: (tf.broadcast_to(w, x.shape), [x]),
        )
        x = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
        by_x, by_w = gradients(wrap, h, [x], [w])
        np.testing.assert_allclose(by_x, 2 * np.tile([1.0, 2.0], (3, 1)))
        np.testing.assert_allclose(by_w, 2 * x.numpy().sum(0))

    @pytest.mark.parametrize("sparse", [False, True])
    def test_of_a_gathered_table(self, wrap, sparse):
        table = tf.Variable(tf.reshape(tf.range(8.0), [4, 2]))
        rows = tf.constant([2, 0, 2])

        def grad(x, variables):
            (v,) = variables
            slices = tf.IndexedSlices(tf.fill([3, 2], 7.0), rows, tf.constant([4, 2]))
            return x, [slices if sparse else tf.scatter_nd(rows[:, None], slices.values, v.shape)]

        h = sgtrick.with_gradient(lambda x: x * tf.reduce_sum(tf.gather(table, rows)), grad)
        _, by_table = gradients(wrap, h, [tf.constant(1.0)], [table])
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

    def test_under_a_mirrored_strategy(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            a, b = tf.Variable(2.0, name="a"), tf.Variable(3.0, name="b")
        seen = []

        @sgtrick.custom_vjp
        def h(x):
            def grad_fn(u, variables):
                seen.append([v.name for v in variables])
                return u * a * b, [10 * u * x, 20 * u * x]

            return b * a * x, grad_fn

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
    @pytest.mark.parametrize("by", ["px", "pv", "xp", "vp", "xx", "xv", "vx", "vv"])
    def test_are_those_of_the_function(self, by):
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
        if by in ("px", "vv"):
            expected = derivatives(f, *args)
            np.testing.assert_allclose(derivatives(tf.function(h), *args), expected)
            np.testing.assert_allclose(tf.function(derivatives)(h, *args), expected)

    @WRAPS
    def test_an_argument_beside_the_point_that_is_closed_over(self, wrap):
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
        np.testing.assert_allclose(wrap(lambda: run(x, b, 0))(), [3 * 4 * 27, 6 * 2 * 27])
        message = "(?s)a tensor that it closes over.* but its grad only gives"
        with pytest.raises((LookupError, tf.errors.InvalidArgumentError), match=message):
            wrap(lambda: run(x, b, 1))()

    def test_what_is_closed_over_and_was_computed_from_the_point(self, wrap):
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

        np.testing.assert_allclose(wrap(run)(tf.constant(2.0)), [12, 12])

    def test_mixed_ones_in_forward_mode(self, wrap):
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

        np.testing.assert_allclose(wrap(run)(x, p), [1.5 * 8 * 6, 1.5 * 12 * 6])

    def test_by_what_has_no_rule_where_the_point_has_no_derivatives(self, wrap):
        h = sgtrick.with_gradient(
            lambda n, p: tf.cast(n, p.dtype) * p**2, lambda n, p, variables: (None, [])
        )

        first = derivative(lambda p: h(tf.constant(5), p))
        np.testing.assert_allclose(wrap(first)(tf.constant(3.0)), 30)
        np.testing.assert_allclose(wrap(forward_derivative(first))(tf.constant(3.0)), 10)


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

    @WRAPS
    def test_vectorized_map_under_a_tape(self, wrap, h, w):
        x, y = tf.constant([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), tf.constant([1.0, 2.0, 3.0])
        mapped = lambda x, y: tf.vectorized_map(lambda a: h(*a), (x, y))  # noqa: E731
        by_x, by_y, by_w = gradients(wrap, mapped, [x, y], [w], 1.0)
        np.testing.assert_allclose(by_x, np.full([3, 2], 100))
        np.testing.assert_allclose(by_y, 2 * y * tf.linalg.matvec(x, w.value()))
        np.testing.assert_allclose(by_w, [21, 24])

    @WRAPS
    def test_forward_mode(self, wrap, h, w):
        def run(x, y):
            with tf.autodiff.ForwardAccumulator([x, y], [tf.constant([1.0, 2.0]), 1.0]) as forward:
                z = h(x, y)
            return forward.jvp(z)

        x, y = tf.constant([1.0, 2.0]), tf.constant(3.0)
        np.testing.assert_allclose(wrap(run)(x, y), 300 + 2 * 3 * (3 + 8))


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
            (lambda x: (x, [tf.ones([3])]), r"(?s)the gradient with respect to the variable weights:0.*\[3\].*\[2\]"),
            (lambda x: (x, [tf.constant("a")]), r"the gradient with respect to the variable weights:0 has dtype string"),
        ],
    )  # fmt: skip
    def test_a_wrong_return(self, wrap, v, returned, message):
        f = lambda x: x * tf.reduce_sum(v)  # noqa: E731
        h = sgtrick.with_gradient(f, lambda x, variables: returned(x))
        with pytest.raises((TypeError, ValueError), match=message):
            gradients(wrap, h, [tf.constant(1.0)], [v])


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
@WRAPS
class TestAmongTheArguments:
    """They are arguments and nothing that the function reads, whatever wraps them."""

    @pytest.mark.parametrize(
        ("of", "policy"),
        [(tf_keras, "float32"), (tf_keras, "mixed_float16"), (keras, "mixed_float16")],
        ids=["tf_keras", "tf_keras mixed", "keras mixed"],
    )
    def test_weights_of_layers(self, form, wrap, of, policy):
        class Layer(of.layers.Layer):
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
            return y, tape.gradient(
                y, layer.v.value if of is keras else layer.trainable_variables[0]
            )

        y, g = run()
        assert y.dtype == (tf.float16 if policy == "mixed_float16" else tf.float32)
        assert g.dtype == tf.float32
        np.testing.assert_allclose(y, 9)
        np.testing.assert_allclose(g, [3, 24])


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
    for wrap in (EXECUTED["eager"], EXECUTED["tf.function"]):

        @wrap
        def run():
            with tf.GradientTape() as tape:
                y = layer(x)
            return tape.gradient(y, layer.trainable_variables)

        np.testing.assert_allclose(run()[0], [1, 2])
        assert len(seen) == 1
        assert seen[0].dtype == tf.float32


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
    "custom_vjp": vjp_form,
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

    READS = {
        "read": lambda v, x: x * v,
        "in a branch": lambda v, x: tf.cond(x > 0, lambda: x * v, lambda: x),
        "in a function": lambda v, x: tf.function(lambda x: x * v)(x),
        "returned": lambda v, x: v,
        "made": lambda v, x: x * tf.compat.v1.get_variable("v/inside", [], use_resource=False),
    }

    @pytest.mark.parametrize("form", FORMS_OF_FUNCTIONS.values(), ids=FORMS_OF_FUNCTIONS)
    def test_are_refused(self, v, form):
        with pytest.raises(TypeError, match=self.MATCH.format("x")):
            form(lambda x: x**2, lambda x: 2 * x)(v)
        named = r"(v.*, which the function reads,|the result of <lambda>|<lambda>\(\.\.\.\))"
        for read in self.READS.values():
            h = form(lambda x, read=read: read(v, x), lambda x: v)
            with pytest.raises(TypeError, match=self.MATCH.format(named)):
                h(tf.constant(2.0))

    def test_in_a_structure(self, v):
        with pytest.raises(TypeError, match=self.MATCH.format(r"x\['v'\]")):
            sgtrick.custom_gradient(1.0, {"v": 1.0}, {"v": v})
        form = sgtrick.custom_vjp(lambda x, n: (x["v"] ** n, lambda u: ({"v": u}, None)))
        with pytest.raises(TypeError, match=self.MATCH.format(r"x\['v'\]")):
            form({"v": v}, 2)

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
