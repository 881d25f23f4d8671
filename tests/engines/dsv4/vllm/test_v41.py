"""vLLM's DeepSeek-V4.1: attention layers as vLLM builds them, their latents and both records."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch

from backend_core.engines import seams
from dsv4_backend.engines.seam_list import VLLM_V41

if seams.difference(VLLM_V41) is not None:  # requests without a ring wrote into one
    pytest.skip("0.32.0 is not served", allow_module_level=True)

from vllm.config import CUDAGraphMode, set_current_vllm_config
from vllm.models.deepseek_v41 import attention as deepseek_v41
from vllm.models.deepseek_v41.common.ops import indexer_k_store
from vllm.models.deepseek_v41.compressor import (
    CompressorMetadataBuilder,
    CompressorStateCache,
    DeepseekCompressor,
)
from vllm.models.deepseek_v41.sparse_mla import DeepseekV4SparseMLABackend
from vllm.utils.torch_utils import set_default_torch_dtype

from backend_core.engines import entry, vllm_flag
from backend_core.strict import FallbackError
from backend_core.target import KNOWN_TARGETS
from dsv4_backend import reference, v41_step
from dsv4_backend.engines import vllm as flag
from dsv4_backend.engines import vllm_v41 as adapter
from dsv4_backend.engines.vllm_v41 import (
    V41Compressor,
    V41StateCache,
)
from dsv4_backend.testing import v41 as kit
from dsv4_backend.testing.engine import Chunk
from dsv4_backend.testing.oracle import within_one_code
from dsv4_backend.v41.torch import step as definition
from tests.engines.deepseek_v4 import model_directory
from tests.engines.vllm_process import builder_of, common_metadata, config_of, forward_pass

entry.vllm.dsv4()
LAYERS = {2: 1, 1: 3}  # by ratio, those that make latents
STEPS = (*kit.LONG_CHUNKS, ((1, 31, 32), (0, 43, 44), (2, 27, 28)), ((2, 28, 32), (1, 32, 33)))


@functools.cache
def engine_config(flag: bool = True) -> Any:
    family = "dsv4" if flag else None
    return config_of(model_directory("v41"), family, kv_cache_dtype="fp8")


class Attention(deepseek_v41.DeepseekV4Attention):
    """vLLM's layer without the attention itself, which needs a GPU."""

    backend_cls = DeepseekV4SparseMLABackend
    packs: int | None = None

    @classmethod
    def get_padded_num_q_heads(cls, num_heads: int) -> int:
        return num_heads

    def _uses_fp8_ds_mla_layout(self) -> bool:
        return self.packs is not None

    def forward_mqa(self, *args: Any) -> None:
        raise NotImplementedError

    _o_proj = forward_mqa


def build(
    monkeypatch: pytest.MonkeyPatch,
    config: Any,
    ratio: int = 2,
    main: str = "fp8_ds_mla",
    index: str = "indexer_fp8",
) -> Any:
    """An attention layer with random weights, its records in the formats of another GPU."""
    monkeypatch.setattr(torch.cuda, "Event", lambda *args, **options: None)
    config.compilation_config.static_forward_context.clear()
    packs = {v: k for k, v in adapter._PACKED.items()}.get(main)
    monkeypatch.setattr(Attention, "packs", packs)
    is_blackwell = main in ("mxfp8_rows", "nvfp4_rows")
    monkeypatch.setattr(deepseek_v41, "_use_v41_mxfp8_kv_record", lambda: is_blackwell)
    monkeypatch.setattr(deepseek_v41, "dsa_indexer_uses_fp4", lambda _: index == "indexer_mxfp4")
    is_packed, is_rocm = index == "indexer_fp8_ue8m0", index == "indexer_fp8_tiles"
    monkeypatch.setattr(adapter, "mqa_logits_use_mx_scales", lambda: is_packed)
    monkeypatch.setattr(indexer_k_store, "mqa_logits_use_mx_scales", lambda: is_packed)
    platform = types.SimpleNamespace(is_rocm=lambda: is_rocm, is_cuda=lambda: False)
    monkeypatch.setattr(adapter, "current_platform", platform)
    monkeypatch.setattr(indexer_k_store, "current_platform", platform)
    config.cache_config.cache_dtype = {"nvfp4_rows": "nvfp4_ds_mla", "bf16_rows": "auto"}.get(
        main, "fp8"
    )
    config.cache_config.block_size = 64  # as on a GPU, where vLLM's CPU platform takes 16
    with set_default_torch_dtype(torch.bfloat16), set_current_vllm_config(config):
        layer = Attention(
            config,
            f"model.layers.{LAYERS[ratio]}.self_attn",
            topk_indices_buffer=torch.zeros(8, 64, dtype=torch.int32),
        )
    weights = kit.make_layer(kit.make_spec(ratio), ratio, torch.device("cpu"))
    layer.compressor.norm.weight.data.copy_(weights.norm_weight)
    layer.indexer.wk.weight.data.copy_(weights.key_projection)
    layer.indexer.k_norm.weight.data.copy_(weights.key_norm_weight)
    return layer


class Served:
    """A layer bound to poisoned caches, and the steps that the engine runs it through."""

    def __init__(self, layer: Any, main: str, index: str, config: Any) -> None:
        self.layer, self.config, ratio = layer, config, layer.compress_ratio
        spec = kit.make_spec(ratio, main, index, 64 // ratio)
        rings = layer.compressor.state_cache
        self.caches = kit.V41Engine(spec, 3, 48, 8 if rings is None else rings.block_size)
        self.weights = kit.V41Layer(
            spec,
            layer.compressor.norm.weight,
            layer.indexer.wk.weight,
            layer.indexer.k_norm.weight,
            layer.rotary_emb.cos_sin_cache,
        )
        views = []
        for cache, records in zip(self.caches.caches, (spec.main, spec.index), strict=True):
            size = records.record.record_bytes
            shape = (cache.shape[0], records.page_tokens, size)
            views.append(cache.as_strided(shape, (cache.stride(0), size, 1)))
        is_bf16 = main == "bf16_rows"
        layer.kv_cache = views[0].view(torch.bfloat16) if is_bf16 else views[0]
        layer.indexer.k_cache.kv_cache = views[1]
        if rings is not None:
            rings.kv_cache = self.caches.state

    def metadata(self, chunks: tuple[Chunk, ...], padding: int) -> tuple[dict[str, Any], Any]:
        """(the step's metadata, its plan) as vLLM's runner makes them, padded for a graph."""
        layer, plan = self.layer, self.caches.plan(chunks, padding)
        records = {
            layer.prefix: types.SimpleNamespace(slot_mapping=plan.slots),
            layer.indexer.k_cache.prefix: types.SimpleNamespace(slot_mapping=plan.index_slots),
        }
        rings = layer.compressor.state_cache
        if rings is None:
            return records, plan
        bounds = torch.tensor([0, *(end - start for _, start, end in chunks)]).cumsum(0).int()
        common = common_metadata(
            bounds,
            torch.tensor([end for _, _, end in chunks], dtype=torch.int32),
            torch.tensor([[n + 1] for n, _, _ in chunks], dtype=torch.int32),
            plan.slots,
            num_actual_tokens=plan.num_tokens,  # padded, as the runner says
            positions=plan.positions,
        )
        return records | {rings.prefix: builder_of(rings, self.config).build(0, common)}, plan

    def run(
        self, histories: list[torch.Tensor], chunks: tuple[Chunk, ...], padding: int = 2
    ) -> Any:
        """One step in the order of the attention layer; returns its metadata."""
        layer = self.layer
        metadata, plan = self.metadata(chunks, padding)
        rows = torch.cat([histories[n][a:b] for n, a, b in chunks])
        rows = torch.cat([rows, torch.full((padding, rows.shape[1]), torch.nan)])
        with forward_pass(self.config, metadata, len(rows)):
            latent = layer.compressor(rows, plan.positions)
            layer.indexer._produce_k(latent, plan.positions, layer.indexer_rotary_emb)
            layer.compressor.insert_cache(latent, plan.positions, layer.rotary_emb)
        return metadata

    def serve(self, steps: tuple[tuple[Chunk, ...], ...] = STEPS) -> list[torch.Tensor]:
        histories = [kit.make_history(self.caches.spec, 48, seed) for seed in range(3)]
        for chunks in steps:
            self.run(histories, chunks)
        return histories

    def wanted(self, histories: list[torch.Tensor]) -> kit.V41Engine:
        """Rings and caches after the same steps by the definition."""
        spec = self.caches.spec
        engine = kit.V41Engine(spec, 3, 48, self.caches.ring_rows)
        for chunks in STEPS:
            rows = torch.cat([histories[n][a:b] for n, a, b in chunks])
            definition(engine.call(self.weights, rows), engine.plan(chunks, 0))
        return engine


def records_near(ours: kit.V41Engine, other: kit.V41Engine) -> float:
    """The share of values that differ, each of them by one code; nothing else was written."""
    spec, worst = ours.spec, 0.0
    ends = [p for p in range(spec.compress_ratio - 1, 48, spec.compress_ratio)]
    slots = ours.slot_of[:, : len(ends)].flatten()
    for n, records in enumerate((spec.main, spec.index)):
        one, two = (reference.load([x.caches[n]], slots, records) for x in (ours, other))
        assert within_one_code(records, one, two).all()
        values = (reference.dequantise(*record, records).nan_to_num(0) for record in (one, two))
        left, right = values
        worst = max(worst, float((left != right).float().mean()))
    return worst


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize(("main", "index"), kit.FORMATS)
def test_the_engines_steps_give_the_definitions_rings_and_records(
    monkeypatch: pytest.MonkeyPatch, ratio: int, main: str, index: str
) -> None:
    config = engine_config()
    layer = build(monkeypatch, config, ratio, main, index)
    assert type(layer.compressor) is V41Compressor
    assert ratio == 1 or type(layer.compressor.state_cache) is V41StateCache
    step = Served(layer, main, index, config)
    want = step.wanted(step.serve())
    for got, wanted in zip(step.caches.caches, want.caches, strict=True):
        assert torch.equal(got, wanted)
    if ratio == 2:
        assert torch.equal(step.caches.state.nan_to_num(7), want.state.nan_to_num(7))


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_gpus_kernels_give_the_same_through_the_interpreter(
    monkeypatch: pytest.MonkeyPatch, ratio: int
) -> None:
    monkeypatch.setattr(v41_step, "detect_target", lambda device: KNOWN_TARGETS["H200"])
    config = engine_config()
    step = Served(build(monkeypatch, config, ratio), "fp8_ds_mla", "indexer_fp8", config)
    want = step.wanted(step.serve())
    assert records_near(step.caches, want) <= kit.ALLOWED
    if ratio == 2:
        assert torch.equal(step.caches.state.nan_to_num(7), want.state.nan_to_num(7))


@pytest.mark.parametrize("ratio", [1, 2])
@pytest.mark.parametrize("index", ["indexer_fp8", "indexer_fp8_ue8m0", "indexer_fp8_tiles"])
def test_stock_writes_the_same_rings_and_records(
    monkeypatch: pytest.MonkeyPatch, ratio: int, index: str
) -> None:
    """Beside vLLM's own kernels in the interpreter.

    It truncates to bf16 and e4m3, and loses the carry of a mantissa that rounds up to 2: codes may
    be one apart, or theirs is a power of two and eight less. The scale of a group whose largest
    value lies on a boundary may be another.
    """
    found = []
    for is_ours in (True, False):
        config = engine_config(is_ours)
        layer = build(monkeypatch, config, ratio, "fp8_ds_mla", index)
        assert (type(layer.compressor) is DeepseekCompressor) != is_ours
        wk = layer.indexer.wk  # as on a GPU; vLLM's linear layers of a CPU want to be packed
        wk.forward = lambda x, wk=wk: (torch.nn.functional.linear(x, wk.weight), None)
        step = Served(layer, "fp8_ds_mla", index, config)
        step.serve()
        found.append(step.caches)
    spec, slots = found[0].spec, found[0].slot_of[:, : 48 // ratio].flatten()
    for n, records in enumerate((spec.main, spec.index)):
        (data, scales), (theirs, their_scales) = (
            reference.load([x.caches[n]], slots, records) for x in found
        )
        same = (scales == their_scales).all(1)
        assert same.float().mean() > 0.95
        near = within_one_code(records, (data, scales), (theirs, their_scales))
        width = 448 if n == 0 else 128
        apart = data[:, :width].int() - theirs[:, :width].int()
        lost = (theirs[:, :width] % 8 == 0) & (apart >= 7) & (apart <= 8)
        near[:, :width] |= lost
        assert near[same].all()
    if ratio == 2:
        assert torch.equal(*(x.state.nan_to_num(7) for x in found))


def test_a_step_is_one_call_and_layers_share_its_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(adapter, "compress_v41_", lambda *args, **_: calls.append(args))
    config = engine_config()
    step = Served(build(monkeypatch, config), "fp8_ds_mla", "indexer_fp8", config)
    histories = [kit.make_history(step.caches.spec, 48, n) for n in range(3)]
    metadata = step.run(histories, ((0, 0, 7), (1, 0, 1)))
    rings = metadata[step.layer.compressor.state_cache.prefix]
    ((plan, *_),) = rings.plans.values()
    assert [call[-1] for call in calls] == [plan] and plan.longest == 7
    assert adapter._plan(step.layer.compressor, metadata, plan.positions) is plan
    assert len(calls) == 1


def test_what_a_graph_may_replay_decides_what_it_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of decodes holds one launch; any other is replayed with prompts too."""
    config = engine_config()
    step = Served(build(monkeypatch, config), "fp8_ds_mla", "indexer_fp8", config)
    compressor, positions = step.layer.compressor, torch.zeros(3, dtype=torch.int64)
    chunks = ((0, 0, 1), (1, 0, 1), (2, 0, 1))
    for capturing, decodes, longest in (
        (False, False, 1),
        (True, True, 1),
        (True, False, None),
    ):
        monkeypatch.setattr(adapter, "is_capturing", lambda device, now=capturing: now)
        metadata, _ = step.metadata(chunks, 0)
        metadata[compressor.state_cache.prefix].replays_decodes_alone = decodes
        assert adapter._plan(compressor, metadata, positions).longest == longest
    builder = object.__new__(compressor.state_cache.get_attn_backend().get_builder_cls())
    for mode, alone in ((CUDAGraphMode.FULL, False), (CUDAGraphMode.FULL_AND_PIECEWISE, True)):
        builder.vllm_config = types.SimpleNamespace(
            compilation_config=types.SimpleNamespace(cudagraph_mode=mode)
        )
        built = types.SimpleNamespace()
        monkeypatch.setattr(
            CompressorMetadataBuilder,
            "build_for_cudagraph_capture",
            lambda self, common, built=built: built,
        )
        assert builder.build_for_cudagraph_capture(None).replays_decodes_alone is alone


def test_rejected_drafts_are_written_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three drafts of which one is accepted: the next step begins behind it."""
    config = engine_config()
    step = Served(build(monkeypatch, config), "fp8_ds_mla", "indexer_fp8", config)
    spec = step.caches.spec
    right, wrong = ([kit.make_history(spec, 48, seed + n) for n in range(3)] for seed in (0, 50))
    step.run(right, ((0, 0, 10), (1, 0, 9)))
    for n, begin in ((0, 10), (1, 9)):
        drafted = [x.clone() for x in wrong]
        drafted[n][: begin + 2] = right[n][: begin + 2]
        step.run(drafted, ((n, begin, begin + 4),))
        step.run(right, ((n, begin + 2, begin + 6),))
    engine = kit.V41Engine(spec, 3, 48, step.caches.ring_rows)
    for n, length in ((0, 16), (1, 15)):
        definition(engine.call(step.weights, right[n][:length]), engine.plan([(n, 0, length)], 0))
    for got, wanted in zip(step.caches.caches, engine.caches, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("ratio", [1, 2])
def test_the_gpu_script_sees_a_wrong_graph(monkeypatch: pytest.MonkeyPatch, ratio: int) -> None:
    """`benchmarks.engines.dsv4_vllm_watch`, with a step in the place of a graph's replay."""
    from benchmarks.engines.dsv4_vllm_watch import Watch

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(V41Compressor, "forward", V41Compressor.forward)
    watch, config = Watch("v41"), engine_config()
    step = Served(build(monkeypatch, config, ratio), "fp8_ds_mla", "indexer_fp8", config)
    wk = step.layer.indexer.wk  # as on a GPU; vLLM's linear layers of a CPU want to be packed
    wk.forward = lambda x: (torch.nn.functional.linear(x, wk.weight), None)
    state = types.SimpleNamespace(prepare_attn=None)
    runner = types.SimpleNamespace(execute_model=None, model_state=state)
    watch.attach(runner, config)
    histories = [kit.make_history(step.caches.spec, 48, seed) for seed in range(3)]
    step.run(histories, ((0, 0, 7), (1, 0, 3)))
    for planted in (False, True):
        watch.before = watch.copy()
        chunks = ((0, 7, 25), (1, 3, 4))
        metadata = step.run(histories, chunks)
        watch.inputs["PIECEWISE", 21] = watch.inputs["NONE", 0]
        batch = types.SimpleNamespace(
            is_prefilling_np=torch.tensor([True, False]).numpy(),
            num_computed_tokens_np=torch.tensor([7, 3]).numpy(),
            num_draft_tokens=0,
        )
        runner.execute_model_state = types.SimpleNamespace(
            input_batch=batch, attn_metadata=metadata
        )
        mode = types.SimpleNamespace(name="PIECEWISE")
        watch.descriptor = types.SimpleNamespace(cg_mode=mode, num_tokens=21)
        if planted:
            step.caches.caches[1][0, 5] += 1
        watch.compare()
    watch.detach()
    seen = watch.report()
    (found,) = seen["steps"]
    assert (found["kind"], found["later"], found["equal"], found["of"]) == ("mixed", True, 1, 2)
    assert len(seen["failures"]) == 1 and "indexer.k_cache in 1 pages" in seen["failures"][0]
    assert seen["planted_errors_seen"] == {"mixed": True}
    assert seen["records_written"] == 2 * 2 * (19 if ratio == 1 else 10)
    assert 0 < seen["bytes_unlike_upstream"] < seen["bytes_written"] / 4


def test_the_profile_run_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    config = engine_config()
    layer = build(monkeypatch, config)
    with forward_pass(config, None, 3):
        found = layer.compressor(torch.zeros(3, 1024), torch.zeros(3, dtype=torch.int64))
    assert found is None and layer.compressor._bound is None


REFUSALS = {
    "batch invariance": "VLLM_BATCH_INVARIANT is set",
    "context parallelism": "prefill context parallelism gathers latents of all ranks",
    "specialised decode": "decode_backend latency_specialized has launches of its own",
    "fp8 rows": "main records of kv_cache_dtype fp8 are not served",
    "wk": "wk must be [128, 512] of bfloat16, got [128, 512] of torch.float32",
    "indexer": "stores the indexer's keys in an order of its own, which is not served",
    "broken": "it broke",
}


def refuse(monkeypatch: pytest.MonkeyPatch, case: str) -> Any:
    config = engine_config()
    layer = build(monkeypatch, engine_config(flag=False))
    if case == "batch invariance":
        monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    elif case == "context parallelism":
        layer.compressor.pcp_size = 2
    elif case == "specialised decode":
        monkeypatch.setattr(config, "additional_config", {"decode_backend": "latency_specialized"})
    elif case == "fp8 rows":
        layer.kv_cache_dtype, layer.kv_cache_torch_dtype = "fp8", torch.float8_e4m3fn
    elif case == "wk":
        layer.indexer.wk.float()
    elif case == "indexer":
        other = type("RocmIndexer", (type(layer.indexer),), {"_produce_k": lambda self: None})
        layer.indexer.__class__ = other
    elif case == "broken":
        monkeypatch.setattr(vllm_flag._families["dsv4"], "broken", "it broke")
    flag.adopt(layer, config)
    return layer


@pytest.mark.parametrize("case", REFUSALS)
def test_what_is_not_served_stays_upstreams_and_is_said_once(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str], case: str
) -> None:
    for _ in range(2):
        layer = refuse(monkeypatch, case)
        assert type(layer.compressor) is DeepseekCompressor
        assert type(layer.compressor.state_cache) is CompressorStateCache
    lines = [line for line in log_lines if "falling back to upstream's code" in line]
    assert len(lines) == 1 and REFUSALS[case] in lines[0]
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match="KDA_DSV4_STRICT forbids"):
        refuse(monkeypatch, case)


def test_caches_that_cannot_be_served_go_to_stock_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    config = engine_config()
    step = Served(build(monkeypatch, config), "fp8_ds_mla", "indexer_fp8", config)
    calls: list[Any] = []
    monkeypatch.setattr(DeepseekCompressor, "forward", lambda self, *args: calls.append(args))
    step.layer.kv_cache = step.layer.kv_cache[:, :, 1:]  # no longer at a multiple of 4 bytes
    step.run([kit.make_history(step.caches.spec, 48, n) for n in range(3)], ((0, 0, 7),))
    assert len(calls) == 1 and type(step.layer.compressor) is DeepseekCompressor
    assert step.caches.state.isnan().all()
    assert any("cache must have pages aligned to 4 bytes" in line for line in log_lines)


def test_a_failing_step_is_logged_once_and_raised(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    config = engine_config()
    step = Served(build(monkeypatch, config), "fp8_ds_mla", "indexer_fp8", config)
    histories = [kit.make_history(step.caches.spec, 48, n) for n in range(3)]
    step.run(histories, ((0, 0, 4),))

    def fail(*args: Any, **options: Any) -> None:
        raise ValueError("no such page")

    monkeypatch.setattr(adapter, "compress_v41_", fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="no such page"):
            step.run(histories, ((0, 4, 7),))
    assert len([line for line in log_lines if "no such page" in line]) == 1


def test_layers_that_make_no_latents_are_left_alone(
    monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(adapter, "adopt", None)
    flag.adopt(types.SimpleNamespace(compressor=None, indexer=None), engine_config())
    assert log_lines == []
