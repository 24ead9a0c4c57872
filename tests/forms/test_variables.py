"""Rules that also serve the variables which a function reads."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

import sgtrick
import two_workers
from asinh_forms import OF_SLOPE
from matrix import spread
from shared import EXECUTED, WRAPS, WRAPS_AND_XLA, derivative, gradients, with_jvp

# What reads d, b and then c, of which d was made last.
WAYS_TO_READ = {
    "loop": lambda x, b, c, d: tf.while_loop(
        lambda i, _: i < 2, lambda i, y: (i + 1, y * d * b), (0, x * c)
    )[1],
    "branch": lambda x, b, c, d: c * tf.cond(x > 0, lambda: x * d * b, lambda: x * d),
    "vectorized_map": lambda x, b, c, d: (
        c * tf.reduce_sum(tf.vectorized_map(lambda t: t * d * b, tf.stack([x, x])))
    ),
    "functions of functions": lambda x, b, c, d: (
        tf.function(lambda x: tf.function(lambda: d * x)() * b)(x) * c
    ),
    "recompute_grad": lambda x, b, c, d: tf.recompute_grad(lambda x: x * d * b)(x) * c,
    "a form of its own": lambda x, b, c, d: (
        sgtrick.with_gradient(lambda x: x * d * b, lambda x: d * b)(x) * c
    ),
    "operations that read themselves": lambda x, b, c, d: x * tf.maximum(d, b) * tf.exp(c),
}


NOT_TRAINABLE = tf.Variable(1.0, trainable=False)


def _by_tape(f):
    def value_and_gradient(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        return y, tape.gradient(y, x)

    return value_and_gradient


# The sine of `x` times a variable, with its derivative.
READS_AGAIN = {
    "operations": lambda w: lambda x: (w * tf.sin(x), w * tf.cos(x)),
    "a tape": lambda w: _by_tape(lambda x: w * tf.sin(x)),
    "a function": lambda w: _by_tape(tf.function(lambda x: w * tf.sin(x))),
}


class TestOrder:
    @pytest.fixture
    def variables(self):
        return [tf.Variable(float(i), name=name) for i, name in enumerate("abcd")]

    READ = {
        "that of creation, each once": (lambda x, a, b, c, d: x * d * c * d * a, "acd"),
        "trainable ones alone": (lambda x, *_: x * NOT_TRAINABLE, ""),
        "none": (lambda x, *_: x, ""),
    }

    @pytest.mark.parametrize(
        ("read", "names"),
        [*READ.values(), *((lambda x, a, *v, r=r: r(x, *v), "bcd") for r in WAYS_TO_READ.values())],
        ids=[*READ, *WAYS_TO_READ],
    )
    def test_is_that_of_creation_however_they_are_read(self, variables, read, names):
        """In the second trace and in the second call as in the first, by one call of `f`."""
        seen, calls = set(), []

        def f(x):
            calls.append(1)

            def grad_fn(u, variables=()):
                seen.add("".join(v.name[0] for v in variables))
                by_x = u * x
                return (by_x, [tf.ones(v.shape) for v in variables]) if variables else by_x

            return read(x, *variables), grad_fn

        run = derivative(sgtrick.custom_vjp(f))
        in_function = tf.function(run)
        for x in (1.0, 2.0):
            run(tf.constant(x))
            in_function(tf.constant(x))
        assert seen == {names}
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


PAIR, KERAS = tf.Variable([1.0, 2.0]), keras.Variable([3.0, 4.0])
TABLE = tf.Variable(tf.ones([4, 2]))

# A form, its argument, the variables that it reads, and the gradients by all of these.
RETURNED = {
    "of TensorFlow's and Keras's": (
        sgtrick.custom_vjp(
            lambda x: (
                tf.reduce_sum(PAIR * x * KERAS.value),
                lambda u, variables: (u * PAIR * KERAS.value, [[5 * u, 6 * u], [7 * u, 8 * u]]),
            )
        ),
        [1.0, 1.0],
        (PAIR, KERAS.value),
        ([3, 8], [5, 6], [7, 8]),
    ),
    "of a gathered table": (
        sgtrick.custom_vjp(
            lambda x: (
                x * tf.reduce_sum(tf.gather(TABLE, [2, 0, 2])),
                lambda u, variables: (u * x, [7 * u * tf.ones([4, 2])]),
            )
        ),
        1.0,
        (TABLE,),
        (1, np.full([4, 2], 7)),
    ),
}


class TestGradients:
    """Exactly what the rule returns."""

    @WRAPS_AND_XLA
    @pytest.mark.parametrize("case", RETURNED)
    def test_are_what_is_returned(self, case, wrap):
        h, x, by, expected = RETURNED[case]

        def run(h, x):
            found = gradients(lambda x: 2 * h(x), x, by=[x, *by])
            return [tf.convert_to_tensor(g) for g in found]

        x = tf.constant(x)
        for found in (wrap(lambda x: run(h, x))(x), run(wrap(h), x)):
            for g, e in zip(found, expected, strict=True):
                np.testing.assert_allclose(g, 2 * np.asarray(e))

    @WRAPS
    @pytest.mark.parametrize("takes_variables", [False, True])
    def test_of_variables_made_by_the_first_call(self, wrap, takes_variables):
        made = []

        def f(x):
            if not made:
                made.append(tf.Variable(3.0))
            return tf.stop_gradient(x) * made[0]

        if takes_variables:
            form = sgtrick.custom_vjp(lambda x: (f(x), lambda u, variables: (5 * u, [10 * x * u])))
        else:
            form = sgtrick.with_gradient(f, lambda x: 5.0)
        h, x = wrap(form), tf.constant(2.0)
        h(x)
        assert gradients(h, x, by=[x, made[0]]) == [5, 20 if takes_variables else 2]

    @WRAPS
    @pytest.mark.parametrize("reads", READS_AGAIN)
    def test_that_a_value_with_its_gradient_reads_when_computed_again(self, reads, wrap):
        """`tf.recompute_grad` suspends tapes, and a tape inside has to record."""
        x, w = tf.constant(0.5), tf.Variable(3.0)
        h = sgtrick.from_value_and_gradient(READS_AGAIN[reads](w))
        found = gradients(wrap(tf.recompute_grad(h)), x, by=[x, w])
        np.testing.assert_allclose(found, [3 * np.cos(0.5), np.sin(0.5)], rtol=1e-6)

    def test_under_a_mirrored_strategy(self):
        strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
        with strategy.scope():
            a, b = tf.Variable(2.0), tf.Variable(3.0)

        @sgtrick.custom_vjp
        def h(x):
            return b * a * x, lambda u, variables: (u * a * b, [10 * u * x, 20 * u * x])

        def replica():
            x = tf.cast(tf.distribute.get_replica_context().replica_id_in_sync_group, tf.float32)
            return gradients(h, x + 1, by=[a, b])

        for run in (strategy.run, tf.function(strategy.run)):
            found = [strategy.experimental_local_results(g) for g in run(replica)]
            np.testing.assert_allclose(found, [[10, 20], [20, 40]])


@WRAPS
@pytest.mark.parametrize("make", [tf.Variable, keras.Variable])
def test_a_variable_that_is_returned_as_it_is(make, wrap):
    v, x = make([3.0]), tf.constant([2.0])
    source = v if make is tf.Variable else v.value
    pair = with_jvp(lambda p, t: (None, (2 * p[0] * t[0], None)), lambda x: (x**2, v))
    aux = sgtrick.from_value_and_gradient(lambda x: ((x**2, v), 2 * x), has_aux=True)
    alone = sgtrick.with_gradient(lambda x: v, lambda x: tf.linalg.diag(x))
    product = lambda x: pair(x)[0] * pair(x)[1]  # noqa: E731
    for form, want in ((alone, 1), (product, 4)):
        run = wrap(lambda x, form=form: gradients(form, x, by=source))
        np.testing.assert_allclose(run(x), [want])
    with pytest.raises((LookupError, tf.errors.OpError), match=r"\(aux\) was differentiated"):
        wrap(lambda x: gradients(lambda x: aux(x)[1], x, by=source))(x)


def test_a_rule_of_with_gradient_takes_no_variables():
    message = "(?s)grad of f takes `variables`.*use sgtrick.custom_vjp"

    def f(x):
        return x * PAIR

    with pytest.raises(TypeError, match=message):
        sgtrick.with_gradient(f, lambda x, variables: (x, [x]))
    with pytest.raises(TypeError, match=message):
        sgtrick.with_gradient(f).defgrad(lambda x, *, variables=None: x)
    h = sgtrick.with_gradient(lambda x, variables: x * variables, lambda x, variables: variables)
    np.testing.assert_array_equal(derivative(h)(tf.constant(2.0), tf.constant(3.0)), 3.0)


def layer_that(of, call):
    """A layer of mixed precision whose weights `call` gets."""

    class Layer(of.layers.Layer):
        def build(self, _):
            self.w = self.add_weight(name="w", shape=[3], initializer="ones")
            self.b = self.add_weight(name="b", shape=[], initializer="ones")

        def call(self, x):
            return call(x, self.w, self.b)

    return Layer(dtype="mixed_float16")


def weights(of, layer):
    return [v.value for v in layer.weights] if of is keras else layer.weights


class TestWeights:
    """Of layers of mixed precision, whatever wraps them."""

    @pytest.mark.parametrize(
        ("name", "wrap", "of"),
        spread(
            [n for n in two_workers.FORMS if "variable" not in n],
            EXECUTED.values(),
            [tf_keras, keras],
        ),
    )
    def test_among_the_arguments(self, name, wrap, of):
        """They are arguments and nothing that the function reads."""
        form = two_workers.FORMS[name]

        def gradients_with(form):
            layer = layer_that(of, lambda a, w, b: form(w, b, a, tf.ones_like(a[:, 0])))
            layer(a)

            def run(a):
                y, found = layer(a), gradients(layer, a, by=weights(of, layer))
                assert y.dtype == tf.float16
                assert {g.dtype for g in found} == {tf.float32}
                return found

            return wrap(run)(a)

        a = tf.constant(two_workers.A[:4], tf.float32)
        for g, expected in zip(
            gradients_with(form), gradients_with(two_workers.value), strict=True
        ):
            np.testing.assert_allclose(g, expected, atol=0.02)

    @WRAPS
    def test_that_are_read(self, wrap):
        """The rule is given the variable itself."""
        seen = []

        def call(x, w, b):
            def value_and_rule(x):
                def grad_fn(u, variables):
                    seen[:] = variables
                    return u * tf.cast(w, u.dtype), [u * x]

                return tf.reduce_sum(x * w), grad_fn

            return sgtrick.custom_vjp(value_and_rule)(x)

        layer, x = layer_that(tf_keras, call), tf.constant([1.0, 2.0, 3.0])
        layer(x)
        run = wrap(lambda x: gradients(layer, x, by=layer.w))
        np.testing.assert_allclose(run(x), [1, 2, 3])
        assert [v.dtype for v in seen] == [tf.float32]


FORMS = OF_SLOPE | {
    "custom_vjp, variables": lambda f, slope: sgtrick.custom_vjp(
        lambda x: (f(x), lambda u, variables=(): (u * slope(x), [u * x for _ in variables]))
    ),
}
EVERY = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


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

    @EVERY
    def test_are_refused(self, v, form):
        with pytest.raises(TypeError, match=self.MATCH.format("x")):
            form(lambda x: x**2, lambda x: 2 * x)(v)
        named = r"(v.*, which the function reads,|the result of <lambda>|<lambda>\(\.\.\.\))"
        with pytest.raises(TypeError, match=self.MATCH.format(r"x\['v'\]")):
            sgtrick.custom_gradient(1.0, {"v": 1.0}, {"v": v})
        for read in self.READS.values():
            h = form(lambda x, read=read: read(v, x), lambda x: v)
            with pytest.raises(TypeError, match=self.MATCH.format(named)):
                h(tf.constant(2.0))

    @EVERY
    def test_resource_variables_are_not(self, form):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            v = tf.compat.v1.get_variable("v", initializer=5.0, use_resource=True)
            y = form(lambda x: x**2, lambda x: 3 * x)(v)
            session.run(v.initializer)
            assert session.run([y, *tf.gradients(y, v)]) == [25, 15]


ENGINE = lambda *_: sgtrick.from_numpy(lambda x: (x.sum(), np.ones_like(x)))  # noqa: E731


@pytest.mark.parametrize("form", [*FORMS.values(), ENGINE], ids=[*FORMS, "engine"])
def test_placeholders_of_keras_are_refused(form):
    message = r"x is a KerasTensor, .*keras\.layers\.Lambda.*sgtrick\.keras"
    with pytest.raises(TypeError, match=message):
        form(lambda x: x**2, lambda x: 2 * x)(keras.Input([3]))


class torch:  # noqa: N801 - as PyTorch's tensors are recognised, by their class and its module
    class Tensor:
        dtype = "torch.float32"
        requires_grad = True


torch.Tensor.__module__ = "torch"


@pytest.mark.parametrize("form", [*FORMS.values(), ENGINE], ids=[*FORMS, "engine"])
def test_tensors_that_another_framework_differentiates_are_refused(form):
    message = r"x is a tensor that PyTorch differentiates.*sgtrick\.keras\.custom_vjp"
    with pytest.raises(TypeError, match=message):
        form(lambda x: x, lambda x: x)(torch.Tensor())
