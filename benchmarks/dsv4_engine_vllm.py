"""A small DeepSeek-V4 or V4.1 in a real vLLM on one GPU, without and with the flag.

    python -m benchmarks.dsv4_engine_vllm [OUT.json] [--logs DIR] [--model {v4,v41}] [--mtp]
        [--heads {8,16,32,64}] [--limit SECONDS]

Four processes beside each other: upstream and flag, each in the default mode (Model Runner V2,
PIECEWISE and FULL graphs) and eager. `benchmarks.engines.dsv4_model` is the model.
Checked:

- greedy tokens of 64 prompts of 1 to 5,000 tokens, with chunks, and of the same prompts continued
  from the prefix cache: flag beside upstream, in each mode. They may part where upstream's two best
  are no further apart than rounding moves them, which is seen in upstream's own two modes,
  and where it is asked one prompt at a time: the two modes can have the same batches;
- with the flag, all bytes of the caches after each step with a graph, beside eager calls of the
  compressors on the same input (`benchmarks.engines.dsv4_vllm_watch`), by kind of batch and size;
- with the flag, which attention ran: calls by kernel, the sizes whose graphs hold ours; and in
  eager calls the rows of its outputs beside FlashMLA's on the same input
  (`benchmarks.engines.dsv4_attention`);
- that the checks can fail: a planted error is seen, and the tokens depend on compressed rows;
- with ``--mtp`` the same with two drafts per token from an MTP layer, in two processes more; V4.1
  has no such layer.

A process that fails, or takes longer than the limit, leaves what it found until then: that is
compared, and the run ends with status 1 and the end of the log. Rows of other engines, models,
modes and numbers of heads in OUT.json stay.
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

COMPRESSORS = {"v4": "FusedCompressor", "v41": "V41Compressor"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    add_arguments(parser, "vllm")
    args = parser.parse_args()
    conclude(parser, args, "benchmarks.engines.dsv4_vllm_side", judge)


def judge(sides: dict[str, Any]) -> Verdict:
    """Tokens, attention and records of the sides."""
    upstream, flag = sides["upstream"], sides["flag"]
    runner = "Model Runner V2" if flag["engine"]["model_runner_v2"] else "Model Runner V1"
    graphs = flag["engine"]["cudagraph_mode"].replace("_", " ")
    model = f"{upstream['heads']} heads, bf16 weights, fp32 head of 16 tokens, mHC in torch"
    model = f"{NAMES[upstream['model']]}{model}"
    if upstream["model"] == "v4":
        model = f"{model}, CuTe DSL upstream"
    modes = {"": f"default ({runner}, {graphs}); {model}", "-eager": f"eager; {model}"}
    if all(side in sides for side in MTP_SIDES):
        modes["-mtp"] = f"default with MTP, {DRAFTS} drafts ({runner}, {graphs}); {model}"
    verdict = Verdict("vllm", upstream["release"])
    compare_tokens(verdict, sides, modes)
    for name, side in sides.items():
        ours = COMPRESSORS[side["model"]]
        wanted = ours if name.startswith("flag") else "DeepseekCompressor"
        if side["compressors"] != [wanted]:
            verdict.problems.append(
                f"{name}: compressors must be {wanted}, got {side['compressors']}"
            )
    for suffix, mode in modes.items():
        attention_rows(sides["flag" + suffix], mode, verdict)
    record_rows(flag, modes[""], verdict)
    if "-mtp" in modes:
        record_rows(sides["flag-mtp"], modes["-mtp"], verdict)
    return verdict


def record_rows(flag: dict[str, Any], mode: str, verdict: Verdict) -> None:
    """One row for each kind of batch and graph, and one that counts bytes beside upstream's."""
    records, sizes = flag["records"], set(flag["engine"]["capture_sizes"])
    steps = records["steps"]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for step in steps:
        if step["mode"] == "NONE":
            continue  # without a graph: eager beside eager, a failure of which is listed
        start = "behind a chunk or a cached prefix" if step["later"] else "from the beginning"
        place = "" if step["kind"] == "decode" else f", {start}"
        groups.setdefault((step["mode"], step["kind"], place), []).append(step)
    for (graph, kind, place), of in sorted(groups.items()):
        verdict.row(
            mode,
            f"all bytes of states and records, {graph} graph beside eager, {kind} batches{place},"
            f" {len({step['size'] for step in of})} sizes",
            sum(step["equal"] for step in of),
            sum(step["of"] for step in of),
        )
    decoded = {s["size"] for s in steps if (s["mode"], s["kind"]) == ("FULL", "decode")}
    planted = records["planted_errors_seen"]
    if flag["side"] in MTP_SIDES:
        if not records["drafts"] or not decoded or not planted.get("decode", False):
            verdict.problems.append(
                f"no drafts in a graph, or a decode plan for them not seen: {planted}"
            )
    else:
        missing = {size for size in sizes if size <= max(decoded, default=0)} - decoded
        for kind in ("prefill", "mixed"):
            seen = {s["size"] for s in steps if (s["mode"], s["kind"]) == ("PIECEWISE", kind)}
            # a batch of one token cannot be mixed
            missing |= {size for size in sizes if size > (kind == "mixed")} - seen
        if missing or not decoded:
            verdict.problems.append(
                f"no step was seen with graphs of {sorted(missing)} tokens, of {sizes}"
            )
        if set(planted) != {"prefill", "mixed"} or not all(planted.values()):
            verdict.problems.append(
                f"a wrong plan for prefills must be seen as an error, got {planted}"
            )
    verdict.problems += records["failures"]
    written = records["bytes_written"]
    verdict.row(
        mode,
        "bytes of states and records beside upstream's kernels on the same input",
        written - records["bytes_unlike_upstream"],
        written,
        False,
    )
    verdict.row(
        mode,
        "whole records beside upstream's kernels on the same input",
        records["records_written"] - records["records_unlike_upstream"],
        records["records_written"],
        False,
    )


if __name__ == "__main__":
    main()
