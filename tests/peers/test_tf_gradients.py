"""What TensorFlow's tests of `tf.custom_gradient` ask, asked of `custom_vjp`.

Each test has the name of the case in TensorFlow's python/ops/gradients_test.py, as of 2.21.
"""

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from shared import EXECUTED, derivative, gradient, gradients

close = np.testing.assert_allclose
decorated = pytest.mark.parametrize("decorate", EXECUTED.values(), ids=EXECUTED)


@sgtrick.custom_vjp
def exchanged(x1, x2):
    """A product, whose gradients are not those of the arguments."""
    return x1 * x2, lambda u: [u * x1, u * x2]


def in_graph(f, *values):
    """The gradients that `tf.gradients` gives in a graph of TensorFlow 1."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        xs = list(map(tf.constant, values))
        return session.run(tf.gradients(f(*xs), xs))


def dense(x, units=3):
    """A layer of TensorFlow 1, without Keras: its weights are a variable of their own."""
    w = tf.compat.v1.get_variable("w", [x.shape[-1], units], use_resource=True)
    return tf.matmul(x, w)


@sgtrick.custom_vjp
def with_ones(x):
    y = dense(x)

    def pull(u, variables=None):
        (w,) = variables
        return tf.gradients(y, x, u)[0], [tf.ones_like(w)]

    return y, pull


class TestCustomGradient:
    def test_custom_gradient_trivial(self):
        h = sgtrick.custom_vjp(lambda x: (x, lambda u: [3 * u]))
        close(in_graph(lambda x: h(h(x)), 3.0), [9])

    def test_custom_gradient(self):
        close(in_graph(exchanged, 3.0, 5.0), [3, 5])

    def test_custom_gradient_class(self):
        class Model:
            @sgtrick.custom_vjp
            def multiply(self, x1, x2):
                return x1 * x2, lambda u: (u * x1, u * x2)

        close(in_graph(Model().multiply, 3.0, 5.0), [3, 5])

    def test_custom_gradient_errors(self):
        @sgtrick.custom_vjp
        def f(x):
            def pull(_):
                raise RuntimeError("of the rule")

            return x, pull

        with tf.Graph().as_default():
            x = tf.constant(1.0)
            y = f(x)
            with pytest.raises(RuntimeError, match="of the rule"):
                tf.gradients(y, x)

    @pytest.mark.parametrize("before", [0, 2], ids=["", "no false positives"])
    def test_custom_gradient_with_variables(self, before):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.ones([2, 4])
            for i in range(before):
                with tf.compat.v1.variable_scope(f"before_{i}"):
                    x = dense(x)
            y = with_ones(x)
            variables = tf.compat.v1.global_variables()
            session.run(tf.compat.v1.global_variables_initializer())
            found = session.run(tf.gradients(y, [x, *variables]))
        assert len(variables) == before + 1
        assert all(np.isfinite(g).all() for g in found)
        close(found[-1], np.ones([4 if not before else 3, 3]))

    @decorated
    def test_custom_gradient_ragged_tensor(self, decorate):
        f = decorate(sgtrick.custom_vjp(lambda x: (x * x, lambda u: 3 * u)))
        x = tf.ragged.constant([[1.0, 2.0], [3.0]])
        with tf.GradientTape() as tape:
            tape.watch(x.values)
            y = f(x)
        assert y.to_list() == [[1, 4], [9]]
        assert tape.gradient(y, x).to_list() == [[3, 3], [3]]

    @decorated
    def test_custom_gradient_multiple_ragged_tensors(self, decorate):
        f = decorate(sgtrick.custom_vjp(lambda x, y: ((x * x, 2 * y), lambda u, v: (3 * u, 4 * v))))
        xs = tf.ragged.constant([[1.0, 2.0], [3.0]]), tf.ragged.constant([[4.0], [5.0, 6.0]])
        with tf.GradientTape() as tape:
            tape.watch(xs)
            ys = f(*xs)
        assert [y.to_list() for y in ys] == [[[1, 4], [9]], [[8], [10, 12]]]
        found = tape.gradient(ys, xs)
        assert [g.to_list() for g in found] == [[[3, 3], [3]], [[4], [4, 4]]]

    def test_custom_gradient_with_capture(self):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x, y = tf.constant(3.0), tf.constant(5.0)
            f = tf.function(lambda y: tf.gradients(exchanged(x, y), y)[0])
            close(session.run(f(y)), 5)

    def test_custom_gradient_with_variables_eager(self):
        layer = tf.keras.layers.Dense(4, use_bias=False)

        @sgtrick.custom_vjp
        def f(x):
            return layer(x), lambda u, variables: (tf.ones([3, 2]), [tf.ones([2, 4])])

        x = tf.fill([3, 2], 3.0)
        f(x)  # makes the variable
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = f(x)
        close(tape.gradient(y, [x, *layer.trainable_variables])[0], np.ones([3, 2]))

    def test_custom_gradient_errors_with_non_resource_variables(self):
        def f(x, use_resource):
            with tf.compat.v1.variable_scope("f", reuse=tf.compat.v1.AUTO_REUSE):
                w = tf.compat.v1.get_variable(f"w{use_resource}", [2, 4], use_resource=use_resource)
            pull = lambda u, variables=None: (tf.ones([3, 2]), [tf.ones([2, 4])])
            return tf.matmul(x, w), pull

        with tf.Graph().as_default():
            x = tf.ones([3, 2])
            sgtrick.custom_vjp(lambda x: f(x, True))(x)
            with pytest.raises(TypeError, match="reference variable of TensorFlow 1"):
                sgtrick.custom_vjp(lambda x: f(x, False))(x)

    @pytest.mark.parametrize("anonymous", [False, True])
    def test_custom_gradient_variables_kwonly_args(self, anonymous):
        v, x = tf.Variable(3.0), tf.Variable(6.0)

        def of_all(*us, variables=None):
            assert variables[0] is v
            return 4 * v * us[0], [5 * x * us[0]]

        def of_one(u, *, variables=None):
            return of_all(u, variables=variables)

        h = sgtrick.custom_vjp(lambda x: (x * v, of_one if anonymous else of_all))
        with tf.GradientTape() as tape:
            y = h(x)
        close(tape.gradient(y, [x, v]), [12, 30])

    def test_with_numpy_inputs(self):
        x = np.ones([3, 2], np.float32)
        close(sgtrick.custom_vjp(lambda x: (x, lambda _: (None, None)))(x), x)

    def test_recursive_custom_gradient(self):
        @sgtrick.custom_vjp
        def again(x):
            y = with_ones(x)

            def pull(u, variables=None):
                (w,) = variables
                return tf.gradients(y, [x, w], u)[0], [2 * tf.ones_like(w)]

            return y, pull

        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            x = tf.ones([2, 4])
            y = again(x)
            (w,) = tf.compat.v1.global_variables()
            session.run(tf.compat.v1.global_variables_initializer())
            by_x, by_w, of_w = session.run([*tf.gradients(y, [x, w]), w])
        close(by_x, np.tile(of_w.sum(1), [2, 1]), rtol=1e-5)
        close(by_w, np.full([4, 3], 2))

    @decorated
    @pytest.mark.parametrize("y_struct", [[None, ()], (None, (), [], (None, ((), None)))], ids=str)
    @pytest.mark.parametrize(
        "x_struct", [(None, ()), (((), ()), [None, None], [], (None, ()))], ids=str
    )
    def test_custom_gradient_structural_input_output(self, x_struct, y_struct, decorate):
        def zeros(structure):
            return tf.nest.map_structure(lambda _: tf.zeros([]), structure)

        def shape_of(structure):
            return tf.nest.map_structure(lambda _: None, structure)

        @sgtrick.custom_vjp
        def f(*x):
            assert shape_of(x) == x_struct

            def pull(*us):
                assert len(us) == len(tf.nest.flatten(y_struct))
                return tf.nest.flatten(zeros(x_struct))

            return zeros(y_struct), pull

        x = zeros(x_struct)
        with tf.GradientTape() as tape:
            tape.watch(tf.nest.flatten(x))
            y = decorate(f)(*x)
        assert shape_of(y) == y_struct
        assert shape_of(tape.gradient(y, x, zeros(y_struct))) == x_struct


CUBED = sgtrick.custom_vjp(lambda x: (x**3, lambda u: 3 * x**2 * u))


class TestVariablesGradient:
    def test_recompute_grad_zero_size_input(self):
        x = tf.constant(())
        for f in (CUBED, tf.function(CUBED, input_signature=[tf.TensorSpec(None)])):
            assert gradient(tf.recompute_grad(f), x).shape == [0]

    def test_recompute_grad_different_dtypes_inputs(self):
        h = sgtrick.custom_vjp(lambda i, x: ((2 * i, 2 * x), lambda *us: (None, 3 * us[1])))
        i, x = tf.constant(1), tf.constant(1.0)
        for f in (h, tf.function(h)):
            close(gradient(lambda x, f=f: tf.recompute_grad(f)(i, x)[1], x), 3)

    def test_custom_gradient_recompute_grad_higher_order(self):
        f = tf.recompute_grad(lambda x: tf.reduce_prod(CUBED(x)))
        x = tf.constant([2.0])
        for expected in ([12.0], [12.0], [6.0]):
            f = derivative(f)
            close(f(x), expected)

    @pytest.mark.parametrize(
        "outputs", [lambda y: y, lambda y: (y, 2 * y)], ids=["one", "sequence"]
    )
    @decorated
    def test_fn_recompute(self, outputs, decorate):
        v, x = tf.Variable(tf.range(1.0, 4.0)), tf.ones([2, 3])
        mul = sgtrick.custom_vjp(lambda x, v: (x * v, lambda u: (u * v, tf.reduce_sum(u * x, 0))))
        f = lambda x: outputs(mul(x, v))
        expected = gradients(f, x, by=[x, v])
        for g, e in zip(
            gradients(decorate(tf.recompute_grad(f)), x, by=[x, v]), expected, strict=True
        ):
            close(g, e)

    def test_fn_recompute_same_tensor(self):
        x = tf.ones([10])
        mul = sgtrick.custom_vjp(lambda x, y: (x * y, lambda u: (2 * u * y, 3 * u * x)))
        close(gradient(lambda x: tf.recompute_grad(mul)(x, x), x), np.full([10], 5))


class TestGradPassThrough:
    """`tf.grad_pass_through(f)` is `straight_through(f(x), x)`."""

    def test_gradients(self):
        x, z = tf.Variable(1.0), tf.Variable(3.0)
        with tf.GradientTape(persistent=True) as tape:
            square = z**2
            assigned = sgtrick.straight_through(x.assign(square), square)
            product = sgtrick.straight_through(x * z, z)
        close(tape.gradient(assigned, z), 6)
        close(tape.gradient(product, z), 1)
        assert tape.gradient(product, x) is None
