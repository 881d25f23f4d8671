"""Names that Gluon changed between releases of Triton: one for 3.6 and for newer ones."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, tma

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of a warp partition wait for each other."""

_COPY = "async_load" if hasattr(tma, "async_load") else "async_copy_global_to_shared"

tensor_load = getattr(tma, _COPY)
"""A tile of a tensor descriptor into shared memory; an mbarrier completes with its bytes."""

pointer_load = getattr(async_copy, _COPY)
"""Elements at pointers into shared memory, by each thread its own."""

if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(buffer, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """The bytes of a buffer of shared memory as numbers of another type."""
        return buffer.reinterpret(DTYPE, SHAPE, LAYOUT)

else:

    @gluon.jit
    def reinterpret(buffer, DTYPE: gl.constexpr, SHAPE: gl.constexpr, LAYOUT: gl.constexpr):
        """Reinterpret a shared buffer, under the name of this release."""
        return buffer._reinterpret(DTYPE, SHAPE, LAYOUT)
