"""DeepSeek-V4.1's compressors beside the engines' launches: bytes first, then GPU and call time.

A step is one call here. vLLM's is four: rings and latents, main records, the product with wk, and
the indexer's keys. ``vllm`` runs them on one stream, ``vllm_two_streams`` as vLLM schedules them on
CUDA, with the main records beside the product and the keys. Both run in Triton and cuBLAS on every
GPU, but for fp4, whose conversion is an instruction of sm_100.

``sglang`` is what sglang launches on Hopper: its own step without the projections, functions of
torch among it (`benchmarks.peers.dsv4_sglang`).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from backend_core.operator import forced
from backend_core.target import detect_target
from backend_core.testing.timing import graph_time_ms, host_time_ms
from benchmarks.peers.dsv4_sglang import v41_step
from dsv4_backend import RecordSpec, reference
from dsv4_backend.family import FAMILY
from dsv4_backend.launch_params import TABLES
from dsv4_backend.testing import v41 as kit
from dsv4_backend.testing.engine import POISON, default_device
from dsv4_backend.testing.steps import TimedV41, make_v41
from dsv4_backend.v41_step import v41_selection

DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
DRAFTS = (1, 16, 64)  # requests, of four tokens each
PREFILL = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
FORMATS = (
    *(("fp8_ds_mla", "indexer_fp8"), ("mxfp8_rows", "indexer_fp8")),
    ("nvfp4_rows", "indexer_mxfp4"),
)
"""What vLLM keeps on Hopper; Blackwell's main records with keys of fp8; and fp4 for both."""
SGLANG = kit.SGLANG[:2]
SGLANG_SIZES = {"decode": (1, 2, 8, 32, 64), "prefill": (512, 2048, 8192)}
FEW = {"decode": (1, 64, 512), "prefill": (8192,)}
"""The sizes at which all formats are measured."""

Call = Callable[[], object]
Case = tuple[str, int, int, tuple[str, str]]
"""(phase, ratio, tokens or requests, formats)"""


@dataclass(frozen=True)
class Written:
    """A call's records, (data, scales) of the main cache and of the indexer's, and its rings."""

    records: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    state: torch.Tensor | None


def cases(engine: str = "vllm") -> list[Case]:
    found: list[Case] = []
    if engine == "sglang":
        for ratio in (2, 1):
            for phase, sizes in SGLANG_SIZES.items():
                found += [(phase, ratio, n, SGLANG) for n in sizes]
        return found
    for formats in FORMATS:
        for ratio in (2, 1):
            for phase, sizes in (("decode", DECODE), ("drafts", DRAFTS), ("prefill", PREFILL)):
                few = FEW.get(phase, ())
                taken = sizes if formats == FORMATS[0] else few
                found += [(phase, ratio, n, formats) for n in taken]
    return found


def make(case: Case) -> TimedV41:
    """n requests of 4k to 8k tokens with one token each at the end of a group, or with four, whose
    first may end one; or one request of n tokens."""
    phase, ratio, n, formats = case
    device, rounding = default_device(), "sglang_v41" if formats == SGLANG else "vllm"
    if phase == "prefill":
        positions = torch.arange(n, device=device)
        return make_v41(ratio, positions, torch.zeros_like(positions), *formats, rounding)
    generator = torch.Generator(device).manual_seed(5)
    starts = torch.randint(2048, 4096, (n,), generator=generator, device=device) * 2 + 1
    tokens = torch.arange(4 if phase == "drafts" else 1, device=device)
    positions = (starts[:, None] + tokens).flatten()
    requests = torch.arange(n, device=device).repeat_interleave(len(tokens))
    return make_v41(ratio, positions, requests, *formats, rounding)


def slots_of(step: TimedV41) -> torch.Tensor:
    slots = step.step_plan.slots
    return slots[slots >= 0]


def places(records: RecordSpec, slots: torch.Tensor, page_bytes: int) -> torch.Tensor:
    """Where the bytes of records lie in a cache, [E, record bytes], in the order data, scales."""
    ((offsets, columns),) = reference.places(records)
    order = offsets[:, columns.argsort()].to(slots.device)
    page, i = slots // records.page_tokens, slots % records.page_tokens
    return page[:, None] * page_bytes + order[i]


def run(step: TimedV41, call: Call) -> Written:
    """Call with poison in the caches, then put the rings back.

    Raises:
        ArithmeticError: a byte outside the records changed.
    """
    tensors, slots, found = step.call, slots_of(step), []
    before = None if tensors.state is None else tensors.state.clone()
    caches = (
        (tensors.cache, tensors.layer.spec.main),
        (tensors.index_cache, tensors.layer.spec.index),
    )
    for cache, _ in caches:
        cache.fill_(POISON)
    call()
    for cache, records in caches:
        at = places(records, slots, cache.shape[1])
        got = cache.view(-1)[at]
        cache.view(-1)[at] = POISON
        if records.rounding == "sglang_v41":  # whose slot 0 is nobody's
            cache.view(-1)[places(records, torch.zeros_like(slots[:1]), cache.shape[1])] = POISON
        if bool((cache != POISON).any()):
            raise ArithmeticError(f"a byte outside the records of {records.cache_format} changed")
        width = records.record.data_bytes
        found.append((got[:, :width].clone(), got[:, width:].clone()))
    state = None if tensors.state is None else tensors.state.clone()
    if tensors.state is not None and before is not None:
        tensors.state.copy_(before)
    return Written(tuple(found), state)


def float64_records(step: TimedV41) -> tuple[tuple[torch.Tensor, torch.Tensor], ...]:
    """The records by the definition, from the rings before the call and its input."""
    tensors, plan = step.call, step.step_plan
    spec, rows = tensors.layer.spec, tensors.kv_score
    if tensors.score is not None:
        rows = torch.cat((rows, tensors.score), 1)
    tokens = (plan.slots >= 0).nonzero()[:, 0]
    groups = rows[tokens]
    if tensors.state is not None and plan.state_slots is not None:
        ring_rows = tensors.state.shape[1]
        states = plan.state_rows(ring_rows)
        own = states[tokens]
        before = own - own % ring_rows + (own % ring_rows - 1) % ring_rows
        is_new = (tokens > 0) & (states[(tokens - 1).clamp(min=0)] == before)
        old = tensors.state[before // ring_rows, before % ring_rows]
        first = torch.where(is_new[:, None], rows[(tokens - 1).clamp(min=0)], old)
        groups = torch.stack((first, groups), 1).flatten(0, 1)
    latent = reference.latents(groups, tensors.layer)
    positions = plan.positions[tokens] + 1 - spec.compress_ratio
    main, key = reference.v41_rows(latent, positions, tensors.layer)
    return reference.quantise(main, spec.main), reference.quantise(key, spec.index)


def equal_bytes(one: Written, other: tuple[tuple[torch.Tensor, torch.Tensor], ...]) -> float:
    """The share of the records' bytes that are the same."""
    pairs = [
        (a, b) for x, y in zip(one.records, other, strict=True) for a, b in zip(x, y, strict=True)
    ]
    equal = sum(int((a == b).sum()) for a, b in pairs)
    return equal / max(sum(a.numel() for a, _ in pairs), 1)


def upstream(vllm: Any, step: TimedV41) -> dict[str, Call]:
    """vLLM's launches on these tensors, by the name of their schedule."""
    tensors, plan = step.call, step.step_plan
    layer, spec = tensors.layer, tensors.layer.spec
    tokens, device = plan.num_tokens, tensors.kv_score.device
    requests = None
    if plan.query_starts is not None:
        lengths = plan.query_starts.diff()
        requests = torch.arange(len(lengths), device=device).repeat_interleave(lengths).int()
    views = []
    for cache, records in ((tensors.cache, spec.main), (tensors.index_cache, spec.index)):
        size = records.record.record_bytes
        shape = (cache.shape[0], records.page_tokens, size)
        views.append(cache.as_strided(shape, (cache.stride(0), size, 1)))
    stream = torch.cuda.Stream()

    def latents() -> torch.Tensor:
        latent = torch.empty(tokens, 512, dtype=torch.bfloat16, device=device)
        slots = plan.slots if plan.state_slots is None else plan.state_slots
        vllm.latents(
            *(tensors.kv_score, plan.positions, tensors.state, slots, plan.query_starts, requests),
            *(layer.norm_weight, spec.eps, spec.compress_ratio, latent),
        )
        return latent

    def main(latent: torch.Tensor) -> None:
        vllm.main(
            *(latent, plan.positions, layer.rope_table, views[0], plan.slots),
            spec.compress_ratio,
        )

    def keys(latent: torch.Tensor) -> None:
        product = torch.nn.functional.linear(latent, layer.key_projection)
        vllm.keys(
            *(product, plan.positions, layer.rope_table, layer.key_norm_weight, spec.eps),
            *(views[1], plan.index_slots, spec.compress_ratio),
            spec.index.cache_format == "indexer_mxfp4",
        )

    def one_stream() -> None:
        latent = latents()
        keys(latent)
        main(latent)

    def two_streams() -> None:
        latent, here = latents(), torch.cuda.current_stream()
        stream.wait_stream(here)
        with torch.cuda.stream(stream):
            main(latent)
        latent.record_stream(stream)
        keys(latent)
        here.wait_stream(stream)

    return {"vllm": one_stream, "vllm_two_streams": two_streams}


def take_times(row: dict[str, Any], name: str, call: Call) -> None:
    row[f"{name}_host_ms"] = host_time_ms(call)
    row[f"{name}_gpu_ms"] = graph_time_ms(call)


def variants(case: Case, step: TimedV41) -> dict[str, float]:
    """GPU time of every path of the table that can serve the case, and, at the sizes of ``FEW``, of
    those paths with one of their launch parameters exchanged."""
    phase, _, n, formats = case
    target, found = detect_target(step.call.kv_score.device), {}
    for row in dict.fromkeys(v41_selection(target, step.call.layer.spec).rows):
        if row.name == "torch" or not row.serves(n, step.step_plan.longest, 1):
            continue
        options = [row.params]
        if formats == FORMATS[0] and n in FEW.get(phase, ()):
            for name, values in FAMILY.tune_space(row).get(row.operator, {}).items():
                others = (value for value in values if value != getattr(row.params, name))
                options += [dataclasses.replace(row.params, **{name: value}) for value in others]
        for params in options:
            path = dataclasses.replace(row, params=params)
            call = step.run(target, forced(TABLES, target, None, path))
            words = " ".join(f"{name}={value}" for name, value in path.params_dict().items())
            found[f"{row.name} {words}"] = graph_time_ms(call)
    return found


def measure(case: Case, peers: Any, bandwidth: float) -> dict[str, Any]:
    """The row of a case: ours, and the engine's launches on the same tensors.

    Raises:
        ArithmeticError: fewer than 99 % of the records' bytes are float64's, or rings differ.
    """
    phase, ratio, n, formats = case
    step = make(case)
    row: dict[str, Any] = {"phase": phase, "part": "v41", "ratio": ratio, "n": n}
    row |= {"main": formats[0], "index": formats[1], "layout": "ring", "not_run": {}}
    ours, wanted = run(step, step.run()), float64_records(step)
    row["ours_float64_bytes"] = equal_bytes(ours, wanted)
    if row["ours_float64_bytes"] < 0.99:
        raise ArithmeticError(f"only {row['ours_float64_bytes']:.4f} of the bytes are float64's")
    take_times(row, "ours", step.run())
    row["ours_variants_gpu_ms"] = variants(case, step)
    row["floor_ms"] = floor_bytes(step) / (bandwidth * 1e6)
    is_fp4 = formats[1] == "indexer_mxfp4"
    if formats == SGLANG:
        if (modules := peers.sglang_v41) is None:
            row["not_run"]["sglang"] = peers.refused["sglang_v41"]
            return row
        compare(row, step, ours, wanted, {"sglang": v41_step(modules, step)})
        return row
    if peers.v41 is None or (is_fp4 and torch.cuda.get_device_capability() < (10, 0)):
        why = "e2m1 by an instruction of sm_100" if is_fp4 else peers.refused["vllm_v41"]
        row["not_run"]["vllm"] = why
        return row
    compare(row, step, ours, wanted, upstream(peers.v41, step))
    return row


def floor_bytes(step: TimedV41) -> int:
    """Inputs read once, the newest rows of each ring and every record written once, and of decodes
    the row before each end read; the projection of the keys read once."""
    call, plan = step.call, step.step_plan
    spec = call.layer.spec
    records = step.ends * (spec.main.record.record_bytes + spec.index.record.record_bytes)
    rows = call.kv_score.nbytes + (0 if call.score is None else call.score.nbytes)
    moved = rows + records + call.layer.key_projection.nbytes
    if call.state is None:
        return moved
    row = call.state.shape[2] * call.state.element_size()
    if plan.longest == 1:
        return moved + (plan.num_tokens + step.ends) * row
    return moved + min(plan.num_tokens, plan.num_requests * call.state.shape[1]) * row


def compare(
    row: dict[str, Any],
    step: TimedV41,
    ours: Written,
    wanted: tuple[tuple[torch.Tensor, torch.Tensor], ...],
    peers: dict[str, Call],
) -> None:
    """The bytes and times of an engine's launches, by the name of their schedule.

    Raises:
        ArithmeticError: rings differ.
    """
    for name, call in peers.items():
        theirs = run(step, call)
        states = [x.state for x in (ours, theirs) if x.state is not None]
        if states and not torch.equal(*states):
            raise ArithmeticError(f"{int((states[0] != states[1]).sum())} ring values differ")
        row[f"{name}_float64_bytes"] = equal_bytes(theirs, wanted)
        take_times(row, name, call)


def tasks(engine: str) -> list[Callable[[Any, float], dict[str, Any]]]:
    return [functools.partial(measure, case) for case in cases(engine)]
