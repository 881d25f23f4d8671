"""``enable`` on models of diffusers 0.42.1, which sglang's video server brings, on a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import diffusers
import pytest
import torch
from diffusers.models import attention_dispatch as dispatch
from torch import Tensor

from backend_core.testing.numerics import relative_error
from block_sparse_backend.engines import diffusers as adapter
from block_sparse_backend.engines.diffusers import enable
from block_sparse_backend.video import VideoAttention

DENSE = VideoAttention("dense", eight_bit=False)


@pytest.fixture(autouse=True)
def active_backend() -> Iterator[None]:
    """What a model runs that was given no backend is a matter of the process. Pipelines ask for no
    gradients."""
    active = dispatch._AttentionBackendRegistry._active_backend
    with torch.no_grad():
        yield
    assert dispatch._AttentionBackendRegistry._active_backend is active


def wan() -> Any:
    torch.manual_seed(0)
    return diffusers.WanTransformer3DModel(
        num_attention_heads=2, attention_head_dim=32, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=16, ffn_dim=64, num_layers=2, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads", rope_max_seq_len=32,
    ).eval()  # fmt: skip


def outputs(model: Any) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    found: Tensor = model(
        hidden_states=torch.randn(1, 4, 2, 16, 16, generator=generator),
        timestep=torch.tensor([10]),
        encoder_hidden_states=torch.randn(1, 7, 16, generator=generator),
        return_dict=False,
    )[0]
    return found


def tiles(*window: int) -> VideoAttention:
    return VideoAttention(
        "sliding_tile",
        eight_bit=False,
        canvas=(2, 8, 8),
        tile=(2, 4, 4),
        windows=(window,),  # type: ignore[arg-type]
    )


def test_tiny_wan_transformer() -> None:
    model = wan()
    want = outputs(model)
    name = enable(model, DENSE)
    assert relative_error(outputs(model), want) < 1e-5
    assert enable(model, tiles(1, 1, 1)) != name
    assert relative_error(outputs(model), want) > 1e-4  # the window is felt
    enable(model, tiles(3, 3, 3))
    assert relative_error(outputs(model), want) < 1e-5
    with pytest.raises(ValueError, match="transformer must have set_attention_backend"):
        enable(object(), DENSE)


def test_no_other_model_is_changed_and_resetting_undoes_it() -> None:
    """diffusers makes a model's backend that of all models that were given none."""
    model, other = wan(), wan()
    want = outputs(model)
    enable(model, tiles(1, 1, 1))
    assert torch.equal(outputs(other), want)
    model.reset_attention_backend()
    assert torch.equal(outputs(model), want)


def test_a_model_without_backends_of_its_own_is_named() -> None:
    """Cosmos's processors call whichever backend is the process's."""
    torch.manual_seed(0)
    model = diffusers.CosmosTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=32, num_layers=1,
        mlp_ratio=2, text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 16, 16),
        concat_padding_mask=False, extra_pos_embed_type=None,
    )  # fmt: skip
    with pytest.raises(ValueError, match="have a backend of their own, got CosmosTransformer3D"):
        enable(model, DENSE)


def test_a_model_that_calls_torch_is_named() -> None:
    model = diffusers.CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=2, text_embed_dim=8, num_layers=1, sample_width=8, sample_height=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"got CogVideoX.*, which is not served"):
        enable(model, DENSE)


def test_hunyuan_video_and_its_mask(caplog: pytest.LogCaptureFixture) -> None:
    """It always passes one, over text that is padded."""
    torch.manual_seed(0)
    model = diffusers.HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=10, num_layers=1,
        num_single_layers=1, num_refiner_layers=1, patch_size=1, text_embed_dim=16,
        pooled_projection_dim=8, rope_axes_dim=(2, 4, 4),
    ).eval()  # fmt: skip

    def run(words: int) -> Tensor:
        generator = torch.Generator().manual_seed(1)
        found: Tensor = model(
            hidden_states=torch.randn(1, 4, 2, 8, 8, generator=generator),
            timestep=torch.tensor([10]),
            encoder_hidden_states=torch.randn(1, 7, 16, generator=generator),
            encoder_attention_mask=torch.arange(7)[None] < words,
            pooled_projections=torch.randn(1, 8, generator=generator),
            guidance=torch.tensor([1000.0]),
            return_dict=False,
        )[0]
        return found

    full, padded = run(7), run(4)
    enable(model, tiles(3, 3, 3))
    assert relative_error(run(7), full) < 1e-5
    name = enable(model, tiles(1, 1, 1))
    assert relative_error(run(7), full) > 1e-4  # the window is felt
    with caplog.at_level("WARNING", "kda_dsv4"):
        caplog.clear()
        run(7)
        assert not caplog.messages
        assert torch.equal(run(4), padded)
    (reported,) = caplog.messages
    assert f"for {name}, got a mask, False and 0.0" in reported


@pytest.mark.parametrize("shape", [(2, 128), (2, 1, 1, 128)])
@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_mask_that_hides_nothing_is_none(
    shape: tuple[int, ...], dtype: torch.dtype, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 128, 2, 64, generator=generator)
    mask = (torch.ones if dtype == torch.bool else torch.zeros)(shape, dtype=dtype)
    backend = dispatch.AttentionBackendName(enable(wan(), tiles(1, 1, 1)))
    got = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
    assert torch.equal(got, tiles(1, 1, 1)(q, k, v))


@pytest.mark.parametrize("length", [20, 50])
def test_masks_of_keys(length: int, seed: int) -> None:
    """As diffusers' own backend takes them: ``[batch, keys]``."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 50, 2, 64, generator=generator)
    k, v = k[:, :length], v[:, :length]
    mask = torch.rand(2, length, generator=generator) < 0.5
    want = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask)
    backend = dispatch.AttentionBackendName(enable(wan(), DENSE))
    got = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
    assert torch.equal(got, want)


def test_cross_attention_of_equal_length() -> None:
    """A text of as many tokens as the video has is none of it, whoever gave the processors."""
    model = wan()
    x = torch.randn(1, 4, 2, 16, 16, generator=torch.Generator().manual_seed(1))

    def run(words: Tensor) -> Tensor:
        found: Tensor = model(x, torch.tensor([10]), words, return_dict=False)[0]
        return found

    words = torch.randn(1, 128, 16, generator=torch.Generator().manual_seed(2))
    want = run(words)
    for shared in (False, True):
        if shared:
            processor = model.blocks[0].attn1.processor
            for block in model.blocks:
                block.attn1.processor = block.attn2.processor = processor
        enable(model, tiles(3, 3, 3))
        assert relative_error(run(words), want) < 1e-5
        enable(model, tiles(1, 1, 1))
        attn = [block.attn2.processor._attention_backend for block in model.blocks]
        assert attn == [None, None] and relative_error(run(words), want) > 1e-4
        model.reset_attention_backend()
        assert torch.equal(run(words), want)


def test_another_canvas_is_refused() -> None:
    model = wan()
    enable(model, VideoAttention("sliding_tile", eight_bit=False, canvas=(1, 8, 8)))
    with pytest.raises(ValueError, match=r"must have the 64 tokens of canvas \(1, 8, 8\), got 128"):
        outputs(model)


def test_text_first_is_refused_under_tiles() -> None:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, pooled_projection_dim=16,
        axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    with pytest.raises(
        ValueError, match=r"begins with the video's tokens, .* got FluxTransformer2"
    ):
        enable(model, tiles(1, 1, 1))
    assert enable(model, DENSE)


@pytest.mark.parametrize(
    ("size", "dtype", "served"),
    [(96, torch.bfloat16, True), (160, torch.bfloat16, False), (64, torch.float32, False)],
)
def test_what_kernels_do_not_take_runs_in_torch(
    size: int, dtype: torch.dtype, served: bool, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    q, k, v = torch.randn(3, 1, 50, 2, size, generator=torch.Generator().manual_seed(seed)).to(
        dtype
    )
    want = dispatch.dispatch_attention_fn(q, k, v)
    backend = dispatch.AttentionBackendName(enable(wan(), VideoAttention()))
    with caplog.at_level("WARNING", "kda_dsv4"):
        got = dispatch.dispatch_attention_fn(q, k, v, backend=backend)
    assert torch.equal(got, want) != served and relative_error(got, want) < 6e-2


def test_gradients_and_scales_that_are_not_served(caplog: pytest.LogCaptureFixture) -> None:
    """Kernels gave an output without gradients, and an error for a scale that torch takes."""
    q, k, v = torch.randn(3, 1, 50, 2, 64, generator=torch.Generator().manual_seed(0))
    name = enable(wan(), DENSE)
    backend = dispatch.AttentionBackendName(name)
    q.requires_grad_()
    with caplog.at_level("WARNING", "kda_dsv4"):
        with torch.enable_grad():
            dispatch.dispatch_attention_fn(q, k, v, backend=backend).sum().backward()
        got = dispatch.dispatch_attention_fn(q, k, v, scale=0.0, backend=backend)
    assert q.grad is not None
    assert torch.equal(got, dispatch.dispatch_attention_fn(q, k, v, scale=0.0))
    assert f"{name} has no backward pass" in caplog.text and "got 0.0" in caplog.text


def test_gradients_in_compiled_code() -> None:
    """The operator that compiled code holds has none."""
    q, k, v = torch.randn(3, 1, 50, 2, 64, generator=torch.Generator().manual_seed(0))
    backend = dispatch.AttentionBackendName(enable(wan(), DENSE))

    def loss(q: Tensor) -> Tensor:
        found: Tensor = dispatch.dispatch_attention_fn(q, k, v, backend=backend)
        return found.square().sum()

    found = []
    with torch.enable_grad():
        for run in (loss, torch.compile(loss, backend="aot_eager")):
            x = q.clone().requires_grad_()
            run(x).backward()
            found.append(x.grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_mask_in_compiled_code(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    q, k, v = torch.randn(3, 2, 128, 2, 64, generator=generator)
    backend = dispatch.AttentionBackendName(enable(wan(), tiles(1, 1, 1)))

    def model(q: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = dispatch.dispatch_attention_fn(q + 1, k, v, attn_mask=mask, backend=backend)
        return found * 2

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for mask in (torch.ones(2, 1, 1, 128, dtype=torch.bool), torch.rand(2, 1, 1, 128) < 0.5):
        torch.testing.assert_close(compiled(q, mask), model(q, mask), rtol=0, atol=0)


def test_a_mask_in_a_capture_counts_as_hiding(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be read on the host there."""
    q, k, v = torch.randn(3, 2, 128, 2, 64, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(2, 1, 1, 128, dtype=torch.bool)
    want = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask)
    backend = dispatch.AttentionBackendName(enable(wan(), tiles(1, 1, 1)))
    monkeypatch.setattr(adapter, "is_capturing", lambda device: True)
    got = dispatch.dispatch_attention_fn(q, k, v, attn_mask=mask, backend=backend)
    assert torch.equal(got, want)
