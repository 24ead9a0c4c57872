"""`implicit_root` with `solve`: no matrix is formed."""

import functools
from typing import ClassVar

import numpy as np
import pytest
import scipy.sparse
import scipy.sparse.linalg
import tensorflow as tf

from matrix import spread
from sgtrick import implicit_root
from shared import (
    EXECUTED,
    TWICE,
    WAYS,
    Way,
    compiled,
    constant,
    derivative,
    forward_derivative,
    mapped,
)
from shared import gradient as grad


def conjugate_gradients(matvec, b, steps=400):
    """For symmetric and positive definite systems of one vector."""

    def dot(v, w):
        return tf.reduce_sum(v * w)

    def step(i, v, rest, direction, size):
        image = matvec(direction)
        length = size / dot(direction, image)
        rest -= length * image
        after = dot(rest, rest)
        return i + 1, v + length * direction, rest, rest + after / size * direction, after

    start = (0, tf.zeros_like(b), b, b, dot(b, b))
    proceed = lambda i, *state: (i < steps) & (state[-1] > 1e-26 * dot(b, b))  # noqa: E731
    return tf.while_loop(proceed, step, start)[1]


def elimination(matvec, b):
    """For any system of one structure, by the matrix that the products make up."""
    leaves = tf.nest.flatten(b)
    sizes = [tf.size(t) for t in leaves]

    def packed(structure):
        return tf.concat([tf.reshape(t, [-1]) for t in tf.nest.flatten(structure)], 0)

    def unpacked(vector):
        parts = tf.split(vector, sizes, num=len(leaves))
        parts = [tf.reshape(p, tf.shape(t)) for p, t in zip(parts, leaves, strict=True)]
        return tf.nest.pack_sequence_as(b, parts)

    n = packed(b).shape[0]
    columns = [
        packed(matvec(unpacked(row))) for row in tf.unstack(tf.eye(n, dtype=leaves[0].dtype))
    ]
    return unpacked(tf.linalg.solve(tf.stack(columns, 1), packed(b)[:, tf.newaxis])[:, 0])


def chain(x, a):
    """Unknowns that depend on their neighbours, with a symmetric Jacobian."""
    padded = tf.pad(x, [[1, 1]])
    return 2.5 * x - padded[2:] - padded[:-2] + 0.1 * x**3 - a


def root_of_chain(a):
    """The root by Newton's method, and the Jacobian there, as SciPy has them."""
    x, beside = np.zeros_like(a), -np.ones(len(a) - 1)
    for _ in range(10):
        padded = np.pad(x, 1)
        rest = 2.5 * x - padded[2:] - padded[:-2] + 0.1 * x**3 - a
        jacobian = scipy.sparse.diags([2.5 + 0.3 * x**2, beside, beside], [0, 1, -1], format="csc")
        x -= scipy.sparse.linalg.spsolve(jacobian, rest)
    return x, jacobian


def coupled(x):
    """Two leaves, with a Jacobian that is not symmetric."""
    u, (v,) = x["u"], x["v"]
    return {"u": 2 * u + tf.sin(v[0]), "v": [3 * v + 0.3 * u**2]}


def solution(t):
    """The root of `coupled(x) = coupled(solution(t))`."""
    return {"u": t[0] ** 2 * t[1], "v": [tf.sin(t[:1]) + t[1:]]}


def explicit(t):
    """The same in one vector, by autodiff."""
    x = solution(t)
    return tf.concat([x["u"][tf.newaxis], x["v"][0]], 0)


def solved(t):
    """The same by a root, whose derivatives are found by elimination."""

    def residual(x, theta):
        return tf.nest.map_structure(tf.subtract, coupled(x), coupled(solution(theta["t"][0])))

    star = tf.nest.map_structure(tf.stop_gradient, solution(t))
    x = implicit_root(residual, star, {"t": [t]}, solve=elimination)
    return tf.concat([x["u"][tf.newaxis], x["v"][0]], 0)


T = constant([0.3, 0.8])
RAISED = {
    "eager": (LookupError, tf.errors.InvalidArgumentError),
    "tf.function": tf.errors.InvalidArgumentError,
}


@pytest.mark.long
class TestSolve:
    @pytest.mark.parametrize("wrap", [tf.function, compiled], ids=["graph", "XLA"])
    def test_needs_no_matrix(self, wrap):
        n = 100_000  # a matrix would take 80 GB
        a, upstream = np.random.default_rng(n).normal(size=(2, n))
        star, jacobian = root_of_chain(a)
        root = lambda a: implicit_root(chain, star, a, solve=conjugate_gradients)  # noqa: E731
        came = wrap(lambda a: grad(root, a, upstream))(tf.constant(a))
        expected = scipy.sparse.linalg.spsolve(jacobian, upstream)
        np.testing.assert_allclose(came, expected, rtol=1e-8, atol=1e-10)

    # In forward mode TensorFlow takes ten seconds or more. asinh_forms.py has a root whose system is
    # solved by a matrix, which has the same rule.
    NESTINGS: ClassVar = {
        "eager": Way(modes=TWICE),
        "graph": Way(around=tf.function, modes=TWICE),
        "first around a graph": Way(inside=tf.function),
        "reverse over forward": Way(modes=(forward_derivative, derivative)),
        "around a map": Way(
            inside=lambda f: lambda ts: tf.vectorized_map(f, ts),
            around=lambda f: tf.function(lambda t: f(tf.stack([t, 1.1 * t]))),
        ),
    }

    @pytest.mark.parametrize("nesting", NESTINGS.values(), ids=NESTINGS)
    def test_in_nestings_of_the_modes(self, nesting):
        np.testing.assert_allclose(nesting(solved)(T), nesting(explicit)(T), rtol=1e-8, atol=1e-11)

    @pytest.mark.parametrize("factor", [0, 1.001])
    def test_what_is_no_solution_is_loud(self, factor):
        a = np.random.default_rng(0).normal(size=3)
        star, _ = root_of_chain(a)
        solve = lambda matvec, b: factor * elimination(matvec, b)  # noqa: E731
        root = lambda a: implicit_root(chain, star, a, solve=solve)  # noqa: E731
        message = r"solve\(matvec, b\) returned a v for which matvec\(v\) is not b"
        a = tf.constant(a)
        for of in (derivative, forward_derivative):
            for way, wrap in EXECUTED.items():
                with pytest.raises(RAISED[way], match=message):
                    wrap(of(root))(a)
        assert np.isnan(derivative(tf.function(root))(a)).all()
        assert np.isnan(compiled(derivative(root))(a)).all()


@pytest.mark.long
@pytest.mark.parametrize("way", ["around vectorized_map", "in vectorized_map", "in both"])
def test_in_maps(way):
    """Of `x = sqrt(a)`, by a method that sees one member."""

    def root(a):
        solve = lambda matvec, b: b**2 / matvec(b)  # noqa: E731
        return implicit_root(lambda x, a: x**2 - a, tf.sqrt(a), a, solve=solve)

    ways = WAYS | {"in both": Way(inside=mapped, around=lambda f: tf.function(mapped(f)))}
    a = constant([1.0, 4.0, 9.0])
    found = ways[way](root)(a[:, tf.newaxis] if way == "in both" else a)
    np.testing.assert_allclose(tf.reshape(found, [-1]), 0.5 / tf.sqrt(a), rtol=1e-9)


class TestSystemsOfTheirOwn:
    """Each is solved to half of its digits, beside larger ones too."""

    SIZES = constant([[1.0], [1e-9], [1e-30]])

    # `x = sqrt(a)` entry by entry, or a root whose entries depend on each other.
    RESIDUALS: ClassVar = {
        "entries": lambda x, a: x**2 - a,
        "rows": lambda x, a: x**2 + 0.1 * tf.reverse(x, [-1]) - a,
    }

    @staticmethod
    def of(residual, by_member, off, as_leaves=False):
        """The gradient of a root, and of one where a member is solved by a factor that is `off`."""
        star = constant([[1.0, 2.0], [2.0, 3.0], [3.0, 1.0]])
        a = residual(star, 0.0)
        factors = tf.concat([tf.ones([2, 1], a.dtype), [[off]]], 0)

        def leaves(t):
            return {"far": t[:1], "near": [t[1:]]} if as_leaves else t

        def rows(t):
            return tf.concat(tf.nest.flatten(t), 0)

        def solve(matvec, b):
            return leaves(factors * rows(elimination(matvec, b)))

        def root(a):
            f = lambda x, a: leaves(residual(rows(x), a))  # noqa: E731
            return rows(implicit_root(f, leaves(star), a, solve=solve))

        def exact(a):
            return implicit_root(residual, star, a, batch_ndims=1)

        return [grad(f, a, by_member * tf.ones_like(star)) for f in (root, exact)]

    @pytest.mark.long
    @pytest.mark.parametrize(
        ("residual", "as_leaves", "way"), spread(RESIDUALS, [False, True], EXECUTED)
    )
    def test_each_is_tested(self, residual, as_leaves, way):
        residual, wrap = self.RESIDUALS[residual], EXECUTED[way]
        came, expected = wrap(lambda: self.of(residual, self.SIZES, 1.0, as_leaves))()
        np.testing.assert_allclose(came, expected, rtol=1e-9)
        with pytest.raises(RAISED[way], match=r"a part that is a system of its own"):
            wrap(lambda: self.of(residual, self.SIZES, 1.3, as_leaves))()

    def test_one_whose_unknowns_vary_in_size_is_tested_as_a_whole(self):
        """Where a local gradient decays from unknown to unknown, no iteration reaches the end."""
        a = np.random.default_rng(0).normal(size=200)
        star, jacobian = root_of_chain(a)
        solve = functools.partial(conjugate_gradients, steps=25)
        upstream = np.eye(200)[50]

        def root(a):
            return implicit_root(lambda x, a: chain(x, a) + 2 * (x - star), star, a, solve=solve)

        expected = scipy.sparse.linalg.spsolve(jacobian + 2 * scipy.sparse.eye(200), upstream)
        came = grad(root, tf.constant(a), upstream)
        np.testing.assert_allclose(came, expected, atol=1e-9)
        assert (came == 0).numpy().sum() > 100
