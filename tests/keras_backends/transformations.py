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


def dtype_of(t):
    return keras.backend.standardize_dtype(t.dtype)


def pulled(f, u):
    """A scalar function whose gradient is what `u` is pulled back to."""
    return lambda *args: ops.sum(u * f(*args))


def inner(gradients, z):
    """The derivative along `z` of what has these gradients."""
    return sum(ops.sum(g * t) for g, t in zip(gradients, z, strict=True))


def all_of(args):
    return tuple(range(len(args)))


def functional(fn, quick):
    """What jax and torch.func have under the same names; `quick` compiles what takes long."""
    orders = {"fwd": fn.jacfwd, "rev": fn.jacrev}

    def second(outer, inner, mapped=lambda f: f):
        return lambda f, args, u, z: keras.tree.flatten(
            quick(mapped(outer(inner(pulled(f, u), all_of(args)), all_of(args))))(*args)
        )

    first = {
        "value": lambda f, args, u, z: [f(*args)],
        "vjp": lambda f, args, u, z: fn.vjp(f, *args)[1](u),
        "grad": lambda f, args, u, z: fn.grad(pulled(f, u), all_of(args))(*args),
        "jacrev": lambda f, args, u, z: quick(fn.jacrev(f, all_of(args)))(*args),
        "jacfwd": lambda f, args, u, z: quick(fn.jacfwd(f, all_of(args)))(*args),
        "jvp": lambda f, args, u, z: fn.jvp(f, tuple(args), tuple(z)),
    }
    mapped = {
        "grad of vmap": lambda f, args, u, z: fn.grad(pulled(fn.vmap(f), u), all_of(args))(*args),
        "vmap of grad": lambda f, args, u, z: fn.vmap(
            lambda u, *a: fn.grad(pulled(f, u), all_of(a))(*a)
        )(u, *args),
        "vmap of jacfwd": lambda f, args, u, z: quick(fn.vmap(fn.jacfwd(f, all_of(args))))(*args),
        "jacfwd of vmap": lambda f, args, u, z: quick(fn.jacfwd(fn.vmap(f), all_of(args)))(*args),
        "vjp of vmap in the last axis": lambda f, args, u, z: quick(
            lambda *a: fn.vjp(fn.vmap(f, -1), *a)[1](u)
        )(*[ops.moveaxis(a, 0, -1) for a in args]),
    }
    seconds = {
        f"jac{a} of jac{b}": second(orders[a], orders[b])
        for a, b in itertools.product(orders, orders)
    } | {
        "grad of grad": lambda f, args, u, z: quick(
            fn.grad(lambda *a: inner(fn.grad(pulled(f, u), all_of(a))(*a), z), all_of(args))
        )(*args),
        "jvp of grad": lambda f, args, u, z: quick(
            lambda *a: fn.jvp(fn.grad(pulled(f, u), all_of(args)), a, tuple(z))[1]
        )(*args),
        "grad of jvp": lambda f, args, u, z: quick(
            fn.grad(lambda *a: fn.jvp(pulled(f, u), a, tuple(z))[1], all_of(args))
        )(*args),
    }
    third = {
        f"jac{a} of jac{b} of jac{c}": lambda f, x, names=(a, b, c): quick(
            functools.reduce(lambda g, name: orders[name](g), names, f)
        )(x)
        for a, b, c in [("fwd",) * 3, ("rev",) * 3, ("fwd", "rev", "rev"), ("rev", "fwd", "rev")]
    }
    mapped_seconds = {
        f"vmap of jac{a} of jacrev": lambda f, args, u, z, a=a: second(
            orders[a], fn.jacrev, fn.vmap
        )(f, args, 1.0, z)
        for a in orders
    }
    return first, mapped, seconds, third, mapped_seconds


if BACKEND == "jax":
    import jax as fn

    FIRST, MAPPED, SECOND, THIRD, MAPPED_SECOND = functional(fn, quick=fn.jit)

    def gradient(f, args, u):
        return fn.vjp(f, *args)[1](u)

    def variable_gradient(f, v):
        def of_value(value):
            with keras.StatelessScope([(v, value)]):
                return f()

        return fn.grad(of_value)(v.value)

    def scanned(f, *args):
        """The sum over all members, by a loop of jax."""

        def step(total, member):
            y = f(*member)
            return total + ops.sum(y), y

        return fn.lax.scan(step, 0.0, args)[1]

    def looped(f):
        """By a loop of one step, of which only a part depends on the arguments."""

        def of_loop(x, *args):
            ones = ops.ones(1, x.dtype)
            return fn.lax.scan(lambda one, t: (one, f(t * x, *args)), 1.0, ones)[1][0]

        return of_loop

    PLAIN, TWICE = dict(SECOND), SECOND["grad of grad"]
    FIRST |= {
        "jit of grad": lambda f, args, u, z: fn.jit(fn.grad(pulled(f, u), all_of(args)))(*args),
        "grad of jit": lambda f, args, u, z: fn.grad(pulled(fn.jit(f), u), all_of(args))(*args),
        "jit of jacfwd": lambda f, args, u, z: fn.jit(fn.jacfwd(f, all_of(args)))(*args),
        "linearize": lambda f, args, u, z: [fn.linearize(f, *args)[1](*z)],
        "checkpoint": lambda f, args, u, z: gradient(fn.checkpoint(f), args, u),
        "cond": lambda f, args, u, z: gradient(
            lambda *args: fn.lax.cond(ops.sum(args[0]) < 1e9, f, lambda *_: 0 * u, *args), args, u
        ),
    }
    MAPPED |= {
        "grad of scan": lambda f, args, u, z: gradient(lambda *a: scanned(f, *a), args, u),
        "map": lambda f, args, u, z: gradient(lambda *a: fn.lax.map(lambda m: f(*m), a), args, u),
    }
    SECOND |= {
        f"{name} of scan": lambda f, *rest, name=name: PLAIN[name](looped(f), *rest)
        for name in ("grad of grad", "jvp of grad", "jacfwd of jacrev", "jacrev of jacfwd")
    } | {
        "grad of checkpoint of grad": lambda f, args, u, z: fn.jit(
            fn.grad(
                lambda *a: inner(fn.checkpoint(fn.grad(pulled(f, u), all_of(a)))(*a), z),
                all_of(args),
            )
        )(*args),
    }

elif BACKEND == "torch":
    import torch
    from torch import func as fn
    from torch.autograd import forward_ad
    from torch.utils.checkpoint import checkpoint

    FIRST, MAPPED, SECOND, THIRD, MAPPED_SECOND = functional(fn, quick=lambda f: f)
    del SECOND["jacfwd of jacfwd"], THIRD["jacfwd of jacfwd of jacfwd"]  # raise: another test

    def gradient(f, args, u):
        args = [a.detach().clone().requires_grad_() for a in args]
        return torch.autograd.grad(f(*args), args, u, allow_unused=True)

    def variable_gradient(f, v):
        f().backward()
        return v.value.grad

    def compiled(f, fullgraph=False):
        torch._dynamo.reset()
        return torch.compile(f, fullgraph=fullgraph, backend="aot_eager")  # needs no C++ compiler

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

    def batched(f, args, u, z):
        """The same as `jacrev`."""
        args = [a.clone().requires_grad_() for a in args]
        y = f(*args)
        units = torch.eye(y.numel(), dtype=y.dtype).reshape(-1, *y.shape)
        rows = torch.autograd.grad(y, args, units, is_grads_batched=True)
        return [row.reshape(*y.shape, *a.shape) for row, a in zip(rows, args, strict=True)]

    FIRST |= {
        "autograd": lambda f, args, u, z: gradient(f, args, u),
        "forward_ad": dual,
        "batched gradients": batched,
        "checkpoint": lambda f, args, u, z: gradient(
            lambda *a: checkpoint(f, *a, use_reentrant=False), args, u
        ),
        "compile": lambda f, args, u, z: gradient(compiled(f), args, u),
    }
    MAPPED |= {"autograd of vmap": lambda f, args, u, z: gradient(fn.vmap(f), args, u)}
    SECOND |= {
        "double backward": double_backward,
        "forward_ad of backward": forward_over_reverse,
        "autograd of func.grad": lambda f, args, u, z: gradient(
            lambda *a: inner(fn.grad(pulled(f, u), all_of(a))(*a), z), args, None
        ),
    }
    TWICE = double_backward

else:
    import tensorflow as tf

    def gradient(f, args, u):
        with tf.GradientTape() as tape:
            tape.watch(args)
            y = f(*args)
        return tape.gradient(y, args, u)

    def variable_gradient(f, v):
        with tf.GradientTape() as tape:
            y = f()
        return tape.gradient(y, v.value)

    def traced(**options):
        return lambda f, args, u, z: tf.function(
            lambda *args: gradient(f, list(args), u), autograph=False, **options
        )(*args)

    def forward(f, args, u, z):
        with tf.autodiff.ForwardAccumulator(list(args), list(z)) as accumulator:
            y = f(*args)
        return [y, accumulator.jvp(y)]

    def jacobians(f, args, u, z):
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

    FIRST = {
        "value": lambda f, args, u, z: [f(*args)],
        "tape": lambda f, args, u, z: gradient(f, args, u),
        "tf.function": traced(),
        "XLA": traced(jit_compile=True),
        "jacobian": jacobians,
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
    THIRD, MAPPED_SECOND = {}, {}
    TWICE = hessian_times


def reverse(transformations):
    """Those that are open to a rule: torch has no forward mode of a pullback."""
    forward = re.compile("fwd|jvp|linearize|hessian|forward")
    return {
        name: transformation
        for name, transformation in transformations.items()
        if BACKEND != "torch" or not forward.search(name)
    }


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


def first_with_all(cases, others):
    """All cases with the first of the others; with the rest in turn, until each was there."""
    first, *rest = others
    pairs = [*in_turn(cases, rest), *((case, other) for other, case in in_turn(rest, cases))]
    return [*itertools.product(cases, [first]), *dict.fromkeys(pairs)]


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


def check_reverse(form, truth, *args):
    """The law for the gradient and the value."""
    check(lambda f, args, u, z: [f(*args), *gradient(f, args, u)], form, truth, args)
