"""The arguments of the value form, checked: a value, Jacobians and a Hessian."""

from collections.abc import Callable, Sequence

from sgtrick._arguments import dtypes, structures
from sgtrick._arguments.backend import Backend
from sgtrick._arguments.shapes import Names
from sgtrick._arguments.structures import Leaf
from sgtrick._types import Ndims, Structure, Tensor


def at_point(
    backend: Backend, fx: Structure, gx: Structure, x: Structure, batch_ndims: int | None
) -> tuple[Tensor, list[Leaf]]:
    """Returns the value, and the points with the Jacobians that are not None."""
    pairs = [(path, x, gx) for path, x, gx in structures.pair(x, gx) if gx is not None]
    places = {"fx": fx, **{f"x{path}": x for path, x, _ in pairs}}
    # Numbers of Python have no dtype, and get the precision of the others.
    numbers = {name: _number_in(t) for name, t in places.items()}
    own = {name: backend.to_tensor(t, name) for name, t in places.items() if numbers[name] is None}
    beside = list(map(backend.dtype_of, own.values()))
    read = own | {
        name: backend.to_tensor(places[name], name, dtype=dtypes.of_number(number, beside))
        for name, number in numbers.items()
        if number is not None
    }
    fx, pairs = read["fx"], [(path, read[f"x{path}"], gx) for path, _, gx in pairs]
    dtypes.check_differentiable(backend.dtype_of(fx), "fx")
    return fx, [
        backend.leaf(path, x, gx, fx, batch_ndims, Names("fx", f"gx{path}", f"x{path}"))
        for path, x, gx in pairs
    ]


def _number_in(value: Structure) -> float | complex | None:
    """The number of Python that a value is, or one in a list of such; None for all else."""
    is_list = structures.is_python_number(value)
    numbers = [n for _, n in structures.flatten(value)] if is_list else [value]
    return next((n for n in numbers if type(n) in (float, complex)), None)


Rows = list[list[Leaf | None]]


def is_zero(hx: Structure) -> bool:
    """Whether `hx` states that the whole Hessian is zero."""
    return isinstance(hx, (int, float)) and hx == 0


class Blocks:
    """Blocks `H_ij`, `B + R + D_i + D_j`: the Jacobian of one `gx` with respect to another `x`."""

    def __init__(
        self,
        backend: Backend,
        hx: Structure,
        x: Structure,
        fx: Tensor,
        leaves: Sequence[Leaf],
        stop: Callable[[Tensor], Tensor],
    ) -> None:
        blocks = structures.pair_hessian(hx, x, {leaf.path for leaf in leaves})
        of_leaves = [backend.dtype_of(leaf.x) for leaf in leaves]
        dtypes.check_hessian(backend.dtype_of(fx), of_leaves)
        self._backend, self._leaves = backend, leaves

        def block(p: Leaf, q: Leaf) -> Leaf | None:
            path = p.path + q.path
            if blocks[path] is None:
                return None
            names = Names(f"gx{p.path}", f"hx{path}", f"x{q.path}")
            leaf = backend.leaf(path, q.x, blocks[path], p.gx, q.batch_ndims, names)
            return leaf._replace(gx=stop(leaf.gx))

        self._rows = [[block(p, q) for q in leaves] for p in leaves]

    def times(self, z: Sequence[Tensor], rows: Rows | None = None) -> list[Tensor]:
        """Returns `H z`, each of the shape and dtype of its `gx`, for these or for other blocks."""
        return [
            self._backend.push(row, z, leaf.gx)
            for leaf, row in zip(self._leaves, rows or self._rows, strict=True)
        ]

    def symmetric(self) -> Rows:
        """The blocks of the symmetric part."""
        ndims = [self._backend.rank(leaf.x) - leaf.batch_ndims for leaf in self._leaves]
        rows = zip(ndims, self._rows, zip(*self._rows, strict=True), strict=True)
        return [
            [
                block and other and self._mean(block, other, i, j)
                for j, block, other in zip(ndims, row, column, strict=True)
            ]
            for i, row, column in rows
        ]

    def _mean(self, block: Leaf, other: Leaf, i: Ndims, j: Ndims) -> Leaf:
        """The mean of a block `B + R + D_i + D_j` and the transpose of one `B + R + D_j + D_i`."""
        swapped = self._backend.swap(other.gx, j, i)
        half = self._backend.cast(swapped, self._backend.dtype_of(block.gx)) / 2
        # TensorFlow's optimizer loses a loop's c + transpose(c) if c does not change in the loop.
        return block._replace(gx=block.gx / 2 + half)


class ByVector:
    """A function `v -> H v` on the structure of `x`, called only for second derivatives."""

    def __init__(
        self,
        backend: Backend,
        hx: Callable[[Structure], Structure],
        x: Structure,
        leaves: Sequence[Leaf],
    ) -> None:
        self._backend, self._hx, self._x, self._leaves = backend, hx, x, leaves
        self.not_connected = _NOT_CONNECTED.format(backend.name)

    def times(self, z: Sequence[Tensor]) -> list[Tensor]:
        """Returns `H z`, each of the shape and dtype of its `gx`."""
        of_leaves = zip(self._leaves, z, strict=True)
        by_path = {
            leaf.path: self._backend.cast(z_i, self._backend.dtype_of(leaf.x))
            for leaf, z_i in of_leaves
        }
        v = [by_path.get(path) for path, _ in structures.flatten(self._x)]
        product = self._hx(self._backend.pack(self._x, v))
        products = {path: hv for path, _, hv in structures.pair(self._x, product, gx_name="hx(v)")}
        if all(hv is None for hv in products.values()):
            raise ValueError(self.not_connected)
        return [self._like_gradient(products[leaf.path], leaf) for leaf in self._leaves]

    def _like_gradient(self, hv: Tensor, leaf: Leaf) -> Tensor:
        if hv is None:
            return self._backend.zeros_like(leaf.gx)
        name, x_dtype = f"hx(v){leaf.path}", self._backend.dtype_of(leaf.x)
        dtype = self._backend.dtype_of(leaf.gx)
        hv = self._backend.to_dtype(hv, dtype, name, f"x{leaf.path} is {x_dtype}")
        return self._backend.shaped_like(hv, leaf.gx, name, "expected")


_NOT_CONNECTED = (
    "hx(v) is not connected to v, so the second derivative would be lost. {0} must be able to "
    "differentiate it. If it calls code outside {0}, give it its own gradient: H is symmetric, so "
    "the gradient of v -> H v is u -> H u."
)
