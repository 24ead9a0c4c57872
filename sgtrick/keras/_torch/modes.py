"""What is being done to a function of torch. No public name of torch tells."""

import torch


def transformed() -> bool:
    """Whether a transformation of `torch.func` is active."""
    return bool(torch._C._are_functorch_transforms_active())


def compiling() -> bool:
    """Whether torch.compile reads this; it loses derivatives inside what `torch.func` makes."""
    if not torch.compiler.is_compiling():
        return False
    if transformed():
        raise NotImplementedError(
            "torch.compile loses custom derivatives inside transformations of torch.func. Compile "
            "the function that is transformed, not the transformed one."
        )
    return True


def check_one_forward_mode() -> None:
    """Raises where the tangents of an autograd function would themselves get none."""
    levels = torch._C._functorch.get_interpreter_stack() or []
    jvp = torch._C._functorch.TransformType.Jvp
    if sum(level.key() == jvp for level in levels) > 1:
        raise NotImplementedError(
            "torch loses the derivatives of custom functions in forward mode over forward mode. "
            "Use torch.func.jacfwd over torch.func.jacrev, as torch.func.hessian does."
        )
