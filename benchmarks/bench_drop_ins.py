"""Drop-ins beside their originals on one GPU: the same calls, with the import changed.

    python benchmarks/bench_drop_ins.py --originals FOLDER \
        --output benchmarks/results/dropins_h200.json

`cases` has two callers of each function, with the shapes of the models that they serve. A case
makes its inputs once and calls the function of the same name in both packages: ours first or the
original first by turns. Every output is compared with float64 before anything is timed, and an
original that cannot be imported or refuses a call leaves its columns empty, with the reason.

``--accuracy`` writes instead, without times, the errors of SageAttention's and SpargeAttn's
functions at 20 lengths that no block divides, dense, causal, packed and predicted, with attention
that is nearly uniform and attention that is sharp. ``e4m3_error`` is what the rounding of weights
and values to e4m3 costs alone. It prints last, for each function, the smallest and the largest
ratio of our error to the original's:

    python benchmarks/bench_drop_ins.py --accuracy --originals FOLDER \
        --output benchmarks/results/dropins_accuracy_h200.json

On several GPUs a run goes faster in parts, one process each: ``--only`` names the functions of a
part, and ``--merge PART.json ...`` makes their results one.

``us`` is the median time of a call between events on the default stream while the GPU is kept busy
before it, which is the kernels' time; ``host_us`` the host's time in a call; ``plan_us`` the whole
time of a plan, which a step makes once. ``FOLDER`` holds the originals' packages, where they are
not installed.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from backend_core.testing.records import write_record
from backend_core.testing.timing import call_time_ms, environment, host_time_ms, stream_time_ms
from mla_backend import reference_sparse_mla
from mla_backend.testing.sparse_mla_cases import write_records

SAMPLED = 256  # query rows that are compared with float64
PAGE = 64
ROUNDS = 5
VLLMS_FLASH_MLA = "vllm.third_party.flashmla.flash_mla_interface"
"""FlashMLA as vLLM 0.33.0 builds it: its sparse kernels serve Hopper, those of the package on PyPI
SM100 alone. In a folder of originals that is this file and ``vllm/_flashmla_C.abi3.so``."""
Run = Callable[[], Tensor]


@dataclass
class Inputs:
    """The inputs of a case.

    Attributes:
        make: given a package, (its plan or ``None``, its call).
        error: of an output, as relative L2 of sampled rows in float64.
        e4m3_error: likewise, of attention whose weights and values alone are rounded to e4m3.
    """

    make: Callable[[Any], tuple[Callable[[], object] | None, Run]]
    error: Callable[[Tensor], float]
    e4m3_error: Callable[[], float] | None = None


@dataclass
class Case:
    """One function as one caller calls it.

    Attributes:
        ours, theirs: modules.
        function: a name in both.
        draw: makes the inputs on a device, of the sizes of ``shape``.
    """

    ours: str
    theirs: str
    function: str
    caller: str
    draw: Callable[..., Inputs]
    shape: dict[str, Any] = field(default_factory=dict)


def attention_error(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    got: Tensor | None,
    *,
    times_seen: Callable[[Tensor], Tensor],
) -> float:
    """Relative L2 of sampled rows of attention, as their root mean square.

    Rows are compared one by one: under a causal mask the first, which see few keys, are so much
    larger than the others that a norm of all would be theirs.

    Args:
        q: ``[rows, H, D]``; k, v: ``[keys, Hkv, D]``; got: ``[rows, H, DV]``, or ``None`` for
            float64 attention that rounds its weights and values to e4m3.
        times_seen: how often each of the given rows ``[R, 1]`` sees each key, ``[R, keys]``.
    """
    rows = torch.linspace(0, len(q) - 1, min(SAMPLED, len(q))).long().to(q.device)
    grouped = q[rows].double().unflatten(1, (k.shape[1], -1))
    logits = torch.einsum("rhgd,nhd->rhgn", grouped, k.double()) * q.shape[2] ** -0.5
    logits += times_seen(rows[:, None]).double().log()[:, None, None]
    weights = (logits - logits.amax(-1, keepdim=True)).exp()
    want = _weighted(weights, v.double())
    found = got[rows].double() if got is not None else _weighted(_e4m3(weights), _e4m3(v, dim=0))
    errors = (found - want).square().sum(-1) / want.square().sum(-1)
    return float(errors.mean().sqrt())


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """Rows ``[R, H, DV]`` of weights ``[R, Hkv, G, keys]`` that do not sum to 1."""
    sums = torch.einsum("rhgn,nhd->rhgd", weights, v)
    return (sums / weights.sum(-1, keepdim=True)).flatten(1, 2)


def _e4m3(x: Tensor, dim: int = -1) -> Tensor:
    """float64 numbers that e4m3 holds, once the largest along ``dim`` is scaled to its 448."""
    scale = x.double().abs().amax(dim, keepdim=True) / torch.finfo(torch.float8_e4m3fn).max
    return (x.double() / scale).float().to(torch.float8_e4m3fn).double() * scale


def normal(device: torch.device, *shape: int) -> Tensor:
    return torch.randn(shape, device=device).bfloat16()


def sparse_decode(device: torch.device, heads: int, requests: int, keys: int) -> Inputs:
    rows = 0.05 * torch.randn(2 * requests, PAGE, 512)
    cache = write_records(rows).to(device)
    q = normal(device, requests, 1, heads, 512)
    indices = torch.randint(0, rows.shape[0] * PAGE, (requests, 1, keys), dtype=torch.int32)
    indices = indices.to(device)

    def make(package: Any) -> tuple[None, Run]:
        meta = package.get_mla_metadata()[0] if hasattr(package, "get_mla_metadata") else None

        def run() -> Tensor:
            out: Tensor = package.flash_mla_with_kvcache(
                q,
                cache.unsqueeze(2),
                None,
                None,
                512,
                meta,
                is_fp8_kvcache=True,
                indices=indices,
            )[0]
            return out

        return None, run

    def error(got: Tensor) -> float:
        numbers = reference_sparse_mla.read_records(cache).view(-1, 1, 512)
        out = got.view(requests, heads, 512)

        def times_seen(rows: Tensor) -> Tensor:
            named = indices[rows[:, 0], 0].long()
            return q.new_zeros(len(rows), len(numbers)).scatter_add_(
                1, named, q.new_ones(named.shape)
            )

        return attention_error(q[:, 0], numbers, numbers, out, times_seen=times_seen)

    return Inputs(make, error)


def cascade(
    device: torch.device, heads: int, kv_heads: int, requests: int, shared: int, own: int
) -> Inputs:
    page, dim = 16, 128
    pages = [shared // page, requests * (own // page)]
    q = normal(device, requests, heads, dim)
    cache = normal(device, sum(pages), 2, page, kv_heads, dim)
    each = torch.arange(requests + 1, dtype=torch.int32, device=device)
    ends = each.new_tensor([0, requests]), each
    starts = each.new_tensor([0, pages[0]]), each * (own // page)
    indices = torch.arange(sum(pages), dtype=torch.int32, device=device).split(pages)
    last = [torch.full((len(x) - 1,), page, dtype=torch.int32, device=device) for x in ends]

    def make(package: Any) -> tuple[Callable[[], object], Run]:
        workspace = torch.empty(128 << 20, dtype=torch.uint8, device=device)
        wrapper = package.MultiLevelCascadeAttentionWrapper(2, workspace, "NHD")

        def plan() -> None:
            sizes = (heads, kv_heads, dim, page)
            arrays = (list(ends), list(starts), list(indices), last)
            wrapper.plan(*arrays, *sizes, q_data_type=q.dtype)

        plan()
        return plan, lambda: wrapper.run(q, cache)

    def times_seen(rows: Tensor) -> Tensor:
        keys = torch.arange(shared + requests * own, device=device)
        return (keys < shared) | ((keys - shared) // own == rows)

    def error(got: Tensor) -> float:
        k, v = (x.reshape(-1, kv_heads, dim) for x in cache.unbind(1))
        return attention_error(q, k, v, got, times_seen=times_seen)

    return Inputs(make, error)


def block_map(device: torch.device, heads: int, tiles: int, blocks: int, density: float) -> Tensor:
    """bool ``[heads, tiles, blocks]``: every tile has the same number of blocks."""
    scores = torch.rand(heads, tiles, blocks, device=device)
    kept = max(1, round(density * blocks))
    return torch.zeros_like(scores).scatter_(2, scores.topk(kept, 2).indices, 1.0).bool()


def dense_video(
    device: torch.device,
    name: str,
    heads: int,
    dim: int,
    tokens: int,
    is_causal: bool = False,
    sharpness: float = 1.0,
) -> Inputs:
    """SageAttention's function ``name`` on one clip.

    Args:
        sharpness: the standard deviation of logits.
    """
    q, k, v = (normal(device, 1, heads, tokens, dim) for _ in range(3))
    q *= sharpness

    def make(package: Any) -> tuple[None, Run]:
        call = getattr(package, name)
        return None, lambda: call(q, k, v, tensor_layout="HND", is_causal=is_causal)

    def error(got: Tensor | None = None) -> float:
        q_1, k_1, v_1 = (x[0, :1].transpose(0, 1) for x in (q, k, v))
        out = None if got is None else got[0, :1].transpose(0, 1)
        keys = torch.arange(tokens, device=device)
        last = 0 if is_causal else tokens
        return attention_error(q_1, k_1, v_1, out, times_seen=lambda rows: keys <= rows + last)

    return Inputs(make, error, error)


def packed_video(
    device: torch.device,
    heads: int,
    dim: int,
    tokens: int,
    clips: int,
    is_causal: bool = False,
    sharpness: float = 1.0,
) -> Inputs:
    """``dense_video`` of several clips of as many tokens, one after another."""
    q, k, v = (normal(device, clips * tokens, heads, dim) for _ in range(3))
    q *= sharpness
    offsets = torch.arange(clips + 1, dtype=torch.int32, device=device) * tokens

    def make(package: Any) -> tuple[None, Run]:
        call = (q, k, v, offsets, offsets, tokens, tokens, is_causal)
        return None, lambda: package.sageattn_varlen(*call)

    def error(got: Tensor) -> float:
        first = [x[:, :1] for x in (q, k, v, got)]

        keys = torch.arange(clips * tokens, device=device)

        def times_seen(rows: Tensor) -> Tensor:
            same = keys // tokens == rows // tokens
            return same & (keys <= rows) if is_causal else same

        return attention_error(*first, times_seen=times_seen)

    return Inputs(make, error)


def sparse_video(
    device: torch.device,
    name: str,
    heads: int,
    tokens: int,
    options: dict[str, float],
    sharpness: float = 1.0,
) -> Inputs:
    """SpargeAttn's function ``name`` on one clip. Every 128 queries, which no package's tile
    exceeds, look for one block of 128 keys, which a prediction has to find; the error holds what it
    leaves out."""
    blocks = -(-tokens // 128)
    centres = normal(device, 1, heads, blocks, 128)
    wanted = torch.randint(0, tokens // 128, (blocks,), device=device)
    k, q = (
        (x + 0.3 * normal(device, *x.shape))[:, :, :tokens]
        for x in (each.repeat_interleave(128, 2) for each in (centres, centres[:, :, wanted]))
    )
    q *= sharpness
    v = normal(device, 1, heads, tokens, 128)
    kept = block_map(device, heads, -(-tokens // 64), -(-tokens // 128), 0.25)
    more = {"mask_id": kept[None]} if name.startswith("block_sparse") else options

    def make(package: Any) -> tuple[None, Run]:
        return None, lambda: getattr(package, name)(q, k, v, **more)

    def error(got: Tensor) -> float:
        first = [x[0, :1].transpose(0, 1) for x in (q, k, v, got)]
        keys = torch.arange(tokens, device=device)

        def times_seen(rows: Tensor) -> Tensor:
            if "mask_id" not in more:
                return rows.new_ones(len(rows), tokens)
            return kept[0, rows // 64, keys // 128]

        return attention_error(*first, times_seen=times_seen)

    return Inputs(make, error)


def cases() -> Iterator[Case]:
    """Two callers of each function."""
    mla, block_sparse = "mla_backend.drop_ins", "block_sparse_backend.drop_ins"
    shape: dict[str, Any]
    for caller, shape in (
        ("vLLM, DeepSeek-V4 decode", {"heads": 64, "requests": 64, "keys": 512}),
        ("sglang, DeepSeek-V4 decode", {"heads": 128, "requests": 16, "keys": 640}),
    ):
        ours, name = f"{mla}.flash_mla", "flash_mla_with_kvcache"
        yield Case(ours, VLLMS_FLASH_MLA, name, caller, sparse_decode, shape)
    for caller, heads, requests in (("Llama-3-8B", 32, 64), ("Llama-3-70B over 2 GPUs", 32, 256)):
        shape = {"heads": heads, "kv_heads": heads // 4, "requests": requests}
        shape |= {"shared": 8192, "own": 512}
        name = "MultiLevelCascadeAttentionWrapper"
        yield Case(f"{mla}.flashinfer", "flashinfer", name, caller, cascade, shape)
    clips = (("CogVideoX-5B", 48, 64, 17776), ("Wan 2.1 14B at 480p", 40, 128, 32760))
    for caller, heads, dim, tokens in clips:
        shape = {"heads": heads, "dim": dim, "tokens": tokens}
        for name in (
            "sageattn",
            "sageattn_qk_int8_pv_fp8_cuda",
            "sageattn_qk_int8_pv_fp16_cuda",
            "sageattn_qk_int8_pv_fp16_triton",
        ):
            named = {"name": name, **shape}
            ours = f"{block_sparse}.sageattention"
            yield Case(ours, "sageattention", name, caller, dense_video, named)
        packed = {**shape, "tokens": tokens // 4, "clips": 4}
        name = "sageattn_varlen"
        yield Case(ours, "sageattention", name, caller, packed_video, packed)
        for name in (
            "spas_sage2_attn_meansim_cuda",
            "spas_sage2_attn_meansim_topk_cuda",
            "spas_sage_attn_meansim_cuda",
            "spas_sage_attn_meansim_topk_cuda",
            "block_sparse_sage2_attn_cuda",
        ):
            shape = {"name": name, "heads": heads, "tokens": tokens // 128 * 128, "options": {}}
            ours = f"{block_sparse}.spargeattn"
            yield Case(ours, "spas_sage_attn", name, caller, sparse_video, shape)


LENGTHS = (
    *(193, 321, 577, 1025, 1409, 2177, 3001, 4444, 5983, 8190, 10007, 13003),
    *(17776, 22223, 32760, 44441, 56789, 75600, 97777, 119056),
)
"""Of clips: no block of 64 or 128 tokens divides one."""
ATTENTION = {"near-uniform": 1.0, "sharp": 4.0}
"""Standard deviations of the logits."""


def accuracy_cases() -> Iterator[Case]:
    """Every function of SageAttention and SpargeAttn at each length."""
    sage = [case for case in cases() if case.theirs == "sageattention"]
    sparge = [case for case in cases() if case.theirs == "spas_sage_attn"]
    for (caller, sharpness), tokens in itertools.product(ATTENTION.items(), LENGTHS):
        for case, is_causal in itertools.product(sage, (False, True)):
            shape = case.shape | {"tokens": tokens, "heads": 1, "is_causal": is_causal}
            if "clips" in shape:
                shape |= {"tokens": tokens // 3, "clips": 3}
            yield replace(case, caller=caller, shape=shape | {"sharpness": sharpness})
        for case in sparge[: len(sparge) // 2]:  # both callers are alike but for their lengths
            shape = case.shape | {"tokens": tokens, "heads": 1, "sharpness": sharpness}
            yield replace(case, caller=caller, shape=shape)


def worst(rows: list[dict[str, Any]]) -> Iterator[str]:
    """For each function and attention, where our error is largest beside the original's."""
    for function, caller in dict.fromkeys((row["function"], row["caller"]) for row in rows):
        of = [row for row in rows if (row["function"], row["caller"]) == (function, caller)]
        compared = [row for row in of if row.get("theirs_error", 0.0) > 0.0]
        if not compared:
            yield f"{function:34} {caller:13} {of[0].get('theirs_refused', '')}"
            continue
        ratios = {row["ours_error"] / row["theirs_error"]: row for row in compared}
        ours, theirs = (1e3 * ratios[max(ratios)][f"{side}_error"] for side in ("ours", "theirs"))
        shape = ratios[max(ratios)]["shape"]
        yield (
            f"{function:34} {caller:13} {min(ratios):.3f} to {max(ratios):.3f} over {len(of)} rows;"
            f" {ours:.1f} beside {theirs:.1f} at {shape['tokens']} tokens"
            f"{', causal' if shape.get('is_causal') else ''}"
        )


def measure(case: Case, device: torch.device, turn: int, is_timed: bool = True) -> dict[str, Any]:
    """A row of the result."""
    torch.manual_seed(turn)
    inputs = case.draw(device, **case.shape)
    row: dict[str, Any] = {"function": case.function, "caller": case.caller, "shape": case.shape}
    calls: dict[str, tuple[Callable[[], object] | None, Run]] = {}
    for side, module in (("ours", case.ours), ("theirs", case.theirs)):
        try:
            package = importlib.import_module(module)
            calls[side] = inputs.make(package)
            row[f"{side}_error"] = inputs.error(calls[side][1]())
        except Exception as reason:
            if side == "ours":
                raise
            calls.pop(side, None)
            row["theirs_refused"] = f"{type(reason).__name__}: {reason}".splitlines()[0][:200]
    if inputs.e4m3_error is not None and "fp16" not in case.function:
        row["e4m3_error"] = inputs.e4m3_error()
    if not is_timed:
        return row
    for side in sorted(calls, reverse=turn % 2 == 1):
        plan, run = calls[side]
        row[f"{side}_host_us"] = 1e3 * host_time_ms(run, repeats=50)
        if plan is not None:
            row[f"{side}_plan_us"] = 1e3 * call_time_ms(plan, repeats=11)
    times: dict[str, list[float]] = {side: [] for side in calls}
    for number in range(ROUNDS):  # alternating, since the clock falls as the GPU warms
        for side in sorted(calls, reverse=number % 2 == 1):
            times[side].append(1e3 * stream_time_ms(calls[side][1], repeats=3))
    return row | {f"{side}_us": statistics.median(found) for side, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--originals", type=Path, action="append", default=[])
    parser.add_argument("--accuracy", action="store_true", help="errors alone, at 20 lengths")
    parser.add_argument("--only", nargs="*", help="functions; by default all")
    parser.add_argument("--merge", type=Path, nargs="+", help="results of parts; nothing is run")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.merge:
        head, rows = merged(options.merge)
        write_record(options.output, {**head, "rows": rows})
    else:
        rows = run(options)
    for line in worst(rows):
        print(line)


def merged(paths: list[Path]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Join the records of one run's parts: what describes the run, and the ``rows`` of all.

    Raises:
        ValueError: the parts are not of one run.
    """
    heads: list[dict[str, Any]] = []
    rows: list[dict[str, Any]] = []
    for path in paths:
        head = json.loads(path.read_text(encoding="utf-8"))
        rows += head.pop("rows")
        heads.append(head)
        if head != heads[0]:
            raise ValueError(f"{path} and {paths[0]} differ: {head} and {heads[0]}")
    return heads[0], rows


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of the chosen cases, written after each."""
    sys.path[:0] = [str(folder) for folder in options.originals]
    head = environment()
    rows: list[dict[str, Any]] = []
    chosen = accuracy_cases() if options.accuracy else cases()
    for turn, case in enumerate(chosen):
        if options.only and case.function not in options.only:
            continue
        rows.append(measure(case, torch.device("cuda", 0), turn, not options.accuracy))
        if not options.accuracy:
            print(json.dumps(rows[-1]), flush=True)
        write_record(options.output, {**head, "rows": rows})
        torch.cuda.empty_cache()
    return rows


if __name__ == "__main__":
    main()
