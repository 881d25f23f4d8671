"""The indexer's keys of a prefill of ratio 1 or 2, from its latents, and the rows of the rings."""

import triton
import triton.language as tl

from backend_core.kernels.codecs import encode_e4m3, round_bf16
from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import rotate_pairs
from dsv4_backend.kernels.arguments import Keys, Pages, State, Table, Tokens, V41Input
from dsv4_backend.kernels.records import (
    four_ue8m0,
    indexer_fp8_scale,
    quantise_indexer_mxfp4,
    row_ptrs,
)
from dsv4_backend.kernels.v41 import find_row


@triton.jit
def load_pair_angles(table, o_p, KEY: tl.constexpr, IS_SPLIT: tl.constexpr):
    """(cosines, sines) [M, KEY/2] fp32 of positions o_p [M]; of channels that RoPE leaves alone
    1 and 0."""
    o_j = tl.arange(0, KEY // 2) - (KEY // 2 - 32)
    m_tail = (o_j >= 0)[None, :]
    row_ptrs = table.ptr + (o_p.to(tl.int64) * table.stride_p)[:, None]
    o_cos = o_j if IS_SPLIT else 2 * o_j
    o_sin = o_j + 32 if IS_SPLIT else 2 * o_j + 1
    b_cos = tl.load(row_ptrs + o_cos[None, :], mask=m_tail, other=1.0).to(tl.float32)
    b_sin = tl.load(row_ptrs + o_sin[None, :], mask=m_tail, other=0.0).to(tl.float32)
    return b_cos, b_sin


@triton.jit
def store_keys(
    b_key,  # [M, KEY] fp32 with values of bf16
    cache,
    slot,  # [M]; < 0 stores nothing
    M: tl.constexpr,
    KEY: tl.constexpr,
    RECORD: tl.constexpr,
):
    """`records.store_record` of several rows."""
    PAGE: tl.constexpr = RECORD.page
    FORMAT: tl.constexpr = RECORD.format
    ROUNDING: tl.constexpr = RECORD.rounding
    m_slot = (slot >= 0)[:, None]
    u_slot = slot.to(tl.uint64)  # a quotient without signs is a shift
    page_ptr = (cache.ptr + (u_slot // PAGE).to(tl.int64) * cache.stride_p)[:, None]
    i_slot = (u_slot % PAGE).to(tl.int32)[:, None]
    if FORMAT == "indexer_mxfp4":
        b_code, b_scale = quantise_indexer_mxfp4(tl.reshape(b_key, (M * KEY,)), M * KEY, ROUNDING)
        b_code = tl.reshape(b_code, (M, KEY // 2))
        tl.store(row_ptrs(page_ptr, i_slot, KEY // 2, 1), b_code, mask=m_slot)
        scale_ptrs = page_ptr + PAGE * (KEY // 2) + i_slot * (KEY // 32)
        scale_ptrs += tl.arange(0, KEY // 32)[None, :]
        tl.store(scale_ptrs, tl.reshape(b_scale, (M, KEY // 32)), mask=m_slot)
    else:
        TILE: tl.constexpr = 16 if FORMAT == "indexer_fp8_tiles" else 1
        b_amax = tl.max(tl.abs(b_key), axis=1)
        b_scale, b_inv = indexer_fp8_scale(b_amax, "vllm", False)
        b_code = encode_e4m3(b_key * b_inv[:, None], False)
        tl.store(row_ptrs(page_ptr, i_slot, KEY, TILE), b_code, mask=m_slot)
        if FORMAT == "indexer_fp8_ue8m0":
            b_scale = four_ue8m0(b_scale).to(tl.float32, bitcast=True)
        scale_ptrs = (page_ptr + PAGE * KEY + i_slot * 4).to(tl.pointer_type(tl.float32))
        tl.store(scale_ptrs, b_scale[:, None], mask=m_slot)


@triton.jit
def write_ring_rows(
    o_t,  # [ROWS] tokens
    num_tokens,
    input,
    state,
    tokens,
    D: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """Write the rows of tokens to their rings, but for those that a later token writes over."""
    m_t = o_t < num_tokens
    state_row = tl.load(tokens.state_slot_ptr + o_t, mask=m_t, other=-1).to(tl.int64)
    state_row = find_row(state_row, tokens, o_t, m_t, STATE_BLOCK)
    o_later = o_t + STATE_BLOCK
    m_later = o_later < num_tokens
    later = tl.load(tokens.state_slot_ptr + o_later, mask=m_later, other=-1).to(tl.int64)
    later = find_row(later, tokens, o_later, m_later, STATE_BLOCK)
    m_row = ((state_row >= 0) & (later != state_row))[:, None]
    WIDTH: tl.constexpr = 2 * D if input.score_ptr is None else D
    o_s = tl.arange(0, WIDTH)[None, :]
    o_row = (state_row // STATE_BLOCK) * state.stride_b + (state_row % STATE_BLOCK) * state.stride_r
    o_input = (o_t.to(tl.int64) * input.stride_t)[:, None]
    b_row = tl.load(input.ptr + o_input + o_s, mask=m_row)
    tl.store(state.ptr + o_row[:, None] + o_s, b_row, mask=m_row)
    if input.score_ptr is not None:
        b_row = tl.load(input.score_ptr + o_input + o_s, mask=m_row)
        tl.store(state.ptr + D + o_row[:, None] + o_s, b_row, mask=m_row)


@triton.jit(do_not_specialize=["num_rows", "num_tokens"])
def v41_keys_kernel(
    latent_ptr,  # [rows, D] bf16
    token_ptr,  # [rows] int32, the token of each latent, or -1
    input: V41Input,  # RATIO 2
    state: State,  # RATIO 2, written
    keys: Keys,
    table: Table,
    index_cache: Pages,
    tokens: Tokens,
    index_slot_ptr,  # [T]
    num_rows,
    num_tokens,
    eps,
    D: tl.constexpr,
    KEY: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    INDEX_RECORD: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr,
    DOT: tl.constexpr,  # dtype of the operands
    PDL: tl.constexpr,
):
    """The first programs make the keys of BLOCK_M latents, the others write ROWS tokens' rows.

    No latent is read from a ring any more when its rows are written: this is the second launch.
    """
    pdl_begin(PDL)
    pdl_wait(PDL)
    i_n = tl.program_id(0)
    tiles = tl.cdiv(num_rows, BLOCK_M)
    if i_n >= tiles:
        o_t = (i_n - tiles) * ROWS + tl.arange(0, ROWS)
        if RATIO == 2:
            write_ring_rows(o_t, num_tokens, input, state, tokens, D, STATE_BLOCK)
        return
    o_m = i_n * BLOCK_M + tl.arange(0, BLOCK_M)
    token = tl.load(token_ptr + o_m, mask=o_m < num_rows, other=-1)
    m_token = token >= 0
    if tokens.request_ptr is not None:  # noqa: SIM102 (a constant)
        # where every token may begin a chunk most tiles are empty
        if tl.max(token, axis=0) < 0:
            return
    slot = tl.load(index_slot_ptr + token, mask=m_token, other=-1).to(tl.int64)
    position = tl.load(tokens.position_ptr + token, mask=m_token, other=RATIO - 1).to(tl.int32)
    o_n, o_k = tl.arange(0, KEY), tl.arange(0, BLOCK_K)
    latent_ptrs = latent_ptr + (o_m.to(tl.int64) * D)[:, None] + o_k[None, :]
    wk_ptrs = keys.wk_ptr + (o_n * keys.stride_wk_n)[None, :] + o_k[:, None]
    b_key = tl.zeros((BLOCK_M, KEY), tl.float32)
    for i_k in range(0, D, BLOCK_K):
        b_x = tl.load(latent_ptrs + i_k, mask=m_token[:, None], other=0.0).to(DOT)
        b_key = tl.dot(b_x, tl.load(wk_ptrs + i_k).to(DOT), b_key, input_precision="ieee")
    b_key = round_bf16(b_key)
    b_rms = tl.rsqrt(tl.sum(b_key * b_key, axis=1) / KEY + eps)
    b_w = tl.load(keys.key_weight_ptr + o_n).to(tl.float32)
    b_key = round_bf16(b_key * b_rms[:, None] * b_w[None, :])
    b_cos, b_sin = load_pair_angles(table, position + 1 - RATIO, KEY, IS_SPLIT_TABLE)
    SIZE: tl.constexpr = BLOCK_M * KEY
    b_cos, b_sin = tl.reshape(b_cos, (SIZE // 2,)), tl.reshape(b_sin, (SIZE // 2,))
    b_key = round_bf16(rotate_pairs(tl.reshape(b_key, (SIZE,)), b_cos, b_sin, SIZE))
    b_key = tl.reshape(b_key, (BLOCK_M, KEY))
    store_keys(b_key, index_cache, slot, BLOCK_M, KEY, INDEX_RECORD)
