"""Attention of sglang's own video server: its plug-in loader, its server arguments, its attention
layer and its Wan transformer on a CPU, under the three names that are served here.

Kernels run in Triton's interpreter. Nothing of sglang is replaced.
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.multimodal_gen.configs.models.dits import WanVideoConfig
from sglang.multimodal_gen.configs.models.dits.wanvideo import WanVideoArchConfig
from sglang.multimodal_gen.runtime.distributed import (
    maybe_init_distributed_environment_and_model_parallel,
)
from sglang.multimodal_gen.runtime.layers.attention import selector
from sglang.multimodal_gen.runtime.layers.attention.layer import LocalAttention
from sglang.multimodal_gen.runtime.managers.forward_context import set_forward_context
from sglang.multimodal_gen.runtime.models.dits.wanvideo import WanTransformer3DModel
from sglang.multimodal_gen.runtime.platforms import (
    AttentionBackendEnum,
    current_platform,
    plugins,
)
from sglang.multimodal_gen.runtime.server_args import ServerArgs, set_global_server_args
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from backend_core.testing.numerics import relative_error
from block_sparse_backend.engines import sglang_diffusion
from block_sparse_backend.plan.sliding_tile import sliding_tile
from block_sparse_backend.plan.token_order import tile_order
from block_sparse_backend.testing.cases import elements_seen

OURS = ("sparge_attn", "sliding_tile_attn", "sage_attn")
NOT_OURS = ("torch_sdpa", "fa", "video_sparse_attn")
CANVAS = (5, 6, 7)  # no multiple of a tile
TOKENS = 5 * 6 * 7
WINDOWS = [[1, 3, 1], [3, 1, 1]]


def class_path(name: str) -> str:
    path: str = current_platform.get_attn_backend_cls_str(
        AttentionBackendEnum[name.upper()], 64, torch.bfloat16
    )
    return path


@pytest.fixture(scope="module")
def upstream() -> dict[str, str]:
    """sglang's own choices, before its plug-ins were applied; then they are, by sglang."""
    paths = {name: class_path(name) for name in OURS + NOT_OURS}
    plugins.apply_plugin_hooks()
    return paths


@pytest.fixture(scope="module", autouse=True)
def one_process(upstream: dict[str, str]) -> None:
    """sglang's process groups, of one process."""
    with socket.socket() as probe, pytest.MonkeyPatch.context() as patch:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
        probe.close()
        names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
        for name, value in zip(names, ("127.0.0.1", port, "0", "0", "1"), strict=True):
            patch.setenv(name, value)
        maybe_init_distributed_environment_and_model_parallel(tp_size=1, sp_size=1)


@contextlib.contextmanager
def server(
    folder: Path, name: str, config: str | None = None, pipeline: str = "WanPipeline"
) -> Iterator[ServerArgs]:
    """sglang's arguments as its command line makes them, of a model without weights."""
    model = {"_class_name": pipeline, "_diffusers_version": "0.33.0"}
    for part in ("transformer", "vae"):
        (folder / part).mkdir(exist_ok=True)
        model[part] = ["diffusers", part]  # type: ignore[assignment]
    (folder / "model_index.json").write_text(json.dumps(model))
    arguments = ServerArgs.from_kwargs(
        model_path=str(folder), attention_backend=name, attention_backend_config=config
    )
    set_global_server_args(arguments)
    selector._cached_get_attn_backend.cache_clear()
    yield arguments
    set_global_server_args(None)


def metadata_of(layer: Any, step: int = 0) -> Any:
    """As the denoising stage builds it."""
    backend = selector.get_attn_backend(64, torch.bfloat16)
    builder = backend.get_builder_cls()
    if builder is None:
        return None
    return builder().build(
        current_timestep=step,
        raw_latent_shape=(CANVAS[0], 2 * CANVAS[1], 2 * CANVAS[2]),
        patch_size=(1, 2, 2),
        STA_param=None,
        VSA_sparsity=0.0,
        device=torch.device("cpu"),
    )


def test_names_are_served_once_plugins_are_applied(upstream: dict[str, str]) -> None:
    assert not any("block_sparse_backend" in path for path in upstream.values())
    for name in OURS:
        module, _, _ = class_path(name).rpartition(".")
        assert module == "block_sparse_backend.engines.sglang_diffusion_backends"
    for name in NOT_OURS:
        assert class_path(name) == upstream[name]
    applied = plugins.HookRegistry._patched
    assert applied == set(sglang_diffusion.TARGETS)


@pytest.mark.parametrize(
    ("name", "config", "bound"),
    [
        ("torch_sdpa", None, 1e-2),
        ("sage_attn", None, 6e-2),
        ("sparge_attn", '{"topk": 1.0}', 6e-2),
        ("sparge_attn", "topk=1.0,eight_bit=false", 1e-2),
        ("sliding_tile_attn", json.dumps({"windows": WINDOWS, "tile": [2, 4, 4]}), 6e-2),
        (
            "sliding_tile_attn",
            json.dumps({"windows": WINDOWS, "tile": [2, 4, 4], "eight_bit": False}),
            1e-2,
        ),
    ],
)
def test_a_layer_of_sglang(
    name: str, config: str | None, bound: float, seed: int, tmp_path: Path
) -> None:
    """Beside float64 attention over what the layer is to see: all, or each head's own window."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, TOKENS, 2, 64, generator=generator).bfloat16() for _ in range(3))
    with server(tmp_path, name, config):
        layer = LocalAttention(2, 64, compute_dtype=torch.bfloat16)
        assert layer.backend is AttentionBackendEnum[name.upper()]
        assert ("block_sparse_backend" in type(layer.attn_impl).__module__) == (name in OURS)
        with set_forward_context(0, metadata_of(layer)):
            got = layer(q, k, v)
        cross = LocalAttention(2, 64, compute_dtype=torch.bfloat16, is_cross_attention=True)
        with set_forward_context(0, None):
            beside = cross(q, k[:, :20], v[:, :20])
    seen = None
    if name == "sliding_tile_attn":
        order = tile_order(CANVAS, (2, 4, 4), block=16, device=torch.device("cpu"))
        windows = [tuple(w) for w in WINDOWS]
        plan = sliding_tile(order, windows, 2, block_m=16, block_n=16)  # type: ignore[arg-type]
        seen = elements_seen(plan)[:, order.slot_of][:, :, order.slot_of]
        assert not bool(seen[0].all()) and not torch.equal(seen[0], seen[1])
    assert relative_error(got, exact(q, k, v, seen)) < bound
    assert relative_error(beside, exact(q, k[:, :20], v[:, :20], None)) < 1e-2


@pytest.mark.parametrize("name", ["sparge_attn", "sage_attn"])
def test_packed_sequences(name: str, seed: int, tmp_path: Path) -> None:
    """sglang's own layer of this name takes them, of FLUX.3 and MiniMax-H3."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(90, 2, 64, generator=generator).bfloat16() for _ in range(3))
    bounds = (0, 30, 30, 90)
    with server(tmp_path, name, '{"topk": 1.0}'):
        layer = LocalAttention(2, 64, compute_dtype=torch.bfloat16)
        given = {"cu_seqlens": torch.tensor(bounds, dtype=torch.int32), "max_seqlen": 60}
        got = layer.attn_impl.forward_varlen(q, k, v, **given)
        again = layer.attn_impl.forward_varlen(q, k, v, **given, cu_seqlens_host=bounds)
    assert torch.equal(got, again)
    for begin, end in ((0, 30), (30, 90)):
        want = exact(*(x[None, begin:end] for x in (q, k, v)), None)[0]
        assert relative_error(got[begin:end], want) < 6e-2


def exact(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None) -> Tensor:
    """float64 attention of [B, L, H, D], over what is seen [H, M, N]."""
    heads_first = (x.double().transpose(1, 2) for x in (q, k, v))
    return scaled_dot_product_attention(*heads_first, attn_mask=seen).transpose(1, 2)


def wan(seed: int) -> WanTransformer3DModel:
    """Two blocks of sglang's Wan transformer, two heads of 64."""
    arch = WanVideoArchConfig(num_attention_heads=2, attention_head_dim=64, ffn_dim=64)
    arch.num_layers, arch.text_dim, arch.freq_dim, arch.text_len = 2, 32, 32, 16
    torch.manual_seed(seed)
    model = WanTransformer3DModel(WanVideoConfig(arch_config=arch), hf_config={})
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.08)
    return model.bfloat16().eval()


@pytest.mark.parametrize("name", OURS)
def test_the_layers_of_a_transformer(name: str, seed: int, tmp_path: Path) -> None:
    """Wan's self-attention layers are ours, its cross-attention too where sglang has it so, and one
    computes attention. The whole transformer does not run on a CPU from this wheel: what modulates
    between its layers has its CPU form in sgl_kernel, another package."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, TOKENS, 2, 64, generator=generator).bfloat16() for _ in range(3))
    config = {"topk": 1.0, "windows": [9, 9, 9], "tile": [2, 4, 4]}
    with server(tmp_path, name, json.dumps(config)):
        model = wan(seed)
        for block in model.blocks:
            assert type(block.attn1.attn_impl).__module__.startswith("block_sparse_backend.")
        with set_forward_context(0, metadata_of(model)):
            got = model.blocks[0].attn1(q, k, v)
    assert relative_error(got, exact(q, k, v, None)) < 6e-2


def test_what_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    for name, config, message in (
        ("sparge_attn", "topk=0", "topk must be above 0 and at most 1, got 0.0"),
        ("sliding_tile_attn", "windows=3", "windows must be one .* or a list of them, got 3"),
        ("sliding_tile_attn", '{"windows": [2, 3, 3]}', "even_windows must be .* for the window"),
        ("sliding_tile_attn", "even_windows=odd", 'must be "wide" or "exact", got .odd'),
    ):
        with server(tmp_path, name, config), pytest.raises(ValueError, match=message):
            LocalAttention(2, 64, compute_dtype=torch.bfloat16)
    with server(tmp_path, "sage_attn"):
        with pytest.raises(
            ValueError, match="heads must have at most 128 channels under sage_attn"
        ):
            LocalAttention(2, 256, compute_dtype=torch.bfloat16)
        layer = LocalAttention(2, 64, compute_dtype=torch.bfloat16)
        x = torch.zeros(1, 16, 2, 64)
        with set_forward_context(0, None):
            assert not layer(x, x, x).any()  # float32, in torch


@pytest.mark.parametrize("name", OURS)
def test_a_text_encoder_with_larger_heads_keeps_its_own_attention(
    name: str, tmp_path: Path
) -> None:
    """As sglang's own choice under ``sage_attn`` lets it: the flag is strict for transformers."""
    heads = {"num_heads": 2, "head_size": 256, "causal": True, "compute_dtype": torch.bfloat16}
    with server(tmp_path, name):
        with selector.component_attn_backend_context_manager(
            None, component_name="text_encoder", allow_global_backend_fallback=True
        ):
            layer = LocalAttention(**heads)
        assert layer.backend is AttentionBackendEnum.TORCH_SDPA
        with pytest.raises(ValueError, match="at most 128 channels"):
            LocalAttention(**heads)


def test_hunyuan_video_under_sliding_tiles(seed: int, tmp_path: Path) -> None:
    """Its patches are one number and another along time; the layer that refines its text attends
    to fewer tokens than the video has, all of them."""
    generator = torch.Generator().manual_seed(seed)
    text, every = 20, TOKENS + 20
    q, k, v = (torch.randn(1, every, 2, 64, generator=generator).bfloat16() for _ in range(3))
    config = json.dumps({"windows": [1, 1, 1], "tile": [2, 4, 4], "eight_bit": False})
    with server(tmp_path, "sliding_tile_attn", config, "HunyuanVideoPipeline") as arguments:
        model = arguments.pipeline_config.dit_config
        assert model.patch_size == 2 and model.patch_size_t == 1
        build = selector.get_attn_backend(64, torch.bfloat16).get_builder_cls()().build
        options = {"current_timestep": 0, "STA_param": None, "patch_size": model.patch_size}
        metadata = build(raw_latent_shape=(CANVAS[0], 2 * CANVAS[1], 2 * CANVAS[2]), **options)
        assert metadata.canvas == CANVAS
        with pytest.raises(ValueError, match=r"along time, height and width, got \(64, 64\) and"):
            build(raw_latent_shape=(64, 64), **options)
        layer = LocalAttention(2, 64, compute_dtype=torch.bfloat16)
        with set_forward_context(0, metadata):
            refined = layer(*(x[:, :text] for x in (q, k, v)))
            whole = layer(q, k, v)
    assert relative_error(refined, exact(*(x[:, :text] for x in (q, k, v)), None)) < 1e-2
    want = exact(q, k, v, None)
    assert relative_error(whole[:, TOKENS:], want[:, TOKENS:]) < 1e-2  # text sees everything
    assert relative_error(whole[:, :TOKENS], want[:, :TOKENS]) > 1e-1  # the windows are felt
