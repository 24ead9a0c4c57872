"""Operations that `keras.ops` lacks on torch: autograd functions with rules for `torch.func`.

Under torch.compile they have no rules for forward mode and vmap, which it does not support.
"""
