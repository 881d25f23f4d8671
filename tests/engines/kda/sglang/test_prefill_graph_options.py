"""Prefill graphs by the flag alone: what sglang resolves, and which KDA layers may be captured."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.arg_groups import memory_hook
from sglang.srt.arg_groups.cuda_graph_hook import resolving_view
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.model_executor import cuda_graph_config
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.models.bailing_moe_v3 import BailingMoELinearDecoderLayer

from kda_backend.engines import prefill_graphs, sglang_layer, sglang_prefill_graphs
from tests.engines.kda.sglang.harness import LING, Served, server_args

FLAG = ("--attention-backend", "kda")


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_prefill_graphs, "is_cuda", lambda: True)
    monkeypatch.setattr(cuda_graph_config, "default_prefill_backend", lambda: "breakable")


def prefill(*options: str) -> Any:
    return resolving_view(server_args(*options)).cuda_graph_config.prefill


def test_graphs_are_on_with_the_flag_alone(on_a_gpu: None) -> None:
    assert prefill().backend == "disabled"
    config = prefill(*FLAG)
    # the checkpoint has narrow layers, whose work never hides the host
    assert (config.backend, config.max_bs) == ("breakable", 8192)
    assert config.bs == prefill_graphs.sizes(8192)
    # every batch of up to so many tokens has a graph of less than twice as many
    assert all(b < 2 * a for a, b in zip(config.bs, config.bs[1:], strict=False) if a > 16)


def test_graphs_stay_off_without_a_gpu() -> None:
    assert prefill(*FLAG).backend == "disabled"


@pytest.mark.parametrize(
    ("options", "backend", "most"),
    [
        (("--disable-prefill-cuda-graph",), "disabled", None),
        (("--disable-cuda-graph",), "disabled", None),
        (("--cuda-graph-max-bs-prefill", "512"), "breakable", 512),
        (("--cuda-graph-backend-prefill", "breakable"), "breakable", None),
        (("--pp-size", "2"), "disabled", None),
        (("--disaggregation-mode", "decode"), "disabled", None),
        (("--enable-memory-saver",), "disabled", None),
        (("--cpu-offload-gb", "1"), "disabled", None),
        (("--chunked-prefill-size", "512"), "breakable", 512),
    ],
)
def test_what_the_user_says_and_sglangs_other_rules_stay(
    on_a_gpu: None, options: tuple[str, ...], backend: str, most: int | None
) -> None:
    config = prefill(*FLAG, *options)
    assert config.backend == backend
    if most is not None:
        assert max(config.bs) == config.max_bs == most


def test_memory_that_graphs_do_not_take_goes_to_the_pools(
    on_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang reserves 1,536 MiB for prefill graphs of a model with MLA, of any size."""
    memory = 143771

    def reserved(*options: str) -> float:
        static: float = resolving_view(server_args(*options)).mem_fraction_static
        return memory * (1 - static)

    monkeypatch.setattr(memory_hook, "get_device_memory_capacity", lambda *_: memory)
    upstream = reserved()
    rounding = 0.001 * memory
    assert reserved(*FLAG) == pytest.approx(upstream, abs=rounding)
    own = ("--cuda-graph-max-bs-prefill", "512")  # sizes that the user names
    assert reserved(*FLAG, *own) - upstream == pytest.approx(1536, abs=rounding)
    assert reserved(*FLAG, "--mem-fraction-static", "0.5") == pytest.approx(memory / 2)


def test_a_graph_breaks_at_kda_layers_that_stay_upstreams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's kernel takes logits for step sizes in a captured prefill of Kimi-Linear."""
    monkeypatch.setattr(hybrid_linear_attn_backend, "check_cuda_graph_backend", lambda *_: True)
    served = Served(*FLAG)
    assert served.backend.use_captured_forward_metadata_for_breakable_cuda_graph
    # a captured scan has as many tasks for the checkpoint's two heads as for 32 of 16 sequences
    assert served.backend.prefill_cuda_graph_max_batch_size == 128
    assert served.backend.linear_attn_backend.prefill_graph_max_seqs == 128

    def no_path(*_: Any) -> None:
        raise LookupError("no path of cpu serves K = 512")

    with monkeypatch.context() as patch:
        patch.setattr(sglang_layer, "selection_for", no_path)
        served = Served(*FLAG)
    assert not served.backend.use_captured_forward_metadata_for_breakable_cuda_graph


@pytest.mark.parametrize(
    ("ranks", "dp_size", "q_lora_rank", "most"),
    [
        *((1, 1, None, 2048), (4, 1, None, 8192), (4, 4, None, 2048), (4, 1, 1536, 1024)),
        *((8, 1, None, 8192), (8, 2, None, 8192), (8, 1, 1536, 1024)),
    ],
)
def test_the_largest_graph_follows_from_ranks_and_the_models_mla(
    ranks: int, dp_size: int, q_lora_rank: int | None, most: int
) -> None:
    """Kimi-Linear's hidden size. Queries from a latent keep MLA in the graph, in the form that is
    slow for long prompts."""
    args = SimpleNamespace(chunked_prefill_size=None, tp_size=ranks, attn_dp_size=dp_size)
    config = SimpleNamespace(hidden_size=2304, q_lora_rank=q_lora_rank, kv_lora_rank=512)
    assert sglang_prefill_graphs._buckets(args, config)[-1] == most


@pytest.mark.parametrize(
    "options", [("--attn-dp-size", "4"), ("--enable-dp-attention", "--dp-size", "4")]
)
def test_attention_in_data_parallel_has_a_ranks_graphs(
    on_a_gpu: None, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By either of sglang's options for it; the four ranks have 65,536 tokens of a step."""
    monkeypatch.setattr(sglang_prefill_graphs, "most_tokens", lambda hidden, ranks, budget: ranks)
    monkeypatch.setattr(sglang_prefill_graphs, "ABSORBED_TOKENS", 1)
    config = prefill(*FLAG, "--tp-size", "4", "--chunked-prefill-size", "65536", *options)
    assert config.max_bs == 1


def test_the_tables_of_a_graph_follow_from_a_ranks_heads() -> None:
    """Those of Kimi-Linear, GLM-5.3-Flash and Kimi-K3 on eight ranks."""
    assert [sglang_prefill_graphs.most_sequences(heads) for heads in (4, 8, 12)] == [128, 64, 42]


@pytest.mark.parametrize("said", ["many", "0", "-1", " "])
def test_the_number_of_a_graphs_sequences_is_one(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SGLANG_KDA_PREFILL_GRAPH_MAX_SEQS", said)
    with pytest.raises(ValueError, match=f"MAX_SEQS must be a positive number, got '{said}'"):
        sglang_prefill_graphs.most_sequences(8)


def test_mla_layers_of_the_model_break_large_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    from kda_backend.engines import sglang_mla_breaks

    broken: list[tuple[Any, int]] = []
    monkeypatch.setattr(hybrid_linear_attn_backend, "check_cuda_graph_backend", lambda *_: True)
    monkeypatch.setattr(sglang_mla_breaks, "break_at_mla", lambda *of: broken.append(of))
    Served(*FLAG)
    ((_, tokens),) = broken
    assert tokens == sglang_prefill_graphs.ABSORBED_TOKENS


def ling(folder: Path, **more: Any) -> tuple[str, str]:
    """The option for a small Ling-V3, whose graphs sglang leaves on and drops as it captures."""
    (folder / "config.json").write_text(json.dumps({**LING, **more}))
    return "--model-path", str(folder)


def test_ling_v3_has_graphs_of_these_sizes(on_a_gpu: None, tmp_path: Path) -> None:
    model = ling(tmp_path, q_lora_rank=256)
    assert prefill(*model).backend == prefill(*FLAG, *model).backend == "breakable"
    assert prefill(*FLAG, *model).bs == prefill_graphs.sizes(1024) != prefill(*model).bs
    own = ("--cuda-graph-max-bs-prefill", "512")
    assert prefill(*FLAG, *model, *own).bs == prefill(*model, *own).bs
    assert prefill(*FLAG, *model, "--enable-two-batch-overlap").backend == "disabled"


@pytest.mark.parametrize("option", [None, "--enable-memory-saver", "--cpu-offload-gb=1", "drafter"])
def test_ling_v3s_mla_layers_are_found(
    option: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """sglang captures nothing if a layer has no attention that it knows; here for options, and for
    a drafter that reads the states of layers."""
    monkeypatch.setattr(hybrid_linear_attn_backend, "check_cuda_graph_backend", lambda *_: True)
    served = Served(*FLAG, *ling(tmp_path), *([option] if option and option != "drafter" else []))
    kda, absorbed, per_head = object(), object(), object()
    attention = SimpleNamespace(attn=kda), SimpleNamespace(attn_mqa=absorbed, attn_mha=per_head)
    layers = [LingLayer(own) for own in attention]
    model = SimpleNamespace(layers=layers, capture_aux_hidden_states=option == "drafter")
    found = served.runner.get_cuda_graph_layers(model)
    eager = option is not None
    assert found.attention_layers == [kda, None if eager else absorbed]
    assert found.mha_companion_layers == [None, None if eager else per_head]
    # a captured layer's tensors are written as graphs are replayed, outside of inference mode
    with torch.no_grad():
        assert [layer.run().is_inference() for layer in layers] == [eager, eager]


class LingLayer:
    """Upstream's forward of Ling's layers, without what it calls."""

    forward = BailingMoELinearDecoderLayer.forward

    def __init__(self, attention: Any) -> None:
        self.attention = attention
        self.attn_boundary = self.ffn_boundary = SimpleNamespace(
            prepare=lambda hidden, batch, capture=None: torch.empty_like(hidden),
            finish=lambda hidden, batch: hidden,
        )
        self.is_layer_sparse = True
        self.mlp = lambda hidden, forward_batch: hidden

    def run(self) -> torch.Tensor:
        """The output for an idle batch of one token."""
        idle = SimpleNamespace(forward_mode=ForwardMode.IDLE)
        return self.forward(torch.ones(1, 4), torch.zeros(1), idle, None)


def test_glms_own_graphs_stay() -> None:
    """Its step sizes are right in upstream's kernel."""
    backend = SimpleNamespace(use_captured_forward_metadata_for_breakable_cuda_graph=True)
    config = SimpleNamespace(architectures=["Glm5NextForConditionalGeneration"], q_lora_rank=1536)
    model_config = SimpleNamespace(hf_config=config, hf_text_config=config)
    runner = SimpleNamespace(model_config=model_config)
    sglang_prefill_graphs.prepare(backend, runner, ours=False)
    assert backend.use_captured_forward_metadata_for_breakable_cuda_graph
