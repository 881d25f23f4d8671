"""DeepSeek-V4's compressor step beside its peers: bytes first, then GPU and call time.

    python benchmarks/bench_dsv4_compressor.py --output benchmarks/results/dsv4_compressor_h200.json

Tensors as vLLM lays them out: fp32 projections, a paged fp32 state, a block table, paged caches
(main fp8_ds_mla, indexer fp8). Parts: ``main`` (C4 and C128), ``indexer``, ``both`` (a C4 layer's
two compressors, one call after the other), and ``indexer_rows``, the in-place operator on pooled
rows, whose peers are the same operation in two launches and in the style of the seed kernel,
through memory. vLLM 0.26's Triton kernels are timed where they can be imported, from an installed
vLLM or, with ``--vllm-source``, from a directory that holds
``vllm/models/deepseek_v4/common/ops``.
"""

from __future__ import annotations

import argparse
import json
import sys
import types
from collections.abc import Iterator
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
from benchmarks.dsv4_peers import empty_kernel, load_vllm, rows_calls, vllm_step
from dsv4_backend import quantise_indexer_queries
from dsv4_backend.compressor.queries import Queries
from dsv4_backend.testing.engine import make_spec
from dsv4_backend.testing.steps import TimedStep, make_step, on_ring, rope_table

DECODE = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
PREFILL = (1024, 2048, 4096, 8192, 16384, 32768, 65536)
QUERIES = (1, 64, 512, 4096)
INDEXER_HEADS = 64
CUDA = torch.device("cuda", 0)


def kind_of(part: str, ratio: int) -> str:
    return "indexer" if part == "indexer" else f"main_c{ratio}"


def equal_bytes(vllm: types.SimpleNamespace, part: TimedStep) -> float:
    """Share of the records' bytes in which ours and vLLM's step agree; the states must be equal."""
    results = []
    for call in (vllm_step(vllm, part), part.call()):
        state = part.state.clone()
        part.cache.zero_()
        call()
        results.append((part.cache.clone(), part.state.clone()))
        part.state.copy_(state)
    if not torch.equal(results[0][1], results[1][1]):
        raise SystemExit("the states differ from vLLM's: no times were taken")
    written = part.ends * part.layer.spec.record.record_bytes
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
    parts = [make_step(kind_of(name, ratio), *tokens_of(phase, n, ratio, ends)) for name in names]
    equal = None if vllm is None else min(equal_bytes(vllm, p) for p in parts)
    if equal is not None and equal < 0.999:
        raise SystemExit(f"{phase} {part} c{ratio}: only {equal:.4f} of the bytes are vLLM's")
    calls = [p.call() for p in parts]
    call = calls[0] if len(calls) == 1 else lambda: [each() for each in calls]
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
    part = make_step(kind_of(part_name, ratio), *tokens_of("prefill", n, ratio, "all"))
    part.call()()
    wanted = part.cache.clone()
    part.cache.zero_()
    call = on_ring(part).call()
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
        "floor_ms": (part.kv_score.nbytes + part.ends * part.layer.spec.record.record_bytes)
        / (bandwidth * 1e6),
    }


def measure_queries(
    cache_format: str, rotate: bool, n: int, vllm: Any, bandwidth: float
) -> dict[str, object]:
    """The indexer's queries of n tokens; vLLM's kernel does not rotate."""
    spec = make_spec(cache_format, rotate=rotate, rope_layout="split")
    q = torch.randn(n, INDEXER_HEADS, 128, device="cuda", dtype=torch.bfloat16)
    weights = torch.randn(n, INDEXER_HEADS, device="cuda", dtype=torch.bfloat16)
    positions = torch.randint(4096, 8192, (n,), device="cuda")
    scales = (128**-0.5, INDEXER_HEADS**-0.5)

    def call() -> Queries:
        return quantise_indexer_queries(spec, q, positions, rope_table(CUDA), weights, *scales)

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
        "floor_ms": (q.nbytes + n * INDEXER_HEADS * (spec.record.record_bytes + 2))
        / (bandwidth * 1e6),
    }
    is_fp4 = cache_format == "indexer_mxfp4"
    # vLLM's kernel for fp4 is of sm_100 instructions
    if vllm is None or rotate or (is_fp4 and torch.cuda.get_device_capability() < (10, 0)):
        return row

    def theirs() -> Any:
        return vllm.queries(positions, q, rope_table(CUDA), weights, *scales, use_fp4=is_fp4)

    codes = theirs()[0][0] if is_fp4 else theirs()[0].view(torch.uint8)
    row["vllm_equal_bytes"] = float((codes == call()[0]).float().mean())
    row["vllm_gpu_ms"] = graph_time_ms(theirs)
    row["vllm_call_ms"] = call_time_ms(theirs)
    return row


def measure_rows(n: int, bandwidth: float) -> dict[str, object]:
    calls = rows_calls(n, rope_table(CUDA))
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
        "script": "benchmarks/bench_dsv4_compressor.py",
        "vllm": installed_version("vllm") or ("source" if vllm else None),
        "copy_gbs": bandwidth,
        "empty_launch_ms": graph_time_ms(lambda: empty_kernel[(1,)](rope_table(CUDA)), calls=20),
    }
    args.output.parent.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, object]] = []
    for row in measurements(args.quick, vllm, bandwidth):
        print({k: f"{v:.4f}" if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        rows.append(row)
        args.output.write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
