"""DeepSeek-V4's compressor step beside its peers: bytes first, then GPU and call time.

    python benchmarks/bench_dsv4_compressor.py --output benchmarks/results/dsv4_compressor_h200.json

Tensors as vLLM lays them out: fp32 projections, a paged fp32 state, a block table, paged caches
(main fp8_ds_mla, indexer fp8). Parts: ``main`` (C4 and C128), ``indexer``, ``both`` (a C4 layer's
two compressors), and ``indexer_rows``, the in-place operator on pooled rows, whose peers are the
same operation in two launches and in the style of the seed kernel, through memory. vLLM 0.26's
Triton kernels are timed where they can be imported, from an installed vLLM or, with
``--vllm-source``, from a directory that holds ``vllm/models/deepseek_v4/common/ops``.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.testing.timing import (
    call_time_ms,
    copy_bandwidth_gbs,
    environment,
    graph_time_ms,
    host_time_ms,
    installed_version,
)
from benchmarks.dsv4_peers import EPS, Part, empty_kernel, load_vllm, rows_calls, vllm_step
from dsv4_backend import (
    CompressorLayer,
    CompressorSpec,
    PagedDecode,
    PagedPrefill,
    RingPrefill,
    compress_decode_,
    compress_decode_pair_,
    compress_prefill_,
    quantise_indexer_queries,
    window_ends,
)
from dsv4_backend.queries import Queries
from dsv4_backend.spec import RECORD_BYTES

DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUERIES = (1, 64, 512, 4096)
PAGE_TOKENS = 64
INDEXER_HEADS = 64


@functools.cache
def rope_table() -> torch.Tensor:
    """[positions, 64], cosines first, for the longest case."""
    angle = torch.rand(65536 + 8192, 32, device="cuda") * 6.3
    return torch.cat((angle.cos(), angle.sin()), 1)


def make_spec(part: str, ratio: int) -> CompressorSpec:
    is_indexer = part == "indexer"
    return CompressorSpec(
        head_dim=128 if is_indexer else 512,
        compress_ratio=ratio,
        cache_format="indexer_fp8" if is_indexer else "fp8_ds_mla",
        page_tokens=PAGE_TOKENS,
        rounding="vllm",
        rotate=False,
        fp8="ocp",
        rope_layout="split",
        eps=EPS,
    )


def make_part(part: str, ratio: int, positions: torch.Tensor, requests: torch.Tensor) -> Part:
    """A part for tokens at ``positions [T]`` of ``requests [T]``, which are in order."""
    spec = make_spec(part, ratio)
    generator = torch.Generator("cuda").manual_seed(11)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    tokens, count = positions.shape[0], int(requests.max()) + 1
    block = 4 if ratio == 4 else 8
    is_prefill = tokens > count
    last = int(positions.max()) // block + 1
    # Decoding requests keep a window; a prefilled one keeps all, as vLLM does within a step.
    kept = last if is_prefill else spec.window // block + 1
    own = torch.arange(last, device="cuda") % kept
    table = (own[None] + kept * torch.arange(count, device="cuda")[:, None]).int()
    pages = count * kept
    state = normal(pages, block, spec.row_width)
    state_slots = table[requests, positions // block].long() * block + positions % block
    is_end = (positions + 1) % ratio == 0
    slots = torch.where(is_end, is_end.cumsum(0) - 1, -1)
    page_bytes = -(-spec.page_bytes // 576) * 576
    cache = torch.zeros(tokens // PAGE_TOKENS + 1, page_bytes, dtype=torch.uint8, device="cuda")
    layer = CompressorLayer(
        spec,
        ape=normal(ratio, spec.halves, spec.head_dim),
        norm_weight=1 + 0.1 * normal(spec.head_dim),
        rope_table=rope_table(),
    )
    common = (positions, state_slots, requests.int(), table, slots)
    # as in an engine: the plan and the state are older than the launch before, a projection's
    plan: PagedDecode | PagedPrefill = PagedDecode(*common, is_settled=True)
    if is_prefill:
        starts = torch.searchsorted(requests, torch.arange(count + 1, device="cuda")).int()
        plan = PagedPrefill(*common, starts, window_ends(positions, state_slots, count, ratio))
    ends = int(is_end.sum())
    return Part(layer, normal(tokens, spec.row_width), state, cache, plan, ends)


def on_ring(part: Part) -> Part:
    """One request's prefill with sglang's plan v2, whose state keeps the last window alone."""
    layer, tokens = part.layer, part.plan.num_tokens
    spec, ratio = layer.spec, layer.spec.compress_ratio
    seq_lens = torch.arange(ratio, tokens + 1, ratio, device="cuda")
    # the rows before the first token count as rows of the state
    packed = (seq_lens - 1) | ((spec.window - seq_lens).clamp_(min=0) << 16)
    pages = torch.arange(2, device="cuda").expand(len(seq_lens), 2)
    windows = torch.cat((seq_lens[:, None], packed[:, None], pages), 1).int()
    last = torch.arange(tokens - spec.window, tokens, device="cuda")
    writes = torch.stack((last, last % (2 * ratio)), 1).int()
    state = torch.zeros(2, ratio, spec.row_width, device="cuda")
    plan = RingPrefill(windows, writes, part.plan.slots)
    return Part(layer, part.kv_score, state, part.cache, plan, part.ends)


def ours(part: Part) -> Callable[[], None]:
    if isinstance(part.plan, PagedPrefill | RingPrefill):
        return lambda: compress_prefill_(*part.tensors, part.plan)
    return lambda: compress_decode_(*part.tensors, part.plan)


def ours_both(main: Part, indexer: Part) -> Callable[[], None]:
    if isinstance(main.plan, PagedPrefill):
        calls = (ours(main), ours(indexer))
        return lambda: [call() for call in calls]
    object.__setattr__(indexer.plan, "requests", main.plan.requests)
    return lambda: compress_decode_pair_(main.tensors, indexer.tensors, main.plan, indexer.plan)


def equal_bytes(vllm: types.SimpleNamespace, part: Part) -> float:
    """Share of the records' bytes in which ours and vLLM's step agree; the states must be equal."""
    results = []
    for call in (vllm_step(vllm, part), ours(part)):
        state = part.state.clone()
        part.cache.zero_()
        call()
        results.append((part.cache.clone(), part.state.clone()))
        part.state.copy_(state)
    if not torch.equal(results[0][1], results[1][1]):
        raise SystemExit("the states differ from vLLM's: no times were taken")
    written = part.ends * sum(RECORD_BYTES[part.layer.spec.cache_format])
    return 1 - float((results[0][0] != results[1][0]).sum()) / max(written, 1)


def tokens_of(phase: str, n: int, ratio: int, ends: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions and requests: n requests of 4k to 8k tokens, or one request of n tokens."""
    if phase == "prefill":
        return torch.arange(n, device="cuda"), torch.zeros(n, dtype=torch.int64, device="cuda")
    generator = torch.Generator("cuda").manual_seed(5)
    positions = torch.randint(4096, 8192, (n,), generator=generator, device="cuda")
    if ends == "all":
        positions = positions // ratio * ratio + ratio - 1
    return positions, torch.arange(n, device="cuda")


def measure(
    phase: str, part: str, ratio: int, n: int, ends: str, vllm: Any, bandwidth: float
) -> dict[str, object]:
    names = ("main", "indexer") if part == "both" else (part,)
    parts = [make_part(name, ratio, *tokens_of(phase, n, ratio, ends)) for name in names]
    equal = None if vllm is None else min(equal_bytes(vllm, p) for p in parts)
    if equal is not None and equal < 0.999:
        raise SystemExit(f"{phase} {part} c{ratio}: only {equal:.4f} of the bytes are vLLM's")
    call = ours(parts[0]) if len(parts) == 1 else ours_both(*parts)
    row: dict[str, object] = {
        "phase": phase,
        "part": part,
        "ratio": ratio,
        "n": n,
        "ends": ends,
        "ours_gpu_ms": graph_time_ms(call),
        "ours_call_ms": call_time_ms(call),
        "ours_host_ms": host_time_ms(call),
        "vllm_gpu_ms": None,
        "seed_style_gpu_ms": None,
        "two_launch_gpu_ms": None,
        "floor_ms": sum(p.floor_bytes() for p in parts) / (bandwidth * 1e6),
    }
    if vllm is not None:
        steps = [vllm_step(vllm, p) for p in parts]
        both = lambda: [step() for step in steps]  # noqa: E731
        row["vllm_gpu_ms"] = graph_time_ms(both)
        row["vllm_call_ms"] = call_time_ms(both)
        row["vllm_equal_bytes"] = equal
    return row


def measure_ring(part_name: str, ratio: int, n: int, bandwidth: float) -> dict[str, object]:
    part = make_part(part_name, ratio, *tokens_of("prefill", n, ratio, "all"))
    ours(part)()
    wanted = part.cache.clone()
    part.cache.zero_()
    call = ours(on_ring(part))
    call()
    if not torch.equal(part.cache, wanted):
        raise SystemExit(
            f"prefill {part_name} c{ratio}: a ring's records differ from a paged plan's"
        )
    return {
        "phase": "prefill",
        "part": part_name,
        "layout": "ring",
        "ratio": ratio,
        "n": n,
        "ends": "all",
        "ours_gpu_ms": graph_time_ms(call),
        "ours_call_ms": call_time_ms(call),
        "ours_host_ms": host_time_ms(call),
        "vllm_gpu_ms": None,
        "seed_style_gpu_ms": None,
        "two_launch_gpu_ms": None,
        "floor_ms": (
            part.kv_score.nbytes + part.ends * sum(RECORD_BYTES[part.layer.spec.cache_format])
        )
        / (bandwidth * 1e6),
    }


def measure_queries(
    cache_format: str, rotate: bool, n: int, vllm: Any, bandwidth: float
) -> dict[str, object]:
    """The indexer's queries of n tokens; vLLM's kernel does not rotate."""
    spec = dataclasses.replace(make_spec("indexer", 4), cache_format=cache_format, rotate=rotate)
    q = torch.randn(n, INDEXER_HEADS, 128, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(n, INDEXER_HEADS, device="cuda", dtype=torch.bfloat16)
    positions = torch.randint(4096, 8192, (n,), device="cuda")
    scales = (128**-0.5, INDEXER_HEADS**-0.5)

    def call() -> Queries:
        return quantise_indexer_queries(spec, q, positions, rope_table(), weights, *scales)

    row: dict[str, object] = {
        "phase": "decode",
        "part": f"queries_{cache_format.removeprefix('indexer_')}",
        "rotate": rotate,
        "ratio": 4,
        "n": n,
        "ends": "all",
        "ours_gpu_ms": graph_time_ms(call),
        "ours_call_ms": call_time_ms(call),
        "ours_host_ms": host_time_ms(call),
        "vllm_gpu_ms": None,
        "seed_style_gpu_ms": None,
        "two_launch_gpu_ms": None,
        "floor_ms": (q.nbytes + n * INDEXER_HEADS * (sum(RECORD_BYTES[spec.cache_format]) + 2))
        / (bandwidth * 1e6),
    }
    is_fp4 = cache_format == "indexer_mxfp4"
    # vLLM's kernel for fp4 is of sm_100 instructions
    if vllm is None or rotate or (is_fp4 and torch.cuda.get_device_capability() < (10, 0)):
        return row

    def theirs() -> Any:
        return vllm.queries(positions, q, rope_table(), weights, *scales, use_fp4=is_fp4)

    codes = theirs()[0][0] if is_fp4 else theirs()[0].view(torch.uint8)
    row["vllm_equal_bytes"] = float((codes == call()[0]).float().mean())
    row["vllm_gpu_ms"] = graph_time_ms(theirs)
    row["vllm_call_ms"] = call_time_ms(theirs)
    return row


def measure_rows(n: int, bandwidth: float) -> dict[str, object]:
    calls = rows_calls(n, rope_table())
    return {
        "phase": "decode",
        "part": "indexer_rows",
        "ratio": 4,
        "n": n,
        "ends": "all",
        "ours_gpu_ms": graph_time_ms(calls["ours"]),
        "ours_call_ms": call_time_ms(calls["ours"]),
        "ours_host_ms": host_time_ms(calls["ours"]),
        "vllm_gpu_ms": None,
        "seed_style_gpu_ms": graph_time_ms(calls["seed_style"]),
        "two_launch_gpu_ms": graph_time_ms(calls["two_launch"]),
        "floor_ms": 2 * n * 128 * 4 / (bandwidth * 1e6),
    }


def cases(quick: bool) -> list[tuple[str, str, int, int, str]]:
    decode = (1, 64, 512) if quick else DECODE
    prefill = (1024, 16384) if quick else PREFILL
    kinds = [("main", 4), ("indexer", 4), ("both", 4), ("main", 128)]
    found = [("decode", p, r, n, "all") for p, r in kinds for n in decode]
    found += [("decode", p, r, n, "mixed") for p, r in kinds for n in (1, 64, 512)]
    return found + [("prefill", p, r, n, "all") for p, r in kinds for n in prefill]


def measurements(quick: bool, vllm: Any, bandwidth: float) -> Iterator[dict[str, object]]:
    for case in cases(quick):
        yield measure(*case, vllm, bandwidth)
    for n in DECODE:
        yield measure_rows(n, bandwidth)
    for cache_format in ("indexer_fp8", "indexer_mxfp4"):
        for rotate in (False, True):
            for n in QUERIES:
                yield measure_queries(cache_format, rotate, n, vllm, bandwidth)
    for name, ratio in (("main", 4), ("indexer", 4), ("main", 128)):
        for n in PREFILL[::3]:
            yield measure_ring(name, ratio, n, bandwidth)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--vllm-source", type=Path, help="directory that holds vllm/models/...")
    parser.add_argument("--quick", action="store_true", help="fewer sizes")
    args = parser.parse_args()

    bandwidth = copy_bandwidth_gbs()
    vllm = load_vllm(args.vllm_source)
    result: dict[str, object] = environment() | {
        "vllm": installed_version("vllm") or ("source" if vllm else None),
        "copy_gbs": bandwidth,
        "empty_launch_ms": graph_time_ms(lambda: empty_kernel[(1,)](rope_table()), calls=20),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for row in measurements(args.quick, vllm, bandwidth):
        print({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows.append(row)
        args.output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
