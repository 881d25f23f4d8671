"""A decode step of Kimi-Linear in a real vLLM engine's CUDA graphs, stock and with this backend.

    python -m benchmarks.decode_vllm stock.json kda.json vllm_kimi48b_decode.json

Of two runs of `benchmarks.serve_vllm` with ``--graphs decode --parts decode``. A step's time is
that of one generation less that of a shorter one with the same prompts, over the difference of
their tokens; its GPU time is the kernels of ``PROFILED`` steps, from the profiler.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES = (1, 16, 64)
PROMPT, SHORT, LONG, PROFILED = 128, 16, 144, 8
# what of a step's kernels is a KDA layer between its projections, by parts of their names
KDA_KERNELS = ("causal_conv1d_update", "kda", "decode_step", "recurrent", "rms_norm_gated",
               "layer_norm_gated", "gated_norm")  # fmt: skip


def step(batch: int, generate: Callable[[int], Any]) -> dict[str, Any]:
    """A decode step of ``batch`` sequences; ``generate(n)``: n tokens of each, seconds."""
    generate(SHORT)
    times = sorted((generate(LONG) - generate(SHORT)) / (LONG - SHORT) for _ in range(3))
    row = {"batch": batch, "step_ms": 1e3 * times[1], "all_ms": [1e3 * t for t in times]}
    row |= kernels_of_a_step(generate)
    print(json.dumps({k: v for k, v in row.items() if k != "kernels_us"}), flush=True)
    return row


def kernels_of_a_step(generate: Callable[[int], Any]) -> dict[str, Any]:
    """GPU time by kernel, of ``PROFILED`` steps by the difference of two profiles."""
    longer = kernels_of(lambda: generate(2 + PROFILED))
    shorter = kernels_of(lambda: generate(2))
    by_kernel = {
        name: [(at[0] - shorter.get(name, (0.0, 0))[0]) / PROFILED,
               (at[1] - shorter.get(name, (0.0, 0))[1]) / PROFILED]
        for name, at in longer.items()
    }  # fmt: skip
    kda = [v for name, v in by_kernel.items() if any(part in name for part in KDA_KERNELS)]
    top = sorted(by_kernel.items(), key=lambda item: -item[1][0])[:40]
    return {
        "gpu_ms": sum(us for us, _ in by_kernel.values()) / 1e3,
        "launches": sum(count for _, count in by_kernel.values()),
        "kda_us": sum(us for us, _ in kda),
        "kda_launches": sum(count for _, count in kda),
        "kernels_us": dict(top),
    }


def kernels_of(call: Callable[[], Any]) -> dict[str, tuple[float, int]]:
    """Kernel name -> (us, launches) of a call."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as record:
        call()
    found: dict[str, tuple[float, int]] = {}
    for event in record.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            us, count = found.get(event.name, (0.0, 0))
            found[event.name] = (us + event.device_time, count + 1)
    return found


def compare(args: argparse.Namespace) -> None:
    stock, ours = (json.loads(path.read_text()) for path in (args.stock, args.ours))
    rows = [
        {
            "batch": a["batch"],
            "stock_ms": a["step_ms"],
            "ours_ms": b["step_ms"],
            **{
                f"{who}_{key}": row[key]
                for key in ("gpu_ms", "launches", "kda_us", "kda_launches")
                for who, row in (("stock", a), ("ours", b))
            },
        }
        for a, b in zip(
            stock["decode"], ours["decode"], strict=False
        )  # a run may have been cut off
    ]
    result = {
        "script": "benchmarks/decode_vllm.py",
        "environment": ours["environment"],
        "prompt_tokens": PROMPT,
        "rows": rows,
        "kernels_us": {
            name: {row["batch"]: row["kernels_us"] for row in run["decode"]}
            for name, run in (("stock", stock), ("ours", ours))
        },
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in rows:
        print(
            f"batch {row['batch']}: step {row['stock_ms']:.2f} -> {row['ours_ms']:.2f} ms, GPU"
            f" {row['stock_gpu_ms']:.2f} -> {row['ours_gpu_ms']:.2f} ms, KDA between projections"
            f" {row['stock_kda_us']:.0f} us in {row['stock_kda_launches']:.0f} launches ->"
            f" {row['ours_kda_us']:.0f} us in {row['ours_kda_launches']:.0f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    for name in ("stock", "ours", "out"):
        parser.add_argument(name, type=Path)
    compare(parser.parse_args())


if __name__ == "__main__":
    main()
