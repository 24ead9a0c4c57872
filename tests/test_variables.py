"""Gradient functions that also serve the variables which a function reads."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import sgtrick

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

    def test_is_that_of_reading_each_once(self, compiled, variables):
        a, _, c, d = variables
        assert self.given(compiled, lambda x: x * c * d * c * a) == ["c:0", "d:0", "a:0"]

    def test_reads_within_a_function_of_the_function(self, compiled, variables):
        _, b, c, d = variables
        inner = tf.function(lambda: d * b)
        assert self.given(compiled, lambda x: x * c * inner()) == ["c:0", "d:0", "b:0"]

    def test_none_that_is_not_trainable_or_not_read(self, compiled, variables):
        constant = tf.Variable(1.0, trainable=False)
        assert self.given(compiled, lambda x: x * constant * variables[2]) == ["c:0"]

    def test_none_read(self, compiled):
        assert self.given(compiled, lambda x: x) == []

    def test_of_code_that_only_runs_eagerly_is_that_of_making(self, variables):
        a, b, *_ = variables
        f = lambda x: x * b * (1.0 if float(a) < 1 else 2.0)  # noqa: E731
        assert self.given(RUNS["eager"], f) == ["a:0", "b:0"]

    def test_is_found_once(self, variables):
        a, b, *_ = variables
        calls = []

        def f(x):
            calls.append(1)
            return x * b * a

        h = sgtrick.with_gradient(f, lambda x, variables: (x, [x, x]))
        for _ in range(5):
            h(tf.constant(1.0))
        assert len(calls) == 6

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
        assert sum(v() is not None for v in read) <= 16

    def test_custom_vjp_has_the_same(self, compiled, variables):
        a, _, c, d = variables
        seen = []

        @sgtrick.custom_vjp
        def f(x):
            def grad_fn(u, variables):
                seen.append([v.name for v in variables])
                return u, [10 * u, 20 * u, 30 * u]

            return x * c * d * c * a, grad_fn

        found = gradients(compiled, f, [tf.constant(1.0)], [c, d, a], 1.0)
        np.testing.assert_allclose(found, [1, 10, 20, 30])
        assert seen[-1] == ["c:0", "d:0", "a:0"]


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

    def test_slices_stay_slices(self):
        table = tf.Variable(tf.ones([4, 2]))
        h = sgtrick.with_gradient(
            lambda x: x * tf.reduce_sum(tf.gather(table, [1])),
            lambda x, variables: (x, [tf.IndexedSlices(tf.ones([1, 2]), [1])]),
        )
        with tf.GradientTape() as tape:
            y = h(tf.constant(1.0))
        assert isinstance(tape.gradient(y, table), tf.IndexedSlices)

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

    def test_without_variables_in_the_rule_they_keep_autodiff(self, compiled):
        w = tf.Variable(3.0)
        h = sgtrick.with_gradient(lambda x: w**2 * x, lambda x: 100.0)
        found = gradients(compiled, h, [tf.constant(2.0)], [w], 1.0)
        np.testing.assert_allclose(found, [100, 2 * 3 * 2])

    def test_in_a_method(self):
        class Model:
            def __init__(self):
                self.w = tf.Variable(3.0)

            @sgtrick.with_gradient
            def __call__(self, x):
                return self.w * x

            @__call__.defgrad
            def _(self, x, variables):
                assert variables[0] is self.w
                return self.w, [10 * x]

        model = Model()
        found = gradients(RUNS["eager"], model.__call__, [tf.constant(2.0)], [model.w], 1.0)
        np.testing.assert_allclose(found, [3, 20])

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
            return tape.gradient(y, [x, b, a])

        for run in (strategy.run, tf.function(strategy.run)):
            found = [strategy.experimental_local_results(g) for g in run(replica)]
            np.testing.assert_allclose(found, [[6, 6], [10, 20], [20, 40]])
            assert seen[-1] == ["b:0", "a:0"]


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
            (lambda x: (x, []), r"each of the variables \['weights:0'\].* it returned 0"),
            (lambda x: (x, [x, x]), r"each of the variables \['weights:0'\].* it returned 2"),
            (lambda x: (x, tf.ones([2])), r"each of the variables \['weights:0'\]"),
            (lambda x: (x, [None]), r"returned None for \['weights:0'\].*return zeros"),
            (
                lambda x: (x, [tf.ones([3])]),
                r"(?s)the gradient by the variable weights:0.*\[3\].*\[2\]",
            ),
            (
                lambda x: (x, [tf.IndexedSlices(tf.ones([1, 3]), [0])]),
                r"the gradient by the variable weights:0 has shape \[1, 3\]",
            ),
            (
                lambda x: (x, [tf.constant("a")]),
                r"the gradient by the variable weights:0 has dtype string",
            ),
        ],
    )
    def test_a_wrong_return(self, compiled, v, returned, message):
        f = lambda x: x * tf.reduce_sum(v)  # noqa: E731
        h = sgtrick.with_gradient(f, lambda x, variables: returned(x))
        with pytest.raises((TypeError, ValueError), match=message):
            gradients(compiled, h, [tf.constant(1.0)], [v])

    def test_slices_of_a_batch(self, v):
        h = sgtrick.with_gradient(
            lambda x: x * tf.reduce_sum(v),
            lambda x, variables: (x, [tf.IndexedSlices(tf.ones([1]), [0])]),
        )
        with pytest.raises(ValueError, match=r"weights:0 is tf.IndexedSlices.*only for a scalar"):
            gradients(RUNS["eager"], h, [tf.ones([3])], [v])
