"""The calls that redesign_pair.py makes in two trees of this repository, with the same inputs.

What the trees call differently is in the adapters below; a tree's own modules are imported late.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable
from typing import Any

import torch

DIM, EPS = 128, 1e-5
COLD_BYTES = (
    150e6  # three times an H200's L2: what a step's states must have passed since last used
)
RAGGED = [1300, 547, 2048, 963, 271, 3063]
SEQUENCES = ([512], [2048], [8192], [32768], [1024] * 8)
PREFILL = [(h, lens, None) for h in (32, 16, 8, 4) for lens in SEQUENCES] + [(32, RAGGED, None)]
PREFILL += [
    (h, lens, -5.0)
    for h, lens in [
        (32, [512]),
        *((h, [8192]) for h in (32, 16, 8, 4)),
        (4, [32768]),
        *((h, [1024] * 8) for h in (32, 8)),
    ]
]
DECODE = list(itertools.product((32, 16, 8, 4), (1, 8, 32, 64, 256, 512)))
COMPRESSORS = (("main", 4), ("indexer", 4), ("main", 128))


@dataclasses.dataclass
class Prepared:
    """One item, ready to be timed.

    Attributes:
        graph_calls: each is captured once, in this order, in one graph.
        outputs: what the first call wrote, copied.
    """

    graph_calls: list[Callable[[], object]]
    outputs: list[torch.Tensor]


def items() -> dict[str, Callable[[], Prepared]]:
    """Every item by name, in the order of the result."""
    found: dict[str, Callable[[], Prepared]] = {}
    for heads, lens, bound in PREFILL:
        lengths = f"{len(lens)} x {lens[0]}" if len(set(lens)) == 1 else f"{len(lens)} ragged"
        gate = "unbounded" if bound is None else "bounded"
        name = f"kda prefill H={heads} {lengths} {gate}"
        found[name] = functools.partial(kda_prefill, heads, lens, bound)
    for heads, rows in DECODE:
        found[f"kda decode H={heads} rows={rows}"] = functools.partial(kda_decode, heads, rows)
    for (part, ratio), rows, ends in itertools.product(COMPRESSORS, (1, 64, 512), ("all", "mixed")):
        name = f"compressor decode {part} c{ratio} rows={rows} ends={ends}"
        found[name] = functools.partial(compressor, "decode", part, ratio, rows, ends)
    for (part, ratio), tokens in itertools.product(COMPRESSORS, (1024, 16384)):
        name = f"compressor prefill {part} c{ratio} tokens={tokens}"
        found[name] = functools.partial(compressor, "prefill", part, ratio, tokens, "all")
    for rows in (1, 64, 512):
        found[f"compressor in place rows={rows}"] = functools.partial(in_place_rows, rows)
        found[f"indexer queries fp8 rows={rows}"] = functools.partial(indexer_queries, rows)
    return found


# ---- inputs, the same in both trees ----


class Draw:
    """Seeded random tensors on the GPU."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator("cuda").manual_seed(seed)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device="cuda")

    def uniform(self, *shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=self._generator, device="cuda")

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self._generator, device="cuda")


def gate_parameters(draw: Draw, heads: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(A_log [heads], dt_bias [heads * 128]) as Hugging Face initialises them."""
    dt = (draw.uniform(heads, DIM) * math.log(100.0) + math.log(1e-3)).exp()
    dt_bias = dt + torch.log(-torch.expm1(-dt))
    return (draw.uniform(heads) * 15 + 1).log(), dt_bias.flatten()


# ---- one adapter per tree: names that differ ----


def kda_names() -> dict[str, Any]:
    """Of the operators' arguments and of what makes them."""
    from kda_backend import chunk_kda

    if "step_plan" in inspect.signature(chunk_kda).parameters:
        from kda_backend.scratch import Scratch
        from kda_backend.selection import KdaShape, select
        from kda_backend.step_plan import build_step_plan

        names = ("step_plan", "scratch", "selection", "pdl_prefetch_safe")
        makers = (build_step_plan, Scratch, select, KdaShape)
    else:
        from kda_backend.metadata import build_metadata
        from kda_backend.paths import KdaShape, select
        from kda_backend.workspace import Workspace

        names = ("metadata", "workspace", "plan", "pools_settled")
        makers = (build_metadata, Workspace, select, KdaShape)
    keys = ("step_plan", "scratch", "selection", "pdl_prefetch_safe")
    return dict(zip(keys, names, strict=True)) | dict(
        zip(("build_plan", "Scratch", "select", "KdaShape"), makers, strict=True)
    )


def compressor_extras(operator: Callable[..., object]) -> dict[str, Any]:
    """An explicit cache of launches, where the tree has one."""
    if "launches" not in inspect.signature(operator).parameters:
        return {}
    from dsv4_backend import LaunchCache

    return {"launches": LaunchCache()}


def settled(plan_class: type) -> dict[str, bool]:
    """The promise that no kernel in flight writes the plan or the state."""
    fields = {field.name for field in dataclasses.fields(plan_class)}
    return {"pdl_prefetch_safe" if "pdl_prefetch_safe" in fields else "is_settled": True}


# ---- the items ----


def kda_prefill(heads: int, lens: list[int], lower_bound: float | None) -> Prepared:
    from backend_core.target import detect_target
    from kda_backend import chunk_kda

    names, draw, tokens = kda_names(), Draw(7), sum(lens)
    q, k, v, g = (draw.normal(1, tokens, heads, DIM) for _ in range(4))
    beta = draw.normal(1, tokens, heads)
    a_log, dt_bias = gate_parameters(draw, heads)
    q, k, v, g, beta = (x.bfloat16() for x in (q, k, v, 0.3 * g, beta))
    offsets = torch.tensor([0, *itertools.accumulate(lens)], dtype=torch.int32)
    pool = torch.zeros(len(lens) + 2, heads, DIM, DIM, device="cuda")
    pool[1:-1] = 0.3 * draw.normal(len(lens), heads, DIM, DIM)
    out = torch.full_like(v, math.nan)
    shape = names["KdaShape"](heads, heads, DIM, DIM, lower_bound is not None)
    arguments = {
        names["step_plan"]: names["build_plan"](offsets.cuda(), tokens, cu_seqlens_cpu=offsets),
        names["scratch"]: names["Scratch"](q.device),
        names["selection"]: names["select"](detect_target(), shape),
    }
    indices = torch.arange(len(lens), dtype=torch.int32, device="cuda") + 1

    def call() -> None:
        chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            safe_gate=lower_bound is not None,
            lower_bound=lower_bound,
            A_log=a_log,
            dt_bias=dt_bias,
            state_pool=pool,
            state_indices=indices,
            out=out,
            **arguments,
        )

    call()
    outputs = [out.clone(), pool.clone()]
    count = 20 if tokens * heads <= 1 << 16 else 4
    return Prepared([call] * count, outputs)


def kda_decode(heads: int, rows: int) -> Prepared:
    from backend_core.target import detect_target
    from kda_backend import kda_decode_step

    names, draw = kda_names(), Draw(1)
    calls = max(4, min(600, round(COLD_BYTES / (rows * heads * DIM * DIM * 4))))
    channels, slots = 3 * heads * DIM, calls * rows + 1
    states = draw.normal(slots, heads, DIM, DIM)
    windows = draw.normal(slots, 3, channels).bfloat16()
    qkv = draw.normal(rows, channels).bfloat16()
    g = (0.3 * draw.normal(rows, heads, DIM)).bfloat16()
    beta = draw.normal(rows, heads).bfloat16()
    z = draw.normal(rows, heads, DIM).bfloat16()
    a_log, dt_bias = gate_parameters(draw, heads)
    q, k, v = (x.unflatten(1, (heads, DIM)) for x in qkv.chunk(3, 1))
    order = torch.randperm(slots - 1, generator=torch.Generator().manual_seed(1)) + 1
    indices = order.int().view(calls, rows).cuda()
    out = torch.full_like(z, math.nan)
    arguments = {
        names["selection"]: names["select"](
            detect_target(), names["KdaShape"](heads, heads, DIM, DIM)
        ),
        names["pdl_prefetch_safe"]: True,  # the call before has other slots
        "conv_weight": 0.5 * draw.normal(channels, 4),
        "norm_weight": 1 + 0.1 * draw.normal(DIM),
    }

    def call(i: int) -> None:
        kda_decode_step(
            q,
            k,
            v,
            g,
            beta,
            states,
            indices[i],
            use_qk_l2norm_in_kernel=True,
            use_gate_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            A_log=a_log,
            dt_bias=dt_bias,
            conv_state=windows.transpose(1, 2),
            norm_gate=z,
            norm_eps=EPS,
            out=out,
            **arguments,
        )

    call(0)
    own = indices[0].long()
    outputs = [out.clone(), states[own], windows[own]]
    return Prepared([functools.partial(call, i) for i in range(calls)], outputs)


@functools.cache
def rope_table() -> torch.Tensor:
    """[positions, 64], cosines first."""
    angle = Draw(3).uniform(65536 + 8192, 32) * 6.3
    return torch.cat((angle.cos(), angle.sin()), 1)


def compressor_spec(part: str, ratio: int) -> Any:
    from dsv4_backend import CompressorSpec

    is_indexer = part == "indexer"
    return CompressorSpec(
        head_dim=128 if is_indexer else 512,
        compress_ratio=ratio,
        cache_format="indexer_fp8" if is_indexer else "fp8_ds_mla",
        page_tokens=64,
        rounding="vllm",
        rotate=False,
        fp8="ocp",
        rope_layout="split",
        eps=1e-6,
    )


def compressor(phase: str, part: str, ratio: int, count: int, ends: str) -> Prepared:
    """Decode of ``count`` requests, or prefill of one with ``count`` tokens, in vLLM's layout."""
    from dsv4_backend import (
        CompressorLayer,
        PagedDecode,
        PagedPrefill,
        compress_decode_,
        compress_prefill_,
        window_ends,
    )

    draw, spec, is_prefill = Draw(11), compressor_spec(part, ratio), phase == "prefill"
    if is_prefill:
        positions = torch.arange(count, device="cuda")
        requests = torch.zeros(count, dtype=torch.int64, device="cuda")
    else:
        positions = draw.integers(4096, 8192, count)
        if ends == "all":
            positions = positions // ratio * ratio + ratio - 1
        requests = torch.arange(count, device="cuda")
    sequences, block = int(requests.max()) + 1, 4 if ratio == 4 else 8
    last = int(positions.max()) // block + 1
    # Decoding requests keep a window; a prefilled one keeps all, as vLLM does within a step.
    kept = last if is_prefill else spec.window // block + 1
    own = torch.arange(last, device="cuda") % kept
    table = (own[None] + kept * torch.arange(sequences, device="cuda")[:, None]).int()
    state = draw.normal(sequences * kept, block, spec.row_width)
    state_slots = table[requests, positions // block].long() * block + positions % block
    is_end = (positions + 1) % ratio == 0
    slots = torch.where(is_end, is_end.cumsum(0) - 1, -1)
    page_bytes = -(-spec.page_bytes // 576) * 576
    cache = torch.zeros(count // 64 + 1, page_bytes, dtype=torch.uint8, device="cuda")
    layer = CompressorLayer(
        spec,
        ape=draw.normal(ratio, spec.halves, spec.head_dim),
        norm_weight=1 + 0.1 * draw.normal(spec.head_dim),
        rope_table=rope_table(),
    )
    kv_score = draw.normal(count, spec.row_width)
    common = (positions, state_slots, requests.int(), table, slots)
    operator: Callable[..., None] = compress_decode_
    plan: Any = PagedDecode(*common, **settled(PagedDecode))
    if is_prefill:
        starts = torch.searchsorted(requests, torch.arange(sequences + 1, device="cuda")).int()
        ends_at = window_ends(positions, state_slots, sequences, ratio)
        operator, plan = compress_prefill_, PagedPrefill(*common, starts, ends_at)
    extras = compressor_extras(operator)

    def call() -> None:
        operator(layer, kv_score, state, cache, plan, **extras)

    call()
    return Prepared([call] * 20, [state.clone(), cache.clone()])


def in_place_rows(rows: int) -> Prepared:
    from dsv4_backend import SeqLens, compress_norm_rope_hadamard_

    draw = Draw(13)
    x, weight = draw.normal(rows, 128), torch.ones(128, device="cuda")
    table = torch.stack(rope_table().chunk(2, 1), -1).flatten(1).contiguous()
    plan = SeqLens((draw.integers(1, 4096, rows) * 4).int())

    def call() -> None:
        compress_norm_rope_hadamard_(
            x, weight, 1e-6, table, plan, head_dim=128, compress_ratio=4, rotate=True
        )

    call()
    return Prepared([call] * 20, [x.clone()])


def indexer_queries(rows: int) -> Prepared:
    from dsv4_backend import quantise_indexer_queries

    draw, spec = Draw(17), compressor_spec("indexer", 4)
    q, weights = draw.normal(rows, 64, 128).bfloat16(), draw.normal(rows, 64).bfloat16()
    positions = draw.integers(4096, 8192, rows)

    def call() -> Any:
        return quantise_indexer_queries(
            spec, q, positions, rope_table(), weights, 128**-0.5, 64**-0.5
        )

    outputs = [x.clone() for x in call() if isinstance(x, torch.Tensor)]
    return Prepared([call] * 20, outputs)
