"""Arguments that kernels and their functions take together; see `backend_core.launch.head`."""

from typing import Any, NamedTuple


class Input(NamedTuple):
    """Projections of the step's tokens: [tokens, 2·C·D] fp32 or bf16."""

    ptr: Any
    stride_t: Any


class State(NamedTuple):
    """Rows [kv | score] of 2·C·D elements: [pages, STATE_BLOCK, 2·C·D] fp32 or bf16."""

    ptr: Any
    stride_b: Any
    stride_r: Any


class Ape(NamedTuple):
    """Absolute position embedding of the scores: [RATIO, C, D] fp32 or bf16."""

    ptr: Any
    stride_r: Any
    stride_c: Any


class Norm(NamedTuple):
    """The weight [D] of the norm of a pooled row, and its eps."""

    weight_ptr: Any
    eps: Any


class Table(NamedTuple):
    """RoPE's angles: [positions, 64], see ``rope_hadamard.load_angles``."""

    ptr: Any
    stride_p: Any


class Cache(NamedTuple):
    """Pages of records: uint8 [pages, page bytes]; second_ptr is ``None`` unless the record format
    keeps a part of its bytes in a second tensor, uint8 [pages, second page bytes]."""

    ptr: Any
    stride_p: Any
    second_ptr: Any
    stride_second_p: Any


class Pages(NamedTuple):
    """`Cache` of the formats without a second tensor."""

    ptr: Any
    stride_p: Any


class Record(NamedTuple):
    """How a row is stored: rows of a page, the format and the engine's rounding
    (`backend_core.formats`), and whether its e4m3 is AMD's older one."""

    page: int
    format: str
    rounding: str
    is_fnuz: bool


class Step(NamedTuple):
    """Tensors of a step plan; a layout of the state leaves the other's fields ``None``.

    ring: entry_ptr [N, 4] int32, decode {seq_len, state row, previous page, own page}, prefill
    {seq_len, token | rows in the state << 16, previous page, own page}.

    paged: position_ptr, request_ptr [T]; block_table_ptr [B, blocks]; of prefill also
    window_end_ptr [N] and query_start_ptr [B + 1].
    """

    entry_ptr: Any
    position_ptr: Any
    request_ptr: Any
    block_table_ptr: Any
    stride_block_table_b: Any
    window_end_ptr: Any
    query_start_ptr: Any


class V41Input(NamedTuple):
    """V4.1's `Input`: [T, RATIO·D] fp32, of ratio 1 also bf16; with score_ptr [T, D] fp32, of ratio
    2, it is [T, D] and has the strides of the scores."""

    ptr: Any
    score_ptr: Any
    stride_t: Any


class Tokens(NamedTuple):
    """V4.1's tokens, [T]: of ratio 1 their positions alone; request_ptr may be ``None``."""

    position_ptr: Any
    state_slot_ptr: Any
    request_ptr: Any


class Keys(NamedTuple):
    """The projection [KEY, D] bf16 from latents to the indexer's keys, and their norm's weight
    [KEY]."""

    wk_ptr: Any
    stride_wk_n: Any
    key_weight_ptr: Any


class Window(NamedTuple):
    """A window that ends with a token.

    seq_len counts the sequence's tokens up to it; the first rows_in_state rows lie in the state. On
    a ring they are in the pages page_0 (previous window) and page_1 (own); in the paged layout both
    are the request's row of the block table.
    """

    seq_len: Any
    rows_in_state: Any
    page_0: Any
    page_1: Any
