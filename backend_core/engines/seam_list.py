"""Seams of the flags in vLLM and sglang."""

from __future__ import annotations

from backend_core.engines.seams import Part, Seam, each

_BACKENDS = "vllm.v1.attention"
VLLM_FLAG = Part.of(
    "flag",
    (
        Seam(f"{_BACKENDS}.backends.registry:AttentionBackendEnum.register"),
        Seam(f"{_BACKENDS}.backends.registry:register_backend", given="backend class_path"),
    ),
)
VLLM_BACKENDS = Part.of(
    "choice of attention backends",
    (
        Seam(
            f"{_BACKENDS}.backend:AttentionBackend",
            has="validate_configuration full_cls_name get_supported_kernel_block_sizes"
            " get_preferred_block_size get_name get_builder_cls get_impl_cls",
        ),
        Seam(
            f"{_BACKENDS}.selector:AttentionSelectorConfig",
            has="use_mla use_sparse head_size dtype kv_cache_dtype has_sink has_sliding_window"
            " use_non_causal use_adaptive_verification",
        ),
        Seam("vllm.config.attention:AttentionConfig", has="backend backend_per_kind"),
        Seam("vllm.config:get_current_vllm_config"),
        Seam("vllm.platforms:current_platform"),
        *(
            Seam(
                f"vllm.platforms.{module}:{name}.get_attn_backend_cls",
                given="selected_backend attn_selector_config num_heads",
            )
            for module, name in (("cuda", "CudaPlatformBase"), ("rocm", "RocmPlatform"))
        ),
        Seam("vllm.utils.import_utils:resolve_obj_by_qualname"),
        Seam("vllm.envs:VLLM_BATCH_INVARIANT"),
    ),
)

_SRT = "sglang.srt"
_REGISTRY = f"{_SRT}.layers.attention.attention_registry"
SGLANG_FLAG = Part.of(
    "flag",
    (
        *each(f"{_SRT}.server_args", "add_attention_backend_choices ATTENTION_BACKEND_CHOICES"),
        Seam(f"{_SRT}.server_args:ServerArgs.resolve_once", takes=""),
        *each(f"{_SRT}.plugins.hook_registry", "HookRegistry.register HookType"),
        Seam(f"{_SRT}.arg_groups.fields.exec_:ExecGraph", has="enable_torch_compile"),
        Seam(f"{_REGISTRY}:register_attention_backend"),
        Seam(f"{_REGISTRY}:attn_backend_wrapper", takes="runner full_attn_backend"),
        *each(f"{_SRT}.model_executor.model_runner:ModelRunner", "alloc_memory_pool load_model"),
    ),
)

SEAMS = (VLLM_FLAG, VLLM_BACKENDS, SGLANG_FLAG)
