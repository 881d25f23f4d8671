"""A small DeepSeek-V4 or V4.1 in a real sglang on one GPU, without and with the flag.

    python -m benchmarks.dsv4_engine_sglang [OUT.json] [--logs DIR] [--model {v4,v41}] [--mtp]
        [--heads {8,16,32,64}] [--limit SECONDS]

The twin of `benchmarks.dsv4_engine_vllm`, whose rows of the same file it leaves. Four processes
beside each other: upstream and flag, each in the default mode (graphs of decodes, prompts without)
and eager; `benchmarks.engines.dsv4_sglang_side` describes them. Checked:

- greedy tokens of 64 prompts of 1 to 5,000 tokens, with chunks, and of the same prompts continued
  from the prefix cache, by the rule of the twin;
- with the flag, how many compressors this package serves, and in the eager process the bytes of
  states and records beside those of sglang's own kernels on the same input
  (`benchmarks.engines.dsv4_sglang_watch`): of V4's decodes, whose prefills the path table leaves to
  sglang, and of all of V4.1's steps. Graphs are not replayed for it;
- with the flag, which attention ran: calls by kernel, the sizes whose graphs hold ours; and in the
  eager process the rows of its outputs beside FlashMLA's (`benchmarks.engines.dsv4_attention`);
- that the checks can fail: a planted error is seen, and the tokens depend on compressed rows;
- with ``--mtp`` the tokens with two drafts each from an MTP layer, in two processes more.

It needs FlashMLA and DeepGEMM as sglang does, and nvcc and ninja for what they compile. A process
that fails, or takes longer than the limit, leaves its parts until then and the end of its log, and
the status is 1.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.engines.dsv4_model import DRAFTS, MTP_SIDES
from benchmarks.engines.dsv4_verdict import (
    NAMES,
    Verdict,
    add_arguments,
    attention_rows,
    compare_tokens,
    conclude,
)

COMPRESSORS = {"v4": 5, "v41": 3}  # V4: main ones of three layers, of the indexers of two
UNLIKE = 0.01  # share of bytes that rounding may store otherwise


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser, "sglang")
    args = parser.parse_args()
    conclude(parser, args, "benchmarks.engines.dsv4_sglang_side", judge)


def judge(sides: dict[str, Any]) -> Verdict:
    """Tokens, attention, compressors and records of the sides."""
    upstream = sides["upstream"]
    model = f"{NAMES[upstream['model']]}{upstream['heads']} heads, bf16 weights"
    model += ", fp32 head of 16 tokens, mHC in torch and Triton"
    modes = {"": f"default (graphs of decodes); {model}", "-eager": f"eager; {model}"}
    if all(side in sides for side in MTP_SIDES):
        modes["-mtp"] = f"default with MTP, {DRAFTS} drafts (graphs of verifications); {model}"
    verdict = Verdict("sglang", upstream["release"])
    compare_tokens(verdict, sides, modes)
    for suffix, mode in modes.items():
        name = "flag" + suffix
        attention_rows(sides[name], mode, verdict)
        found, wanted = sides[name]["compressors"], COMPRESSORS[upstream["model"]]
        print(f"{name}: compressors {found}")
        if (found["here"], found["left"]) != (wanted, 0):
            verdict.problems.append(
                f"{name}: {wanted} compressors must be served here, got {found['here']}, and"
                f" {found['left']} that are not"
            )
        for side in ("upstream" + suffix, name) if suffix == "-mtp" else ():
            accepted = [x for x in sides[side]["tokens"]["accepted"] if x]
            print(f"{side}: tokens per step {sum(accepted) / max(len(accepted), 1):.2f}")
            if not accepted:
                verdict.problems.append(f"{side}: no drafts were verified")
    record_rows(sides["flag-eager"], modes["-eager"], verdict)
    return verdict


def record_rows(flag: dict[str, Any], mode: str, verdict: Verdict) -> None:
    """One row that counts bytes beside upstream's."""
    records = flag["records"]
    written, unlike = records["bytes_written"], records["bytes_unlike_upstream"]
    check = "bytes of states and records beside upstream's kernels on the same input"
    verdict.row(mode, check, written - unlike, written, False)
    if unlike > UNLIKE * written or not written:
        verdict.problems.append(f"{flag['side']}: {unlike} of {written} bytes unlike sglang's")
    planted = records["planted_errors_seen"]
    calls = flag["compressors"]["calls"]
    kinds = {kind for kind, by in calls.items() if by.get("ours", 0)}  # others are sglang's
    if "decode" not in kinds or set(planted) != kinds or not all(planted.values()):
        verdict.problems.append(f"{flag['side']}: moved input must be seen, got {planted}")


if __name__ == "__main__":
    main()
