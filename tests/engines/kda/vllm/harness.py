"""The engine's own objects around one KDA layer of the recall checkpoint, on the CPU."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from backend_core.engines.vllm_flag import flag_name
from kda_backend import reference

CHECKPOINT = Path(__file__).parents[4] / "benchmarks" / "recall" / "checkpoint"
BLOCK = 16  # tokens of a cache block, with prefix caching
SLOTS = 12


def engine_config(*, flag: bool, **options: Any) -> VllmConfig:
    """The configuration that vLLM makes of its arguments."""
    backend = {"attention_backend": flag_name("kda")} if flag else {}
    return EngineArgs(
        model=str(CHECKPOINT),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=8,
        enable_prefix_caching=False,
        **{"dtype": "bfloat16", **backend, **options},
    ).create_engine_config()


Weights = dict[str, torch.Tensor]


def build_layer(config: VllmConfig, index: int = 0, weights: Weights | None = None) -> Any:
    """A KDA layer as the model builds it, with the checkpoint's weights by its own loaders."""
    prefix = f"model.layers.{index}.self_attn"
    with set_current_vllm_config(config):
        layer = KimiGatedDeltaNetAttention(config.model_config.hf_config, config, prefix=prefix)
    for name, tensor in (weights or checkpoint_weights(index)).items():
        _load(layer, name, tensor)
    for module in layer.modules():
        if hasattr(module, "quant_method"):
            # What vLLM sets on a CPU after loading; its packed form is in the library for CPUs.
            module.cpu_linear = lambda x, weight, bias: F.linear(x, weight, bias)
    return layer


@functools.cache
def checkpoint_weights(index: int) -> Weights:
    """The parameters of a layer, by their names in the checkpoint."""
    prefix = f"model.layers.{index}.self_attn."
    file = load_file(CHECKPOINT / "model.safetensors")
    return {name.removeprefix(prefix): x for name, x in file.items() if name.startswith(prefix)}


def drawn_weights(heads: int) -> Weights:
    """Weights of a layer with more heads than the checkpoint's, at its scale."""
    rng = torch.Generator().manual_seed(heads)

    def randn(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float32)

    channels = heads * 128
    rows = {"q": channels, "k": channels, "v": channels, "b": heads, "f_a": 128, "g_a": 128}
    weights = {f"{part}_proj.weight": 0.06 * randn(n, 256).bfloat16() for part, n in rows.items()}
    for part in ("f_b", "g_b"):
        weights[f"{part}_proj.weight"] = 0.09 * randn(channels, 128).bfloat16()
    for part in "qkv":
        weights[f"{part}_conv1d.weight"] = 0.5 * randn(channels, 1, 4)
    weights["A_log"] = randn(1, 1, heads, 1)
    weights["dt_bias"] = randn(channels)
    weights["o_norm.weight"] = 1.0 + 0.1 * randn(128).bfloat16()
    weights["o_proj.weight"] = 0.02 * randn(256, channels).bfloat16()
    return weights


def _load(layer: Any, name: str, tensor: torch.Tensor) -> None:
    """As the model's ``load_weights``: parameters by name, or a shard of a packed one."""
    parameters = dict(layer.named_parameters())
    packed = {
        f"{part}.weight": ("in_proj_qkvgfab.weight", shard)
        for shard, part in enumerate(("q_proj", "k_proj", "v_proj", "b_proj", "f_a_proj"))
    } | {f"{part}_conv1d.weight": ("conv1d.weight", shard) for shard, part in enumerate("qkv")}
    if name in parameters:
        parameter = parameters[name]
        getattr(parameter, "weight_loader", default_weight_loader)(parameter, tensor)
    else:
        target, shard = packed[name]
        parameters[target].weight_loader(parameters[target], tensor, shard)


def bind_cache(layer: Any, config: VllmConfig, padding: int = 256) -> None:
    """A cache of `SLOTS` pages that hold both states each, filled with old requests' noise."""
    shapes, dtypes = layer.get_state_shape(), layer.get_state_dtype()
    sizes = [
        torch.Size(shape).numel() * dtype.itemsize
        for shape, dtype in zip(shapes, dtypes, strict=True)
    ]
    page = sum(sizes) + padding
    memory = torch.zeros(SLOTS * page, dtype=torch.uint8)
    states, offset = [], 0
    for shape, dtype, size in zip(shapes, dtypes, sizes, strict=True):
        item = dtype.itemsize
        inner = torch.empty(shape, device="meta").stride()
        state = memory.view(dtype).as_strided(
            (SLOTS, *shape), (page // item, *inner), offset // item
        )
        state.copy_(torch.randn(SLOTS, *shape, generator=torch.Generator().manual_seed(1)))
        states.append(state)
        offset += size
    layer.kv_cache = tuple(states)


def cache_spec(layer: Any, config: VllmConfig) -> MambaSpec:
    """The layer's own."""
    if config.cache_config.mamba_block_size is None:
        config.cache_config.mamba_block_size = config.model_config.max_model_len
    spec: MambaSpec = layer.get_kv_cache_spec(config)
    return spec


def step_metadata(
    layer: Any,
    config: VllmConfig,
    query_lens: Sequence[int],
    computed: Sequence[int],
    block_table: torch.Tensor,
    accepted: Sequence[int] | None = None,
) -> Any:
    """The metadata of one step, by the builder that the engine uses for this layer.

    Args:
        query_lens: tokens of each request in this step; computed: those before it.
        block_table: ``[N, blocks]`` int32.
        accepted: of each request's draft before; 0 for one that has no draft to verify.
    """
    spec = cache_spec(layer, config)
    with set_current_vllm_config(config):
        make = layer.get_attn_backend().get_builder_cls()
        builder = make(spec, [layer.prefix], config, torch.device("cpu"))
    bounds = torch.tensor([0, *query_lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    queries = torch.tensor(query_lens, dtype=torch.int32)
    before = torch.tensor(computed, dtype=torch.int32)
    seq_lens = queries + before
    fields = {
        "query_start_loc": bounds,
        "query_start_loc_cpu": bounds,
        "seq_lens": seq_lens,
        "num_reqs": len(query_lens),
        "num_actual_tokens": sum(query_lens),
        "max_query_len": max(query_lens),
        "max_seq_len": int(seq_lens.max()),
        "block_table_tensor": block_table,
        "slot_mapping": torch.zeros(sum(query_lens), dtype=torch.int64),
        "is_prefilling": before == 0,
        "seq_lens_cpu_upper_bound": seq_lens,
    }
    known = {field.name for field in dataclasses.fields(CommonAttentionMetadata)}
    common = CommonAttentionMetadata(**{k: v for k, v in fields.items() if k in known})
    upstream = next(base for base in make.__mro__ if base.__module__.startswith("vllm."))
    if spec.mamba_cache_mode == "align" and upstream is not GDNAttentionMetadataBuilder:
        # what the runner precomputes on a GPU: each request's blocks from its last one on
        first = (seq_lens - 1).clamp(min=0) // spec.block_size
        slots = first[:, None] + torch.arange(1 + spec.num_speculative_blocks)
        builder.mamba_aligned_state_indices = block_table.gather(1, slots.long())
    if accepted is None:
        return builder.build(0, common)
    number = torch.tensor(accepted, dtype=torch.int32)
    drafted = torch.where(number > 0, queries - 1, -1)
    return builder.build(0, common, number.clamp(min=1), drafted)


def run_layer(
    layer: Any, config: VllmConfig, hidden_states: torch.Tensor, metadata: Any | None
) -> torch.Tensor:
    """The layer's forward as the model calls it, under the engine's forward context."""
    (output,) = run_layers([layer], config, hidden_states, None if metadata is None else [metadata])
    return output


def run_layers(
    layers: Sequence[Any],
    config: VllmConfig,
    hidden_states: torch.Tensor,
    metadata: Sequence[Any] | None,
) -> list[torch.Tensor]:
    """Each layer on the same input, with its own metadata, in one forward context."""
    positions = torch.zeros(hidden_states.shape[0], dtype=torch.int64)
    attn_metadata = None
    if metadata is not None:
        attn_metadata = {layer.prefix: m for layer, m in zip(layers, metadata, strict=True)}
    outputs = []
    with (
        torch.no_grad(),
        set_current_vllm_config(config),
        set_forward_context(attn_metadata, config, num_tokens=hidden_states.shape[0]),
    ):
        for layer in layers:
            output = torch.empty_like(hidden_states)
            try:
                result = layer(hidden_states=hidden_states, positions=positions, output=output)
            except TypeError as error:
                if "output" not in str(error):
                    raise
                result = layer(hidden_states=hidden_states, positions=positions)
            outputs.append(output if result is None else result)
    return outputs


class Definition:
    """Stock's layer by its mathematics in float64, from the checkpoint's weights alone."""

    def __init__(self, weights: Weights | None = None) -> None:
        self.w = {name: x.double() for name, x in (weights or checkpoint_weights(0)).items()}
        self.dim = self.w["f_a_proj.weight"].shape[0]
        self.heads = self.w["q_proj.weight"].shape[0] // self.dim
        channels = 3 * self.heads * self.dim
        self.conv = torch.zeros(channels, 3, dtype=torch.float64)
        self.state = torch.zeros(1, self.heads, self.dim, self.dim, dtype=torch.float64)

    def run(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The next tokens ``[T, hidden]`` of one sequence; the states move on."""
        w, x = self.w, hidden_states.double()
        tokens = x.shape[0]
        qkv = torch.cat([x @ w[f"{part}_proj.weight"].T for part in "qkv"], 1)
        filters = torch.cat([w[f"{part}_conv1d.weight"].flatten(1) for part in "qkv"])
        line = torch.cat([self.conv, qkv.T], 1)
        self.conv = line[:, -3:]
        mixed = F.silu(F.conv1d(line[None], filters[:, None], groups=line.shape[0])[0]).T
        q, k, v = mixed.reshape(tokens, 3, self.heads, self.dim).unbind(1)
        g = (x @ w["f_a_proj.weight"].T) @ w["f_b_proj.weight"].T
        gate = (x @ w["g_a_proj.weight"].T) @ w["g_b_proj.weight"].T
        decay = reference.log_decay(
            g.view(tokens, self.heads, self.dim),
            w["A_log"].flatten(),
            w["dt_bias"].view(self.heads, self.dim),
            None,
        )
        o, self.state = reference.recurrent_kda(
            reference.l2norm(q),
            reference.l2norm(k),
            v,
            decay,
            (x @ w["b_proj.weight"].T).sigmoid(),
            scale=self.dim**-0.5,
            state=self.state,
            cu_seqlens=[0, tokens],
        )
        o = o * torch.rsqrt(o.square().mean(-1, keepdim=True) + 1e-5) * w["o_norm.weight"]
        o = o * gate.view(tokens, self.heads, self.dim).sigmoid()
        return o.flatten(1) @ w["o_proj.weight"].T
