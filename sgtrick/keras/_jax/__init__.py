"""Operations that `keras.ops` lacks on jax: overrides, and linear maps with their own transpose.

The maps are primitives with rules for every transformation of jax, so that they can be
differentiated in forward and reverse mode, mapped, compiled, exported and staged in any order.
"""

from sgtrick.keras._jax.embedding import depends, embed
from sgtrick.keras._jax.product import times, zero
from sgtrick.keras._jax.rules import with_vjp

__all__ = ["depends", "embed", "times", "with_vjp", "zero"]
