"""The plug-in of sglang's video server, against stand-ins for the few names of sglang it uses.

The stand-ins have the signatures of sglang 0.5.23.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
import sys
import types
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from backend_core.strict import FallbackError
from backend_core.testing.numerics import relative_error
from block_sparse_backend.engines import sglang_diffusion

ROOT = "sglang.multimodal_gen.runtime"


class Backends(enum.Enum):
    FA = enum.auto()
    SAGE_ATTN = enum.auto()
    SPARGE_ATTN = enum.auto()
    SLIDING_TILE_ATTN = enum.auto()


class HookType(enum.Enum):
    AROUND = "around"


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """sglang's modules, and what is registered with its hook registry."""
    registered: dict[str, Any] = {}

    class HookRegistry:
        @classmethod
        def register(cls, target: str, hook: Any, hook_type: HookType) -> None:
            assert hook_type is HookType.AROUND
            registered[target] = hook

    class Abstract:
        pass

    @dataclasses.dataclass
    class Metadata:
        current_timestep: int

    class Stage:
        def prepare_sta_param(self, batch: Any, server_args: Any) -> None:
            batch.STA_param = "from a search"

    sglang_diffusion.serve_windows.cache_clear()
    dit = type("WanVideoConfig", (), {})()
    arguments = types.SimpleNamespace(
        attention_backend_config={"topk": 0.75},
        pipeline_config=types.SimpleNamespace(dit_config=dit),
    )
    modules = {
        "platforms": {"AttentionBackendEnum": Backends},
        "platforms.plugins": {"HookRegistry": HookRegistry, "HookType": HookType},
        "server_args": {"get_global_server_args": lambda: arguments},
        "pipelines_core.stages.denoising": {"DenoisingStage": Stage},
        "layers.attention.backends.attention_backend": dict.fromkeys(
            ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder"), Abstract
        )
        | {"AttentionMetadata": Metadata},
    }
    for name, content in modules.items():
        module = types.ModuleType(f"{ROOT}.{name}")
        vars(module).update(content)
        parts = f"{ROOT}.{name}".split(".")
        for i in range(1, len(parts)):
            parent = ".".join(parts[:i])
            if parent not in sys.modules:
                monkeypatch.setitem(sys.modules, parent, types.ModuleType(parent))
        monkeypatch.setitem(sys.modules, f"{ROOT}.{name}", module)
    monkeypatch.delitem(
        sys.modules, "block_sparse_backend.engines.sglang_diffusion_backends", raising=False
    )
    with monkeypatch.context() as patch:
        patch.setattr(sglang_diffusion.seams, "refusal", lambda part: "another sglang")
        sglang_diffusion.register()
        assert not registered
        patch.setattr(sglang_diffusion.seams, "refusal", lambda part: None)
        sglang_diffusion.register()
    return registered


def load(path: str) -> Any:
    module, name = path.rsplit(".", 1)
    return getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("name", [Backends.SAGE_ATTN, Backends.SPARGE_ATTN])
def test_forward(
    name: Backends,
    hooks: dict[str, Any],
    seed: int,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = load(sglang_diffusion.choose(lambda *a: "", "cls", name, 64, None))
    impl = backend.get_impl_cls()(
        num_heads=2, head_size=64, softmax_scale=0.125, causal=False, supported_attention=None
    )
    if name is Backends.SPARGE_ATTN:
        assert impl.attention(2, None).topk == 0.75
    generator = torch.Generator().manual_seed(seed)
    q, k, v, text = (
        torch.randn(2, length, 2, 64, generator=generator).half().to(device)
        for length in (50, 50, 50, 20)
    )

    def exact(*x: torch.Tensor) -> torch.Tensor:
        heads_first = [t.cpu().double().transpose(1, 2) for t in x]
        return scaled_dot_product_attention(*heads_first).transpose(1, 2).to(device)

    # one tile: the prediction keeps its one block
    got = impl.forward(q, k, v, None)
    assert got.is_contiguous() and relative_error(got, exact(q, k, v)) < 6e-2
    wide = impl.forward(q.float(), k.float(), v.float(), None)  # in torch
    assert relative_error(wide, exact(q, k, v)) < 1e-5
    monkeypatch.setenv("KDA_DSV4_STRICT", "1")
    with pytest.raises(FallbackError, match=r"query must be bfloat16 or float16, got torch\.float"):
        impl.forward(q.float(), k.float(), v.float(), None)
    cross = impl.forward(q, text, text, None)
    assert relative_error(cross, exact(q, text, text)) < 2e-3
    # the queries of one of two GPUs, under sage_attn beside the keys of both
    half = relative_error(impl.forward(q[:, :25], k, v, None), exact(q[:, :25], k, v))
    assert (5e-3 if name is Backends.SAGE_ATTN else 0) < half < 6e-2
    for said in ({"is_cross_attention": True}, {"prefix": "blocks.1.attn2.impl"}):
        layer = backend.get_impl_cls()(2, 64, 0.125, **said)
        for queries in (q, q[:, :25]):
            assert relative_error(layer.forward(queries, k, v, None), exact(queries, k, v)) < 2e-3
    with pytest.raises(ValueError, match="head_size must be 1 to 128, got 256"):
        backend.get_impl_cls()(num_heads=2, head_size=256, softmax_scale=1.0)


@pytest.mark.parametrize("size", [40, 80, 112])
def test_heads_between_the_sizes_of_the_kernels(
    size: int, hooks: dict[str, Any], seed: int, device: torch.device
) -> None:
    """As SageAttention serves them under sglang's own ``sage_attn``."""
    backend = load(sglang_diffusion.choose(lambda *a: "", "cls", Backends.SAGE_ATTN, size, None))
    assert size in backend.get_supported_head_sizes()
    impl = backend.get_impl_cls()(num_heads=2, head_size=size, softmax_scale=size**-0.5)
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 50, 2, size, generator=generator).half().to(device)
    got = impl.forward(q, k, v, None)
    assert got.is_contiguous() and got.shape == q.shape
    double = [x.cpu().double().transpose(1, 2) for x in (q, k, v)]
    want = scaled_dot_product_attention(*double).transpose(1, 2)
    assert relative_error(got.cpu(), want) < 6e-2


def test_windows_come_from_the_configuration_or_from_sglang(hooks: dict[str, Any]) -> None:
    path = sglang_diffusion.choose(lambda *a: "", "cls", Backends.SLIDING_TILE_ATTN, 64, None)
    backend = load(path)
    module = sys.modules[backend.__module__]
    config = sys.modules[f"{ROOT}.server_args"].get_global_server_args().attention_backend_config

    def make(**given: Any) -> Any:
        config.clear()
        config.update(given)
        return backend.get_impl_cls()(
            num_heads=4, head_size=64, softmax_scale=0.125, prefix="blocks.1.attn1.impl"
        )

    build = backend.get_builder_cls()().build
    options = {"raw_latent_shape": (5, 12, 12), "patch_size": (1, 2, 2), "VSA_sparsity": 0.0}
    plain = build(current_timestep=1, STA_param=None, **options)
    assert plain.canvas == (5, 6, 6) and plain.windows is None
    sound = backend.get_impl_cls()(4, 64, 0.125, prefix="blocks.1.audio_attn1.attn.impl")
    video = torch.zeros(1, 5 * 6 * 6, 4, 64)
    assert make().serves(video, video, plain) and not sound.serves(video, video, plain)
    arguments = sys.modules[f"{ROOT}.server_args"].get_global_server_args()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments.pipeline_config, "dit_config", type("FluxConfig", (), {})())
        with pytest.raises(ValueError, match=r"tokens begin with the video's, .* got FluxConfig"):
            build(current_timestep=1, STA_param=None, **options)
    two = [[3, 3, 3], [1, 3, 5]]
    of_steps = build(current_timestep=1, STA_param=[None, [two, two[::-1]]], **options)
    assert make().attention(4, plain).windows == ((3, 3, 3),)
    settings = make(windows=two, tile=[2, 4, 4], even_windows="wide").attention(2, plain)
    assert settings.windows == ((3, 3, 3), (1, 3, 5))
    assert settings.tile == (2, 4, 4) and settings.even_windows == "wide" and settings.eight_bit
    assert make(eight_bit=False).attention(2, of_steps).windows == ((1, 3, 5), (3, 3, 3))
    assert not make(eight_bit=False).attention(2, of_steps).eight_bit
    with pytest.raises(ValueError, match="needs the canvas in the attention metadata, got None"):
        make().attention(2, None)
    for wrong in ("3,3,3", [], [[3, 3]], [0, 3, 3], [3, 3, "3"]):
        with pytest.raises(ValueError, match="windows must be"):
            make(windows=wrong)
    assert module._of_rank(((1, 1, 1),), 7) == ((1, 1, 1),)

    stage = sys.modules[f"{ROOT}.pipelines_core.stages.denoising"].DenoisingStage()
    for given in ({}, {"STA_mode": "STA_inference"}):
        batch = types.SimpleNamespace(STA_param="as it was")
        arguments = types.SimpleNamespace(attention_backend_config=given)
        stage.prepare_sta_param(batch, arguments)
        assert batch.STA_param == ("from a search" if given else None)
