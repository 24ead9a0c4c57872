"""How the function of a host engine is called and differentiated.

Each takes what is called, `call(flat) -> [value, *aux]`, on a flat list of points, and gives some
of `value`, `aux`, `gradients` (of the sum of weighted values), `along` (directions) and `second`
(derivatives of the gradients along these directions). `host` says by which points, and by what is
weighted.
"""

import tensorflow as tf


def eager(host, call, points):
    xs = [points[k] for k in host.watched]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y, *aux = call(points)
    assert y.dtype == host.value_dtype, f"the value is {y.dtype}"
    gradients = list(map(tf.convert_to_tensor, tape.gradient(y, xs, weights(host, y))))
    assert all(g.dtype == x.dtype for g, x in zip(gradients, xs, strict=True)), gradients
    return {"value": y, "gradients": gradients} | ({"aux": aux[0]} if aux else {})


def weights(host, y):
    return tf.cast(tf.constant(host.weights()), y.dtype)


def directions(host, points):
    vs = host.directions()
    return [tf.cast(tf.constant(vs[k]), points[k].dtype) for k in host.watched]


def graph(host, call, points):
    return tf.function(lambda: eager(host, call, points))()


def around(host, call, points):
    return eager(host, lambda flat: tf.function(call)(flat), points)


def unknown_dimensions(host, call, points):
    return unknown(host, call, points, lambda x: [None] * x.shape.rank)


def unknown_ranks(host, call, points):
    return unknown(host, call, points, lambda x: None)


def unknown(host, call, points, shape):
    """By the points that are watched; the others are known."""
    xs = [tf.convert_to_tensor(points[k]) for k in host.watched]

    @tf.function(input_signature=[tf.TensorSpec(shape(x), x.dtype) for x in xs])
    def run(*xs):
        return eager(host, call, replaced(host, points, xs))

    return run(*xs)


def replaced(host, points, xs):
    points = list(points)
    for k, x in zip(host.watched, xs, strict=True):
        points[k] = x
    return points


def vectorized_map(host, call, points):
    """Over the first dimension of the batch, of those points that have it."""
    kinds = [leaf.kind for leaf in host.leaves]
    points = [x if kind == "number" else tf.convert_to_tensor(x)
              for x, kind in zip(points, kinds, strict=True)]  # fmt: skip
    fronts = [x.batch[:1] if len(x.batch) == len(host.batch) else () for x in host.leaves]
    places = [k for k, front in enumerate(fronts) if front == host.batch[:1]]

    def call_mapped(points):
        # Of size one where others have more.
        own = [x[0] if front and k not in places else x
               for k, (x, front) in enumerate(zip(points, fronts, strict=True))]  # fmt: skip

        def member(rows):
            flat = list(own)
            for k, row in zip(places, rows, strict=True):
                flat[k] = row
            return call(flat)

        return tf.vectorized_map(member, [own[k] for k in places])

    return eager(host, call_mapped, points)


def accumulator(host, call, points):
    xs = [points[k] for k in host.watched]
    with tf.autodiff.ForwardAccumulator(xs, directions(host, points)) as forward:
        y, *_ = call(points)
    return {"value": y, "along": forward.jvp(y)}


def jacobian(host, call, points):
    xs = [points[k] for k in host.watched]
    with tf.GradientTape() as tape:
        tape.watch(xs)
        y, *_ = call(points)
    u = tf.constant(host.weights())
    jacobians = [tf.cast(j, u.dtype) for j in tape.jacobian(y, xs)]
    return {"value": y, "gradients": [tf.tensordot(u, j, u.shape.rank) for j in jacobians]}


def second(host, call, points):
    xs = [points[k] for k in host.watched]
    with tf.GradientTape() as outer:
        outer.watch(xs)
        with tf.GradientTape() as inner:
            inner.watch(xs)
            y, *_ = call(points)
        gradients = inner.gradient(y, xs, weights(host, y))
    return {"value": y, "second": outer.gradient(gradients, xs, directions(host, points))}
