"""sglang's video server (``sglang.multimodal_gen`` 0.5.23): ``--attention-backend sparge_attn`` or
``sage_attn`` run here instead of in the libraries of those names, which need not be installed.

``register`` is the entry point of the group ``sglang.multimodal_gen.plugins``. It wraps the one
method that turns a backend's name into a class, and only for those two names: every other choice
goes to sglang's own code. The hook is on ``CudaPlatformBase``, which defines the method: sglang's
registry would take the inherited method of ``CudaPlatform`` for a plain function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

PLATFORMS = "sglang.multimodal_gen.runtime.platforms"
TARGETS = (
    f"{PLATFORMS}.cuda.CudaPlatformBase.get_attn_backend_cls_str",
    f"{PLATFORMS}.cpu.CpuPlatform.get_attn_backend_cls_str",
)
BACKENDS = {
    "SPARGE_ATTN": f"{__package__}.sglang_diffusion_backends.PredictedBackend",
    "SAGE_ATTN": f"{__package__}.sglang_diffusion_backends.DenseBackend",
}


def register() -> None:
    """Wrap the choice of the attention backend; sglang calls this in each of its processes."""
    from sglang.multimodal_gen.runtime.platforms.plugins import HookRegistry, HookType

    for target in TARGETS:
        HookRegistry.register(target, choose, HookType.AROUND)


def choose(
    original: Callable[..., str], cls: Any, selected_backend: Any, head_size: int, dtype: Any
) -> str:
    """The dotted path of the class for a backend: ours under our names, else sglang's choice."""
    ours = BACKENDS.get(getattr(selected_backend, "name", ""))
    if ours is not None:
        return ours
    return original(cls, selected_backend, head_size, dtype)
