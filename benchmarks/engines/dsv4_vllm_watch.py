"""Records of a CUDA graph's compressors, beside eager calls on the same input, in a running vLLM.

A graph's input can be read after its replay: the projections' outputs are kept alive as the graphs
are captured, so that nothing else of a graph is laid over them. After each step the caches are set
back to what they were before it, every compressor is called eagerly with what its graph had read,
and all bytes of all caches are compared, but for the pages that the attention itself writes: those
of its sliding window.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context, set_forward_context
from vllm.v1.worker.gpu import model_runner

Input = tuple[Any, ...]  # a compressor, projections, positions, and in V4 the RoPE
Call = Callable[..., Any]
Memory = dict[int, torch.Tensor]  # all bytes of the caches' storages, by their address
Key = tuple[str, str, bool, int]  # mode, kind, starts behind a chunk or a prefix, tokens
LEAST_PLANTED = 16  # tokens of the steps that a planted error is shown in
DATA_BYTES = {584: 576, 132: 128}
"""Of a record by its width: main, and the indexer's (docs/families/dsv4.md, cache formats). A
page's scales lie behind its data."""


class Watch:
    """Made before the engine, since it has to see the captures; attached to it afterwards."""

    def __init__(self, model: str) -> None:
        # by mode and tokens of a graph, and of the last eager step: compressors and their input
        self.inputs: dict[tuple[str, int], dict[str, Input]] = {}
        self.steps: Counter[Key] = Counter()
        self.equal: Counter[Key] = Counter()
        self.failures: list[str] = []
        self.differing, self.written = 0, 0  # bytes, beside upstream's kernels
        self.records = [0, 0]  # that differ, and written
        self.planted: dict[str, bool] = {}
        self.drafts = 0
        self.descriptor: Any = None
        self.before: Memory | None = None
        adapter = "vllm_compressor" if model == "v4" else "vllm_v41"
        ours = importlib.import_module(f"dsv4_backend.engines.{adapter}")
        served = ours.FusedCompressor if model == "v4" else ours.V41Compressor
        self.upstream: Call = ours.DeepseekCompressor.forward
        self.forward: Call = served.forward
        watch = self

        def forward(self: Any, *read: Any) -> Any:
            watch.keep(self, *read)
            return watch.forward(self, *read)

        served.forward = forward

    def keep(self, compressor: Any, *read: Any) -> None:
        mode, tokens = "NONE", 0
        if torch.cuda.is_current_stream_capturing():
            piecewise = get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.PIECEWISE
            mode, tokens = "PIECEWISE" if piecewise else "FULL", read[0].shape[0]
        self.inputs.setdefault((mode, tokens), {})[compressor.prefix] = (compressor, *read)

    def attach(self, runner: Any, vllm_config: Any) -> None:
        """Compare every step of the engine from now on."""
        self.runner, self.vllm_config = runner, vllm_config
        layers = vllm_config.compilation_config.static_forward_context
        self.caches: dict[str, torch.Tensor] = {
            name: layer.kv_cache
            for name, layer in layers.items()
            if isinstance(getattr(layer, "kv_cache", None), torch.Tensor) and layer.kv_cache.numel()
        }
        self.memory: Memory = {}
        for cache in self.caches.values():
            storage = cache.untyped_storage()
            whole = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(storage)
            self.memory[storage.data_ptr()] = whole
        self.execute = runner.execute_model
        self.dispatch = model_runner.dispatch_cg_and_sync_dp
        self.prepare = runner.model_state.prepare_attn

        def dispatch(*args: Any, **options: Any) -> Any:
            result = self.dispatch(*args, **options)
            self.descriptor = result[0]
            return result

        def prepare(*args: Any, **options: Any) -> Any:
            result = self.prepare(*args, **options)
            torch.cuda.synchronize()  # new blocks have been cleared, nothing else is written yet
            self.before = self.copy()
            return result

        def execute(scheduler_output: Any, *args: Any, **options: Any) -> Any:
            self.before = None
            result = self.execute(scheduler_output, *args, **options)
            if self.before is not None and not options.get("dummy_run", False):
                self.compare()
            return result

        model_runner.dispatch_cg_and_sync_dp = dispatch
        runner.execute_model, runner.model_state.prepare_attn = execute, prepare

    def detach(self) -> None:
        model_runner.dispatch_cg_and_sync_dp = self.dispatch
        self.runner.execute_model = self.execute
        self.runner.model_state.prepare_attn = self.prepare
        self.before = None

    def copy(self) -> Memory:
        return {start: memory.clone() for start, memory in self.memory.items()}

    def restore(self, copy: Memory) -> None:
        for start, memory in self.memory.items():
            memory.copy_(copy[start])

    def compare(self) -> None:
        """The step that just ran: graph beside eager, and beside upstream's kernels."""
        torch.cuda.synchronize()
        state = self.runner.execute_model_state
        batch, metadata = state.input_batch, state.attn_metadata
        mode, size = self.descriptor.cg_mode.name, self.descriptor.num_tokens
        inputs = self.inputs[(mode, 0 if mode == "NONE" else size)]
        prefilling = batch.is_prefilling_np
        kind = "prefill" if prefilling.all() else "mixed" if prefilling.any() else "decode"
        later = bool((batch.num_computed_tokens_np[prefilling] > 0).any())
        after = self.copy()
        if mode == "PIECEWISE":  # V4.1: as captured, where no length of a chunk is known
            replan(inputs, metadata, longest=None)
        eager = self.again(self.forward, inputs, metadata, after)
        key = (mode, kind, later, size)
        self.steps[key] += 1
        if same(after, eager):
            self.equal[key] += 1
        elif len(self.failures) < 20:
            self.failures.append(f"{key}: {self.where(after, eager, inputs)}")
        upstream = self.again(self.by_upstream, inputs, metadata, after)
        self.count(after, upstream, inputs, metadata)
        drafts = int(batch.num_draft_tokens)
        self.drafts += drafts
        several = drafts if kind == "decode" else later and mode == "PIECEWISE"
        if several and size >= LEAST_PLANTED and not self.planted.get(kind, False):
            self.planted[kind] = not same(after, self.planted_error(inputs, metadata, after))
        self.restore(after)
        torch.cuda.synchronize()

    def again(self, call: Call, inputs: dict[str, Input], metadata: Any, after: Memory) -> Memory:
        """The caches after calls of the compressors on those before the step.

        The pages that the attention wrote in the step are those of ``after``.
        """
        assert self.before is not None
        self.restore(self.before)
        context = set_forward_context(metadata, self.vllm_config, num_tokens=1)
        with torch.inference_mode(), context:
            for compressor, kv_score, positions, *rope in inputs.values():
                tokens = metadata[caches_of(compressor)[0]].slot_mapping.shape[0]
                torch.cuda.synchronize()
                call(compressor, kv_score[:tokens], positions[:tokens], *rope)
        torch.cuda.synchronize()
        copy = self.copy()
        for name, cache in self.caches.items():
            if name.endswith("swa_cache"):
                slots = metadata[name].slot_mapping
                pages = (slots[slots >= 0] // cache.shape[1]).unique()
                view(copy, cache)[pages] = view(after, cache)[pages]
        return copy

    def by_upstream(
        self, compressor: Any, kv_score: torch.Tensor, positions: Any, *rope: Any
    ) -> None:
        """Upstream's launches for a compressor; in V4.1 its layer makes those of the records."""
        latent = self.upstream(compressor, kv_score, positions, *rope)
        if latent is not None:
            layer, indexer = compressor.source
            compressor.insert_cache(latent, positions, layer.rotary_emb)
            indexer._produce_k(latent, positions, layer.indexer_rotary_emb)

    def planted_error(self, inputs: dict[str, Input], metadata: Any, after: Memory) -> Memory:
        """The caches after a wrong graph: in V4 one that was captured with one token per request,
        with its decode plan; in V4.1, where lengths only choose launches, one of other positions.
        """
        if any(len(one) == 3 for one in inputs.values()):
            moved = {name: (one, kv, at + 1) for name, (one, kv, at) in inputs.items()}
            replan(inputs, metadata)
            result = self.again(self.forward, moved, metadata, after)
            replan(inputs, metadata)
            return result
        states = [metadata[one[0].state_cache.prefix] for one in inputs.values()]
        lengths = [state.max_query_len for state in states]
        replan(inputs, metadata, max_query_len=1)
        result = self.again(self.forward, inputs, metadata, after)
        for state, length in zip(states, lengths, strict=True):
            state.max_query_len = length
            state.plans.clear()
        return result

    def where(self, after: Memory, eager: Memory, inputs: dict[str, Input]) -> str:
        """The compressors whose caches differ, with the number of differing pages."""
        found = []
        for compressor, *_ in inputs.values():
            for name in caches_of(compressor):
                cache = self.caches[name]
                pages = (view(after, cache) != view(eager, cache)).any(1).sum()
                if pages:
                    found.append(f"{name} in {int(pages)} pages")
        return ", ".join(found) or "memory that no compressor has"

    def count(
        self, after: Memory, upstream: Memory, inputs: dict[str, Input], metadata: Any
    ) -> None:
        """Add up the bytes and the records that the compressors wrote, and those that upstream's
        kernels did not write the same."""
        self.differing += sum(int((after[x] != upstream[x]).sum()) for x in after)
        for compressor, *_ in inputs.values():
            names = caches_of(compressor)
            tokens = metadata[names[0]].slot_mapping.shape[0]
            for name in names:
                cache = self.caches[name]
                slots = metadata[name].slot_mapping[:tokens]
                slots = slots[slots >= 0]
                row_bytes = cache.shape[2] * cache.element_size()
                self.written += slots.numel() * row_bytes
                if cache.element_size() == 1:
                    pages = (slots // cache.shape[1]).unique()
                    unlike = view(after, cache)[pages] != view(upstream, cache)[pages]
                    found = unlike.nonzero().tolist()
                    self.records[1] += slots.numel()
                    rows = {(page, row_of(byte, *cache.shape[1:3])) for page, byte in found}
                    self.records[0] += len(rows)

    def report(self) -> dict[str, Any]:
        rows = [
            {"mode": m, "kind": k, "later": later, "size": s, "equal": self.equal[key], "of": of}
            for key, of in sorted(self.steps.items())
            for m, k, later, s in [key]
        ]
        return {
            "steps": rows,
            "failures": self.failures,
            "planted_errors_seen": self.planted,
            "drafts": self.drafts,
            "bytes_unlike_upstream": self.differing,
            "bytes_written": self.written,
            "records_unlike_upstream": self.records[0],
            "records_written": self.records[1],
        }


def caches_of(compressor: Any) -> list[str]:
    """The names of the caches that a compressor writes: of its state, if it has one, and of its
    records; one of V4.1 writes the indexer's too."""
    state = [] if compressor.state_cache is None else [compressor.state_cache.prefix]
    keys = [compressor.source[1].k_cache.prefix] if hasattr(compressor, "source") else []
    return [*state, compressor.k_cache_prefix, *keys]


def replan(inputs: dict[str, Input], metadata: Any, **changes: Any) -> None:
    """Change fields of the states' metadata, and let the next calls make their plans anew."""
    for compressor, *_ in inputs.values():
        if compressor.state_cache is not None:
            state = metadata[compressor.state_cache.prefix]
            vars(state).update(changes)
            state.plans.clear()


def view(memory: Memory, cache: torch.Tensor) -> torch.Tensor:
    """The pages of a cache, ``[pages, bytes]``, in a copy of the caches' memory."""
    unit = cache.element_size()
    shape = (cache.shape[0], cache.shape[1] * cache.shape[2] * unit)
    whole = memory[cache.untyped_storage().data_ptr()]
    return whole.as_strided(shape, (cache.stride(0) * unit, 1), cache.storage_offset() * unit)


def row_of(byte: int, rows: int, width: int) -> int:
    """The record of a page that a byte belongs to."""
    data = DATA_BYTES[width]
    over = byte - rows * data
    return byte // data if over < 0 else over // (width - data)


def same(one: Memory, other: Memory) -> bool:
    return all(torch.equal(one[start], other[start]) for start in one)
