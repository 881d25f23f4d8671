"""What one block of keys does: hooks of the Triton kernels, each with the same in torch.

A hook is a ``@triton.jit`` function that is compiled into the kernel, one compiled kernel per
variant; it may use the two scalars ``a`` and ``b`` and load nothing. A sink is no hook but an
argument of the operators, since it changes nothing within a block.
"""

from softmax_backend.variants.hooks import PLAIN, Variant, sliding_window, soft_cap

__all__ = ["PLAIN", "Variant", "sliding_window", "soft_cap"]
