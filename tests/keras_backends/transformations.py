"""How each backend differentiates, maps and compiles a function: `f, args, u, z -> arrays`.

`f` maps tensors to one tensor, `u` is an upstream gradient of it, `z` are tangents of the arguments.
A law holds when the form under test and the true function give the same arrays.
"""

import functools
import itertools
import re

import keras
import numpy as np
from keras import ops

BACKEND = keras.backend.backend()


def tensor(value, dtype="float64"):
    return ops.convert_to_tensor(np.asarray(value, dtype))


def array(t):
    return ops.convert_to_numpy(t)


def pulled(f, u):
    """A scalar function whose gradient is what `u` is pulled back to."""
    return lambda *args: ops.sum(u * f(*args))


def inner(gradients, z):
    """The derivative along `z` of what has these gradients."""
    return sum(ops.sum(g * t) for g, t in zip(gradients, z, strict=True))


if BACKEND == "jax":
    import jax

    def gradient(f, args, u):
        return jax.vjp(f, *args)[1](u)

    def all_of(args):
        return tuple(range(len(args)))

    def scanned(f, *args):
        """The sum over all members, by a loop of jax."""

        def step(total, member):
            y = f(*member)
            return total + ops.sum(y), y

        return jax.lax.scan(step, 0.0, args)[1]

    FIRST = {
        "value": lambda f, args, u, z: [f(*args)],
        "vjp": lambda f, args, u, z: gradient(f, args, u),
        "grad": lambda f, args, u, z: jax.grad(pulled(f, u), all_of(args))(*args),
        "jit of grad": lambda f, args, u, z: jax.jit(jax.grad(pulled(f, u), all_of(args)))(*args),
        "grad of jit": lambda f, args, u, z: jax.grad(pulled(jax.jit(f), u), all_of(args))(*args),
        "jacrev": lambda f, args, u, z: jax.jacrev(f, all_of(args))(*args),
        "jacfwd": lambda f, args, u, z: jax.jacfwd(f, all_of(args))(*args),
        "jit of jacfwd": lambda f, args, u, z: jax.jit(jax.jacfwd(f, all_of(args)))(*args),
        "jvp": lambda f, args, u, z: jax.jvp(f, tuple(args), tuple(z)),
        "linearize": lambda f, args, u, z: [jax.linearize(f, *args)[1](*z)],
        "checkpoint": lambda f, args, u, z: gradient(jax.checkpoint(f), args, u),
        "cond": lambda f, args, u, z: gradient(
            lambda *args: jax.lax.cond(ops.sum(args[0]) < 1e9, f, lambda *_: 0 * u, *args), args, u
        ),
    }
    MAPPED = {
        "grad of vmap": lambda f, args, u, z: gradient(jax.vmap(f), args, u),
        "vmap of grad": lambda f, args, u, z: jax.vmap(
            lambda u, *a: jax.grad(pulled(f, u), all_of(a))(*a)
        )(u, *args),
        "vmap of jacfwd": lambda f, args, u, z: jax.jit(jax.vmap(jax.jacfwd(f, all_of(args))))(
            *args
        ),
        "jacfwd of vmap": lambda f, args, u, z: jax.jit(jax.jacfwd(jax.vmap(f), all_of(args)))(
            *args
        ),
        "jit of grad of vmap in the last axis": lambda f, args, u, z: jax.jit(
            lambda *a: gradient(jax.vmap(f, in_axes=-1), a, u)
        )(*[ops.moveaxis(a, 0, -1) for a in args]),
        "grad of scan": lambda f, args, u, z: gradient(lambda *a: scanned(f, *a), args, u),
        "map": lambda f, args, u, z: gradient(lambda *a: jax.lax.map(lambda m: f(*m), a), args, u),
    }
    _orders = {"fwd": jax.jacfwd, "rev": jax.jacrev}

    def _second(outer, inner):
        return lambda f, args, u, z: jax.tree.leaves(
            jax.jit(outer(inner(pulled(f, u), all_of(args)), all_of(args)))(*args)
        )

    # Compiled as a whole, which is faster than operation by operation.
    SECOND = {
        f"jac{a} of jac{b}": _second(outer, inner)
        for a, outer in _orders.items()
        for b, inner in _orders.items()
    } | {
        "grad of grad": lambda f, args, u, z: jax.jit(
            jax.grad(lambda *a: inner(jax.grad(pulled(f, u), all_of(a))(*a), z), all_of(args))
        )(*args),
        "jvp of grad": lambda f, args, u, z: jax.jvp(
            jax.grad(pulled(f, u), all_of(args)), tuple(args), tuple(z)
        )[1],
        "grad of jvp, not compiled": lambda f, args, u, z: jax.grad(
            lambda *a: jax.jvp(pulled(f, u), a, tuple(z))[1], all_of(args)
        )(*args),
        "grad of checkpoint of grad": lambda f, args, u, z: jax.grad(
            lambda *a: inner(jax.checkpoint(jax.grad(pulled(f, u), all_of(a)))(*a), z),
            all_of(args),
        )(*args),
    }
    THIRD = {
        f"jac{a} of jac{b} of jac{c}": lambda f, x, names=(a, b, c): functools.reduce(
            lambda g, name: _orders[name](g), names, f
        )(x)
        for a, b, c in [("fwd",) * 3, ("rev",) * 3, ("fwd", "rev", "rev"), ("rev", "fwd", "rev")]
    } | {
        "jit of hessian of grad": lambda f, x: jax.jit(jax.hessian(jax.grad(f)))(x),
        "vmap of jacrev of hessian": lambda f, x: jax.vmap(jax.jacrev(jax.hessian(f)))(x[None]),
    }
    MAPPED_SECOND = {
        "vmap of hessian": lambda f, args, u, z: jax.tree.leaves(
            jax.jit(jax.vmap(jax.hessian(lambda *a: ops.sum(f(*a)), all_of(args))))(*args)
        ),
        "vmap of jacrev of jacrev": lambda f, args, u, z: jax.tree.leaves(
            jax.vmap(jax.jacrev(jax.jacrev(lambda *a: ops.sum(f(*a)), all_of(args)), all_of(args)))(
                *args
            )
        ),
    }

elif BACKEND == "torch":
    import torch
    from torch.autograd import forward_ad
    from torch.utils.checkpoint import checkpoint

    def gradient(f, args, u, **options):
        args = [a.detach().clone().requires_grad_() for a in args]
        return torch.autograd.grad(f(*args), args, u, **options)

    def all_of(args):
        return tuple(range(len(args)))

    def backward(f, args, u, z):
        args = [a.clone().requires_grad_() for a in args]
        f(*args).backward(u)
        return [a.grad for a in args]

    def compiled(f):
        torch._dynamo.reset()
        return torch.compile(f, backend="aot_eager")

    def dual(f, args, u, z):
        with forward_ad.dual_level():
            y = f(*[forward_ad.make_dual(a, t) for a, t in zip(args, z, strict=True)])
            return list(forward_ad.unpack_dual(y))

    def double_backward(f, args, u, z):
        args = [a.clone().requires_grad_() for a in args]
        first = torch.autograd.grad(f(*args), args, u, create_graph=True)
        return torch.autograd.grad(first, args, z)

    def forward_over_reverse(f, args, u, z):
        with forward_ad.dual_level():
            args = [
                forward_ad.make_dual(a.clone().requires_grad_(), t)
                for a, t in zip(args, z, strict=True)
            ]
            first = torch.autograd.grad(f(*args), args, u)
            return [forward_ad.unpack_dual(g).tangent for g in first]

    def autograd_times(n, f, x):
        x = x.clone().requires_grad_()
        y = f(x)
        for _ in range(n):
            (y,) = torch.autograd.grad(ops.sum(y), x, create_graph=True)
        return y

    fn = torch.func
    FIRST = {
        "value": lambda f, args, u, z: [f(*args)],
        "autograd": lambda f, args, u, z: gradient(f, args, u),
        "backward": backward,
        "forward_ad": dual,
        "func.grad": lambda f, args, u, z: fn.grad(pulled(f, u), all_of(args))(*args),
        "func.vjp": lambda f, args, u, z: fn.vjp(f, *args)[1](u),
        "func.jvp": lambda f, args, u, z: fn.jvp(f, tuple(args), tuple(z)),
        "func.jacrev": lambda f, args, u, z: fn.jacrev(f, all_of(args))(*args),
        "func.jacfwd": lambda f, args, u, z: fn.jacfwd(f, all_of(args))(*args),
        "checkpoint": lambda f, args, u, z: gradient(
            lambda *a: checkpoint(f, *a, use_reentrant=False), args, u
        ),
        "compile": lambda f, args, u, z: gradient(compiled(f), args, u),
    }
    MAPPED = {
        "autograd of vmap": lambda f, args, u, z: gradient(fn.vmap(f), args, u),
        "grad of vmap": lambda f, args, u, z: fn.grad(pulled(fn.vmap(f), u), all_of(args))(*args),
        "vmap of grad": lambda f, args, u, z: fn.vmap(
            lambda u, *a: fn.grad(pulled(f, u), all_of(a))(*a)
        )(u, *args),
        "vmap of jacfwd": lambda f, args, u, z: fn.vmap(fn.jacfwd(f, all_of(args)))(*args),
        "jacfwd of vmap": lambda f, args, u, z: fn.jacfwd(fn.vmap(f), all_of(args))(*args),
        "grad of vmap in the last axis": lambda f, args, u, z: gradient(
            fn.vmap(f, in_dims=-1), [torch.moveaxis(a, 0, -1) for a in args], u
        ),
    }

    def _second(outer, inner):
        return lambda f, args, u, z: keras.tree.flatten(
            outer(inner(pulled(f, u), all_of(args)), all_of(args))(*args)
        )

    # Forward over forward raises, which is another test.
    SECOND = {
        "jacfwd of jacrev": _second(fn.jacfwd, fn.jacrev),
        "jacrev of jacrev": _second(fn.jacrev, fn.jacrev),
        "jacrev of jacfwd": _second(fn.jacrev, fn.jacfwd),
        "double backward": double_backward,
        "func.jvp of func.grad": lambda f, args, u, z: fn.jvp(
            fn.grad(pulled(f, u), all_of(args)), tuple(args), tuple(z)
        )[1],
        "func.grad of func.jvp": lambda f, args, u, z: fn.grad(
            lambda *a: fn.jvp(pulled(f, u), a, tuple(z))[1], all_of(args)
        )(*args),
        "forward_ad of backward": forward_over_reverse,
        "autograd of func.grad": lambda f, args, u, z: gradient(
            lambda *a: inner(fn.grad(pulled(f, u), all_of(a))(*a), z), args, None
        ),
    }
    _orders = {"fwd": fn.jacfwd, "rev": fn.jacrev}
    THIRD = {
        f"jac{a} of jac{b} of jac{c}": lambda f, x, names=(a, b, c): functools.reduce(
            lambda g, name: _orders[name](g), names, f
        )(x)
        for a, b, c in [("rev",) * 3, ("fwd", "rev", "rev"), ("rev", "fwd", "rev")]
    } | {
        "autograd three times": lambda f, x: autograd_times(3, f, x),
        "vmap of jacrev of hessian": lambda f, x: fn.vmap(fn.jacrev(fn.hessian(f)))(x[None]),
    }
    MAPPED_SECOND = {
        "vmap of hessian": lambda f, args, u, z: keras.tree.flatten(
            fn.vmap(fn.hessian(lambda *a: ops.sum(f(*a)), all_of(args)))(*args)
        ),
        "vmap of jacrev of jacrev": lambda f, args, u, z: keras.tree.flatten(
            fn.vmap(fn.jacrev(fn.jacrev(lambda *a: ops.sum(f(*a)), all_of(args)), all_of(args)))(
                *args
            )
        ),
    }

else:
    import tensorflow as tf

    def gradient(f, args, u):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
        return tape.gradient(y, args, u)

    def traced(**options):
        return lambda f, args, u, z: tf.function(
            lambda *args: gradient(f, list(args), u), autograph=False, **options
        )(*args)

    def forward(f, args, u, z):
        with tf.autodiff.ForwardAccumulator(list(args), list(z)) as accumulator:
            y = f(*args)
        return [y, accumulator.jvp(y)]

    def jacobians(f, args):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
        return tape.jacobian(y, args)

    def mapped(f):
        return lambda *args: tf.vectorized_map(lambda a: f(*a), tuple(args))

    def hessian_times(f, args, u, z):
        with tf.GradientTape() as outer:
            outer.watch(args)
            first = gradient(f, args, u)
        return outer.gradient(first, args, z)

    def tapes(n, f, x):
        if n == 0:
            return f(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = tapes(n - 1, f, x)
        return tape.gradient(y, x)

    FIRST = {
        "value": lambda f, args, u, z: [f(*args)],
        "tape": lambda f, args, u, z: gradient(f, args, u),
        "tf.function": traced(),
        "XLA": traced(jit_compile=True),
        "jacobian": lambda f, args, u, z: jacobians(f, args),
        "forward mode": forward,
        "forward mode in tf.function": lambda f, args, u, z: tf.function(
            lambda *args: forward(f, args, u, z), autograph=False
        )(*args),
    }
    MAPPED = {
        "tape of vectorized_map": lambda f, args, u, z: gradient(mapped(f), args, u),
        "vectorized_map of tape": lambda f, args, u, z: tf.vectorized_map(
            lambda a: gradient(f, list(a[1:]), a[0]), (u, *args)
        ),
    }
    SECOND = {"nested tapes": hessian_times}
    THIRD = {"nested tapes": lambda f, x: tapes(3, f, x)}
    MAPPED_SECOND = {}


def reverse(transformations):
    """Those that are open to a rule: jax and torch have no forward mode of a pullback."""
    forward = re.compile("fwd|jvp|linearize|hessian|forward")
    return {
        name: transformation
        for name, transformation in transformations.items()
        if BACKEND == "tensorflow" or not forward.search(name)
    }


TWICE = SECOND[{"jax": "grad of grad", "torch": "double backward"}.get(BACKEND, "nested tapes")]

# What second derivatives are taken of: everything that has the result in it.
OF = {
    "itself": lambda f: f,
    "its square": lambda f: lambda *args: f(*args) ** 2,
    "a sum with native terms": lambda f: lambda *args: f(*args) + sum(ops.sum(a**3) for a in args),
}


def misled(y):
    """A value whose own derivative is wrong, so that a lost rule is seen."""
    return ops.stop_gradient(y)


def in_turn(cases, others):
    return list(zip(cases, itertools.cycle(others), strict=False))


def check(transformation, form, truth, args, seed=0):
    """The law: the form and the true function come out alike.

    Some of `keras.ops` compute in float32 what is given in float64, hence the tolerance.
    """
    random = np.random.default_rng(seed)
    args = [tensor(a) for a in args]
    u = tensor(random.uniform(0.5, 2.0, tuple(truth(*args).shape)))
    z = [tensor(random.normal(size=tuple(a.shape))) for a in args]
    came, expected = ([array(t) for t in transformation(f, args, u, z)] for f in (form, truth))
    assert len(came) == len(expected)
    for a, b in zip(came, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
