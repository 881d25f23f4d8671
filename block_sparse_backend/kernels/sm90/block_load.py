# ruff: noqa: RUF005, RUF059  Gluon needs lists added and tuples taken apart whole
"""The ring of keys and values of block-sparse attention for Hopper in Gluon, and the warp that
loads it, beside ``block_walk.py``."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backend_core.kernels.gluon_names import tensor_load


@gluon.jit
def allocate_ring(k_desc, v_desc, STAGES: gl.constexpr):
    """Buffers of keys and of values, and for each stage full and empty barriers of both.

    Every barrier must be used by a role: over others the compiler would lay the roles' arguments,
    and the warps that store those do not wait for the one that initialises.
    """
    k_s = gl.allocate_shared_memory(k_desc.dtype, [STAGES] + k_desc.block_type.shape, k_desc.layout)
    v_s = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_type.shape, v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    return k_s, v_s, k_full, k_empty, v_full, v_empty


@gluon.jit
def load_row(
    descs,
    buffers,
    barriers,
    row,
    place,
    STAGES: gl.constexpr,
    BLOCK_N: gl.constexpr,
    IS_PACKED: gl.constexpr,
):
    """The loading warp: the tile's queries, then the row's blocks, each keys then values."""
    q_desc, k_desc, v_desc = descs
    q_s, k_s, v_s = buffers
    q_full, k_full, k_empty, v_full, v_empty = barriers
    batch, head, kv_head, first, k_begin = place
    mbarrier.expect(q_full, 2 * q_desc.block_type.nbytes)
    for half in gl.static_range(2):
        tensor_load(q_desc, [batch, head, first + 64 * half, 0], q_full, q_s.index(half))
    cols_ptr, begin, full_end, end = row
    for j in range(begin, end):
        i = j - begin
        stage = i % STAGES
        phase = ((i // STAGES) & 1) ^ 1
        start = gl.load(cols_ptr + j) * BLOCK_N
        at = [batch, kv_head, k_begin + start if IS_PACKED else start, 0]
        mbarrier.wait(k_empty.index(stage), phase)
        mbarrier.expect(k_full.index(stage), k_desc.block_type.nbytes)
        tensor_load(k_desc, at, k_full.index(stage), k_s.index(stage))
        mbarrier.wait(v_empty.index(stage), phase)
        mbarrier.expect(v_full.index(stage), v_desc.block_type.nbytes)
        tensor_load(v_desc, at, v_full.index(stage), v_s.index(stage))
