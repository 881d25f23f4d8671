"""``@triton.jit`` functions of KDA's kernels; no kernel of its own."""
