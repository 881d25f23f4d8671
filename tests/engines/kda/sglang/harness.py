"""sglang's own objects around the KDA layers of the recall checkpoint, on the CPU.

Arguments are parsed and resolved by sglang; the pools, the attention backend with its KDA
dispatcher, the model's KDA layers and the batches are its classes. Only the model runner that holds
them is ours, since sglang's starts process groups and asks for a GPU.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import tempfile
from collections.abc import Iterator, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import ModelConfig
from sglang.srt.distributed import init_distributed_environment, initialize_model_parallel
from sglang.srt.layers.attention import attention_registry
from sglang.srt.mem_cache.kv_cache_configurator import KVCacheConfigurator
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.model_executor.model_runner_components.layer_setup import (
    compute_attention_and_moe_layers,
)
from sglang.srt.models.bailing_moe_v3 import BailingKDA
from sglang.srt.models.kimi_linear import KimiDeltaAttention
from sglang.srt.runtime_context import get_parallel, publish
from sglang.srt.server_args import prepare_server_args
from triton.runtime.interpreter import GridExecutor

from backend_core.target import KNOWN_TARGETS
from tests.engines.kda.weights import (
    CHECKPOINT,
    DIM,
    EPS,
    HIDDEN,
    Definition,
    Weights,
    checkpoint_weights,
    drawn,
)

REQUESTS = 8
SLOTS = 12
LAYERS = (0, 1)
LING = {
    "architectures": ["BailingMoeV3ForCausalLM"],
    "model_type": "bailing_hybrid",
    "hidden_size": HIDDEN,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": DIM,
    "v_head_dim": DIM,
    "qk_nope_head_dim": DIM,
    "qk_rope_head_dim": 64,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "layer_group_size": 4,
    "short_conv_kernel_size": 4,
    "no_kda_lora": True,
    "kda_safe_gate": True,
    "kda_lower_bound": -5.0,
}
"""The configuration of a small Ling-V3."""


def server_args(*options: str) -> Any:
    """What sglang makes of a command line."""
    arguments = prepare_server_args(
        [
            *("--model-path", str(CHECKPOINT), "--device", "cpu", "--dtype", "bfloat16"),
            # the default of the states' prefix cache asks for a GPU
            *("--mamba-radix-cache-strategy", "no_buffer", "--disable-overlap-schedule"),
            *options,
        ]
    )
    arguments.resolve_once()
    return arguments


_open = contextlib.ExitStack()


@functools.cache
def one_rank() -> None:
    """The process groups and ranks of a scheduler that is alone; they outlive the tests."""
    with tempfile.TemporaryDirectory() as directory:
        init_distributed_environment(1, 0, f"file://{directory}/rendezvous", backend="gloo")
        initialize_model_parallel()
    ranks = get_parallel().override(
        tp_size=1, tp_rank=0, attn_tp_size=1, attn_tp_rank=0, attn_dp_size=1
    )
    _open.enter_context(ranks)


def kernels_of_an_a100(device: torch.device, shape: Any) -> Any:
    from kda_backend.selection import select

    return select(KNOWN_TARGETS["A100"], shape)


@contextlib.contextmanager
def on_an_a100() -> Iterator[None]:
    """Servers have the kernels that an A100's table chooses; the interpreter compiles nothing."""
    from kda_backend.engines import sglang_layer  # a process may have no use

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sglang_layer, "selection_for", kernels_of_an_a100)
        patch.setattr(sglang_layer, "compile_kernels", lambda *_: None)
        yield


def leave_out_upstreams_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """sglang's own Triton kernels write nothing, where only what is launched of ours matters."""
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *args, **kwargs: None)


def pools_of(arguments: Any, model_config: Any, gib: float, **changes: Any) -> Any:
    """What sizes sglang's pools, once it has sized those of the states for so much memory."""
    sizes = {"attn_dp_size": 1, "pp_size": 1}
    fields = {
        "server_args": arguments,
        "model_config": model_config,
        "mambaish_config": mambaish_config(model_config),
        "spec_algorithm": SimpleNamespace(is_none=lambda: True),
        "hybrid_gdn_config": None,
        "hybrid_kda_config": None,
        "extra_mamba_cache_bytes_per_req": 0,
        "fused_entry_bytes": lambda kind: None,
        "ps": SimpleNamespace(**sizes),
        **sizes,
    }
    found = SimpleNamespace(**{**fields, **changes})
    for name in ("_calculate_mamba_ratio", "_handle_max_mamba_cache", "resolve_max_num_reqs"):
        setattr(found, name, MethodType(getattr(KVCacheConfigurator, name), found))
    found._handle_max_mamba_cache(gib)
    return found


class Served:
    """KDA layers with the attention backend that sglang builds for a command line."""

    def __init__(self, *options: str) -> None:
        self.args = server_args(*options)
        publish(self.args, role="test")
        one_rank()
        model_config = ModelConfig.from_server_args(self.args)
        config = model_config.hf_config
        torch.set_default_dtype(torch.bfloat16)
        self.is_ling = config.model_type == LING["model_type"]
        kind = BailingKDA if self.is_ling else KimiDeltaAttention
        layers = [
            kind(index, config.hidden_size, config, prefix=f"layers.{index}") for index in LAYERS
        ]
        torch.set_default_dtype(torch.float32)
        for index, layer in zip(LAYERS, layers, strict=True):
            load(layer, self.weights(index), is_ling=self.is_ling)
        self.layers = torch.nn.ModuleList(layers)
        # sglang copies tracked states once the last layer of its pool has run
        params = dataclasses.replace(config.mamba2_cache_params, layers=list(LAYERS))
        self.runner = SimpleNamespace(
            device="cpu",
            gpu_id=0,
            dtype=torch.bfloat16,
            server_args=self.args,
            max_running_requests=min(REQUESTS, self.args.max_running_requests or REQUESTS),
            model=self.layers,
            model_config=model_config,
            token_to_kv_pool=SimpleNamespace(),
            is_draft_worker=False,
            use_mla_backend=False,
            get_cuda_graph_layers=compute_attention_and_moe_layers,
        )
        if self.args.enable_linear_replayssm_spec:
            self.reserve_records()
        self.pool = HybridReqToTokenPool(
            size=REQUESTS,
            mamba_size=SLOTS,
            mamba_spec_state_size=REQUESTS,
            max_context_len=1024,
            device="cpu",
            enable_memory_saver=False,
            cache_params=params,
            mamba_layer_ids=list(params.layers),
            enable_mamba_extra_buffer=False,
            enable_overlap_schedule=False,
            speculative_num_draft_tokens=self.args.speculative_num_draft_tokens,
            speculative_eagle_topk=self.args.speculative_eagle_topk,
            enable_linear_replayssm=self.args.enable_linear_replayssm,
            enable_linear_replayssm_spec=self.args.enable_linear_replayssm_spec,
        )
        self.runner.req_to_token_pool = self.pool
        full = attention_registry.ATTENTION_BACKENDS["torch_native"](self.runner)
        self.backend = attention_registry.attn_backend_wrapper(self.runner, full)

    def reserve_records(self) -> None:
        """As `sglang_layer.reserve`, but for its scratch memory."""
        from kda_backend.engines import sglang_layer, sglang_records  # a process may have no use

        attention = [layer.attn for layer in self.layers]
        selection = sglang_layer._selection(self.runner, attention, [], torch.device("cpu"))
        assert selection is not None
        sglang_records.reserve(self.runner, attention[0], selection, one_launch=True)

    def weights(self, index: int) -> Weights:
        """Of a layer; Ling-V3's gates have full rank."""
        return drawn(low_rank="") if self.is_ling else checkpoint_weights(index)

    def definition_of(
        self, index: int, window: torch.Tensor | None = None, state: torch.Tensor | None = None
    ) -> Definition:
        """A request through a layer; a new one has no states."""
        bound, eps = (-5.0, 1e-6) if self.is_ling else (None, EPS)
        return Definition(self.weights(index), bound, window, state, eps)

    @property
    def dispatcher(self) -> Any:
        return self.backend.linear_attn_backend.kernel_dispatcher

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Pools ``[slots, 3, C]`` and ``[slots, HV, V, K]`` of a layer."""
        cache = self.pool.mamba2_layer_cache(LAYERS[layer])
        return cache.conv[0], cache.temporal

    def fill_pools(self, seed: int) -> None:
        """What earlier requests left in the slots."""
        generator = torch.Generator().manual_seed(seed)
        for layer in range(len(LAYERS)):
            for pool in self.states(layer):
                pool.copy_(0.3 * torch.randn(pool.shape, generator=generator))

    def forward(self, x: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        """The outputs ``[T, hidden]`` of every layer on ``x``."""
        self.backend.init_forward_metadata(batch)
        return self.layers_on(x, batch)

    def layers_on(self, x: torch.Tensor, batch: Any) -> list[torch.Tensor]:
        """The same with metadata that is there."""
        with forward_context(ForwardContext(attn_backend=self.backend)):
            return [layer(x, batch.positions, batch, None) for layer in self.layers]

    def init_graphs(self, requests: int, tokens: int) -> None:
        """The buffers of sglang's graphs of decodes, for batches of so many."""
        linear = self.backend.linear_attn_backend
        self.backend.attn_backend_list = [linear]  # there are no full-attention layers here
        linear.state_indices_list, linear.query_start_loc_list = [], []
        self.backend.init_cuda_graph_state(requests, tokens)

    def batch(
        self,
        mode: ForwardMode,
        new: Sequence[int],
        prefix: Sequence[int],
        slots: Sequence[int],
        *,
        tracked: Sequence[tuple[int, int]] = (),
    ) -> Any:
        """A batch of requests whose states lie in ``slots``.

        Args:
            new: tokens of each request in this step; prefix: those before it.
            tracked: (request, slot) whose state the prefix cache wants at the last full chunk.
        """
        requests = torch.arange(len(new), dtype=torch.int32)
        self.pool.req_index_to_mamba_index_mapping[requests.long()] = torch.tensor(
            slots, dtype=torch.int32
        )
        lengths, before = (torch.tensor(n, dtype=torch.int32) for n in (new, prefix))
        total = int(lengths.sum())
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(new),
            input_ids=torch.zeros(total, dtype=torch.int64),
            req_pool_indices=requests,
            seq_lens=lengths + before,
            seq_lens_cpu=lengths + before,
            out_cache_loc=torch.zeros(total, dtype=torch.int64),
            seq_lens_sum=int((lengths + before).sum()),
            positions=torch.zeros(total, dtype=torch.int64),
        )
        if mode.is_extend():
            batch.extend_seq_lens, batch.extend_prefix_lens = lengths, before
            batch.extend_seq_lens_cpu, batch.extend_prefix_lens_cpu = list(new), list(prefix)
            batch.extend_start_loc = lengths.cumsum(0, dtype=torch.int32) - lengths
            batch.extend_num_tokens = total
        if tracked:
            mask = torch.zeros(len(new), dtype=torch.bool)
            target = torch.zeros(len(new), dtype=torch.int64)
            for request, slot in tracked:
                mask[request], target[request] = True, slot
            batch.mamba_track_mask = mask
            batch.mamba_track_indices = target
            batch.mamba_track_seqlens = lengths + before
        return batch


def load(layer: Any, weights: Weights, *, is_ling: bool) -> None:
    """A layer's weights, by the loaders of its parameters, as the model's ``load_weights``."""
    parameters = dict(layer.named_parameters())
    packed = {
        f"{part}.weight": ("fused_qkvbfg_a_proj.weight", shard)
        for shard, part in enumerate(
            ("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj", "g_a_proj")
        )
    }
    packed |= {
        f"{part}_b_proj.weight": ("fused_fg_b_proj.weight", s) for s, part in enumerate("fg")
    }
    if is_ling:
        parts = ("q", "k", "v", "b", "f", "g")
        packed = {
            f"{part}_proj.weight": ("fused_qkvbfg_proj.weight", n) for n, part in enumerate(parts)
        }
    packed |= {f"{part}_conv1d.weight": ("qkv_conv1d.weight", s) for s, part in enumerate("qkv")}
    for name, tensor in weights.items():
        if name == "A_log":
            tensor = tensor.view(parameters[name].shape)
        if name in packed:
            target, shard = packed[name]
            parameters[target].weight_loader(parameters[target], tensor, shard)
        else:
            loader = getattr(parameters[name], "weight_loader", None)
            if loader is None:
                parameters[name].data.copy_(tensor)
            else:
                loader(parameters[name], tensor)
