"""The operations that `_backends.native` describes, on torch.

They are autograd functions with rules for `torch.func`. Under torch.compile they have no rules for
forward mode and vmap, which it does not support.
"""

from sgtrick.keras._torch.embedding import depends, embed
from sgtrick.keras._torch.product import times, zero
from sgtrick.keras._torch.rules import with_vjp

__all__ = ["depends", "embed", "times", "with_vjp", "zero"]
