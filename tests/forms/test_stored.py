"""SavedModels with custom gradients, stored, loaded and stored again; here and in another process."""

import functools
import json
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

import sgtrick
from asinh_forms import ALL, CALLS_HOST, POINTS, exact, hidden, slope
from matrix import spread
from shared import FORWARD, TWICE, Way, derivative, forward_derivative


def of_intermediate_results(x):
    """The rule uses what the function computed on the way."""
    s = tf.sqrt(1 + x**2)
    return tf.math.log(x + s), lambda upstream: upstream / s


VARIABLE = tf.Variable(2.0, dtype=tf.float64)


def reads_variable(x):
    def grad_fn(upstream, variables):
        return upstream * slope(x), [tf.reduce_sum(upstream * hidden(x) / v) for v in variables]

    return hidden(x) * VARIABLE / 2, grad_fn


FORMS = {name: ALL[name] for name in ALL if name not in CALLS_HOST} | {
    "custom_vjp, intermediate results": sgtrick.custom_vjp(of_intermediate_results),
    "custom_vjp, variable": sgtrick.custom_vjp(reads_variable),
    "with_gradient, variable": sgtrick.with_gradient(
        lambda x: hidden(x) * VARIABLE / 2, lambda x: slope(x) * VARIABLE / 2
    ),
}
FORMS["nested"] = sgtrick.with_gradient(
    lambda x: FORMS["custom_vjp"](x), lambda x: 0 * FORMS["custom_jvp"](x) + slope(x)
)
FORMS["custom_vjp, JVP rule"] = sgtrick.custom_vjp(lambda x: (hidden(x), lambda u: u * slope(x)))
FORMS["custom_vjp, JVP rule"].defjvp(lambda primals, tangents: (None, 3 * tangents[0]))
FORMS["clip_gradient"] = lambda x: tf.asinh(sgtrick.clip_gradient(x, -100.0, 100.0))


def store(f, folder, custom_gradients=True):
    module = tf.Module()
    module.variable = VARIABLE
    module.f = tf.function(f, input_signature=[tf.TensorSpec([None], tf.float64)])
    return store_again(module, folder, custom_gradients)


def store_again(module, folder, custom_gradients=True):
    options = tf.saved_model.SaveOptions(experimental_custom_gradients=custom_gradients)
    tf.saved_model.save(module, str(folder), options=options)
    return str(folder)


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """The form of a name, stored and loaded."""

    @functools.cache
    def load(name, custom_gradients=True):
        folder = tmp_path_factory.mktemp("form")
        return tf.saved_model.load(store((ALL | FORMS)[name], folder, custom_gradients))

    return load


DIFFERENT = [name for name in FORMS if "stopped" not in name]  # the others differ at second order


@pytest.mark.long
@pytest.mark.parametrize("name", DIFFERENT)
def test_twice_over(name, loaded, tmp_path):
    once = loaded(name)
    for form in (once, tf.saved_model.load(store_again(once, tmp_path))):
        np.testing.assert_allclose(form.f(tf.constant(POINTS)), exact(0), rtol=1e-12)
        for run in (derivative(form.f), tf.function(derivative(form.f))):
            np.testing.assert_allclose(run(tf.constant(POINTS)), exact(1), rtol=1e-12)


LOADS = """
import json, sys
import tensorflow as tf
x = tf.constant(json.loads(sys.argv[1]), tf.float64)
came = []
for folder in sys.argv[2:]:
    loaded = tf.saved_model.load(folder)  # holds the variables
    try:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = loaded.f(x)
        came.append([y.numpy().tolist(), tape.gradient(y, x).numpy().tolist()])
    except LookupError as error:
        came.append(str(error))
print(json.dumps(came))
"""


@pytest.mark.long
def test_in_a_process_without_sgtrick(loaded, tmp_path):
    """What was stored, and what was loaded here and stored again; errors by what lacks its rule."""

    def folder():
        return tmp_path / str(len(folders))

    folders = []
    for name in DIFFERENT:
        folders.append(store(FORMS[name], folder()))
    for name in ("custom_jvp", "custom_vjp, variable", "nested"):
        folders.append(store_again(loaded(name), folder()))
    folders.append(store(lambda x: sgtrick.clip_gradient(x, -1.0, 1.0) ** 2, folder()))
    for form in (FORMS["clip_gradient"], FORMS["custom_vjp"], ALL["custom_vjp, host"]):
        folders.append(store(form, folder(), custom_gradients=False))
    command = [sys.executable, "-c", LOADS, json.dumps(POINTS.tolist()), *folders]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    *came, clipped, no_clip, no_vjp, no_host = json.loads(printed.splitlines()[-1])
    assert len(came) == len(DIFFERENT) + 3
    for y, g in came:
        np.testing.assert_allclose(y, exact(0), rtol=1e-12)
        np.testing.assert_allclose(g, exact(1), rtol=1e-12)
    np.testing.assert_allclose(clipped, [POINTS**2, np.clip(2 * POINTS, -1, 1)])
    for error in (no_clip, no_vjp, no_host):
        assert "needs_a_SavedModel_with_experimental_custom_gradients" in error


@pytest.mark.parametrize("name", sorted(FORMS.keys() - {"custom_gradient"} | {"custom_vjp, host"}))
def test_without_custom_gradients(name, loaded):
    f = loaded(name, custom_gradients=False).f
    np.testing.assert_allclose(f(tf.constant(POINTS)), exact(0), rtol=1e-12)
    with pytest.raises(LookupError, match="experimental_custom_gradients"):
        derivative(f)(tf.constant(POINTS))


@pytest.mark.long
def test_without_custom_gradients_the_value_form_is_right_and_then_loud(tmp_path):
    """Through the order that is known: the first, or the second with a Hessian."""
    forms = {
        "first": lambda x: sgtrick.custom_gradient(hidden(x), slope(x), x),
        "second": lambda x: sgtrick.custom_gradient(
            hidden(x), slope(x), x, hx=-x * (1 + x**2) ** -1.5
        ),
    }
    first, second = (
        tf.saved_model.load(store(form, tmp_path / name, custom_gradients=False)).f
        for name, form in forms.items()
    )
    x = tf.constant(POINTS)
    assert said(derivative(first), x, exact(1)) == "right"
    assert said(derivative(derivative(first)), x, exact(2)) == "NaN"
    twice = derivative(derivative(second))
    assert said(twice, x, exact(2)) == "right"
    assert said(derivative(twice), x, exact(3)) == "NaN"


# TensorFlow does not map a loaded assertion.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "custom_gradients"),
    spread([name for name in DIFFERENT if name != "clip_gradient"], [True, False], together=1),
)
def test_mapped(name, custom_gradients, loaded):
    """Right, or an error that says what to do."""
    f = loaded(name, custom_gradients).f
    x = tf.constant(np.stack([POINTS, 2 * POINTS]))

    def mapping(f):
        return lambda x: tf.vectorized_map(f, x)

    np.testing.assert_allclose(mapping(f)(x), exact(0, x.numpy()), rtol=1e-12)
    for run in (derivative(mapping(f)), mapping(derivative(f))):
        came = said(run, x, exact(1, x.numpy()))
        # Nor a loaded function of which nothing is mapped.
        assert came in ("right", "says the option") or "AssertionError: (<tf.Operation" in came


def said(run, x, expected):
    """How a derivative came out."""
    try:
        y = run(x)
    except Exception as error:
        return "says the option" if "experimental_custom_gradients" in str(error) else str(error)
    if y is None:
        return "None"
    if not np.any(np.isfinite(y)):
        return "NaN"
    return "right" if np.allclose(y, expected, rtol=1e-9) else "wrong"


# Those whose rule consists of operations, and of no other rule.
KEPT = (
    *("with_gradient", "from_value_and_gradient", "custom_jvp", "custom_vjp"),
    *("custom_vjp, variable", "with_gradient, variable", "custom_vjp, intermediate results"),
)
ORDERS = {
    "twice": Way(modes=TWICE),
    "twice in tf.function": Way(around=tf.function, modes=TWICE),
    "three times": Way(modes=(derivative,) * 3),
    "forward": Way(modes=FORWARD),
    "forward over reverse": Way(modes=(derivative, forward_derivative)),
}


@pytest.mark.parametrize(
    ("name", "order"),
    # TensorFlow has no forward mode of loaded functions that read variables.
    spread(
        KEPT,
        ORDERS,
        together=1,
        valid=lambda name, order: not ("variable" in name and "forward" in order),
    ),
)
def test_other_derivatives_of_rules_are_kept(name, order, loaded):
    way = ORDERS[order]
    found = way(loaded(name).f)(tf.constant(POINTS))
    np.testing.assert_allclose(found, exact(len(way.modes)), rtol=1e-9)


OF_A_RULE = "no_derivatives_of_this_gradient"


@pytest.mark.parametrize("name", sorted(FORMS.keys() - KEPT - {"custom_gradient"}))
def test_second_derivatives_are_right_or_loud(name, loaded):
    x = tf.constant(POINTS)
    came = said(derivative(derivative(loaded(name).f)), x, exact(2))
    assert came == "right" or OF_A_RULE in came


@pytest.mark.parametrize(
    "rule",
    [
        lambda u, x: tf.clip_by_value(u, -0.1, 0.1) * slope(x),
        lambda u, x: tf.abs(u) * slope(x),
        lambda u, x: u * tf.stop_gradient(slope(x)),
    ],
    ids=["clipped", "absolute", "stopped"],
)
def test_what_is_lost_of_a_stored_rule_is_an_error(rule, tmp_path):
    form = sgtrick.custom_vjp(lambda x: (hidden(x), lambda u: rule(u, x)))
    f = tf.saved_model.load(store(form, tmp_path)).f
    for mode in (forward_derivative, lambda f: derivative(derivative(f))):
        with pytest.raises(LookupError, match=OF_A_RULE):
            mode(f)(tf.constant(POINTS))


def test_mixed_derivatives_of_a_stored_form(tmp_path):
    """By the point and then the variable they are right; the other order is NaN."""
    module = tf.Module()
    module.w = w = tf.Variable(2.0, dtype=tf.float64)
    form = sgtrick.with_gradient(lambda x: hidden(x) * w, lambda x: slope(x) * w)
    module.f = tf.function(form, input_signature=[tf.TensorSpec([None], tf.float64)])
    loaded = tf.saved_model.load(store_again(module, tmp_path))
    x = tf.constant(POINTS)
    with tf.GradientTape(persistent=True) as outer:
        outer.watch(x)
        with tf.GradientTape(persistent=True) as inner:
            inner.watch(x)
            y = loaded.f(x)
        by_x, by_w = inner.gradient(y, x), inner.gradient(y, loaded.w)
    np.testing.assert_allclose(outer.gradient(by_x, x), 2 * exact(2), rtol=1e-9)
    np.testing.assert_allclose(outer.gradient(by_x, loaded.w), exact(1).sum(), rtol=1e-9)
    assert np.isnan(outer.gradient(by_w, x)).all()


@pytest.mark.parametrize("custom_gradients", [True, False])
def test_host_engines_refuse(custom_gradients, tmp_path):
    engine = sgtrick.from_numpy(lambda x: (np.sum(x**2), 2 * x))
    with pytest.raises(AssertionError, match=r"A host engine .* cannot be stored in a SavedModel"):
        store(engine, tmp_path / "a", custom_gradients)
