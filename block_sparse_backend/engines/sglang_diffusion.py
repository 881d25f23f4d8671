"""sglang's video server (``sglang.multimodal_gen``): ``--attention-backend sparge_attn``,
``sliding_tile_attn`` and ``sage_attn`` run here instead of in the libraries of those names, which
need not be installed.

``register`` is the entry point of the group ``sglang.multimodal_gen.plugins``. It wraps the method
that turns a backend's name into a class, for those names alone: every other choice goes to sglang's
own code. The hook is on ``CudaPlatformBase``, which defines the method: sglang's registry would
take the inherited method of ``CudaPlatform`` for a plain function.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

from backend_core.engines import seams
from backend_core.strict import fallback
from block_sparse_backend.engines.seam_list import VIDEO

PLATFORMS = "sglang.multimodal_gen.runtime.platforms"
TARGETS = (
    f"{PLATFORMS}.cuda.CudaPlatformBase.get_attn_backend_cls_str",
    f"{PLATFORMS}.cpu.CpuPlatform.get_attn_backend_cls_str",
)
DENOISING = "sglang.multimodal_gen.runtime.pipelines_core.stages.denoising"
BACKENDS = {
    "SPARGE_ATTN": f"{__package__}.sglang_diffusion_backends.PredictedBackend",
    "SLIDING_TILE_ATTN": f"{__package__}.sglang_diffusion_backends.SlidingTileBackend",
    "SAGE_ATTN": f"{__package__}.sglang_diffusion_backends.DenseBackend",
}
MAX_HEAD_SIZE = 128


def register() -> None:
    """Wrap the choice of the attention backend; sglang calls this in each of its processes.

    Raises:
        FallbackError: this sglang's is another, in strict mode.
    """
    if (reason := seams.refusal(VIDEO)) is not None:
        fallback(reason)
        return
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for target in TARGETS:
        HookRegistry.register(target, choose, HookType.AROUND)


def choose(
    original: Callable[..., str], cls: Any, selected_backend: Any, head_size: int, dtype: Any
) -> str:
    """The dotted path of the class for a backend: ours under our names, else sglang's choice.

    Raises:
        ValueError: no backend of ours has heads of this size. sglang then gives a text encoder or
            another part beside the transformer the backend that it has without the flag.
    """
    name = getattr(selected_backend, "name", "")
    if name in BACKENDS and head_size > MAX_HEAD_SIZE:
        raise ValueError(
            f"heads must have at most {MAX_HEAD_SIZE} channels under {name.lower()}, got"
            f" {head_size}"
        )
    if name == "SLIDING_TILE_ATTN":
        serve_windows()
    if name in BACKENDS:
        return BACKENDS[name]
    return original(cls, selected_backend, head_size, dtype)


@functools.cache
def serve_windows() -> None:
    """Wrap, once, what sglang does under ``sliding_tile_attn`` before it denoises. It is no hook of
    the registry, which would import the stages in every process."""
    stage = importlib.import_module(DENOISING).DenoisingStage
    original = stage.prepare_sta_param

    @functools.wraps(original)
    def prepare(self: Any, batch: Any, server_args: Any) -> None:
        prepare_windows(original, self, batch, server_args)

    stage.prepare_sta_param = prepare


def prepare_windows(
    original: Callable[..., None], stage: Any, batch: Any, server_args: Any
) -> None:
    """sglang asks under ``sliding_tile_attn`` for a search mode, and for a file of windows for each
    step, layer and head. With a mode (``STA_mode``) that is as it was; without one the windows are
    those of ``--attention-backend-config``."""
    config = server_args.attention_backend_config or {}
    if config.get("STA_mode"):
        original(stage, batch, server_args)
    else:
        batch.STA_param = None
