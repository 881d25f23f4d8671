"""A small DeepSeek-V4 in a real sglang on one GPU, without and with the flag: greedy tokens.

    python -m benchmarks.dsv4_engine_sglang [OUT.json] [--logs DIR] [--mtp] [--budget 590]

The twin of `benchmarks.dsv4_engine_vllm`, whose rows of the same file it leaves. Four processes
beside each other: upstream and flag, each in the default mode (graphs of decodes, prompts without)
and eager; `benchmarks.engines.dsv4_sglang_side` says what the model is. Checked are the tokens, as
there, and which compressors this package served; with ``--mtp`` the same with two drafts per token
from an MTP layer, in two processes more, where graphs verify several tokens of a request. Records
are compared with those of sglang's kernels by ``bench_dsv4_compressor.py``.

It needs FlashMLA of sglang-kernel, and nvcc and ninja for what sglang compiles.

Exit status 1 and the end of a process's log where one of them fails.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.dsv4_engine_vllm import Verdict, add_arguments, compare_tokens, conclude
from benchmarks.engines.dsv4_vllm_side import DRAFTS, MTP_SIDES

COMPRESSORS = 5  # of four layers with ratios 0, 4, 128 and 4: three main ones, two of indexers
MODEL = "64 heads, bf16 weights, fp32 head of 16 tokens, mHC in torch"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser, "sglang")
    parser.add_argument("--budget", type=float, default=590.0, help="seconds, of the whole command")
    args = parser.parse_args()
    conclude(args, "benchmarks.engines.dsv4_sglang_side", args.budget - 10.0, judge)


def judge(sides: dict[str, Any]) -> Verdict:
    """Tokens of the sides, and who served their compressors."""
    upstream = sides["upstream"]
    logits = "DeepGEMM" if upstream["engine"]["deep_gemm"] else "torch"
    model = f"{MODEL}, logits of the indexer in {logits}"
    modes = {"": f"default (graphs of decodes); {model}", "-eager": f"eager; {model}"}
    if all(side in sides for side in MTP_SIDES):
        modes["-mtp"] = f"default with MTP, {DRAFTS} drafts (graphs of verifications); {model}"
    verdict = Verdict("sglang", upstream["release"])
    compare_tokens(verdict, sides, modes)
    for name, side in sides.items():
        engine = side["engine"]
        wanted = COMPRESSORS if name.startswith("flag") else 0
        if (engine["served"], engine["unserved"]) != (wanted, 0):
            verdict.problems.append(
                f"{name}: {wanted} compressors must be served here, got {engine['served']}, and"
                f" {engine['unserved']} that are not"
            )
        if name.endswith("-mtp"):
            accepted = [x for x in side["tokens"]["accepted"] if x]
            print(f"{name}: tokens per step {sum(accepted) / max(len(accepted), 1):.2f}")
    return verdict


if __name__ == "__main__":
    main()
