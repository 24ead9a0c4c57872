"""Which torch transformation is running. Torch has no public API for this."""

import torch
from torch.autograd import forward_ad


def transformed() -> bool:
    """Whether a transformation of `torch.func` is active."""
    return bool(torch._C._are_functorch_transforms_active())


def has_tangent(x: torch.Tensor) -> bool:
    """Whether forward mode outside `torch.func` follows `x`."""
    return forward_ad.unpack_dual(x).tangent is not None


def compiling() -> bool:
    """Whether torch.compile is tracing; it raises inside transformations of `torch.func`."""
    if not torch.compiler.is_compiling():
        return False
    if transformed():
        raise NotImplementedError(
            "torch.compile loses custom derivatives inside transformations of torch.func. Do "
            "not compile the transformed function: transform without torch.compile, or around it."
        )
    return True


def check_one_forward_mode() -> None:
    """Raises for nested forward mode, where tangents of custom functions have no derivatives."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    jvp = torch._C._functorch.TransformType.Jvp
    if sum(level.key() == jvp for level in levels) > 1:
        raise NotImplementedError(
            "torch loses the derivatives of custom functions in forward mode over forward mode. "
            "Use torch.func.jacfwd over torch.func.jacrev, as torch.func.hessian does."
        )
