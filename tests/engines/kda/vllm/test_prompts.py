"""MLA layers inside of a graph, in steps that begin all of their requests."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import BatchDescriptor, set_forward_context
from vllm.model_executor.layers.attention.mla_attention import (
    MLACommonMetadata,
    MLACommonPrefillMetadata,
)
from vllm.models.kimi_k3.nvidia import mla
from vllm.models.kimi_k3.nvidia.mla import MultiHeadLatentAttention
from vllm.v1.attention.backends import fa_utils

from backend_core.engines import seams
from kda_backend.engines import vllm_graphs
from kda_backend.engines.vllm_prompts import PromptAttention, layers_of
from kda_backend.engines.vllm_seams import VLLM_CAPTURE
from kda_backend.engines.vllm_tables import run_on
from tests.engines.kda.sglang.device_graph import DeviceGraph
from tests.engines.kda.vllm.harness import engine_config
from tests.engines.kda.vllm.test_tables import BUCKET, Captured, graph_manager, kernels, options

vars(fa_utils).setdefault("compile_flash_attn_varlen_func_from_specs", None)  # not on a CPU
flash_attn = importlib.import_module("vllm.v1.attention.backends.mla.prefill.flash_attn")

HEADS, NOPE, ROPE, VALUES, LATENT = 4, 16, 8, 16, 32
PAGES, PAGE = 24, 16  # of the cache; the last token has what padding writes
NAME = "model.layers.3.self_attn.attn"

__all__ = ["kernels"]
pytestmark = pytest.mark.skipif(
    seams.difference(VLLM_CAPTURE) is not None, reason="0.32.0's graphs have no key of ours"
)


def attention_of_segments(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    cu_seqlens_q: torch.Tensor,
    softmax_scale: float,
    out: torch.Tensor,
    **others: Any,
) -> torch.Tensor:
    """FlashAttention's causal prefill, whose lengths the host does not read."""
    assert others["causal"] and others["fa_version"] == 3
    assert others["max_seqlen_q"] == others["max_seqlen_k"] <= len(q)
    tokens = torch.arange(len(q))
    owner = torch.searchsorted(cu_seqlens_q[1:].contiguous(), tokens.int(), right=True)
    seen = (owner[:, None] == owner) & (tokens[:, None] >= tokens)
    logits = torch.einsum("qhd,khd->hqk", q.float(), k.float()) * softmax_scale
    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
    result = torch.einsum("hqk,khd->qhd", weights, v.float())
    out.copy_(torch.where((tokens < cu_seqlens_q[-1])[:, None, None], result, out))
    return out


def insert(
    q: torch.Tensor,
    k_nope: torch.Tensor,
    k_pe: torch.Tensor,
    latent: torch.Tensor,
    cache: torch.Tensor,
    slots: torch.Tensor,
    *_: Any,
) -> torch.Tensor:
    """vLLM's kernel: whole keys, and latents to the slots that are not negative."""
    k_pe = k_pe.reshape(len(k_pe), -1)
    rows = torch.where(slots < 0, PAGES * PAGE - 1, slots)
    cache.view(-1, LATENT + ROPE).index_copy_(0, rows, torch.cat((latent, k_pe), 1))
    return torch.cat((k_nope, k_pe[:, None].expand(-1, HEADS, -1)), -1)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlashAttention 3 and vLLM's kernel, as on an H200."""
    platform = SimpleNamespace(
        get_device_capability=lambda: (9, 0), is_cuda=lambda: True, is_xpu=lambda: False
    )
    monkeypatch.setattr(flash_attn, "current_platform", platform)
    monkeypatch.setattr(flash_attn, "flash_attn_varlen_func", attention_of_segments)
    monkeypatch.setattr(flash_attn, "get_flash_attn_version", lambda **_: 3)
    monkeypatch.setattr(mla, "fused_mla_key_concat_kv_cache_insert", insert)
    yield


def build_mla(config: Any) -> Any:
    """A layer of vLLM's class, of which ``_attention`` needs this."""
    layer: Any = object.__new__(MultiHeadLatentAttention)
    torch.nn.Module.__init__(layer)
    layer.layer_name, layer.kv_cache_dtype, layer.rotary_emb = NAME, "auto", None
    layer.num_local_heads, layer.dcp_world_size = HEADS, 1
    layer.qk_nope_head_dim, layer.qk_rope_head_dim, layer.v_head_dim = NOPE, ROPE, VALUES
    weight = torch.randn(LATENT, HEADS * (NOPE + VALUES), generator=torch.manual_seed(4)) / 6
    layer.kv_b_proj = lambda x: (x @ weight,)
    layer.kv_cache = torch.zeros(PAGES, PAGE, LATENT + ROPE)
    layer.prefill_backend = flash_attn.FlashAttnPrefillBackend(
        HEADS, (NOPE + ROPE) ** -0.5, LATENT, NOPE, ROPE, VALUES, config
    )
    return layer


def tensors(tokens: int) -> list[torch.Tensor]:
    """What ``_attention`` takes; the output is what a graph's memory held before."""
    generator = torch.manual_seed(tokens)
    return [
        torch.zeros(tokens, dtype=torch.int64),
        torch.randn(tokens, HEADS, NOPE + ROPE, generator=generator),
        torch.randn(tokens, LATENT, generator=generator),
        torch.randn(tokens, 1, ROPE, generator=generator),
        torch.full((tokens, HEADS * VALUES), 7.0),
    ]


def of_a_step(layer: Any, lengths: tuple[int, ...], slots: torch.Tensor) -> MLACommonMetadata:
    """vLLM's metadata of prompts without a context."""
    bounds = torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    backend = layer.prefill_backend.clone()
    prefill = MLACommonPrefillMetadata(
        block_table=torch.zeros(len(lengths), 4, dtype=torch.int32),
        query_start_loc=bounds,
        max_query_len=max(lengths),
        q_data_type=torch.float32,
        output_dtype=torch.float32,
        prefill_backend=backend,
    )
    backend.prepare_metadata(prefill)
    return MLACommonMetadata(
        **{"num_reqs": len(lengths), "max_query_len": max(lengths), "max_seq_len": max(lengths)},
        **{"num_actual_tokens": sum(lengths), "query_start_loc": bounds, "slot_mapping": slots},
        **{"num_decodes": 0, "num_decode_tokens": 0, "num_prefills": len(lengths)},
        prefill=prefill,
    )


def test_a_graph_serves_all_prompts_that_begin(kernels: None, hopper: None) -> None:
    """Outputs and cache of vLLM's own call, for other batches than the captured one; padding writes
    to no slot of a request."""
    config = engine_config(**options())
    captured, layer = Captured(config), build_mla(config)
    tables, graph = captured.tables, DeviceGraph()
    (found,) = layers_of(torch.nn.ModuleList([layer]))
    prompts = PromptAttention([found])
    given, slots = tensors(BUCKET), torch.full((BUCKET,), -1, dtype=torch.int64)
    dummy = {NAME: of_a_step(layer, (BUCKET,), slots)}
    tables.clear()
    with set_forward_context(dummy, config, num_tokens=BUCKET, slot_mapping={NAME: slots}):
        run_on(tables, prompts=True)
        graph.record(lambda: layer._attention(*given))
    assert not layer.kv_cache.view(-1, LATENT + ROPE)[:-1].any()
    assert prompts.fits({NAME: slots}) and not prompts.fits({NAME: slots.clone()})
    for lengths in ((70, 3, 20), (150,), (1, 1, 65, 40, 30), (BUCKET,)):
        tokens = sum(lengths)
        batch = lengths, (tuple(range(1, 1 + len(lengths))),) * 2
        captured.computed = [{}, {}]
        step = captured.metadata(batch)
        assert tables.fill(step) and tables.begins_all(step)
        slots.fill_(-1)
        slots[:tokens] = torch.randperm(PAGES * PAGE - 1)[:tokens]
        fresh = tensors(tokens)
        for static, own in zip(given[1:4], fresh[1:4], strict=True):
            static[:tokens] = own
            static[tokens:] = float("nan")
        layer.kv_cache.zero_()
        graph.replay()
        ours, cache = given[4][:tokens].clone(), layer.kv_cache.clone()
        assert not given[4][tokens:].any()
        layer.kv_cache.zero_()
        metadata = {NAME: of_a_step(layer, lengths, slots[:tokens])}
        with set_forward_context(
            metadata, config, num_tokens=tokens, slot_mapping={NAME: slots[:tokens]}
        ):
            type(layer)._attention(layer, *fresh)
        torch.testing.assert_close(ours, fresh[4], rtol=1e-5, atol=1e-6)
        assert torch.equal(cache.flatten(0, 1)[:-1], layer.kv_cache.flatten(0, 1)[:-1])


def test_continued_prompts_and_decodes_do_not_begin(kernels: None) -> None:
    captured = Captured(engine_config(**options()))
    batch = ((70, 3), ((3, 5), (2, 9)))
    assert captured.tables.begins_all(captured.metadata(batch))
    for known in ({3: 64}, {5: 1}):  # a cached prefix, and a prompt whose rest is three tokens
        captured.computed = [known, {}]
        step = captured.metadata(batch)
        assert captured.tables.fill(step) and not captured.tables.begins_all(step)


def test_layers_that_cannot_be_captured_break_the_graph(hopper: None) -> None:
    config = engine_config(flag=True)
    for change in ("version", "cache"):
        layer = build_mla(config)
        assert layers_of(torch.nn.ModuleList([layer])) == [layer]
        if change == "version":
            layer.prefill_backend.vllm_flash_attn_version = 4
        else:
            layer.kv_cache_dtype = "fp8"
        assert layers_of(torch.nn.ModuleList([build_mla(config), layer])) == []
    assert layers_of(torch.nn.Linear(1, 1)) == []


class Model(torch.nn.Module):
    """A KDA layer's group and an MLA layer."""

    def __init__(self, captured: Captured, layer: Any) -> None:
        super().__init__()
        self.kda, self.mla = torch.nn.ModuleList(captured.layers), layer
        self.captured, self.x = captured, tensors(BUCKET)

    def forward(self) -> torch.Tensor:
        from vllm.forward_context import get_forward_context

        from kda_backend.engines.vllm_tables import tables_of_pass

        if (context := get_forward_context()).attn_metadata and (tables := tables_of_pass()):
            for layer in self.captured.layers:
                tables._group(layer.prefix, context.attn_metadata)
        if context.attn_metadata:
            self.mla._attention(*self.x)
        return torch.zeros(1)


def test_a_step_replays_the_graph_with_mla_where_all_requests_begin(
    kernels: None, hopper: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = engine_config(**options(enforce_eager=True))
    monkeypatch.setattr(vllm_graphs, "refusal", lambda config: None)
    captured = Captured(config)
    layer = build_mla(config)
    manager, graphs = graph_manager(config, monkeypatch)
    model = Model(captured, layer)
    manager.init_breakable_cg_runner(model)
    slots = torch.full((BUCKET,), -1, dtype=torch.int64)

    def step(lengths: tuple[int, ...], known: dict[int, int], slots: torch.Tensor) -> Any:
        captured.computed = [known, known]
        metadata = captured.metadata((lengths, ((3, 5), (3, 5))))
        metadata[NAME] = of_a_step(layer, lengths, slots)
        with set_forward_context(
            metadata,
            config,
            num_tokens=BUCKET,
            cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE,
            batch_descriptor=BatchDescriptor(num_tokens=BUCKET),
            slot_mapping={NAME: slots},
        ):
            manager.run_pw_graph(model, {})
        return graphs[-1][1]

    step((70, 90), {}, slots)
    breaking, with_kda, whole = (entry for _, entry in graphs)
    assert len({breaking, with_kda, whole}) == 3
    manager._graphs_captured = True
    assert step((70, 20), {}, slots) == whole
    assert step((70, 20), {3: 64}, slots) == with_kda
    assert step((1, 20), {3: 64}, slots) == with_kda
    assert step((70, 20), {}, slots.clone()) == with_kda
    assert step((1, 20), {}, slots) == whole
