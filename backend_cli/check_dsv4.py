"""What ``kda-dsv4 check`` asks of a compressor path: steps of a small engine, byte by byte.

Each call is made twice, on the path under test and by ``dsv4_backend.reference_step`` in float64 on
the CPU, from the same state and cache. State rows must be equal bit for bit, bytes outside the
written records untouched, and records equal but for roundings that fp32 cannot tell apart.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch

from backend_core.path_table import PathSelection
from backend_core.table_file import KernelPath
from backend_core.target import Target
from dsv4_backend import (
    CompressorLayer,
    CompressorSpec,
    PagedDecode,
    PagedPrefill,
    RingDecode,
    RingDecodeV1,
    RingPrefill,
    RingPrefillV1,
    RowPlan,
    SeqLens,
    compress_decode_,
    compress_decode_pair_,
    compress_norm_rope_hadamard_,
    compress_prefill_,
    paths,
    reference,
    reference_step,
    window_ends,
)
from dsv4_backend.metadata import CacheFormat
from dsv4_backend.plans import DecodePlan, PrefillPlan

Layout = Literal["paged", "ring", "ring_v1"]
Part = tuple[CompressorLayer, torch.Tensor, torch.Tensor, torch.Tensor]
Plan = TypeVar("Plan", bound=DecodePlan | PrefillPlan | SeqLens | RowPlan)

ALLOWED = 0.02
"""Share of the written values that may differ from the definition's, each by one step of its code:
float32 meets the middle between two codes on the other side."""

_POISON = 0xA5
_PAGE_TOKENS = 4
_KINDS = ("in_place_128", "in_place_512", "indexer", "main_c4", "main_c128", "pair")


def cases(path: KernelPath) -> dict[str, Callable[[Target, torch.device], float]]:
    """The calls that ``path`` must get right, by name; each returns the share of
    values that differ."""
    found: dict[str, Callable[[Target, torch.device], float]] = {}
    declared: list[Layout] = [x for x in ("paged", "ring", "ring_v1") if x in path.features]
    for kind in _KINDS:
        if kind not in path.features:
            continue
        for hard in (False, True):
            name = f"{kind}, {'adversarial' if hard else 'small'}"
            if kind.startswith("in_place"):
                found[name] = _in_place(path, int(kind[9:]), hard)
                continue
            for layout in declared or ("paged", "ring"):
                found[f"{name}, {layout}"] = _steps(path, kind, layout, hard)
    return found


@dataclass
class Engine:
    """A compressor with the state and cache of requests, all on the CPU.

    Attributes:
        lengths: tokens of each request at the end.
        history: the projections of each request, ``[length, row_width]`` fp32.
    """

    layer: CompressorLayer
    layout: Layout
    lengths: tuple[int, ...]
    history: list[torch.Tensor]
    state: torch.Tensor
    cache: torch.Tensor

    @property
    def spec(self) -> CompressorSpec:
        return self.layer.spec

    @property
    def block(self) -> int:
        return self.state.shape[1]

    def location(self, request: int, position: int) -> int:
        """The state row of a token, counted over all pages."""
        if self.layout == "paged":
            return int(self.block_table()[request, position // self.block]) * self.block + (
                position % self.block
            )
        return request * self.spec.window + position % self.spec.window

    def block_table(self) -> torch.Tensor:
        """[requests, blocks] int32; the blocks of one request are not neighbours."""
        requests, blocks = len(self.lengths), max(self.lengths) // self.block + 1
        return torch.arange(requests * blocks, dtype=torch.int32).view(blocks, requests).T

    def slot(self, request: int, position: int) -> int:
        """The cache slot of the window that ends at a position, -1 where none does."""
        window, rest = divmod(position + 1, self.spec.compress_ratio)
        if rest:
            return -1
        return (window - 1) * len(self.lengths) + len(self.lengths) - 1 - request

    def decode_plan(self, positions: list[int | None]) -> DecodePlan:
        """The newest token of each request, and a padded entry for ``None``."""
        r, rows = self.spec.compress_ratio, []
        for request, position in enumerate(positions):
            if position is None:
                rows.append([-1, -1, 0, 0])
                continue
            pages = [
                self.location(request, max(p, 0)) // self.block for p in (position - r, position)
            ]
            rows.append([position + 1, self.location(request, position), *pages])
        slots = [-1 if p is None else self.slot(n, p) for n, p in enumerate(positions)]
        if self.layout == "ring":
            return RingDecode(_i32(rows), _i64(slots))
        if self.layout == "ring_v1":
            pages_of = [-1 if p is None else n for n, p in enumerate(positions)]
            return RingDecodeV1(_i32([row[0] for row in rows]), _i32(pages_of), _i64(slots))
        return PagedDecode(
            positions=_i64([row[0] - 1 if row[0] > 0 else 7 for row in rows]),
            state_slots=_i64([row[1] for row in rows]),
            requests=_i32(list(range(len(rows)))),
            block_table=self.block_table().contiguous(),
            slots=_i64(slots),
        )

    def prefill_plan(self, chunks: list[tuple[int, int]]) -> PrefillPlan:
        """Tokens [start, end) of every request, one request behind the other."""
        spec, r = self.spec, self.spec.compress_ratio
        tokens = [(n, p) for n, (start, end) in enumerate(chunks) for p in range(start, end)]
        slots = _i64([self.slot(*token) for token in tokens])
        windows, windows_v1, writes, writes_v1 = [], [], [], []
        for token, (request, position) in enumerate(tokens):
            start, end = chunks[request]
            old = max(spec.window - (position - start + 1), 0)
            if self.slot(request, position) >= 0:
                pages = [
                    self.location(request, max(p, 0)) // self.block
                    for p in (position - r, position)
                ]
                windows.append([position + 1, token | old << 16, *pages])
                windows_v1.append([token, request, position, old])
            if position >= end - spec.window:  # what later windows read
                writes.append([token, self.location(request, position)])
                writes_v1.append([token, request, position, 0])
        if self.layout == "ring":
            padded = [[-1, -1, -1, -1], *windows], [*writes, [-1, -1]]
            return RingPrefill(_i32(padded[0]), _i32(padded[1]), slots)
        if self.layout == "ring_v1":
            pad = [-1, -1, -1, -1]
            pages_of = _i32(list(range(len(chunks))))
            return RingPrefillV1(_i32([pad, *windows_v1]), _i32([*writes_v1, pad]), pages_of, slots)
        positions = _i64([p for _, p in tokens])
        state_slots = _i64([self.location(*token) for token in tokens])
        starts = [sum(end - start for start, end in chunks[:n]) for n in range(len(chunks) + 1)]
        return PagedPrefill(
            positions=positions,
            state_slots=state_slots,
            requests=_i32([n for n, _ in tokens]),
            block_table=self.block_table().contiguous(),
            slots=slots,
            query_starts=_i32(starts),
            ends=window_ends(positions, state_slots, len(chunks), r),
        )

    def rows(self, chunks: list[tuple[int, int]]) -> torch.Tensor:
        """The projections of those tokens."""
        return torch.cat([self.history[n][a:b] for n, (a, b) in enumerate(chunks)])


def make_engine(kind: str, layout: Layout, hard: bool, seed: int = 5) -> Engine:
    """A poisoned engine: unwritten state rows are NaN, unwritten cache bytes 0xA5.

    ``paged`` follows vLLM's rounding, formats and RoPE table, the rings sglang's. Hard rows hold
    magnitudes from 1e-20 to 1e4, scores that differ by hundreds, and a row of zeros.
    """
    is_indexer, ratio = kind == "indexer", 128 if kind == "main_c128" else 4
    fp4: CacheFormat = "indexer_mxfp4" if hard else "indexer_fp8"
    vllm = layout == "paged"
    spec = CompressorSpec(
        head_dim=128 if is_indexer else 512,
        compress_ratio=ratio,
        cache_format=fp4 if is_indexer else "fp8_ds_mla",
        page_tokens=_PAGE_TOKENS,
        rounding="vllm" if vllm else "sglang",
        rotate=is_indexer and not vllm,
        fp8="ocp",
        rope_layout="split" if vllm else "interleaved",
    )
    rng = torch.Generator().manual_seed(seed)
    ape = torch.randn(ratio, spec.halves, spec.head_dim, generator=rng)
    weight = 0.5 + torch.rand(spec.head_dim, generator=rng)
    angle = 6.3 * torch.rand(1024, 32, generator=rng)
    split = torch.cat((angle.cos(), angle.sin()), 1)
    table = split if vllm else torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
    lengths = (130, 257, 128) if ratio == 128 else (6, 21, 4)
    history, half = [], spec.row_width // 2
    for length in lengths:
        row = torch.randn(length, spec.row_width, generator=rng)
        if hard:
            row[:, :half] *= 10.0 ** (24 * torch.rand(length, 1, generator=rng) - 20)
            row[:, half:] *= 100.0
            row[length // 2, :half] = 0.0
        history.append(reference.round_bf16(row))
    block = {"paged": 4 if ratio == 4 else 8, "ring": ratio, "ring_v1": spec.window}[layout]
    kept = max(lengths) // block + 1 if vllm else spec.window // block
    # One row more than a page holds: pages are not contiguous.
    full = torch.full((len(lengths) * kept, block + 1, spec.row_width), torch.nan)
    windows = len(lengths) * (max(lengths) // ratio)
    stride = -(-spec.page_bytes // 64) * 64 + 64
    cache = torch.full((windows // _PAGE_TOKENS + 1, stride), _POISON, dtype=torch.uint8)
    layer = CompressorLayer(spec, ape, weight, table)
    return Engine(layer, layout, lengths, history, full[:, :block], cache)


def _steps(
    path: KernelPath, kind: str, layout: Layout, hard: bool
) -> Callable[[Target, torch.device], float]:
    def run(target: Target, device: torch.device) -> float:
        if kind == "pair":
            return _run_pair(path, layout, hard, target, device)
        engine = make_engine(kind, layout, hard)
        return max(
            _compare(path, (engine,), (plan,), rows, target, device)
            for plan, rows in _calls(engine, path.phase)
        )

    return run


def _calls(engine: Engine, phase: str) -> Iterator[tuple[DecodePlan | PrefillPlan, torch.Tensor]]:
    """Prefill in two chunks cut inside a window; or, behind such a prefill, one decoded token."""
    lengths = engine.lengths
    cut = [length // 2 + 1 for length in lengths]
    if phase == "prefill":
        for chunks in ([(0, c) for c in cut], list(zip(cut, lengths, strict=True))):
            yield engine.prefill_plan(chunks), engine.rows(chunks)
        return
    _advance(engine, [(0, length - 1) for length in lengths])
    last = [(length - 1, length) for length in lengths]
    positions: list[int | None] = [start for start, _ in last]
    positions[0] = None
    yield engine.decode_plan(positions), engine.rows(last)


def _advance(engine: Engine, chunks: list[tuple[int, int]]) -> None:
    plan, rows = engine.prefill_plan(chunks), engine.rows(chunks)
    reference_step.step(engine.layer, rows, engine.state, engine.cache, plan)


def _run_pair(
    path: KernelPath, layout: Layout, hard: bool, target: Target, device: torch.device
) -> float:
    main, indexer = (make_engine(kind, layout, hard) for kind in ("main_c4", "indexer"))
    object.__setattr__(indexer.layer, "rope_table", main.layer.rope_table)
    steps = [next(_calls(engine, "decode")) for engine in (main, indexer)]
    plans = tuple(plan for plan, _ in steps)
    if isinstance(plans[0], PagedDecode):
        object.__setattr__(plans[1], "requests", plans[0].requests)
    return _compare(path, (main, indexer), plans, [rows for _, rows in steps], target, device)


def _compare(
    path: KernelPath,
    engines: tuple[Engine, ...],
    plans: tuple[DecodePlan | PrefillPlan, ...],
    rows: torch.Tensor | list[torch.Tensor],
    target: Target,
    device: torch.device,
) -> float:
    """One call on the path and by the definition; engines go on from the definition's result."""
    inputs = rows if isinstance(rows, list) else [rows]
    moved = _to_device(engines, plans, inputs, device)
    _force(path, target, engines, plans)
    if len(engines) == 2:
        (main, main_plan), (indexer, indexer_plan) = moved
        compress_decode_pair_(main, indexer, main_plan, indexer_plan, target=target)
    else:
        step: Any = compress_decode_ if path.phase == "decode" else compress_prefill_
        step(*moved[0][0], moved[0][1], target=target)
    worst = 0.0
    for engine, plan, row, ((_, _, state, cache), _) in zip(
        engines, plans, inputs, moved, strict=True
    ):
        before = engine.cache.clone()
        reference_step.step(engine.layer, row, engine.state, engine.cache, plan)
        if not torch.equal(_bits(state.cpu()), _bits(engine.state)):
            raise RuntimeError("state rows differ from those of the definition")
        worst = max(worst, _different(engine, cache.cpu(), before, plan))
    return worst


def _different(
    engine: Engine, cache: torch.Tensor, before: torch.Tensor, plan: DecodePlan | PrefillPlan
) -> float:
    """Share of the written values that are not the definition's."""
    spec = engine.spec
    ends = reference_step.windows(plan, spec, engine.block)
    slots = torch.tensor(sorted({w.slot for w in ends if w.slot >= 0}))
    outside = cache.clone()
    if len(slots):
        reference.store(outside, slots, _PAGE_TOKENS, *_records(before, slots, spec))
    if not torch.equal(outside, before):
        raise RuntimeError("a cache byte outside the written records changed")
    if not len(slots):
        return 0.0
    got, want = (
        reference.dequantise(*_records(x, slots, spec), spec, engine.layer.fp8_scale)
        for x in (cache, engine.cache)
    )
    error, largest = (got - want).abs(), want.abs().amax(1, keepdim=True)
    if not bool((error <= largest / 64 + 0.26 * want.abs()).all()):
        raise RuntimeError("a cached value is more than one step of its code off")
    return float((error > 2e-6 * largest).float().mean())


def _records(
    cache: torch.Tensor, slots: torch.Tensor, spec: CompressorSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    return reference.load(cache, slots, spec.page_tokens, spec.cache_format)


def _to_device(
    engines: tuple[Engine, ...],
    plans: tuple[DecodePlan | PrefillPlan, ...],
    rows: list[torch.Tensor],
    device: torch.device,
) -> list[tuple[Part, Any]]:
    """Copies on the device; what a pair shares stays shared."""
    table = engines[0].layer.rope_table.to(device)
    shared: dict[int, torch.Tensor] = {}
    moved = []
    for engine, plan, row in zip(engines, plans, rows, strict=True):
        layer = CompressorLayer(
            engine.spec, engine.layer.ape.to(device), engine.layer.norm_weight.to(device), table
        )
        full = engine.state.new_empty(
            len(engine.state), engine.block + 1, engine.spec.row_width
        ).to(device)
        state = full[:, : engine.block]
        state.copy_(engine.state)
        part = (layer, row.to(device), state, engine.cache.to(device, copy=True))
        moved.append((part, _move(plan, device, shared)))
    return moved


def _move(plan: Plan, device: torch.device, shared: dict[int, torch.Tensor]) -> Plan:
    tensors = {field.name: getattr(plan, field.name) for field in dataclasses.fields(plan)}
    for name, tensor in tensors.items():
        tensors[name] = shared.setdefault(id(tensor), tensor.to(device))
    return dataclasses.replace(plan, **tensors)


def _force(
    path: KernelPath,
    target: Target,
    engines: tuple[Engine, ...],
    plans: tuple[DecodePlan | PrefillPlan, ...],
) -> None:
    """Let calls like these run ``path`` whatever their grid."""
    spec, layout = engines[0].spec, plans[0].layout
    selected: paths.Paths[Any]
    if len(engines) == 2:
        blocks = (engines[0].block, engines[1].block)
        selected = paths.pair_paths(target, spec, engines[1].spec, layout, blocks)
    elif path.phase == "decode":
        selected = paths.decode_paths(target, spec, layout, engines[0].block)
    else:
        selected = paths.prefill_paths(target, spec, layout, engines[0].block)
    _force_selection(selected, path)


def _force_selection(selected: paths.Paths[Any], path: KernelPath) -> None:
    rows = tuple(selected.selection.explain())
    same = [row for row in selected.selection.paths if _row_of(row) == _row_of(path)]
    if not same:
        raise RuntimeError("the table never chooses this row: another one comes before it")
    selected.selection = PathSelection(path.phase, (same[0],), (), rows)


def _row_of(path: KernelPath) -> tuple[object, ...]:
    return path.name, path.features, tuple(path.params.items())


def _in_place(
    path: KernelPath, head_dim: int, hard: bool
) -> Callable[[Target, torch.device], float]:
    """``compress_norm_rope_hadamard_``: the share of elements more than one bf16 ulp off."""

    def run(target: Target, device: torch.device) -> float:
        ratio, rotate = 4, head_dim == 128
        rng = torch.Generator().manual_seed(head_dim)
        kv = torch.randn(6, head_dim, generator=rng)
        if hard:
            kv *= 10.0 ** (30 * torch.rand(6, 1, generator=rng) - 20)
            kv[2] = 0.0
        kv = kv.bfloat16()
        weight = (0.5 + torch.rand(head_dim, generator=rng)).bfloat16()
        angle = 6.3 * torch.rand(1024, 32, generator=rng)
        table = torch.stack((angle.cos(), angle.sin()), -1).flatten(1)
        plan: SeqLens | RowPlan = SeqLens(_i32([4, 5, 28, -1, 0, 400]))
        if path.phase == "prefill":
            rows = [[0, 0, 3, 0], [-1, -1, -1, -1], [2, 0, 27, 0], [5, 0, 399, 0], [4, 0, 400, 0]]
            plan = RowPlan(_i32(rows))
        want = kv.clone()
        reference_step.compress_in_place(want, weight, 1e-6, table, plan, ratio, rotate)
        got = kv.to(device)
        selected = paths.in_place_paths(target, path.phase, head_dim, ratio, rotate)
        _force_selection(selected, path)
        compress_norm_rope_hadamard_(
            got, weight.to(device), 1e-6, table.to(device), _move(plan, device, {}),
            head_dim=head_dim, compress_ratio=ratio, rotate=rotate, target=target,
        )  # fmt: skip
        result = got.cpu()
        if not torch.equal(result[[1, 3, 4]], kv[[1, 3, 4]]):
            raise RuntimeError("a row outside the plan was written")
        ulp = 2.0**-7 * want.float().abs() + 1e-6
        if not bool(((result.float() - want.float()).abs() <= ulp).all()):
            raise RuntimeError("an element is more than one bf16 ulp off")
        return float((result != want)[[0, 2, 5]].float().mean())

    return run


def _bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int32)


def _i32(values: list[list[int]] | list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def _i64(values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)
