"""Programmatic dependent launch (sm_90 and newer): a kernel starts while the one before it ends.

``PDL`` is one of

- ``off``: the launch itself waits for everything before it; the only one outside of CUDA;
- ``wait``: this kernel starts early, and waits before its first dependent access;
- ``release_after_wait``: it then lets the kernel after it start early, too;
- ``release_first``: it does so before it waits.

All but ``off`` need the launch option ``launch_pdl``. A kernel that was released early must wait in
its turn.
"""

import triton
import triton.language as tl


@triton.jit
def pdl_begin(PDL: tl.constexpr):
    """First statement of a kernel: with ``release_first`` lets the kernel after it start."""
    if PDL == "release_first":
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def pdl_wait(PDL: tl.constexpr):
    """Before the first access to anything that an earlier kernel wrote or reads."""
    if PDL != "off":
        tl.extra.cuda.gdc_wait()
    if PDL == "release_after_wait":
        tl.extra.cuda.gdc_launch_dependents()
