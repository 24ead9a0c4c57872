"""Puts defects of the past back, one at a time, and says how long each took to be found.

`python -m fuzz.defects --seconds 300`, with `tests` on the path, or some by their numbers.
"""

import argparse
import dataclasses
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Defect:
    """Text of a file of the library, and what stood there once or might have.

    Attributes:
        what: In words.
        kind: Of what is drawn to find it.
        path: The file in the package.
        edits: Pairs of texts, of which the first is there once.
    """

    what: str
    kind: str
    path: str
    edits: tuple[tuple[str, str], ...]

    def put_back(self, package: pathlib.Path) -> None:
        path = package / self.path
        text = path.read_text()
        for old, new in self.edits:
            assert text.count(old) == 1, f"{self.what}: {old!r} is not in {self.path} once"
            text = text.replace(old, new)
        path.write_text(text)


DEFECTS = (
    Defect(
        "vectorized_map is not told of overrides",
        "programs",
        "_core/_tensorflow/overrides.py",
        (("    outputs[0].op.pfor_converter = _map\n", ""),),
    ),
    Defect(
        "a gradient that is lost is not guarded: second derivatives are zero",
        "programs",
        "_core/override.py",
        (
            (
                "lost.message(rule.name), of, by_points)",
                "lost.message(rule.name), of, [False] * len(xs))",
            ),
        ),
    ),
    Defect(
        "the value is not stopped, so that its own derivative is added",
        "programs",
        "_custom_gradient.py",
        (("_embed(name, stop(fx),", "_embed(name, fx,"),),
    ),
    Defect(
        "a mapped rule in a rule reaches for a tensor of one member",
        "programs",
        "_core/_tensorflow/mapping.py",
        (("                raise OutOfReachError\n", "                pass\n"),),
    ),
    Defect(
        "a Jacobian is transposed",
        "programs",
        "_core/backend.py",
        (
            (
                "        gx, b = leaf.gx, leaf.batch_ndims\n        domain_ndims",
                "        gx, b = leaf.gx, leaf.batch_ndims\n"
                "        gx = self.swap(gx, 1, 1) if self.rank(gx) == b + 2 else gx\n"
                "        domain_ndims",
            ),
        ),
    ),
    Defect(
        "forward mode over forward mode loses what the rule loses",
        "programs",
        "_core/override.py",
        (
            (
                "return _losing(rule.name, tangent, points) if points else tangent",
                "return tangent",
            ),
        ),
    ),
    Defect(
        "the mean over the members, and not the sum, for what they share",
        "programs",
        "_core/mapped.py",
        (("else tf.reduce_sum(g, 0)", "else tf.reduce_mean(g, 0)"),),
    ),
    Defect(
        "a transpose that is none is not found out",
        "programs",
        "_core/transposition.py",
        (("zero = loud.zero_if(fits,", "zero = loud.zero_if(tf.constant(True),"),),
    ),
    Defect(
        "second derivatives of engines without a Hessian are zero",
        "engines",
        "_core/embedding.py",
        (
            (
                "    xs = [graphs.here(x) for x in xs]\n\n    def pull(*z: Tensor) -> list[Gradient]:\n"
                "        return [*z, *loud",
                "    return list(gxs)\n\n    def pull(*z: Tensor) -> list[Gradient]:\n"
                "        return [*z, *loud",
            ),
        ),
    ),
    Defect(
        "objects share the engine of the first",
        "engines",
        "_host/host_function.py",
        (
            ('cache = getattr(instance, "__dict__", {})', "cache = self.__dict__"),
            (" or found._bound_to[0] is not instance", ""),
        ),
    ),
    Defect(
        "one member that fails rejects all of a vectorized engine",
        "engines",
        "_host/engine.py",
        (("self._instead is not None and math.prod(batch) > 1", "False"),),
    ),
    Defect(
        "the gradient's function sees what the value's made of its arguments",
        "engines",
        "_host/engine.py",
        (("a.copy() if a.flags.writeable else a", "a"),),
    ),
    Defect(
        "JAX maps over the batch dimensions in the wrong order",
        "jax",
        "_host/jax.py",
        (("for in_axes in reversed(dims):", "for in_axes in dims:"),),
    ),
    Defect(
        "PyTorch multiplies the Hessian by the point",
        "torch",
        "_host/torch.py",
        (("points)[1](vs)[0]", "points)[1](points)[0]"),),
    ),
    Defect(
        "autodiff differentiates the product with a Hessian, of which it may see a part",
        "programs",
        "_core/hessian.py",
        (
            (
                "        inputs = [*products, *tangents, *xs]\n        return keep(products, inputs, "
                "Rule(self._name, pull, along, lost=False))",
                "        return embedding.refused(self._name, self._checked(*tangents), xs, message)",
            ),
        ),
    ),
    Defect(
        "mixed derivatives that are not known are left out",
        "programs",
        "_core/mixed.py",
        (("if others.covers else None", "if False else None"),),
    ),
    Defect(
        "systems of roots are solved with a Jacobian that is not transposed",
        "programs",
        "_implicit.py",
        (("_solve(tf.linalg.matrix_transpose(j), upstream)", "_solve(j, upstream)"),),
    ),
    Defect(
        "the same tensor in another argument counts as this one",
        "programs",
        "_core/_tensorflow/tapes.py",
        (
            ("tf.raw_ops.Cast(x=x, DstT=x.dtype)", "tf.identity(x)"),
            ("    if not is_recorded([x]):\n        return x\n", "    return x\n"),
        ),
    ),
    Defect(
        "check_gradient takes 1 % for rounding",
        "checks",
        "_check/comparison.py",
        (("max(1e-6, self._unit**0.5)", "max(2e-2, self._unit**0.5)"),),
    ),
)


def seconds_until_found(defect: Defect, seconds: float, seed: int) -> str:
    with tempfile.TemporaryDirectory() as folder:
        package = pathlib.Path(folder) / "sgtrick"
        shutil.copytree(ROOT / "sgtrick", package)
        defect.put_back(package)
        options = ["--kinds", defect.kind, "--seconds", str(seconds), "--seed", str(seed)]
        run = subprocess.run(
            [sys.executable, "-m", "fuzz", "--as-found", *options],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(ROOT / "tests")])},
            cwd=folder,
            capture_output=True,
            text=True,
        )
    said = run.stderr if run.returncode else run.stdout
    return said.strip().splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int, default=range(len(DEFECTS)))
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for number in arguments.numbers:
        defect = DEFECTS[number]
        said = seconds_until_found(defect, arguments.seconds, arguments.seed)
        print(f"{number:2} {defect.what}: {said}", flush=True)


if __name__ == "__main__":
    main()
