"""The operations that `_backends.native` describes, on jax."""

from sgtrick.keras._jax.embedding import depends, embed
from sgtrick.keras._jax.product import times, zero
from sgtrick.keras._jax.rules import with_vjp

__all__ = ["depends", "embed", "times", "with_vjp", "zero"]
