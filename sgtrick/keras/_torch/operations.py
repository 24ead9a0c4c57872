"""The operations that `_backends.native` describes."""

from sgtrick.keras._torch.embedding import depends, embed
from sgtrick.keras._torch.rules import with_vjp

__all__ = ["depends", "embed", "with_vjp"]
