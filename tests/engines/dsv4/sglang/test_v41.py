"""sglang's DeepSeek-V4.1: its own compression beside the operator, from its own pools on.

sglang's modules, pools and attention backend run in their torch form, its packing of the indexer's
keys in the interpreter. Its store of main records is a CUDA kernel, which the definition of V4's
records stands for.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from backend_core.engines import seams
from dsv4_backend.engines.seam_list import SGLANG_V41

if seams.difference(SGLANG_V41) is not None:
    pytest.skip("0.5.22 is not served", allow_module_level=True)

from sglang.kernels.ops.attention.dsv4.kv_layout import KVLayout
from sglang.srt.environ import envs
from sglang.srt.layers.attention import deepseek_v4_backend as v4_backend
from sglang.srt.layers.attention.dsv4 import dsv41_sparse as sparse
from sglang.srt.mem_cache import deepseek_v4_memory_pool as pools
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from dsv4_backend import RecordSpec, V41Layer, reference, v41_step
from dsv4_backend.engines import sglang as flag
from dsv4_backend.engines import sglang_v41 as adapter
from dsv4_backend.engines.v41_paths import say_paths
from dsv4_backend.testing import v41 as kit
from dsv4_backend.testing.engine import Chunk
from dsv4_backend.testing.oracle import within_one_code
from tests.engines.dsv4.sglang.harness import real_pool

GROUPS, HIDDEN, REQUESTS = 128, 64, 3
LAYERS = {2: 1, 1: 3}  # by ratio, those that make latents
ROUNDED = 1e-3
"""Share of a latent's channels that fp32 may round to the other bf16 than float64."""
PAGE = 256
DECODES = (((1, 30, 31), (0, 43, 44), (2, 27, 28)), ((2, 28, 29), (1, 31, 32), (0, 44, 45)))
STEPS = (*kit.LONG_CHUNKS[:2], ((0, 10, 43), (2, 18, 27)), *DECODES)


def share(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of the values that differ."""
    return (one.double() != other.double()).double().mean().item()


def make_layer(ratio: int) -> V41Layer:
    return kit.make_layer(kit.make_spec(ratio, *kit.SGLANG), 1, torch.device("cpu"))


def sglangs_latents(history: torch.Tensor, layer: V41Layer) -> torch.Tensor:
    spec = layer.spec
    compressor = sparse.DeepseekV41Compressor(
        64, 512, spec.compress_ratio, spec.eps, fused_compress=False
    )
    compressor.norm.weight.data.copy_(layer.norm_weight)
    if spec.compress_ratio == 2:
        history = compressor.pool_pairs(*history.view(GROUPS, 2, 2, 512).unbind(2))
    latents: torch.Tensor = compressor.finish(history)
    return latents


@pytest.mark.parametrize("ratio", [1, 2])
def test_latents_are_the_definitions(ratio: int) -> None:
    layer = make_layer(ratio)
    history = kit.make_history(layer.spec, ratio * GROUPS, 2)
    theirs = sglangs_latents(history, layer)
    assert share(theirs, reference.latents(history, layer)) < ROUNDED
    vllms = kit.make_layer(kit.make_spec(ratio), 1, torch.device("cpu"))
    assert ratio == 1 or share(theirs, reference.latents(history, vllms)) > 0.1


@pytest.mark.parametrize("magnitude", [1.0, 1e-3, 1e-5, 1e3])
def test_records_are_the_definitions(magnitude: float) -> None:
    """Also of keys whose scales are small, and of a row of zeros."""
    from sglang.kernels.ops.quantization.fp4_indexer_quant import quantize_fp4_indexer_tensor

    layer, positions = make_layer(1), torch.arange(GROUPS)
    latent = sglangs_latents(kit.make_history(layer.spec, GROUPS, 2), layer)
    latent = (latent.float() * magnitude).bfloat16()
    latent[5] = 0.0
    layer.key_norm_weight.mul_(magnitude)
    angles = torch.view_as_complex(layer.rope_table.float().view(-1, 32, 2))[positions]
    main, key = reference.v41_rows(latent.double(), positions, layer)

    theirs = sparse._rope_fq4(latent, angles, 64, compressed_kv=True)
    given: dict[str, Any] = {"cache_format": "fp8_ds_mla", "page_tokens": 1, "fp8": "ocp"}
    stored = reference.quantise(theirs.double(), RecordSpec(rounding="vllm", **given))
    ours = reference.quantise(main, layer.spec.main)
    assert all(share(*pair) == 0 for pair in zip(stored, ours, strict=True))

    norm = sparse.RMSNorm(128, layer.spec.eps)
    norm.weight.data.copy_(layer.key_norm_weight)
    wk = layer.key_projection.T
    indexer = SimpleNamespace(k_norm=norm, forward_wk=lambda x: x @ wk, rope_head_dim=64)
    theirs = sparse.DeepseekV41Indexer.index_keys(indexer, latent, angles)
    packed, scales = (x.view(torch.uint8) for x in quantize_fp4_indexer_tensor(theirs, rne=True))
    ours = reference.quantise(key, layer.spec.index)
    # a product in another order meets the middle of two bf16 on the other side
    assert share(packed, ours[0]) < 0.005 and share(scales.view(GROUPS, 4), ours[1]) < 0.005
    assert torch.equal(packed[5], ours[0][5]) and not packed[5].any()


def test_the_ring_and_the_layouts_are_as_the_page_says() -> None:
    assert envs.SGLANG_DSV4_KV_LAYOUT.get() == "v4"
    for ratio in (1, 2):
        layout = pools.resolve_compressed_kv_layout(KVLayout.V4, ratio)
        assert layout is KVLayout.V4
        assert pools.resolve_compressed_kv_layout(KVLayout.V41, ratio) is KVLayout.V41_FP4
    rings = [pools.get_compress_state_ring_size(2, drafts) for drafts in range(4)]
    assert rings == [2, 4, 4, 8]


class Served:
    """A source layer of each ratio in sglang's pool, and steps through sglang's own entry."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ours: bool, drafts: int = 0) -> None:
        monkeypatch.setattr(
            pools,
            "resolve_compress_state_ring_size",
            lambda ratio: pools.get_compress_state_ring_size(ratio, drafts),
        )
        self.pool = real_pool(
            (0, 2, 2, 1), kv_source_layers=list(LAYERS.values()), full_size=PAGE * REQUESTS
        )
        self.backend = object.__new__(v4_backend.DeepseekV4AttnBackend)
        self.backend.token_to_kv_pool = self.pool
        self.backend.low_ratios, self.backend.has_c4, self.backend.has_c128 = (1, 2), False, False
        self.backend.is_draft_runner = self.backend.is_dspark_draft = False
        self.backend.speculative_num_draft_tokens = drafts or None
        self.backend.tail_source_kv_layer_id = None
        monkeypatch.setattr(
            v4_backend.DeepseekV4AttnBackend, "_low_ratio_in_prefill_graph", lambda self: False
        )
        self.pool.set_extra_key_buffer_fused = self.store_main
        self.held: tuple[torch.Tensor, ...] | None = None  # as a graph holds a step's tensors
        self.layers = {ratio: self.make(ratio) for ratio in LAYERS}
        if ours:
            flag._install_v41(self.backend, None)

    def make(self, ratio: int) -> Any:
        definition = make_layer(ratio)
        compressor = sparse.DeepseekV41Compressor(HIDDEN, 512, ratio, definition.spec.eps)
        config = SimpleNamespace(
            index_n_heads=4,
            index_head_dim=128,
            qk_rope_head_dim=64,
            index_topk=64,
            kv_source_layer_ids=list(LAYERS.values()),
            candidate_source_layer_id=-1,
            candidate_topk_blocks=0,
            candidate_block_size=0,
            q_lora_rank=32,
            hidden_size=HIDDEN,
            rms_norm_eps=definition.spec.eps,
        )
        indexer = sparse.DeepseekV41Indexer(config, LAYERS[ratio], 512, None, "indexer")
        g = torch.Generator().manual_seed(ratio)
        with torch.no_grad():
            for module in (compressor, indexer):
                for weight in module.parameters():
                    weight.copy_(torch.randn(weight.shape, generator=g) / HIDDEN**0.5)
            compressor.norm.weight.copy_(definition.norm_weight)
            indexer.k_norm.weight.copy_(definition.key_norm_weight)
            indexer.wk.weight.copy_(definition.key_projection)
        angles = definition.rope_table.float().view(-1, 32, 2).contiguous()
        return SimpleNamespace(
            layer_id=LAYERS[ratio],
            compress_ratio=ratio,
            compressor=compressor,
            indexer=indexer,
            freqs_cis=torch.view_as_complex(angles),
            rope_head_dim=64,
        )

    def store_main(self, layer_id: int, loc: torch.Tensor, cache_k: torch.Tensor) -> None:
        pages = self.pool.get_extra_key_buffer(layer_id).view(torch.uint8).flatten(1)
        page_tokens = self.pool.get_extra_key_page_size(layer_id)
        spec = RecordSpec(
            cache_format="fp8_ds_mla", page_tokens=page_tokens, rounding="vllm", fp8="ocp"
        )
        reference.store([pages], loc, spec, *reference.quantise(cache_k.double(), spec))

    def batch(self, chunks: tuple[Chunk, ...], mode: ForwardMode, padding: int) -> tuple[Any, ...]:
        """(forward batch, positions, rows' seeds) of chunks and padding as sglang has it."""
        lengths = [end - start for _, start, end in chunks]
        positions = [p for _, start, end in chunks for p in range(start, end)]
        locations = [(n + 1) * PAGE + p for n, start, end in chunks for p in range(start, end)]
        requests = torch.tensor([n for n, _, _ in chunks] + [0] * padding)
        raw = torch.tensor(locations + [0] * padding)
        pos = torch.tensor(positions + [0] * padding)
        made = v4_backend._low_ratio_compression_metadata
        slots = [made(ratio, pos + 1, raw)[0] for ratio in (1, 2)]
        if self.held is not None:
            for held, new in zip(self.held, (pos, raw, *slots), strict=True):
                held.copy_(new)
            pos, raw, *slots = self.held
        self.last = pos, raw, *slots
        core = SimpleNamespace(raw_out_loc=raw, c1_out_loc=slots[0], c2_out_loc=slots[1])
        starts = torch.tensor([0, *lengths[:-1]]).cumsum(0).int()
        offsets = torch.zeros(2, 8, dtype=torch.int32)
        offsets[:, : len(chunks)] = torch.stack((starts, torch.tensor(lengths)))
        metadata = SimpleNamespace(core_metadata=core, low_ratio_extend_offsets=offsets)
        self.backend.forward_metadata = metadata
        batch = SimpleNamespace(
            forward_mode=mode,
            req_pool_indices=requests if mode.is_decode() else requests[: len(chunks)],
            batch_size=len(chunks),
            extend_seq_lens=torch.tensor([*lengths[:-1], lengths[-1] + padding]).int(),
            extend_seq_lens_cpu=lengths,
            extend_start_loc=starts,
            encoder_swa_replay=False,
            attn_cp_metadata=None,
            spec_info=SimpleNamespace(draft_token_num=max(lengths)),
        )
        return batch, pos, raw

    def run(
        self,
        chunks: tuple[Chunk, ...],
        mode: ForwardMode | None = None,
        padding: int = 2,
        in_graph: bool = False,
    ) -> None:
        """One step of all layers; ``in_graph``: with rows that a graph's break has projected."""
        is_decode = all(end - start == 1 for _, start, end in chunks)
        mode = mode or (ForwardMode.DECODE if is_decode else ForwardMode.EXTEND)
        batch, pos, raw = self.batch(chunks, mode, padding)
        for ratio, layer in self.layers.items():
            g = [torch.Generator().manual_seed(1000 * int(x) + ratio) for x in raw]
            x = torch.stack([torch.randn(HIDDEN, generator=one) for one in g]).bfloat16()
            with torch.no_grad():
                if in_graph:
                    req = v4_backend.token_req_indices(batch, num_tokens=len(pos))
                    rows = layer.compressor.project(x)
                    step = self.backend._low_ratio_compress_torch
                    step(layer, x, req, pos, projected=rows)
                    continue
                self.backend.forward_low_ratio_sources(
                    layer=layer,
                    x=x,
                    q_lora=None,
                    positions=pos,
                    forward_batch=batch,
                    run_indexer=False,
                )

    def memory(self, ratio: int) -> tuple[torch.Tensor, ...]:
        """Main pages and the indexer's as bytes, and of ratio 2 the rings."""
        at = LAYERS[ratio]
        main = self.pool.get_extra_key_buffer(at).view(torch.uint8).flatten(1)
        found = [main, self.pool.get_index_k_with_scale_buffer(at)]
        if ratio == 2:
            state = self.pool.get_attention_compress_states(at)
            rows = self.pool.num_req_slots * state.ring_size
            found.append(state.kv_score_buffer.kv_score[:rows])
        return tuple(found)


def compare(ours: Served, theirs: Served) -> None:
    """Rings are equal, records are so but for codes one apart, and nothing else was written."""
    for ratio in LAYERS:
        one, other = ours.memory(ratio), theirs.memory(ratio)
        if ratio == 2:
            assert torch.equal(one[2], other[2]) and one[2].isfinite().any()
        at = LAYERS[ratio]
        tokens = ours.pool.get_extra_key_page_size(at), one[1].shape[1] // 68
        for n, page_tokens in enumerate(tokens):
            records = make_layer(ratio).spec
            spec = RecordSpec(
                cache_format=(records.main, records.index)[n].cache_format,
                page_tokens=page_tokens,
                rounding="sglang_v41",
                fp8="ocp",
            )
            # slot 0 is nobody's: sglang's torch form stores there what it stores nowhere else
            slots = torch.arange(1, one[n].shape[0] * page_tokens)
            got, want = (reference.load([memory[n]], slots, spec) for memory in (one, other))
            assert within_one_code(spec, got, want).all()
            values = [reference.dequantise(*record, spec) for record in (got, want)]
            written = (got[0] != 0).any(1)
            assert torch.equal(written, (want[0] != 0).any(1)) and written.any()
            assert share(*(x[written] for x in values)) <= kit.ALLOWED
            assert share(got[0][written], want[0][written]) <= kit.ALLOWED  # signs of zeros too


def on_kernels(monkeypatch: pytest.MonkeyPatch, gpu: str | None) -> None:
    if gpu is not None:
        monkeypatch.setattr(v41_step, "detect_target", lambda device: KNOWN_TARGETS[gpu])


def no_stock(monkeypatch: pytest.MonkeyPatch) -> None:
    def upstream(*args: Any, **given: Any) -> None:
        raise AssertionError("upstream's step was called")

    monkeypatch.setattr(v4_backend.DeepseekV4AttnBackend, "_low_ratio_write_group", upstream)


def both(
    monkeypatch: pytest.MonkeyPatch,
    steps: tuple[tuple[Chunk, ...], ...],
    gpu: str | None = "H200",
    drafts: int = 0,
    **more: Any,
) -> tuple[Served, Served]:
    """Ours and sglang's after the same steps."""
    theirs = Served(monkeypatch, False, drafts)
    for chunks in steps:
        theirs.run(chunks, **more)
    on_kernels(monkeypatch, gpu)
    ours = Served(monkeypatch, True, drafts)
    no_stock(monkeypatch)
    for chunks in steps:
        ours.run(chunks, **more)
    return ours, theirs


@pytest.mark.parametrize("gpu", [None, "H200"])
@pytest.mark.parametrize("padding", [0, 2])
def test_steps_leave_what_sglangs_own_leave(
    monkeypatch: pytest.MonkeyPatch, gpu: str | None, padding: int
) -> None:
    """Prompts in chunks that are longer than a ring, decodes beside prompts, decodes."""
    compare(*both(monkeypatch, STEPS, gpu, padding=padding))


def test_a_prefills_graph_hands_over_projected_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    more = {"mode": ForwardMode.EXTEND, "in_graph": True}
    compare(*both(monkeypatch, kit.LONG_CHUNKS, **more))


@pytest.mark.parametrize("drafts", [2, 3])
def test_drafts_are_verified_in_longer_rings(monkeypatch: pytest.MonkeyPatch, drafts: int) -> None:
    """Each step goes on from one token: the others are rejected, and written over. Its tensors are
    those of the step before, refreshed in place, as before a graph is replayed."""
    starts = [((0, 9 + i), (2, 17 + i)) for i in range(3)]
    verified = [tuple((n, p, p + drafts) for n, p in step) for step in starts]
    theirs = Served(monkeypatch, False, drafts)
    on_kernels(monkeypatch, "H200")
    ours = Served(monkeypatch, True, drafts)
    plans = []
    for served in (theirs, ours):
        served.run(((0, 0, 9), (2, 0, 17)))
        for chunks in verified:
            served.run(chunks, ForwardMode.TARGET_VERIFY, 0)
            served.held = served.last
            if served is ours:
                steps: Any = ours.backend._low_ratio_compress.__self__  # type: ignore[attr-defined]
                plans.append(steps._plans[1][1])
    compare(ours, theirs)
    assert plans[0] is plans[1] is plans[2]


def test_a_step_of_decodes_or_drafts_takes_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    known = []

    def remember(layer: Any, *tensors: Any, **_: Any) -> None:
        if layer.spec.compress_ratio == 2:
            known.append((tensors[-1].longest, tensors[-1].query_starts is not None))

    monkeypatch.setattr(adapter, "compress_v41_", remember)
    served = Served(monkeypatch, True, 2)
    for chunks in (((0, 0, 9), (2, 0, 17)), ((0, 9, 10), (2, 17, 18))):
        served.run(chunks, padding=0)
    served.run(((0, 10, 12), (2, 18, 20)), ForwardMode.TARGET_VERIFY, 0)
    served.run(((0, 10, 19),), padding=3)  # padded: where chunks begin is not taken from sglang
    assert known == [(None, True), (1, False), (2, False), (None, False)]


def test_blackwells_rows_are_one_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = Served(monkeypatch, False)
    on_kernels(monkeypatch, "H200")
    ours = Served(monkeypatch, True)
    for ratio, layer in ours.layers.items():
        old = layer.compressor
        new = sparse.DeepseekV41Compressor(HIDDEN, 512, ratio, old.norm.eps, fused_compress=True)
        new.norm = old.norm
        weights = [old.wkv.weight] + ([old.wgate.weight] if ratio == 2 else [])
        module = new.wkv_gate if ratio == 2 else new.wkv
        module.weight.data.copy_(torch.cat(weights))
        layer.compressor = new
    for served in (ours, theirs):
        for chunks in STEPS:
            served.run(chunks)
    compare(ours, theirs)


def test_the_log_says_once_which_paths_serve_a_ratio(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    say_paths.cache_clear()
    served = Served(monkeypatch, True)
    for chunks in STEPS[:2]:
        served.run(chunks)
    lines = [line for line in log_lines if "DeepSeek-V4.1's compressors" in line]
    assert len(lines) == 2 and "ratio 2 (fp8_ds_mla, indexer_mxfp4) on cpu" in lines[0]


class Other(v4_backend.DeepseekV4AttnBackend):
    def _low_ratio_compress(self, layer: Any, x: Any, req: Any, pos: Any, batch: Any) -> None:
        raise NotImplementedError


def refuse(served: Served, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    backend, pool = served.backend, served.pool
    if what == "context":
        monkeypatch.setattr(adapter, "get_parallel", lambda: SimpleNamespace(attn_cp_size=2))
    elif what == "e4m3":
        monkeypatch.setattr(pool, "uniform_fp8", True)
    elif what == "V41_FP4":
        pool.kv_layout = KVLayout.V41
    elif what == "ROCm":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    else:
        backend.__class__ = Other


@pytest.mark.parametrize(
    "what",
    ["context", "e4m3", "V41_FP4", "ROCm", "Other has a _low_ratio_compress"],
)
def test_what_is_not_served_stays_sglangs_and_is_named(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str], what: str
) -> None:
    served = Served(monkeypatch, False)
    refuse(served, monkeypatch, what)
    before = dict(vars(served.backend))
    for _ in range(2):  # the backends of two devices, or of drafts
        flag._install_v41(served.backend, None)
    assert vars(served.backend) == before
    assert len([line for line in log_lines if what in line]) == 1
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match=what):
        flag._install_v41(served.backend, None)


def test_another_width_of_rope_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = Served(monkeypatch, True).layers[2]
    layer.indexer.rope_head_dim = 32
    assert adapter._unserved(layer) == "RoPE must turn 64 channels, got 64 and 32"


@pytest.mark.parametrize("what", ["one eps", "no indexer's keys", "is not replaced"])
def test_a_layer_that_is_not_served_stays_sglangs(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str], what: str
) -> None:
    theirs, ours = Served(monkeypatch, False), Served(monkeypatch, True)
    for served in (theirs, ours):
        for layer in served.layers.values():
            if what == "one eps":
                layer.indexer.k_norm.eps = 1e-6
            elif what == "no indexer's keys":
                layer.indexer.owns_k = False
            else:
                layer.indexer.k_norm = type("Norm", (sparse.RMSNorm,), {})(128, 1e-6)
        for chunks in STEPS:
            served.run(chunks)
    lines = [line for line in log_lines if what in line]
    assert len(lines) in (1, 2)
    for ratio in LAYERS:
        assert all(map(torch.equal, ours.memory(ratio), theirs.memory(ratio)))


@pytest.mark.parametrize("planted", [False, True])
def test_the_gpu_script_sees_wrong_bytes(monkeypatch: pytest.MonkeyPatch, planted: bool) -> None:
    """`benchmarks.engines.dsv4_sglang_watch`, in steps of prompts and decodes."""
    from benchmarks.engines.dsv4_sglang_watch import RecordWatch

    monkeypatch.setattr(adapter.V41Steps, "eager", adapter.V41Steps.eager)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    operator = adapter.compress_v41_

    def wrong(layer: Any, kv: torch.Tensor, *rest: Any, **more: Any) -> None:
        operator(layer, kv.neg() if planted else kv, *rest, **more)

    monkeypatch.setattr(adapter, "compress_v41_", wrong)
    watch = RecordWatch()
    watch.watch_v41(adapter)
    served = Served(monkeypatch, True)
    served.run(kit.LONG_CHUNKS[0])
    watch.comparing = True
    for chunks in (*kit.LONG_CHUNKS[1:2], *DECODES):
        served.run(chunks, padding=0)
    seen = watch.report()
    calls = seen["compressors"].pop("calls")
    assert seen["compressors"] == {"here": 2, "left": 0}
    assert calls == {"prefill": {"ours": 4}, "decode": {"ours": 4}}
    records = seen["records"]
    assert records["compared"] == {"prefill": 2, "decode": 4}
    assert records["planted_errors_seen"] == {"prefill": True, "decode": True}
    unlike = records["bytes_unlike_upstream"] / records["bytes_written"]
    assert unlike > 0.3 if planted else unlike < 0.01
