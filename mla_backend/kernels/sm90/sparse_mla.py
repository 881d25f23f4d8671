# ruff: noqa: RUF059  Gluon needs lists added and tuples taken apart whole
"""Sparse MLA for Hopper in Gluon: some warps fetch and dequantise, one or two warpgroups compute.

The walk is that of ``kernels/sparse_mla.py``. The fetching warps hold the records of the next block
in registers while they turn those of this one into bf16 and store it into a ring of shared memory,
[64, 512] per stage, where both products read it: as the left operand of the logits, and transposed
as the left operand of the output. So the keys are the 64-row side of wgmma, the heads its narrow
side, and eight heads are not padded::

    s = k q^T                  [64, heads]
    o = o exp(m - m') + k^T p  [512, heads]

Of every four channels the ring has 0, 2, 1 and 3, as they come out of a word; the queries are
stored in that order, and the output's channels are put back when they are written. Keys are stored
times 2^-20, so that one multiplication brings bf16's exponent and the scale; the logits' scale and
the last division make up for it.

A CTA takes query tokens, or parts of them, one after another, and the fetching warps run ahead.
Either all tokens are cut into the same number of splits, or each CTA has as much to do as any
other, whatever the lengths of the lists (``equal_share``). At most two of its items are then shared
with others: its part of the one within which its work begins goes to slot 2 CTA of the scratch
memory, that of the one that it begins and does not end to the slot after.

Barriers: ``full`` of a stage completes when it has been stored, ``empty`` when both products have
read it.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from backend_core.kernels.gluon_names import reinterpret, thread_barrier
from mla_backend.kernels.sm90.sparse_mla_compute import (
    STAGES,
    allocate,
    compute,
    equal_share,
    in_turns,
    load_names,
    piece,
    release,
)

ROWS = gl.constexpr(32)
"""Rows ahead that the fetching warps hold in registers."""


@gluon.constexpr_function
def _piece(width, warps):
    """Registers of [rows, 16, width] words: 16 lanes a row, each ``width`` words side by side."""
    return gl.BlockedLayout([1, 1, width], [2, 16, 1], [warps, 1, 1], [2, 1, 0])


@gluon.constexpr_function
def _row_layout(width, warps):
    return gl.SliceLayout(1, gl.SliceLayout(2, _piece(width, warps)))


@gluon.jit
def _load_words(base, row_at, m_key, FIRST: gl.constexpr, WIDTH: gl.constexpr,
                WARPS: gl.constexpr):  # fmt: skip
    """[ROWS, 16, WIDTH] words of each row, from word FIRST on."""
    layout: gl.constexpr = _piece(WIDTH, WARPS)
    at = gl.convert_layout(row_at, _row_layout(WIDTH, WARPS))
    m = gl.convert_layout(m_key, _row_layout(WIDTH, WARPS))
    o_lane = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout))) * WIDTH
    o_in = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))
    at = at[:, None][:, :, None] + (o_lane[None, :][:, :, None] + o_in[None, :][:, None, :] + FIRST)
    return gl.load(base + at, mask=m[:, None][:, :, None], other=0)


@gluon.jit
def _load_records(i, index, own_blocks, own, extra, rows_in, PAGE_SIZE: gl.constexpr,
                  EXTRA_PAGE_SIZE: gl.constexpr, WARPS: gl.constexpr):  # fmt: skip
    """Words of channels 0 to 255, 256 to 383, 384 to 447, of the last 64, of the scales; what is
    added to the logits: 0, or -inf where an entry names no row.

    Everything is loaded as words of four bytes: bytes would take a register each until used.
    """
    cache_ptr, stride_page = own
    extra_cache_ptr, stride_extra_page = extra
    is_own = i < own_blocks
    m_key = (index >= 0) & (index < gl.where(is_own, rows_in[0], rows_in[1]))
    index = gl.where(m_key, index, 0)
    page = gl.where(is_own, index // PAGE_SIZE, index // EXTRA_PAGE_SIZE)
    size = gl.where(is_own, PAGE_SIZE, EXTRA_PAGE_SIZE)
    page_at = page.to(gl.int64) * gl.where(is_own, stride_page, stride_extra_page)
    row = index - page * size
    row_at = gl.multiple_of(page_at + row * 144, 4)
    scale_at = gl.multiple_of(page_at + size * 144 + row * 2, 2)
    cache = gl.where(is_own, cache_ptr, extra_cache_ptr)
    b_0 = _load_words(cache, row_at, m_key, 0, 4, WARPS)
    b_1 = _load_words(cache, row_at, m_key, 64, 2, WARPS)
    b_2 = _load_words(cache, row_at, m_key, 96, 1, WARPS)
    b_r = _load_words(cache, row_at, m_key, 112, 2, WARPS)
    b_low = gl.load(cache + scale_at, mask=m_key, other=0)
    b_high = gl.load(cache + scale_at + 1, mask=m_key, other=0)
    b_seen = gl.where(m_key, 0.0, -float("inf"))
    return b_0, b_1, b_2, b_r, b_low, b_high, b_seen


@gluon.jit
def _decode_bf16(words, b_scale):
    """Each word's four bytes of e4m3 times a scale (twice in a word), as two words of bf16.

    The first word has bytes 0 and 2, the second 1 and 3. The seven bits below the sign are put into
    bf16's at bit 4, which is the value times 2^-120, subnormals too.
    """
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, c;
        shr.u32 a, $2, 4;
        shl.b32 b, $2, 4;
        shl.b32 c, $2, 8;
        and.b32 a, a, 0x07F007F0;
        and.b32 b, b, 0x07F007F0;
        lop3.b32 a, $2, 0x80008000, a, 0xEA;
        lop3.b32 b, c, 0x80008000, b, 0xEA;
        mul.bf16x2 $0, b, $3;
        mul.bf16x2 $1, a, $3;
        }
        """,
        "=&r,=&r,r,r",
        [words, b_scale],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _split_bf16(first, second):
    """Two words of bf16 (channels 0 and 1, 2 and 3) times 2^-20, as channels 0 and 2, 1 and 3."""
    return gl.inline_asm_elementwise(
        """
        {
        .reg .b32 a, b, down;
        mov.b32 down, 0x35803580;
        prmt.b32 a, $2, $3, 0x5410;
        prmt.b32 b, $2, $3, 0x7632;
        mul.bf16x2 $0, a, down;
        mul.bf16x2 $1, b, down;
        }
        """,
        "=&r,=&r,r,r",
        [first, second],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def _dequantise(words, b_scales, FIRST: gl.constexpr, WARPS: gl.constexpr):
    """[ROWS, 32 WIDTH] words of two bf16, of [ROWS, 16, WIDTH] words of four e4m3; times 2^-20.

    Args:
        b_scales: four scales in a word, each for 64 channels; those of this piece begin with byte
            ``FIRST``.
    """
    WIDTH: gl.constexpr = words.shape[2]
    layout: gl.constexpr = _piece(WIDTH, WARPS)
    scale_words = gl.convert_layout(b_scales, _row_layout(WIDTH, WARPS))
    o_lane = gl.arange(0, 16, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))
    shift = (FIRST + o_lane * WIDTH // 16) * 8
    code = (scale_words[:, None] >> shift[None, :]) & 0xFF
    # 2^(code - 127) 2^120 2^-20 in bf16; a scale beyond 2^27 becomes infinite
    bits = gl.minimum(code + 100, 255) << 7
    b_scale, words = gl.broadcast((bits | (bits << 16))[:, :, None], words)
    first, second = _decode_bf16(words, b_scale)
    return gl.reshape(gl.join(first, second), [words.shape[0], 32 * WIDTH])


@gluon.jit
def _rope_words(words):
    """[ROWS, 32] words of two bf16, of [ROWS, 16, 2] words."""
    first, second = gl.split(words)
    first, second = _split_bf16(first, second)
    return gl.reshape(gl.join(first, second), [words.shape[0], 32])


@gluon.jit
def _fetch(
    buffers,
    work,
    lists_of,
    caches,
    WARPS: gl.constexpr,
    REQUESTS: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    ROW_TILES: gl.constexpr,
    PAGE_SIZE: gl.constexpr,
    EXTRA_PAGE_SIZE: gl.constexpr,
):
    """The fetching warps: the blocks of every piece of the CTA's work into the ring.

    They hold the next ROWS rows in registers, and the entries of those after them. The fence that
    lets wgmma see what they store is the readers': here it would wait for the loads in flight.
    """
    k_s, seen_s, full, empty = buffers
    first, lengths, sizes = work
    number, skip, left = first
    indices_ptr, extra_indices_ptr, stride_indices, stride_extra_indices, rows_in = lists_of
    own, extra = caches
    layout: gl.constexpr = _row_layout(4, WARPS)
    word_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 256], gl.int32)
    STEPS: gl.constexpr = 64 // ROWS
    filled = 0
    while left > 0:
        i_token, i_rows, i_split, count, extra_count, own_blocks, begin, end, take, is_whole = (
            piece(number, skip, left, lengths, sizes, REQUESTS, IS_SPLIT, ROW_TILES)
        )
        lists = (
            indices_ptr + i_token * stride_indices,
            extra_indices_ptr + i_token * stride_extra_indices,
        )
        counts = (count, extra_count, own_blocks)
        index = load_names(begin, 0, end, lists, counts, ROWS, layout)
        next_index = load_names(
            begin + 1 // STEPS, 1 % STEPS * ROWS, end, lists, counts, ROWS, layout
        )
        b_0, b_1, b_2, b_r, b_low, b_high, b_seen = _load_records(
            begin, index, own_blocks, own, extra, rows_in, PAGE_SIZE, EXTRA_PAGE_SIZE, WARPS
        )
        for i in range(begin, end):
            stage = filled % STAGES
            k = reinterpret(k_s.index(stage), gl.int32, [64, 256], word_layout)
            for step in gl.static_range(STEPS):
                n_0, n_1, n_2, n_r, n_low, n_high, n_seen = _load_records(
                    i + (step + 1) // STEPS,
                    next_index,
                    own_blocks,
                    own,
                    extra,
                    rows_in,
                    PAGE_SIZE,
                    EXTRA_PAGE_SIZE,
                    WARPS,
                )
                next_index = load_names(
                    i + (step + 2) // STEPS,
                    (step + 2) % STEPS * ROWS,
                    end,
                    lists,
                    counts,
                    ROWS,
                    layout,
                )
                if step == 0:
                    mbarrier.wait(empty.index(stage), ((filled // STAGES) & 1) ^ 1)
                part = k.slice(step * ROWS, ROWS, dim=0)
                part.slice(0, 128, dim=1).store(_dequantise(b_0, b_low, 0, WARPS))
                part.slice(128, 64, dim=1).store(_dequantise(b_1, b_high, 0, WARPS))
                part.slice(192, 32, dim=1).store(_dequantise(b_2, b_high, 2, WARPS))
                part.slice(224, 32, dim=1).store(_rope_words(b_r))
                seen_s.index(stage).slice(step * ROWS, ROWS, dim=0).store(b_seen)
                b_0, b_1, b_2, b_r, b_low, b_high, b_seen = (
                    n_0,
                    n_1,
                    n_2,
                    n_r,
                    n_low,
                    n_high,
                    n_seen,
                )
            thread_barrier()
            mbarrier.arrive(full.index(stage), count=1)
            filled += 1
        if REQUESTS > 0:
            number += 1
        else:
            number += gl.num_programs(0)
        left -= take
        skip = skip * 0


@gluon.jit(
    do_not_specialize=[
        "topk", "extra_topk", "rows", "extra_rows", "query_tokens", "heads", "splits", "items",
    ]
)  # fmt: skip
def sparse_mla_sm90_kernel(
    q_ptr,  # [tokens, heads, 512]
    cache_ptr,  # int32: [pages] of PAGE_SIZE rows of 144 words, then of their scales, 2 words each
    indices_ptr,  # [tokens, topk] int32
    lengths_ptr,  # [requests] int32 or None
    extra_cache_ptr,  # as above; without an extra cache extra_topk is 0 and this is the first's
    extra_indices_ptr,
    extra_lengths_ptr,
    sinks_ptr,  # [heads] fp32 or None
    out_ptr,  # [tokens, heads, 512]
    lse_ptr,  # [tokens, heads] fp32, natural
    partial_out_ptr,  # [tokens * splits, heads, 512] fp32, or with REQUESTS [2 CTAs, HEADS, 512]
    partial_lse_ptr,  # [tokens * splits, heads] fp32, base 2, or with REQUESTS [2 CTAs, HEADS]
    scale,
    stride_q_t,
    stride_q_h,
    stride_page,  # words, a multiple of 4
    stride_extra_page,
    stride_indices,
    stride_extra_indices,
    topk,
    extra_topk,
    rows,
    extra_rows,
    query_tokens,
    heads,
    splits,
    items,
    PAGE_SIZE: gl.constexpr,
    EXTRA_PAGE_SIZE: gl.constexpr,
    HEADS: gl.constexpr,
    ROW_TILES: gl.constexpr,
    REQUESTS: gl.constexpr,
    IS_SPLIT: gl.constexpr,
    WARPS: gl.constexpr,
    FETCH_WARPS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
):
    """Grid: CTAs, which take the items (query tokens x splits x ROW_TILES) in turns, or share the
    tokens of up to ``REQUESTS`` requests equally, if that is not 0; splits is 1 then."""
    buffers = allocate(HEADS, 1)
    lengths = (lengths_ptr, extra_lengths_ptr)
    sizes = (topk, extra_topk, query_tokens, splits)
    if IS_SPLIT or REQUESTS > 0:
        release()
    if REQUESTS > 0:
        first = equal_share(items, lengths, sizes, REQUESTS, ROW_TILES, WARPS)
    else:
        first = in_turns(items)
    work = (first, lengths, sizes)
    lists_of = (
        indices_ptr,
        extra_indices_ptr,
        stride_indices,
        stride_extra_indices,
        (rows, extra_rows),
    )
    own = (cache_ptr, stride_page)
    extra = (extra_cache_ptr, stride_extra_page)
    queries = (q_ptr, stride_q_t, stride_q_h, heads)
    outputs = (sinks_ptr, out_ptr, lse_ptr, partial_out_ptr, partial_lse_ptr)
    ring = (buffers[0], buffers[1], buffers[2], buffers[3])
    gl.warp_specialize(
        [
            (
                compute,
                (
                    buffers,
                    work,
                    queries,
                    outputs,
                    scale,
                    WARPS,
                    ROW_TILES,
                    HEADS,
                    REQUESTS,
                    IS_SPLIT,
                    True,
                ),
            ),
            (
                _fetch,
                (
                    ring,
                    work,
                    lists_of,
                    (own, extra),
                    FETCH_WARPS,
                    REQUESTS,
                    IS_SPLIT,
                    ROW_TILES,
                    PAGE_SIZE,
                    EXTRA_PAGE_SIZE,
                ),
            ),
        ],
        [FETCH_WARPS],
        [FETCH_REGISTERS],
    )
