"""Operations that `keras.ops` lacks on jax: overrides, and linear maps with their own transpose.

The maps are primitives with rules for every transformation of jax, so that they can be
differentiated in forward and reverse mode, mapped, compiled, exported and staged in any order.
"""
