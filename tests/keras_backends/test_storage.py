"""Models with decorated functions are stored, loaded elsewhere, cloned and configured."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import stored
from stored import FORMS, UNREGISTERED, places, trained

HERE = Path(__file__).parent
# The first form in every place, the others in one of a model and one of its compilation.
TELLING = [
    (form, place)
    for form in UNREGISTERED
    for place in (places(form) if form == "custom_vjp" else ["layer", "loss"])
]
# By the name of the file: the functions, and their place.
STORED = {
    f"{form} in {place}{suffix}": (FORMS[form], place)
    for form, place in TELLING
    for suffix in ([".keras", ".h5"] if place in ("layer", "loss") else [".keras"])
} | {
    f"unregistered {form} in {place}": (tuple(functions.values()), place.partition(".")[0])
    for form, functions in UNREGISTERED.items()
    for place in ("activation.keras", "loss.h5")
}


@pytest.fixture(scope="module")
def expected():
    """What training the same models comes to with autodiff of the true functions."""
    return {place: trained(make(*FORMS["native"])) for place, make in places("native").items()}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """What every stored model comes to that a fresh process loads and trains."""
    folder = tmp_path_factory.mktemp("stored")
    for name, (functions, place) in STORED.items():
        form = name.removeprefix("unregistered ").split(" in ")[0]
        places(form)[place](*functions).save(folder / name)
    run = subprocess.run(
        [sys.executable, HERE / "stored.py", folder], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])


def alike(came, expected):
    assert len(came["weights"]) == len(expected["weights"])
    for a, b in zip(came["weights"], expected["weights"], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    for value in came["averages"]:  # the metric is the loss again
        np.testing.assert_allclose(value, expected["averages"][0], rtol=1e-4)


@pytest.mark.long
@pytest.mark.parametrize("name", STORED)
def test_loaded_in_a_fresh_process(name, loaded, expected):
    """By registered names, and by `custom_objects`."""
    alike(loaded[name], expected[STORED[name][1]])


@pytest.mark.parametrize(
    ("form", "place"), [case for case in TELLING if case[1] not in ("loss", "metric")]
)
def test_cloned(form, place, expected):
    model = places(form)[place](*FORMS[form])
    clone = keras.models.clone_model(model)
    alike(trained(stored.compiled(clone, model.loss)), expected[place])


@pytest.mark.parametrize(("form", "place"), TELLING)
def test_made_from_its_configuration(form, place, expected):
    model = places(form)[place](*FORMS[form])
    copy = keras.Model.from_config(model.get_config())
    copy.compile_from_config(model.get_compile_config())
    alike(trained(copy), expected[place])
