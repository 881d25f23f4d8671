"""vLLM's fp8 indexer on ROCm: what this writes is what the release's own readers take.

The op that vLLM runs there reads pages that the adapter wrote by its own kernels, at prefill and at
decode. What tells vLLM that it runs on ROCm is set by hand.
"""

from __future__ import annotations

import importlib
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from vllm._aiter_ops import rocm_aiter_ops
from vllm.v1.attention.backends.mla.indexer import DeepseekV32IndexerMetadata

from backend_core.engines import entry, seams
from dsv4_backend import reference
from dsv4_backend.engines import vllm_compressor
from dsv4_backend.engines.seam_list import VLLM_AMD
from dsv4_backend.engines.vllm_compressor import FusedCompressor
from tests.engines.dsv4.vllm.harness import Step, build, engine_config, on_kernels_of
from tests.engines.dsv4.vllm.test_compressor import check, serve

entry.vllm.dsv4()

PAGE = 64  # compressed tokens in the one block size that vLLM's indexer has
LENGTHS = [290, 17]
STEPS = [
    [(0, 0, 203), (1, 0, 9)],
    [(0, 203, 288), (1, 9, 15)],
    [(0, 288, 289), (1, 15, 16)],
    [(0, 289, 290), (1, 16, 17)],
]
HEADS = 16


class EndOfReadError(Exception):
    """Ends vLLM's op with what it has read."""


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of vLLM's readers, as if imported on an MI355X with aiter."""
    module = importlib.import_module("vllm.v1.attention.ops.rocm_aiter_mla_sparse")
    rocm = SimpleNamespace(is_rocm=lambda: True, is_cuda=lambda: False)
    monkeypatch.setattr(vllm_compressor, "current_platform", rocm)
    monkeypatch.setattr(module, "_ON_GFX950", True)
    monkeypatch.setattr(rocm_aiter_ops, "is_enabled", lambda: True)
    # as on a GPU, where vLLM chooses the size of blocks once the model is built
    monkeypatch.setattr(engine_config(flag=True).cache_config, "block_size", 16)
    return module


def written() -> Step:
    config = engine_config(flag=True)
    ours = build(config, "indexer_fp8")
    assert type(ours) is FusedCompressor and ours.cache_format == "indexer_fp8"
    step = Step(ours, "indexer_fp8", LENGTHS, page_tokens=PAGE)
    check(step, serve(step, STEPS, config))
    return step


def plain_records() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Slots, codes and scales of the same steps."""
    engine = written().caches
    slots = torch.cat([engine.slot_of[r, : n // 4] for r, n in enumerate(LENGTHS)])
    pages, places = slots // PAGE, slots % PAGE
    codes = engine.cache[:, : PAGE * 128].reshape(-1, PAGE, 128)[pages, places]
    scales = engine.cache[:, PAGE * 128 : PAGE * 132].reshape(-1, PAGE, 4)[pages, places]
    return slots, codes, scales


def read(
    readers: ModuleType, step: Step, monkeypatch: pytest.MonkeyPatch, is_decode: bool
) -> tuple[torch.Tensor, Any]:
    """vLLM's op over all pages in an order of their own, up to its logits: where each slot is in
    that order, and what was read: ``(codes, scales)`` of a prefill, the logits of a decode."""
    cache = step.compressor._static_forward_context["layer"].kv_cache
    pages = len(cache)
    table = torch.arange(pages).flip(0).to(torch.int32)[None]
    place = torch.empty(pages * PAGE, dtype=torch.int64)
    order = (table[0].long()[:, None] * PAGE + torch.arange(PAGE)).flatten()
    place[order] = torch.arange(pages * PAGE)
    tokens = pages * PAGE
    metadata = DeepseekV32IndexerMetadata.__new__(DeepseekV32IndexerMetadata)
    chunk = SimpleNamespace(
        block_table=table,
        cu_seq_lens=torch.tensor([0, tokens], dtype=torch.int32),
        token_to_seq=torch.zeros(tokens, dtype=torch.int32),
        total_seq_lens=tokens,
        token_start=0,
        token_end=1,
        cu_seqlen_ks=None,
        cu_seqlen_ke=None,
    )
    fields = {
        "slot_mapping": torch.tensor([-1]),
        "num_decodes": int(is_decode),
        "num_prefills": int(not is_decode),
        "num_decode_tokens": int(is_decode),
        "prefill": SimpleNamespace(chunks=[chunk]),
        "decode": SimpleNamespace(
            decode_lens=torch.ones(1, dtype=torch.int32),
            requires_padding=False,
            seq_lens=torch.tensor([tokens], dtype=torch.int32),
            block_table=table,
            schedule_metadata=None,
        ),
    }
    for name, value in fields.items():
        object.__setattr__(metadata, name, value)
    context = SimpleNamespace(attn_metadata={"layer": metadata})
    workspace = SimpleNamespace(
        get_simultaneous=lambda *wanted: [torch.zeros(shape, dtype=kind) for shape, kind in wanted]
    )
    monkeypatch.setattr(readers, "get_forward_context", lambda: context)
    monkeypatch.setattr(readers, "current_workspace_manager", lambda: workspace)
    logits = readers.rocm_fp8_paged_mqa_logits

    def gathered(q: Any, kv: Any, *others: Any) -> None:
        raise EndOfReadError(kv)

    def scored(*tensors: Any, **options: Any) -> None:
        raise EndOfReadError(logits(*tensors, **options))

    monkeypatch.setattr(readers, "rocm_fp8_mqa_logits", gathered)
    monkeypatch.setattr(readers, "rocm_fp8_paged_mqa_logits", scored)
    q, weights = query()
    call: dict[str, Any] = {
        "hidden_states": torch.zeros(1, 1),
        "k_cache_prefix": "layer",
        "kv_cache": cache,
        "q_fp8": q,
        "k": None,
        "weights": weights,
        "quant_block_size": 128,
        "scale_fmt": "ue8m0",
        "topk_tokens": 512,
        "head_dim": 128,
        "max_model_len": tokens,
        "total_seq_lens": tokens,
        "topk_indices_buffer": torch.zeros(1, 512, dtype=torch.int32),
        "skip_k_cache_insert": True,
        "compress_ratio": 4,
    }
    with pytest.raises(EndOfReadError) as found:
        readers.rocm_aiter_sparse_attn_indexer(**call)
    return place, found.value.args[0]


def query() -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 ``[1, heads, 128]`` and fp32 weights ``[1, heads]``."""
    rng = torch.Generator().manual_seed(8)
    q = torch.randn(1, HEADS, 128, generator=rng).to(torch.float8_e4m3fn)
    return q, torch.rand(1, HEADS, generator=rng) + 0.1


@pytest.mark.parametrize("part", ["cpu", "MI355X"])
def test_prefill_gathers_the_keys_that_were_written(
    readers: ModuleType, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    if part != "cpu":
        on_kernels_of(monkeypatch, part)
    place, (codes, scales) = read(readers, written(), monkeypatch, is_decode=False)
    slots, want_codes, want_scales = plain_records()
    assert torch.equal(codes.view(torch.uint8)[place[slots]], want_codes)
    assert torch.equal(scales.contiguous().view(torch.uint8).view(-1, 4)[place[slots]], want_scales)


def test_decode_scores_the_keys_that_were_written(
    readers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, logits = read(readers, written(), monkeypatch, is_decode=True)
    slots, codes, scales = plain_records()
    q, weights = query()
    keys = reference.decode_e4m3(codes, "ocp").double()
    keys *= scales.contiguous().view(torch.float32).double()
    want = (keys @ q[0].double().T).relu() @ weights[0].double()
    got = logits[0][place[slots]].double()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert len(want) == 76 and want.unique().numel() > 70


def test_readers_of_another_release_leave_the_indexer_to_upstream(
    readers: ModuleType, monkeypatch: pytest.MonkeyPatch, log_lines: list[str]
) -> None:
    monkeypatch.setattr(seams, "refusal", {VLLM_AMD: "tiles of 16 tokens"}.get)
    assert type(build(engine_config(flag=True), "indexer_fp8")) is not FusedCompressor
    assert log_lines[-1].endswith("--attention-backend DSV4: tiles of 16 tokens")


def test_the_main_records_lie_as_elsewhere(readers: ModuleType) -> None:
    assert build(engine_config(flag=True), "fp8_ds_mla").cache_format == "fp8_ds_mla"
