"""Products that are zero wherever a tangent is zero, on jax and torch.

`zero(x)` is zero with the identity as its derivative, for any `x`. `times(c, z)` is the bilinear
product of tensors of the same shape, zero where `z` is zero even if `c` is not finite.
"""

import keras

# Keras cannot change its backend once it is imported. On tensorflow, none are needed.
if keras.backend.backend() == "jax":
    from sgtrick.keras._jax.product import times, zero
elif keras.backend.backend() == "torch":
    from sgtrick.keras._torch.product import times, zero

__all__ = ["times", "zero"]
