"""Seams of the adapter of sglang's video server."""

from __future__ import annotations

from backend_core.engines.seams import Part, Seam, each

_RUNTIME = "sglang.multimodal_gen.runtime"
_ATTENTION = f"{_RUNTIME}.layers.attention.backends.attention_backend"
VIDEO = Part.of(
    "attention of the video server",
    (
        *each(f"{_RUNTIME}.platforms.plugins", "HookRegistry.register HookType"),
        *(
            Seam(
                f"{_RUNTIME}.platforms.{module}:{name}.get_attn_backend_cls_str",
                takes="selected_backend head_size dtype",
            )
            for module, name in (("cuda", "CudaPlatformBase"), ("cpu", "CpuPlatform"))
        ),
        Seam(f"{_RUNTIME}.platforms:AttentionBackendEnum"),
        *each(_ATTENTION, "AttentionBackend AttentionMetadata AttentionMetadataBuilder"),
        Seam(
            f"{_ATTENTION}:AttentionImpl.__init__",
            takes="num_heads head_size softmax_scale causal num_kv_heads prefix ...",
        ),
        Seam(f"{_ATTENTION}:AttentionImpl.forward", takes="query key value attn_metadata"),
        Seam(f"{_RUNTIME}.server_args:get_global_server_args", takes=""),
        Seam(
            f"{_RUNTIME}.pipelines_core.stages.denoising:DenoisingStage.prepare_sta_param",
            takes="batch server_args",
        ),
    ),
)

SEAMS = (VIDEO,)
