"""``@triton.jit`` functions that kernels of several families share; no kernel of its own."""
