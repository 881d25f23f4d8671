"""DeepSeek-V4's and V4.1's attention through vLLM's layer: results, who serves what, graphs,
refusals."""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from backend_core.engines import entry, seams
from backend_core.engines.seams import Part
from backend_core.testing.numerics import relative_error
from dsv4_backend.engines.seam_list import VLLM_V41 as COMPRESSORS_V41
from mla_backend.engines import sparse_layer
from mla_backend.engines import vllm as adapter
from mla_backend.engines.seam_list import VLLM_V4, VLLM_V41
from tests.engines.mla.flash import TARGETS, TOLERANCE, FlashMla
from tests.engines.mla.vllm.sparse_harness import (
    Batches,
    build_layer,
    engine_config,
    flashmla_of,
    version_of,
    without_a_gpu,
)
from tests.mla.beside import run_as_on_h200

DECODES = [(200, 201), (0, 1), (131, 132)]
MIXED = [*DECODES, (0, 3), (124, 134)]  # decodes, a short prompt, a later piece of another
FEW = [(131, 132), (0, 1), (127, 129)]
DRAFTED = [(200, 203), (0, 3), (126, 129)]

RATIOS = [("v4", 4), ("v4", 128), ("v41", 1), ("v41", 2)]

Serve = Callable[..., Batches]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> FlashMla:
    entry.vllm.dsv4()
    entry.vllm.mla()
    engine_config(8)  # the first of a process sets vLLM's loggers up anew
    return without_a_gpu(monkeypatch)


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, kernel: FlashMla) -> Iterator[Serve]:
    """Makes a layer on a target where this family is ahead as it is on an H200."""
    from mla_backend.engines import vllm_sparse

    def made(target: str, heads: int, ratio: int, **options: Any) -> Batches:
        config = engine_config(heads, **options)
        monkeypatch.setattr(vllm_sparse, "detect_target", lambda device: TARGETS[target])
        run_as_on_h200(monkeypatch)
        return Batches(config, build_layer(config, ratio))

    vllm_sparse._served.clear()
    yield made
    vllm_sparse._served.clear()


def check(batches: Batches, out: torch.Tensor) -> None:
    wanted = batches.expected()
    live = batches.layer.n_local_heads
    for token, want in enumerate(wanted):
        assert relative_error(out[token, :live], want) < TOLERANCE, token


@pytest.mark.parametrize("ratio", [4, 128])
def test_records_are_those_of_vllms_writer(serve: Serve, ratio: int) -> None:
    """Every byte of both caches, over several pages and to the middle of one."""
    from vllm.models.deepseek_v4.common.ops.cache_utils import quantize_and_insert_k_cache

    batches = serve("torch", 8, ratio)
    caches = (batches.swa_cache, batches.cache)
    batches.write([(131, 132), (0, 1)], seed=1)
    ours = [_all_bytes(cache) for cache in caches]
    batches.insert = quantize_and_insert_k_cache
    batches.write([(131, 132), (0, 1)], seed=1)
    for cache, written in zip(caches, ours, strict=True):
        assert (written != 0xFF).any()
        assert torch.equal(_all_bytes(cache), written)


def _all_bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.as_strided((cache.shape[0], cache.stride(0)), (cache.stride(0), 1)).clone()


@pytest.mark.parametrize(
    ("target", "heads", "version", "ratio"),
    [
        *(("torch", 8, "v4", 4), ("torch", 20, "v4", 128), ("torch", 32, "v4", 4)),
        *(("torch", 8, "v41", 1), ("torch", 20, "v41", 2)),
        *(("triton", 8, version, ratio) for version, ratio in RATIOS),
    ],
)
def test_decodes_and_prefills_beside_each_other(
    serve: Serve, kernel: FlashMla, target: str, heads: int, version: str, ratio: int
) -> None:
    """Lengths around the window, with no compressed row at all, and with heads of the padding."""
    batches = serve(target, heads, ratio, version=version)
    layer = batches.layer
    assert type(layer).__name__ == "SparseAttention"
    assert layer.padded_heads == max(8, 1 << (heads - 1).bit_length())
    assert layer.attn_sink.shape == (layer.padded_heads,)
    assert layer.attn_sink[layer.n_local_heads :].isneginf().all()
    check(batches, batches.run(MIXED if target == "torch" else FEW))
    assert not kernel.calls


@pytest.mark.parametrize(("version", "ratio"), RATIOS)
def test_kernels_are_made_for_the_pages_that_vllm_will_choose(
    serve: Serve, version: str, ratio: int
) -> None:
    batches = serve("torch", 8, ratio, version=version)
    served = batches.layer.served
    sizes = batches.swa_cache.shape[1], batches.cache.shape[1]
    assert (served.form.page_size, served.form.extra_page_size) == sizes
    (spec,) = served.paths.served["decode"]._of_spec
    check(batches, batches.run(MIXED))
    assert list(served.paths.served["decode"]._of_spec) == [spec]


def test_memory_is_shared_by_layers_and_ends_with_them(serve: Serve) -> None:
    """vLLM's pool of weights must be empty before a process makes another engine that can sleep."""
    batches = serve("torch", 8, 4)
    config, scratch = batches.config, weakref.ref(batches.layer.served._scratch)
    config.compilation_config.static_forward_context.clear()
    another = build_layer(config, 128)
    assert another.served._scratch is scratch() and another.served is not batches.layer.served
    del batches, config, another
    gc.collect()
    assert scratch() is None


def test_both_families_decide_on_a_layer_of_v41(serve: Serve) -> None:
    owner = serve("torch", 8, 1, version="v41").owner
    assert type(owner).__name__ == "SparseAttention"
    served = seams.difference(COMPRESSORS_V41) is None  # not in 0.32.0
    kind = "V41Compressor" if served else "DeepseekCompressor"
    assert type(owner.compressor).__name__ == kind


@pytest.mark.parametrize(("version", "part"), [("v4", VLLM_V4), ("v41", VLLM_V41)])
def test_what_vllm_has_changed_stays_vllms(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, log_lines: list[str], version: str, part: Part
) -> None:
    reason = f"vllm 0.34.0 does not fit the {part.name}"
    monkeypatch.setattr(seams, "refusal", {part: reason}.get)
    batches = serve("torch", 8, 4 if version == "v4" else 1, version=version)
    assert type(batches.layer).__name__ == "DeepseekV4FlashMLAAttention"
    flag = "falling back to upstream's code: --attention-backend DSV4: "
    assert f"{flag}{reason}" in log_lines


@pytest.mark.parametrize("ratio", [4, 128])
def test_drafts_have_lists_of_their_own(serve: Serve, kernel: FlashMla, ratio: int) -> None:
    batches = serve("torch", 8, ratio, drafts=2)
    tokens = batches.write(DRAFTED, seed=1)
    metadata = batches.metadata(len(DRAFTED), tokens)
    assert metadata[batches.layer.swa_cache_layer.prefix].num_decode_tokens == tokens
    check(batches, batches.forward(metadata, tokens))
    assert not kernel.calls


@pytest.mark.parametrize(("tokens", "here"), [(16, True), (17, False)])
def test_at_64_heads_the_number_of_query_tokens_decides(
    serve: Serve, kernel: FlashMla, tokens: int, here: bool
) -> None:
    batches = serve("torch", 64, 4)
    assert type(batches.layer).__name__ == "SparseAttention"
    assert batches.layer.padded_heads == 64
    batches = Batches(batches.config, batches.layer, requests=tokens)
    batches.write([(5, 6)], seed=0)
    metadata = batches.metadata(tokens, tokens)
    batches.forward(metadata, tokens)
    assert len(kernel.calls) == (not here)
    for call in kernel.calls:
        assert call["q"].shape == (tokens, 1, 64, 512)
        assert call["tile_scheduler_metadata"] is not None


def test_at_64_heads_prefills_stay_flashmlas(serve: Serve, kernel: FlashMla) -> None:
    batches = serve("torch", 64, 4)
    batches.run([(3, 4), (0, 4)])
    (call,) = kernel.calls
    assert call["q"].shape == (4, 64, 512) and "kv" in call


class Graph:
    """The launches of one decode step, recorded with the addresses of what they read.

    vLLM captures a FULL graph on a dummy batch and replays it for others, whose lengths, slots and
    index lists its builders write into the same memory.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, batches: Batches, size: int) -> None:
        flashmla = flashmla_of(version_of(batches.config))
        self.batches, self.size = batches, size
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        batches.write([(0, 1)] * min(size, 4), seed=99)
        with monkeypatch.context() as patch:
            for module, name in (
                (flashmla, "compute_global_topk_indices_and_lens"),
                (sparse_layer, "sparse_mla"),
            ):
                patch.setattr(module, name, self.recorded(getattr(module, name)))
            metadata = batches.metadata(size, size, capture=True)
            self.out = batches.forward(metadata, size)

    def recorded(self, operator: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            result = operator(*args, **options)
            self.calls.append((operator, args, options, result))
            return result

        return call

    def replay(self, chunks: list[tuple[int, int]], seed: int) -> None:
        self.batches.write(chunks, seed)
        self.batches.metadata(self.size, self.size)
        self.out.fill_(float("nan"))
        for operator, args, options, result in self.calls:
            for old, new in zip(result, operator(*args, **options), strict=True):
                old.copy_(new)  # a graph writes where it wrote before
        check(self.batches, self.out)
        used = sum(end - begin for begin, end in chunks)
        assert (self.out[used:] == 0).all()  # what a graph is padded with sees nothing


@pytest.mark.parametrize(("version", "ratio"), RATIOS)
def test_a_graph_serves_other_batches_of_its_size(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, version: str, ratio: int
) -> None:
    graph = Graph(monkeypatch, serve("torch", 8, ratio, version=version), 4)
    assert graph.calls[-1][0].__name__ == "sparse_mla"
    graph.replay([(200, 201), (0, 1), (131, 132)], seed=1)
    graph.replay([(2, 3), (150, 151), (3, 4), (127, 128)], seed=2)


def test_a_warm_layer_takes_no_memory_in_a_step(serve: Serve) -> None:
    """SplitScratch is there before anything is captured, for every number of tokens and width.

    In float32, though vLLM builds layers with bfloat16 as torch's default.
    """
    batches = serve("triton", 8, 128)
    scratch, address = _scratch_of(batches)
    assert scratch.nbytes and scratch.reserve(1, 1, 1)[0].dtype == torch.float32
    batches.run(DECODES)
    assert _scratch_of(batches) == (scratch, address)


def _scratch_of(batches: Batches) -> tuple[Any, int]:
    scratch = batches.layer.served._scratch
    return scratch, scratch.reserve(1, 1, 1)[0].data_ptr()


@pytest.mark.parametrize(("version", "ratio"), [("v4", 1), ("v41", 0)])
def test_a_layer_may_attend_to_its_window_alone(
    serve: Serve, kernel: FlashMla, log_lines: list[str], version: str, ratio: int
) -> None:
    batches = serve("torch", 8, ratio, version=version)
    assert type(batches.layer).__name__ == "SparseAttention"
    assert batches.layer.padded_heads == 8
    pages = f"over pages of {batches.swa_page} rows on cpu"
    assert sum(pages in line for line in log_lines) == 2, "of decodes and of prefills"
    check(batches, batches.run(MIXED))
    assert not kernel.calls


def test_what_is_served_is_logged_once(serve: Serve, log_lines: list[str]) -> None:
    batches = serve("torch", 64, 4)
    build_layer(batches.config, 4)
    lines = [line for line in log_lines if "attention with" in line]
    assert lines == [
        "kda-dsv4-backend: DeepSeek-V4's attention with 64 heads per rank over pages of 64 and 64"
        " rows on cpu (cpu): decodes of up to 16 query tokens run here, where"
        " benchmarks/results/dsv4_attention_h200.json has them ahead of FlashMLA",
        "kda-dsv4-backend: DeepSeek-V4's attention with 64 heads per rank over pages of 64 and 64"
        " rows on cpu (cpu): prefills stay FlashMLA's: it was compared with flashmla at up to 64"
        " heads per rank in decode and 32 in prefill",
    ]


def test_without_the_flag_the_layer_is_vllms(serve: Serve, kernel: FlashMla) -> None:
    serve("torch", 8, 4)  # its calls of FlashMLA go through this package from now on
    config = engine_config(8, flag=False)
    batches = Batches(config, build_layer(config, 4))
    assert type(batches.layer).__name__ == "DeepseekV4FlashMLAAttention"
    batches.run(DECODES)
    assert len(kernel.calls) == 1


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"kv_cache_dtype": "bfloat16"},
            "rows must be fp8_ds_mla records of 512 channels, got bfloat16 of 512",
        ),
        (
            {"compressed_cache_prefix": "model.layers.1.attn", "compress_ratio": 1}
            | {"kv_mxfp8": True},
            "rows must be fp8_ds_mla records of 512 channels, got mxfp8 of 512",
        ),
        (
            {"n_local_heads": 128},
            "it was compared with flashmla at up to 64 heads per rank in decode and 32 in prefill",
        ),
        (
            {"VLLM_BATCH_INVARIANT": "1"},
            "VLLM_BATCH_INVARIANT is set, and the splits of a step change with the batch",
        ),
        (
            {"ubatch_size": 2},
            "micro-batches run layers at the same time, and these share one scratch memory",
        ),
    ],
)
def test_refused_by_name(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], reason: str
) -> None:
    """By fields of the layer, an environment variable, and the server's micro-batches."""
    from mla_backend.engines import vllm_sparse

    config = serve("torch", 8, 4).config
    for name in changes.keys() & {"VLLM_BATCH_INVARIANT"}:
        monkeypatch.setenv(name, changes[name])
    if "ubatch_size" in changes:
        config.parallel_config.ubatch_size = changes["ubatch_size"]
        config.parallel_config.enable_dbo = True
        assert config.parallel_config.use_ubatching
    fields = {"compress_ratio": 4, "head_dim": 512, "kv_cache_dtype": "fp8_ds_mla"}
    layer = types.SimpleNamespace(**{**fields, "n_local_heads": 8, **changes})
    assert vllm_sparse.refusal(layer, config) == reason


def test_layers_of_another_class_stay_what_they_are(kernel: FlashMla, log_lines: list[str]) -> None:
    from vllm.models.deepseek_v4.nvidia.flashinfer_sparse import DeepseekV4FlashInferMLAAttention

    layer = object.__new__(DeepseekV4FlashInferMLAAttention)
    adapter.adopt(layer, engine_config(8))
    assert type(layer) is DeepseekV4FlashInferMLAAttention
    assert log_lines == [
        "kda-dsv4-backend: DeepSeek-V4 attention stays DeepseekV4FlashInferMLAAttention's: the"
        " calls that are served are FlashMLA's"
    ]


def sparse_prefill(
    q: torch.Tensor,
    kv: torch.Tensor,
    indices: torch.Tensor,
    sm_scale: float,
    attn_sink: torch.Tensor,
    topk_length: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """FlashMLA's prefill by the definition, as vLLM calls it."""
    from mla_backend import reference_sparse_mla as reference

    rows = [(kv.squeeze(1), indices, topk_length)]
    found = reference.sparse_mla(q.unsqueeze(1), rows, sm_scale, sinks=attn_sink)
    out.copy_(found[0].squeeze(1))


@pytest.mark.parametrize("spoiled", [1.0, 1.1])
def test_the_gpu_script_sees_what_ran_and_a_wrong_row(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, spoiled: float
) -> None:
    """`benchmarks.engines.dsv4_attention`, with this package's drop-ins in FlashMLA's place."""
    from vllm.models.deepseek_v4.nvidia import flashmla

    from benchmarks.engines.dsv4_vllm_side import watch_attention
    from mla_backend.drop_ins import flash_mla
    from mla_backend.engines import vllm_sparse

    layer = sparse_layer.SparseLayer
    monkeypatch.setattr(flashmla, "flash_mla_with_kvcache", flash_mla.flash_mla_with_kvcache)
    monkeypatch.setattr(flashmla, "flash_mla_sparse_fwd", sparse_prefill)
    monkeypatch.setattr(vllm_sparse, "make", vllm_sparse.make)
    decode = layer.decode

    def wrong(self: Any, *args: Any, **options: Any) -> torch.Tensor:
        return decode(self, *args, **options).mul_(spoiled)

    monkeypatch.setattr(layer, "decode", wrong)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    watch = watch_attention("v4")
    watch.comparing = True
    batches = serve("torch", 8, 4)
    check_run = batches.run([(131, 132), (0, 1), (0, 3)])
    assert not check_run.isnan().any()
    seen = watch.report()
    assert seen["captured"] == {}
    assert seen["calls"] == {"decode": {"ours": 1}, "prefill": {"ours": 1}}
    assert seen["rows"] == {"decode": [16 if spoiled == 1.0 else 0, 16], "prefill": [24, 24]}
    assert (seen["worst"]["decode"] > 0.05) == (spoiled != 1.0) and seen["worst"]["prefill"] < 0.02
