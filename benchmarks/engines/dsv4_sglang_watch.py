"""Changes to sglang's scheduler process, and its watching, for `dsv4_sglang_side`.

`install` is the entry point of a plug-in. Weights are drawn as sglang initialises its dummies, and
what the machine may lack is replaced by torch on every side alike:

- the Sinkhorn step of mHC, whose kernel is TileLang's, by its equations; the rest of mHC has torch
  functions of sglang's own, which environment variables choose;
- without DeepGEMM, the logits of the indexer by sglang's own torch function.

With the variable ``DSV4_WATCH`` a `Watch` compares each step's records. The scheduler gets a method
``dsv4_watch``, which the engine's ``collective_rpc`` calls.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from backend_core.engines.after_import import after_import
from benchmarks.engines import dsv4_pages

WATCH = "DSV4_WATCH"
LEAST_PLANTED = 16  # tokens of the steps that a planted error is shown in
Memory = dict[int, tuple[torch.Tensor, torch.Tensor]]  # states and pages of each compressor
Key = tuple[str, str, bool, int]  # graph, kind, starts behind a chunk or a prefix, tokens

_watch: Watch | None = None


def install() -> None:
    """In each process of the engine; acts in the one that loads the model."""
    after_import("sglang.srt.model_loader.loader", _draw)
    after_import("sglang.kernels.ops.layernorm.mhc", _replace_sinkhorn)
    if importlib.util.find_spec("deep_gemm") is None:
        after_import("sglang.srt.layers.attention.dsv4.indexer", _replace_logits)
    after_import("sglang.srt.managers.scheduler", _add_method)
    if os.environ.get(WATCH):
        after_import("sglang.srt.model_executor.model_runner", _attach)


def _draw(loader: ModuleType) -> None:
    from benchmarks.engines.dsv4_vllm_side import draw_weights

    loader.initialize_dummy_weights = draw_weights  # type: ignore[attr-defined]


def _replace_sinkhorn(mhc: ModuleType) -> None:
    mhc.hc_split_sinkhorn = split_sinkhorn  # type: ignore[attr-defined]


def _replace_logits(indexer: ModuleType) -> None:
    # the one for other GPUs asserts lengths of one dimension, which its caller does not pass
    indexer.fp8_paged_mqa_logits_torch = indexer.fp8_paged_mqa_logits_torch_sm120  # type: ignore[attr-defined]


def _add_method(scheduler: ModuleType) -> None:
    scheduler.Scheduler.dsv4_watch = command


def _attach(model_runner: ModuleType) -> None:
    global _watch
    _watch = Watch(model_runner.ModelRunner)


def split_sinkhorn(
    mixes: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mixes [B, S, (2 + n)·n]`` fp32 as pre ``[B, S, n]``, post ``[B, S, n]`` and the combination
    ``[B, S, n, n]``, whose rows and columns sum up to about 1."""
    n = hc_mult
    pre, post, comb = mixes.split([n, n, n * n], dim=-1)
    pre = torch.sigmoid(pre * hc_scale[0] + hc_base[:n]) + eps
    post = 2 * torch.sigmoid(post * hc_scale[1] + hc_base[n : 2 * n])
    comb = (comb * hc_scale[2] + hc_base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def command(scheduler: Any, what: str, path: str = "") -> None:
    """A method of sglang's scheduler.

    Args:
        what: ``"halve"`` main compressed rows by their norm's weight; ``"watch"`` each step from
            now on; ``"report"`` into ``path`` and end watching.

    Raises:
        ValueError: another ``what``.
    """
    runner = scheduler.tp_worker.model_runner
    if what == "halve":
        for name, parameter in runner.model.named_parameters():
            if "compressor.norm" in name and "indexer" not in name:
                parameter.data.mul_(0.5)
    elif what == "watch":
        if _watch is not None:
            _watch.on = True
    elif what == "report":
        report = engine_of(runner)
        if _watch is not None:
            _watch.on = False
            report["records"] = _watch.report()
        Path(path).write_text(json.dumps(report) + "\n")
    else:
        raise ValueError(f"what must be halve, watch or report, got {what}")


def engine_of(runner: Any) -> dict[str, Any]:
    """The engine's choices, and by kind the number of compressors with each step."""
    graphs = runner.decode_cuda_graph_runner
    sizes = sorted(getattr(graphs, "capture_bs", None) or [])
    step = vars(runner.attn_backend).get("_forward_compress_all_in_one")
    bound = getattr(step, "_bound", {}).values()
    return {
        "capture_sizes": sizes,
        "tokens_per_request": getattr(graphs, "captured_req_width", 1),
        "attention_backend": type(runner.attn_backend).__name__,
        "compressor_step": type(step).__name__ if step is not None else "upstream",
        "served": sum(one.layer is not None for one in bound),
        "unserved": sum(one.layer is None for one in bound),
        "deep_gemm": importlib.util.find_spec("deep_gemm") is not None,
    }


@dataclass(frozen=True)
class Kept:
    """A compressor's call: its tensors, and the plans of the step that it belongs to."""

    fused: Any
    call: dict[str, Any]
    metadata: Any

    @property
    def bound(self) -> Any:
        return self.fused._bound[id(self.call["norm"])]

    @property
    def plan(self) -> Any:
        return getattr(self.metadata, f"c{self.call['compress_ratio']}_compress_metadata")

    @property
    def rows(self) -> int:
        """Records of a page."""
        return int(self.call["page_size"])

    @property
    def width(self) -> int:
        """Bytes of a record."""
        return 132 if self.call["is_indexer"] else 584


class Watch:
    """Compares what a step's compressors wrote with eager calls on the same input.

    Made before the engine captures graphs: what a captured compressor reads is kept alive, so that
    nothing else of a graph is laid over it and it can be read after a replay. After each step all
    states and records are set back to what they were before it, every compressor is called eagerly
    with what its graph had read, by this package and by upstream's kernels, and all bytes are
    compared, but for what padded rows of a graph write: sglang's dummy slots.
    """

    def __init__(self, runner: Any) -> None:
        from dsv4_backend.engines.sglang_compressor import FusedStep

        self.on = False
        self.inputs: dict[tuple[str, int], dict[int, Kept]] = {}
        self.steps: Counter[Key] = Counter()
        self.equal: Counter[Key] = Counter()
        self.failures: list[str] = []
        self.planted: dict[str, bool] = {}
        self.written, self.differing = 0, 0  # bytes, beside upstream's kernels
        self.records = [0, 0]  # that differ, and written
        self.kinds: Counter[str] = Counter()
        self.step: Callable[..., None] = FusedStep.__call__
        self.forward = runner.forward
        watch = self

        def step(fused: Any, **call: Any) -> None:
            watch.keep(fused, call)
            watch.step(fused, **call)

        def forward(runner: Any, batch: Any, *args: Any, **options: Any) -> Any:
            if not watch.on or runner.is_draft_worker:
                return watch.forward(runner, batch, *args, **options)
            mode, later = kind_of(batch)
            before = watch.copy()
            watch.inputs.pop(("NONE", 0), None)
            result = watch.forward(runner, batch, *args, **options)
            if result.can_run_graph:
                graphs = runner.decode_cuda_graph_runner
                size = graphs.bs * graphs.captured_req_width
                watch.compare(before, ("FULL", mode, later, size), graphs.raw_num_token)
            elif ("NONE", 0) in watch.inputs:
                watch.compare(before, ("NONE", mode, later, 0), None)
            return result

        FusedStep.__call__ = step  # type: ignore[method-assign]
        runner.forward = forward

    def keep(self, fused: Any, call: dict[str, Any]) -> None:
        graph, tokens = "NONE", 0
        if torch.cuda.is_current_stream_capturing():
            graph, tokens = "FULL", call["kv_score_input"].shape[0]
        kept = Kept(fused, call, fused._backend.forward_metadata)
        self.inputs.setdefault((graph, tokens), {})[id(call["norm"])] = kept

    def all_bound(self) -> dict[int, Any]:
        return {
            key: kept.bound
            for inputs in self.inputs.values()
            for key, kept in inputs.items()
            if key in kept.fused._bound
        }

    def copy(self) -> Memory:
        _wait()
        return {key: (b.state.clone(), b.pages.clone()) for key, b in self.all_bound().items()}

    def restore(self, memory: Memory) -> None:
        for key, bound in self.all_bound().items():
            if key in memory:
                bound.state.copy_(memory[key][0])
                bound.pages.copy_(memory[key][1])
        _wait()

    def again(
        self, call: Callable[[Kept], None], inputs: dict[int, Kept], before: Memory
    ) -> Memory:
        """The memory after calls of the compressors on that before the step."""
        self.restore(before)
        for kept in inputs.values():
            backend = kept.fused._backend
            current, backend.forward_metadata = backend.forward_metadata, kept.metadata
            try:
                call(kept)
            finally:
                backend.forward_metadata = current
        return self.copy()

    def compare(self, before: Memory, key: Key, real: int | None) -> None:
        """The step that just ran; of its tokens the first ``real`` are of requests."""
        graph, kind, _, size = key
        inputs = self.inputs[graph, size]
        if not set(inputs) <= set(before):
            return  # a compressor's first step, which bound it
        after = self.copy()
        self.steps[key] += 1
        eager = self.again(self._ours, inputs, before)
        parts = self.unlike(after, eager, inputs, real)
        if not parts:
            self.equal[key] += 1
        elif len(self.failures) < 20:
            self.failures.append(f"{key}: {', '.join(parts)}")
        upstream = self.again(self._upstream, inputs, before)
        for one, kept in inputs.items():
            self.count(after[one], upstream[one], kept, real)
        tokens = next(iter(inputs.values())).call["kv_score_input"].shape[0]
        if tokens >= LEAST_PLANTED and not self.planted.get(f"{graph} {kind}", False):
            planted = self.again(self._doubled, inputs, before)
            seen = bool(self.unlike(after, planted, inputs, real))
            self.planted[f"{graph} {kind}"] = seen
        self.restore(after)

    def _ours(self, kept: Kept) -> None:
        self.step(kept.fused, **kept.call)

    def _upstream(self, kept: Kept) -> None:
        kept.fused._upstream(**kept.call)

    def _doubled(self, kept: Kept) -> None:
        """A planted error: another input."""
        self.step(kept.fused, **{**kept.call, "kv_score_input": 2 * kept.call["kv_score_input"]})

    def unlike(
        self, one: Memory, other: Memory, inputs: dict[int, Kept], real: int | None
    ) -> list[str]:
        """The compressors whose memory differs, with the number of differing pages."""
        found = []
        for key in one:
            hidden = hide(inputs[key], real) if key in inputs else (None, None)
            for what, a, b, rows in zip(
                ("states", "records"), one[key], other[key], hidden, strict=True
            ):
                pages = differing(a, b, rows)
                if pages:
                    name = f"ratio {inputs[key].call['compress_ratio']}" if key in inputs else "?"
                    found.append(f"{what} of {name} in {pages} pages")
        return found

    def count(
        self,
        ours: tuple[torch.Tensor, torch.Tensor],
        theirs: tuple[torch.Tensor, torch.Tensor],
        kept: Kept,
        real: int | None,
    ) -> None:
        """Add up what a compressor wrote, and what upstream's kernels did not write the same."""
        state_rows, records = written(kept, real)
        row_bytes = ours[0].shape[-1] * ours[0].element_size()
        self.written += state_rows * row_bytes + records * kept.width
        self.records[1] += records
        hidden = hide(kept, real)
        for a, b, rows, is_state in zip(ours, theirs, hidden, (True, False), strict=True):
            flat = [mask(x, rows).view(torch.uint8).flatten(1) for x in (a, b)]
            found = (flat[0] != flat[1]).nonzero()
            self.differing += len(found)
            if is_state:
                self.kinds["state"] += len(found)
                continue
            shape = kept.rows, kept.width
            places = {(page, dsv4_pages.row_of(byte, *shape)) for page, byte in found.tolist()}
            self.records[0] += len(places)
            for page, byte in found.tolist():
                apart = abs(int(flat[0][page, byte]) - int(flat[1][page, byte]))
                self.kinds[f"{dsv4_pages.part_of(byte, *shape)}, {apart} apart"] += 1

    def report(self) -> dict[str, Any]:
        rows = [
            {"graph": g, "kind": k, "later": later, "size": s, "equal": self.equal[key], "of": of}
            for key, of in sorted(self.steps.items())
            for g, k, later, s in [key]
        ]
        return {
            "steps": rows,
            "failures": self.failures,
            "planted_errors_seen": self.planted,
            "bytes_unlike_upstream": self.differing,
            "bytes_written": self.written,
            "kinds_of_bytes": dict(self.kinds.most_common(20)),
            "records_unlike_upstream": self.records[0],
            "records_written": self.records[1],
        }


def kind_of(batch: Any) -> tuple[str, bool]:
    """The kind of a batch, and whether a prompt in it starts behind a chunk or a cached prefix."""
    mode = batch.forward_mode
    if mode.is_target_verify():
        return "verify", False
    if mode.is_decode_or_idle():
        return "decode", False
    prefixes = batch.extend_prefix_lens_cpu
    return "prefill", prefixes is not None and any(int(n) > 0 for n in prefixes)


def entries_of(kept: Kept) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(token, state row) of each row that a step writes; (token, slot) of each record."""
    plan, ratio, slots = kept.plan, kept.call["compress_ratio"], kept.call["out_loc"].long()
    if plan.is_decode:
        entries = plan.plan_d.view(torch.int32).long()
        tokens, rows = torch.arange(len(entries), device=entries.device), entries[:, 1]
        ends = tokens[(entries[:, 0] > 0) & (entries[:, 0] % ratio == 0) & (rows >= 0)]
    else:
        windows, writes = (x.view(torch.int32).long() for x in (plan.plan_c, plan.plan_w))
        tokens, rows = writes.unbind(1)
        ends = windows[windows[:, 0] > 0, 1] & 0xFFFF
    writing = (tokens >= 0) & (rows >= 0)
    ends = ends[slots[ends] >= 0]
    return tokens[writing], rows[writing], ends, slots[ends]


def hide(kept: Kept, real: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory that padded rows alone write: rows of the state, and pages of the records."""
    tokens, rows, ends, slots = entries_of(kept)
    real = len(kept.call["kv_score_input"]) if real is None else real
    pages = slots // kept.rows
    return _alone(rows, tokens >= real), _alone(pages, ends >= real)


def _alone(places: torch.Tensor, padded: torch.Tensor) -> torch.Tensor:
    hidden = places[padded].unique()
    return hidden[~torch.isin(hidden, places[~padded])]


def written(kept: Kept, real: int | None) -> tuple[int, int]:
    """Rows of the state and records that a step writes for its requests."""
    tokens, _, ends, _ = entries_of(kept)
    real = len(kept.call["kv_score_input"]) if real is None else real
    return int((tokens < real).sum()), int((ends < real).sum())


def mask(memory: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    """States ``[pages, ratio, width]`` or pages ``[pages, bytes]`` with some rows as 0."""
    flat = memory.flatten(0, 1) if memory.dim() == 3 else memory
    if rows is None or not len(rows):
        return flat
    flat = flat.clone()
    flat[rows] = 0
    return flat


def differing(one: torch.Tensor, other: torch.Tensor, rows: torch.Tensor | None) -> int:
    """How many rows of bytes differ."""
    a, b = (mask(x, rows).view(torch.uint8) for x in (one, other))
    return 0 if torch.equal(a, b) else int((a != b).any(1).sum())


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
