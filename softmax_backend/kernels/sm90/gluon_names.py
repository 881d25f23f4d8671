"""What the releases of Triton call differently in Gluon."""

from triton.experimental.gluon import language as gl

thread_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
"""All threads of a warp partition wait for each other: ``barrier`` since Triton 3.7."""
