"""The operations that `_backends.native` describes."""

from sgtrick.keras._jax.embedding import depends, embed
from sgtrick.keras._jax.rules import with_vjp

__all__ = ["depends", "embed", "with_vjp"]
