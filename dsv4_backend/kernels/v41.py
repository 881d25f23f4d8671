"""DeepSeek-V4.1's compressors of ratio 1 and 2: from projections to the latent and its main record.

A token's row of projections is [kv], or [kv | score] of ratio 2, fp32; with score_ptr the scores
are a tensor of their own, whose rows are as far apart. A ring of the state holds a request's newest
rows of ratio 2, so a token's state row says which row is its predecessor's: the one before it in
the ring. Where the input row before a token has that state row, it is the predecessor itself;
otherwise the chunk begins with the token, and the ring holds its predecessor.

With request_ptr a token's state row follows from its request and position, and state_slot_ptr says
only which tokens are padding: those with 0 or less.
"""

import triton
import triton.language as tl

from backend_core.kernels.codecs import round_bf16
from backend_core.kernels.pdl import pdl_begin, pdl_wait
from backend_core.kernels.rope_hadamard import load_angles, rope_tail
from dsv4_backend.kernels.arguments import Keys, Norm, Pages, State, Table, Tokens, V41Input
from dsv4_backend.kernels.finish import rms_norm
from dsv4_backend.kernels.pooling import LOG2_E
from dsv4_backend.kernels.records import store_record
from dsv4_backend.kernels.state_rows import load_row, store_state_row


@triton.jit
def row_before(state_row, STATE_BLOCK: tl.constexpr):
    """The state row of the token before that of state_row, in the same ring of STATE_BLOCK rows."""
    i_r = state_row % STATE_BLOCK
    return state_row - i_r + (i_r + STATE_BLOCK - 1) % STATE_BLOCK


@triton.jit
def find_row(state_slot, tokens, o_t, m_t, STATE_BLOCK: tl.constexpr):
    """The state rows of input rows o_t, < 0 of padding and where m_t is false; state_slot is what
    state_slot_ptr holds of them, int64."""
    if tokens.request_ptr is not None:
        request = tl.load(tokens.request_ptr + o_t, mask=m_t, other=0).to(tl.int64)
        position = tl.load(tokens.position_ptr + o_t, mask=m_t, other=0).to(tl.int32)
        row = request * STATE_BLOCK + position % STATE_BLOCK
        state_slot = tl.where(state_slot > 0, row, -1)
    return state_slot


@triton.jit
def find_row_before_token(tokens, i_t, STATE_BLOCK: tl.constexpr):
    """The state row of input row i_t - 1, or -1: that of the token before i_t's, or of another."""
    state_slot = tl.load(tokens.state_slot_ptr + i_t - 1, mask=i_t > 0, other=-1).to(tl.int64)
    return find_row(state_slot, tokens, i_t - 1, i_t > 0, STATE_BLOCK)


@triton.jit
def load_kv_and_score(token_ptr, score_ptr, o_token, D: tl.constexpr):
    """A token's (kv, score) [D] fp32; o_token is where its row begins in a tensor of scores."""
    if score_ptr is None:
        b_kv, b_score = load_row(token_ptr, D, 2)
    else:
        o_d = tl.arange(0, D)
        b_kv, b_score = tl.load(token_ptr + o_d), tl.load(score_ptr + o_token + o_d)
    return b_kv, b_score


@triton.jit
def pool_pair(
    b_kv,  # [D] fp32 of the pair's last token
    b_score,
    token_ptr,
    input,
    o_token,
    state,
    state_row,
    is_in_input,  # of the pair's first token
    D: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
):
    """sum softmax(score) · kv [D] of a token that ends a pair and the one before it."""
    o_d = tl.arange(0, D)
    row = row_before(state_row, STATE_BLOCK)
    o_row = (row // STATE_BLOCK) * state.stride_b + (row % STATE_BLOCK) * state.stride_r
    old_ptr, new_ptr = state.ptr + o_row + o_d, token_ptr + (o_d - input.stride_t)
    b_kv0 = tl.load(old_ptr, mask=not is_in_input, other=0.0)
    b_score0 = tl.load(old_ptr + D, mask=not is_in_input, other=0.0)
    b_kv0 = tl.where(is_in_input, tl.load(new_ptr, mask=is_in_input, other=0.0), b_kv0)
    if input.score_ptr is None:
        new_ptr = new_ptr + D
    else:
        new_ptr = input.score_ptr + o_token + (o_d - input.stride_t)
    b_score0 = tl.where(is_in_input, tl.load(new_ptr, mask=is_in_input, other=0.0), b_score0)
    b_less = tl.exp2(-tl.abs(b_score - b_score0) * LOG2_E)
    b_p0 = tl.where(b_score0 < b_score, b_less, 1.0)
    b_p1 = tl.where(b_score0 < b_score, 1.0, b_less)
    return (b_kv0 * b_p0 + b_kv * b_p1) / (b_p0 + b_p1)


@triton.jit
def finish_latent(b_x, b_w, eps, D: tl.constexpr, ROUNDING: tl.constexpr):
    """The pooled row [D] normalised and rounded to bf16, in fp32; b_w [D] is the norm's weight."""
    if ROUNDING == "sglang_v41":
        b_x = round_bf16(b_x)
    return round_bf16(rms_norm(b_x, b_w, eps, D))


@triton.jit
def store_main(
    b_latent,  # [D] fp32 with values of bf16
    b_angles,  # [D] fp32, see rope_hadamard.load_angles
    cache,
    slot,
    D: tl.constexpr,
    RECORD: tl.constexpr,
):
    """RoPE, quantisation and store of a latent's main record; a slot < 0 stores nothing."""
    if slot >= 0:
        b_x = rope_tail(b_latent, b_angles, D)
        store_record(b_x, cache, slot, D, RECORD)


@triton.jit
def v41_step_kernel(
    input: V41Input,
    state: State,  # RATIO 2
    norm: Norm,
    keys: Keys,
    table: Table,
    cache: Pages,
    index_cache: Pages,
    tokens: Tokens,
    slot_ptr,  # [T]
    index_slot_ptr,  # [T]
    D: tl.constexpr,
    KEY: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    INDEX_RECORD: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Two programs per token, chunks shorter than a ring: one for the state row and the main
    record, one for the indexer's key. Both make the latent.

    A chunk that is shorter than its ring writes no row that its first token reads.
    """
    pdl_begin(PDL)
    ROUNDING: tl.constexpr = RECORD.rounding
    i_t, is_key = tl.program_id(0), tl.program_id(1) == 1
    o_d, o_n = tl.arange(0, D), tl.arange(0, KEY)
    # weights, which no earlier launch writes
    b_w = tl.load(norm.weight_ptr + o_d).to(tl.float32)
    b_key_w = tl.load(keys.key_weight_ptr + o_n).to(tl.float32)
    wk_ptrs = keys.wk_ptr + (o_n * keys.stride_wk_n)[:, None] + o_d[None, :]
    b_wk = tl.load(wk_ptrs, mask=is_key, other=0.0)
    pdl_wait(PDL)
    slot = tl.load(slot_ptr + i_t).to(tl.int64)
    index_slot = tl.load(index_slot_ptr + i_t).to(tl.int64)
    position = tl.load(tokens.position_ptr + i_t).to(tl.int32)
    first = position + 1 - RATIO
    o_token = i_t.to(tl.int64) * input.stride_t
    token_ptr = input.ptr + o_token
    if RATIO == 2:
        state_row = tl.load(tokens.state_slot_ptr + i_t).to(tl.int64)
        state_row = find_row(state_row, tokens, i_t, i_t >= 0, STATE_BLOCK)
        before = find_row_before_token(tokens, i_t, STATE_BLOCK)
        b_kv, b_score = load_kv_and_score(token_ptr, input.score_ptr, o_token, D)
        if state_row < 0:
            return
        if position % 2 == 0:
            if not is_key:
                store_state_row(b_kv, b_score, state, state_row, D, RATIO, STATE_BLOCK)
            return
        is_in_input = before == row_before(state_row, STATE_BLOCK)
        b_angles = load_angles(table, first, D, IS_SPLIT_TABLE)
        b_key_angles = load_angles(table, first, KEY, IS_SPLIT_TABLE)
        b_x = pool_pair(
            b_kv, b_score, token_ptr, input, o_token, state, state_row, is_in_input, D, STATE_BLOCK
        )
        if not is_key:
            store_state_row(b_kv, b_score, state, state_row, D, RATIO, STATE_BLOCK)
    else:
        b_x = tl.load(token_ptr + o_d).to(tl.float32)
        if (slot < 0) & (index_slot < 0):
            return
        b_angles = load_angles(table, first, D, IS_SPLIT_TABLE)
        b_key_angles = load_angles(table, first, KEY, IS_SPLIT_TABLE)
    b_x = finish_latent(b_x, b_w, norm.eps, D, ROUNDING)
    if is_key:
        if index_slot >= 0:
            b_key = round_bf16(tl.sum(b_wk.to(tl.float32) * b_x[None, :], axis=1))
            b_key = finish_latent(b_key, b_key_w, norm.eps, KEY, "vllm")
            b_key = rope_tail(b_key, b_key_angles, KEY)
            store_record(b_key, index_cache, index_slot, KEY, INDEX_RECORD)
    else:
        store_main(b_x, b_angles, cache, slot, D, RECORD)


@triton.jit(do_not_specialize=["num_requests", "num_tokens"])
def v41_latents_kernel(
    latent_ptr,  # [rows, D] bf16, written where a group ends
    token_ptr,  # [rows] int32, written: the token of each latent, or -1
    input: V41Input,
    state: State,  # RATIO 2
    norm: Norm,
    table: Table,
    cache: Pages,
    tokens: Tokens,
    query_start_ptr,  # [B + 1], RATIO 2; with request_ptr [B], or None where B is T
    slot_ptr,  # [T]
    index_slot_ptr,  # [T]
    num_requests,
    num_tokens,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    STATE_BLOCK: tl.constexpr,
    RECORD: tl.constexpr,
    IS_SPLIT_TABLE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program per latent; the main record of each, and nothing of the state.

    Of ratio 2 the first num_requests programs are the chunks' first tokens, or every token where
    these are not known. The others are pairs of input rows, of which one at most ends a group and
    is no chunk's first token.
    """
    pdl_begin(PDL)
    ROUNDING: tl.constexpr = RECORD.rounding
    i_n, o_d = tl.program_id(0), tl.arange(0, D)
    b_w = tl.load(norm.weight_ptr + o_d).to(tl.float32)
    pdl_wait(PDL)
    if RATIO == 1:
        i_t = i_n
        slot = tl.load(slot_ptr + i_t).to(tl.int64)
        is_end = (slot >= 0) | (tl.load(index_slot_ptr + i_t) >= 0)
        position = tl.load(tokens.position_ptr + i_t).to(tl.int32)
    else:
        is_first = i_n < num_requests
        start, end = i_n, num_tokens
        if query_start_ptr is not None:
            start = tl.load(query_start_ptr + i_n, mask=is_first, other=0).to(tl.int32)
        if tokens.request_ptr is None:
            end = tl.load(query_start_ptr + i_n + 1, mask=is_first, other=num_tokens).to(tl.int32)
        i_pair = 2 * (i_n - num_requests)
        parity = tl.load(tokens.position_ptr + i_pair, mask=not is_first, other=1).to(tl.int32) % 2
        i_t = tl.where(is_first, start, i_pair + 1 - parity)
        is_token = i_t < tl.minimum(end, num_tokens)
        position = tl.load(tokens.position_ptr + i_t, mask=is_token, other=0).to(tl.int32)
        state_row = tl.load(tokens.state_slot_ptr + i_t, mask=is_token, other=-1).to(tl.int64)
        state_row = find_row(state_row, tokens, i_t, is_token, STATE_BLOCK)
        before = find_row_before_token(tokens, i_t, STATE_BLOCK)
        is_in_input = before == row_before(state_row, STATE_BLOCK)
        is_end = (state_row >= 0) & (position % 2 == 1) & (is_in_input != is_first)
        slot = tl.load(slot_ptr + i_t, mask=is_end, other=-1).to(tl.int64)
    tl.store(token_ptr + i_n, tl.where(is_end, i_t, -1))
    if not is_end:
        return
    o_token = i_t.to(tl.int64) * input.stride_t
    row_ptr = input.ptr + o_token
    b_angles = load_angles(table, position + 1 - RATIO, D, IS_SPLIT_TABLE)
    if RATIO == 1:
        b_x = tl.load(row_ptr + o_d).to(tl.float32)
    else:
        b_kv, b_score = load_kv_and_score(row_ptr, input.score_ptr, o_token, D)
        b_x = pool_pair(
            b_kv, b_score, row_ptr, input, o_token, state, state_row, is_in_input, D, STATE_BLOCK
        )
    b_x = finish_latent(b_x, b_w, norm.eps, D, ROUNDING)
    tl.store(latent_ptr + i_n.to(tl.int64) * D + o_d, b_x.to(tl.bfloat16))
    store_main(b_x, b_angles, cache, slot, D, RECORD)
