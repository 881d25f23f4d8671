"""Prefill on Hopper: the two stages in CUDA C++ (kernels/sm90), for bf16 inputs and K = V = 128."""

from __future__ import annotations

import functools
import itertools
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from backend_core.target import detect_target
from kda_backend.metadata import ChunkMetadata
from kda_backend.validation import KdaInputs, StateInputs
from kda_backend.workspace import Workspace

if TYPE_CHECKING:
    from backend_core.cuda_source import CudaKernel
    from backend_core.path_table import KernelPath

KERNELS = Path(__file__).parent / "kernels" / "sm90"
DIM = 128
TILE_BYTES = 9 * 8192  # -w, q_in, k_out, A_qk, u in 8 KiB blocks
_INTRA_THREADS, _INTRA_SHARED = 128, 56384  # sizeof(Shared) of intra_chunk.cu
_INTRA_BLOCKS = (2, 3, 4)  # on one multiprocessor
_SCAN_THREADS = 384
_SCAN_SHARED = {False: 223232, True: 224256}  # sizeof(Shared) of scan.cu, by SPLIT
# struct Params of the two sources
_INTRA_PARAMS = struct.Struct("=12Q10q2if3iQ")
_SCAN_PARAMS = struct.Struct("=13Q14qf3iQ")


def two_stage_sm90(
    path: KernelPath,
    x: KdaInputs,
    meta: ChunkMetadata,
    state: StateInputs,
    out: torch.Tensor,
    chunk_states: torch.Tensor | None,
    workspace: Workspace,
) -> None:
    """Scores and solve of each chunk in one kernel, the scan of each sequence in another.

    The scan starts on multiprocessors that the first kernel leaves to it, and finds by flags which
    tiles are there.
    """
    if meta.num_sequences == 0:
        return  # no scan block would take back what intra blocks count in the workspace
    q, q_address, stride_q_t, stride_q_h = _rows(x.q)
    _k, k_address, stride_k_t, stride_k_h = _rows(x.k)
    v, v_address, stride_v_t, stride_v_h = _rows(x.v)
    _g, g_address, stride_g_t, stride_g_h = _rows(x.g)
    o, o_address, stride_o_t, stride_o_h = _rows(out)
    a_log, dt_bias = _parameter(x.a_log), _parameter(x.dt_bias)
    beta = x.beta if x.beta.dtype != torch.float16 else x.beta.float()
    _, stride_beta_t, stride_beta_h = beta.stride()
    value_heads = v.shape[2]
    pool = state.read if state.read is not None else state.write
    model = _model(
        path,
        q.device,
        x.gate,
        x.beta_kind,
        x.l2norm,
        beta.dtype,
        meta.cu_seqlens.dtype == torch.int64,
        pool is not None and pool.dtype == torch.bfloat16,
        chunk_states is not None or state.snapshots is not None,
    )
    num_tiles = meta.num_chunks * value_heads
    tiles, totals = workspace.buffers(num_tiles, TILE_BYTES, DIM)
    flags = workspace.flags().data_ptr()
    num_tasks = value_heads * meta.num_sequences
    work = Work(num_tiles, num_tasks, meta.max_chunks, value_heads * meta.long_sequences)
    layout = lay_out(model.costs, work)
    table = meta.chunk_table
    assert table is not None
    model.intra[layout.per_sm](
        layout.intra_blocks,
        _INTRA_THREADS,
        _INTRA_PARAMS.pack(
            q_address,
            k_address,
            v_address,
            g_address,
            beta.data_ptr(),
            _address(a_log),
            _address(dt_bias),
            tiles.data_ptr(),
            totals.data_ptr(),
            table.start.data_ptr(),
            table.length.data_ptr(),
            (table.in_turn if layout.in_turn else table.abreast).data_ptr(),
            stride_q_t,
            stride_q_h,
            stride_k_t,
            stride_k_h,
            stride_v_t,
            stride_v_h,
            stride_g_t,
            stride_g_h,
            stride_beta_t,
            stride_beta_h,
            value_heads,
            value_heads // q.shape[2],
            x.lower_bound,
            num_tiles,
            layout.first_scan_sm,
            layout.limit,
            flags,
        ),
    )
    scan_params = _SCAN_PARAMS.pack(
        tiles.data_ptr(),
        totals.data_ptr(),
        o_address,
        _address(state.read),
        _address(state.write),
        _address(state.indices),
        _address(state.has_initial),
        _address(chunk_states),
        _address(state.snapshot_chunks),
        _address(state.snapshots),
        meta.cu_seqlens.data_ptr(),
        table.offsets.data_ptr(),
        table.sequence_order.data_ptr(),
        stride_o_t,
        stride_o_h,
        *state.strides(state.read),
        *state.strides(state.write),
        *state.strides(chunk_states),
        x.scale,
        0 if state.snapshot_chunks is None else state.snapshot_chunks.shape[1],
        value_heads,
        num_tasks * (2 if layout.split else 1),
        flags,
    )
    scan = model.scan[layout.split]
    try:
        scan(layout.scan_blocks, _SCAN_THREADS, scan_params, overlaps=True)
    except Exception:
        workspace.clear_flags()  # which this scan would have taken back
        raise
    if o is not out:
        out.copy_(o)


class IntraCosts(NamedTuple):
    """The intra stage with so many blocks on one multiprocessor; times in ns.

    Attributes:
        blocks: on one multiprocessor; each makes one tile at a time.
        tile_ns: a multiprocessor's time for a tile, its blocks together.
        alone_ns: time of the last tiles, when there is less than one for each block.
    """

    blocks: int
    tile_ns: int
    alone_ns: int


class ScanCosts(NamedTuple):
    """The scan in one of its forms; times in ns.

    Attributes:
        split: the output of each half of the value rows has a block of its own.
        start_ns: a task's time beside its steps.
        step_ns: time of a chunk.
    """

    split: bool
    start_ns: int
    step_ns: int

    @property
    def blocks(self) -> int:
        """Blocks for a sequence and head, each on a multiprocessor of its own."""
        return 4 if self.split else 1

    def task_ns(self, chunks: int) -> int:
        return self.start_ns + chunks * self.step_ns


class Costs(NamedTuple):
    """What the layout of a launch is estimated from: the path's parameters, times in ns.

    Attributes:
        num_sms: multiprocessors of the device.
        intra: the choices of the intra stage.
        scan: those of the scan.
        fetch_ns: a tile's way from memory to the scan, when all multiprocessors fetch.
    """

    num_sms: int
    intra: tuple[IntraCosts, ...]
    scan: tuple[ScanCosts, ...]
    fetch_ns: int


def costs_of(params: Mapping[str, int | bool | str], num_sms: int) -> Costs:
    """The costs in a table row: ``intra_4_tile_ns``, ``intra_4_alone_ns`` and so on."""
    return Costs(
        num_sms,
        tuple(
            IntraCosts(
                blocks,
                int(params[f"intra_{blocks}_tile_ns"]),
                int(params[f"intra_{blocks}_alone_ns"]),
            )
            for blocks in _INTRA_BLOCKS
            if f"intra_{blocks}_tile_ns" in params
        ),
        tuple(
            ScanCosts(split, *(int(params[f"{name}_{what}_ns"]) for what in ("start", "step")))
            for split, name in ((False, "scan"), (True, "split"))
        ),
        int(params["fetch_ns"]),
    )


class Layout(NamedTuple):
    """How one call shares the multiprocessors.

    Attributes:
        per_sm: intra blocks on one multiprocessor.
        split: the form of the scan.
        scan_blocks: each occupies a whole multiprocessor; tasks beyond their number come in turn.
        intra_blocks: in all.
        first_scan_sm: the multiprocessors from this one on are left to the scan,
        limit: when every intra block there has made so many tiles.
        in_turn: tiles are made for one sequence after the other, not for all abreast.
    """

    per_sm: int
    split: bool
    scan_blocks: int
    intra_blocks: int
    first_scan_sm: int
    limit: int
    in_turn: bool


class Work(NamedTuple):
    """What a call has to do.

    Attributes:
        tiles: chunks times value heads.
        tasks: sequences times value heads.
        chunks: of the longest sequence.
        long_tasks: those of more than half as many chunks.
    """

    tiles: int
    tasks: int
    chunks: int
    long_tasks: int


@functools.lru_cache(maxsize=4096)
def lay_out(costs: Costs, work: Work) -> Layout:
    """The layout with the least estimated time."""
    return min(layouts(costs, work))[1]


def layouts(costs: Costs, work: Work) -> Iterator[tuple[float, Layout]]:
    """The layouts worth a thought, each with its estimated time in ns."""
    for intra, scan in itertools.product(costs.intra, costs.scan):
        yield _tiles_first(costs, work, intra, scan)
        yield from _long_tasks_beside(costs, work, intra, scan)
        if not scan.split:
            yield from _tasks_in_turn(costs, work, intra, scan)


def _tiles_first(
    costs: Costs, work: Work, intra: IntraCosts, scan: ScanCosts
) -> tuple[float, Layout]:
    """All tiles, then the scan."""
    sms, per_sm = costs.num_sms, intra.blocks
    rounds, rest = divmod(-(-work.tiles // sms), per_sm)
    intra_ns = rounds * per_sm * intra.tile_ns
    intra_ns += max(intra.alone_ns, rest * intra.tile_ns) if rest else 0
    waves = -(-work.long_tasks * scan.blocks // sms)
    scan_ns = waves * scan.task_ns(work.chunks) + _short_ns(work, scan) / sms
    scan_ns = max(scan_ns, work.tiles * costs.fetch_ns)
    blocks = sms if work.tiles <= sms else per_sm * sms
    layout = Layout(per_sm, scan.split, _scan_blocks(costs, work, scan), blocks, sms, 0, False)
    return intra_ns + scan_ns, layout


def _long_tasks_beside(
    costs: Costs, work: Work, intra: IntraCosts, scan: ScanCosts
) -> Iterator[tuple[float, Layout]]:
    """The long tasks beside the tiles, on multiprocessors of their own; the others behind them."""
    per_sm, tile_ns = intra.blocks, intra.tile_ns
    at_once = per_sm * costs.num_sms
    others = costs.num_sms - work.long_tasks * scan.blocks
    if others <= 0:
        return
    short_tasks = work.tasks - work.long_tasks
    last_ns: float = scan.start_ns
    if short_tasks:
        last_ns = max(_short_ns(work, scan) / others, _short_steps(work) * costs.fetch_ns)
    long_ns = scan.task_ns(work.chunks)
    beside = others * max(0.0, long_ns - last_ns) / tile_ns
    most = max(0, int((work.tiles - beside) // at_once))
    for limit in (most, most + 1):
        head_ns = limit * per_sm * tile_ns
        rest_ns = max(0, work.tiles - limit * at_once) * tile_ns / others
        # no tile is there before the first round is over
        first_ns = max(intra.alone_ns, min(per_sm, -(-work.tiles // others)) * tile_ns)
        start_ns = first_ns if limit == 0 else 0
        ns = head_ns + max(start_ns + long_ns, rest_ns + last_ns)
        blocks = costs.num_sms if work.tiles <= others else at_once
        scan_blocks = _scan_blocks(costs, work, scan)
        yield ns, Layout(per_sm, scan.split, scan_blocks, blocks, others, limit, False)


def _tasks_in_turn(
    costs: Costs, work: Work, intra: IntraCosts, scan: ScanCosts
) -> Iterator[tuple[float, Layout]]:
    """Tiles of one sequence after the other; some multiprocessors take its tasks as they come."""
    sms, at_once = costs.num_sms, intra.blocks * costs.num_sms
    if work.tiles <= at_once:
        return
    work_ns = work.tasks * scan.start_ns + work.tiles * scan.step_ns
    first_ns = intra.blocks * intra.tile_ns  # nothing can be scanned before, so all make tiles
    short_tasks = work.tasks - work.long_tasks
    last_chunks = -(-_short_steps(work) // short_tasks) if short_tasks else work.chunks
    for workers in range(4, min(work.tasks, sms // 2), 4):
        rest_ns = (work.tiles - at_once) * intra.tile_ns / (sms - workers)
        left = max(0.0, 1 - workers * rest_ns / work_ns)  # of the scan, when all tiles are there
        last_ns = max(
            scan.task_ns(last_chunks), left * work_ns / sms, left * work.tiles * costs.fetch_ns
        )
        scan_blocks = _scan_blocks(costs, work, scan)
        layout = Layout(intra.blocks, False, scan_blocks, at_once, sms - workers, 1, True)
        yield first_ns + max(rest_ns + last_ns, scan.task_ns(work.chunks)), layout


def _short_steps(work: Work) -> int:
    """Chunks of the tasks that are not long, if the long ones are equal."""
    return max(0, work.tiles - work.long_tasks * work.chunks)


def _short_ns(work: Work, scan: ScanCosts) -> int:
    """What the tasks that are not long take, in ns of one multiprocessor."""
    steps = _short_steps(work)
    return scan.blocks * ((work.tasks - work.long_tasks) * scan.start_ns + steps * scan.step_ns)


def _scan_blocks(costs: Costs, work: Work, scan: ScanCosts) -> int:
    return work.tasks * scan.blocks if scan.split else min(work.tasks, costs.num_sms)


class _Model(NamedTuple):
    """The kernels of one model on one path and device.

    ``intra`` by blocks on one multiprocessor; ``scan`` without and with SPLIT.
    """

    intra: Mapping[int, CudaKernel]
    scan: tuple[CudaKernel, CudaKernel]
    costs: Costs


@functools.cache
def _model(
    path: KernelPath,
    device: torch.device,
    gate: int,
    beta: int,
    l2norm: bool,
    beta_dtype: torch.dtype,
    int64_offsets: bool,
    bf16_state: bool,
    track: bool,
) -> _Model:
    from backend_core.cuda_source import CudaKernel

    costs = costs_of(path.params, detect_target(device).num_sms)
    intra = {
        choice.blocks: CudaKernel(
            KERNELS / "intra_chunk.cu",
            "intra_chunk",
            intra_defines(gate, beta, l2norm, beta_dtype, choice.blocks),
            _INTRA_SHARED,
        )
        for choice in costs.intra
    }
    plain, split = (
        CudaKernel(
            KERNELS / "scan.cu",
            "scan",
            scan_defines(int64_offsets, bf16_state, track, split),
            _SCAN_SHARED[split],
        )
        for split in (False, True)
    )
    # all of them now: a later batch may be the first to choose one
    for kernel in (*intra.values(), plain, split):
        kernel.load()
    return _Model(intra, (plain, split), costs)


def intra_defines(
    gate: int, beta: int, l2norm: bool, beta_dtype: torch.dtype, min_blocks: int
) -> dict[str, int]:
    """Preprocessor constants of one variant of intra_chunk.cu."""
    return {
        "GATE": gate,
        "BETA": beta,
        "L2NORM": int(l2norm),
        "BETA_FP32": int(beta_dtype == torch.float32),
        "MIN_BLOCKS": min_blocks,
        "SHARED_BYTES": _INTRA_SHARED,
        "PARAM_BYTES": _INTRA_PARAMS.size,
    }


def scan_defines(int64_offsets: bool, bf16_state: bool, track: bool, split: bool) -> dict[str, int]:
    """Preprocessor constants of one variant of scan.cu."""
    return {
        "CU_INT64": int(int64_offsets),
        "STATE_BF16": int(bf16_state),
        "TRACK": int(track),
        "SPLIT": int(split),
        "SHARED_BYTES": _SCAN_SHARED[split],
        "PARAM_BYTES": _SCAN_PARAMS.size,
    }


def _rows(x: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """(x, its address, token stride, head stride), or those of a packed copy: vector loads and
    stores want the rows of heads on 16 bytes."""
    _, stride_t, stride_h, _ = x.stride()
    address = x.data_ptr()
    if (address | 2 * stride_t | 2 * stride_h) & 15:
        return _rows(x.clone(memory_format=torch.contiguous_format))
    return x, address, stride_t, stride_h


def _parameter(x: torch.Tensor | None) -> torch.Tensor | None:
    """A gate parameter in fp32, aligned."""
    if x is None or (x.dtype == torch.float32 and x.data_ptr() % 16 == 0):
        return x
    return x.float() if x.dtype != torch.float32 else x.clone()


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
