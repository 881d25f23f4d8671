"""Seams of KDA's adapters in vLLM."""

from __future__ import annotations

from backend_core.engines.seams import Part, Seam, each

_GDN = "vllm.v1.attention.backends.gdn_attn"
_METADATA = (
    Seam(
        f"{_GDN}:GDNAttentionMetadata",
        has="num_prefills num_prefill_tokens num_decodes num_decode_tokens num_spec_decodes"
        " has_initial_state spec_query_start_loc non_spec_query_start_loc"
        " spec_state_indices_tensor non_spec_state_indices_tensor spec_sequence_masks"
        " spec_token_indx non_spec_token_indx num_accepted_tokens prefill_query_start_loc"
        " prefill_state_indices prefill_has_initial_state checkpoint",
    ),
    Seam(
        f"{_GDN}:GDNAttentionMetadataBuilder.build",
        takes="common_prefix_len common_attn_metadata ...",
    ),
    Seam(f"{_GDN}:GDNAttentionMetadataBuilder.update_block_table", takes="metadata ..."),
    Seam(f"{_GDN}:GDNAttentionMetadataBuilder", has="checkpoint_builder"),
    Seam(
        "vllm.model_executor.layers.mamba.checkpoint:MambaPrefillCheckpointBuilder.build",
        takes="m request_rows",
    ),
    Seam("vllm.v1.attention.backends.utils:CommonAttentionMetadata", has="query_start_loc_cpu"),
    Seam("vllm.v1.attention.backends.utils:NULL_BLOCK_ID"),
    *each("vllm.model_executor.custom_op", "PluggableLayer.register_oot op_registry_oot"),
    Seam("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first"),
    *each("vllm.forward_context", "get_forward_context is_forward_context_available"),
    Seam("vllm.forward_context:ForwardContext", has="attn_metadata no_compile_layers"),
    Seam(
        "vllm.config.cache:CacheConfig", has="mamba_page_size_padded mamba_cache_mode use_replayssm"
    ),
)
_OFFLOAD = Seam("vllm.config.offload:OffloadConfig", has="uva prefetch")
_LAYER = "get_state_shape get_state_dtype get_attn_backend prefix kv_cache head_dim conv_size"
_CALCULATOR = "vllm.model_executor.layers.mamba.mamba_utils:MambaStateDtypeCalculator"
_STATES = (
    Seam(
        f"{_CALCULATOR}.kda_state_dtype",
        given="model_dtype mamba_cache_dtype mamba_ssm_cache_dtype",
    ),
    Seam("vllm.config.cache:CacheConfig", has="mamba_cache_dtype mamba_ssm_cache_dtype"),
    Seam("vllm.config.mamba:MambaConfig", has="enable_stochastic_rounding"),
)
_SPEC = Seam(
    "vllm.v1.kv_cache_interface:MambaSpec",
    has="num_prefill_checkpoint_blocks prefill_checkpoint_alignment",
)
_BREAK = Seam("vllm.compilation.breakable_cudagraph:eager_break_during_capture")


def _packed(module: str, name: str) -> tuple[Seam, ...]:
    """A layer whose convolutions are packed: ours run in the place of its ``_forward``."""
    return (
        Seam(f"{module}:{name}.__init__", takes="config vllm_config prefix ..."),
        Seam(f"{module}:{name}._forward", takes="mixed_qkv g1 g2 beta core_attn_out", body=True),
        Seam(f"{module}:{name}.forward", calls="_forward: mixed_qkv g1 g2 beta core_attn_out"),
        Seam(
            f"{module}:{name}",
            has=f"{_LAYER} local_num_heads gate_lower_bound conv1d A_log dt_bias o_norm",
        ),
        _SPEC,
        _BREAK,
        *_STATES,
    )


KIMI_LINEAR, K3_NVIDIA, K3_AMD = (
    Part.of(
        f"KDA layers of {model}",
        (
            *_METADATA,
            *_packed(module, name),
        ),
    )
    for model, module, name in (
        (
            "Kimi-Linear",
            "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn",
            "KimiGatedDeltaNetAttention",
        ),
        ("Kimi-K3", "vllm.models.kimi_k3.nvidia.kda", "KimiK3DeltaAttention"),
        ("Kimi-K3 on AMD", "vllm.models.kimi_k3.amd.kda", "KimiK3DeltaAttention"),
    )
)
_RECOVER = "vllm.models.kimi_k3.nvidia.ops.recoverssm"
_STATE = "vllm.v1.worker.gpu.model_states"
# of a step's metadata, which the runner asks for it
_COMMIT = (
    Seam(
        "vllm.v1.attention.backends.recoverssm_metadata:RecoverSSMMetadata.commit_recoverssm_state",
        takes="num_accepted_tokens",
    ),
    Seam(
        "vllm.v1.attention.backends.recoverssm_metadata:RecoverSSMPostprocessMetadata",
        given="num_spec_decodes request_indices block_table num_computed_tokens block_size",
    ),
    *each(f"{_STATE}.recoverssm:RecoverSSMState", "record_step commit_step", body=True),
)
K3_RECORDS = Part.of(
    "records of drafts of Kimi-K3",
    (
        Seam(f"{_RECOVER}:KDARecoverSSMRecords", has="correction key_gate"),
        Seam(f"{_RECOVER}:_kda_recoverssm_verify_kernel", body=True),
        *each(_RECOVER, "_commit_kda_state_kernel _compact_conv_state_kernel", body=True),
        Seam(
            "vllm.models.kimi_k3.nvidia.kda:KimiK3DeltaAttention",
            has="recoverssm_records recoverssm_backend",
        ),
        Seam("vllm.models.kimi_k3.nvidia.kda:KimiK3DeltaAttention._recoverssm_verify", body=True),
        Seam(
            "vllm.models.kimi_k3.nvidia.kda_metadata:KimiK3KDAMetadata",
            has="recoverssm_commit commit_recoverssm_state",
        ),
        *_COMMIT,
    ),
)
_CONTEXT = f"{_RECOVER}:KDARecoverSSMCommitContext"
_HYBRID = f"{_STATE}.mamba_hybrid:MambaHybridModelState"
VLLM_RECORDS = Part.of(
    "records of drafts of other KDA layers",
    (
        Seam(
            "vllm.config.speculative:SpeculativeConfig",
            has="draft_model_config target_model_config",
        ),
        _OFFLOAD,
        # Kimi-K3's commit, of layers that look like its own
        Seam(f"{_RECOVER}:KDARecoverSSMRecords", has="correction key_gate"),
        Seam(f"{_CONTEXT}.create", given="layers spec_query_len max_num_reqs backend", body=True),
        Seam(
            f"{_CONTEXT}.commit",
            given="num_accepted_tokens state_indices query_start_loc request_indices block_table"
            " num_computed_tokens mamba_block_size",
            body=True,
        ),
        Seam(_CONTEXT, has="A_log dt_bias"),
        Seam(f"{_RECOVER}:_prepare_commit_plan_kernel", body=True),
        *each(_RECOVER, "_commit_kda_state_kernel _compact_conv_state_kernel", body=True),
        *_COMMIT,
        Seam(_HYBRID, has="recoverssm"),
        Seam(f"{_HYBRID}.__init__", takes="vllm_config model ..."),
        *each(_HYBRID, "prepare_attn postprocess_state", body=True),
        Seam(
            f"{_GDN}:GDNAttentionMetadataBuilder.build",
            takes="common_prefix_len common_attn_metadata ...",
            body=True,
        ),
        Seam(
            f"{_GDN}:GDNAttentionMetadataBuilder.update_block_table",
            takes="metadata blk_table slot_mapping",
            body=True,
        ),
        Seam(f"{_GDN}:GDNAttentionMetadataBuilder", has="spec_state_indices_tensor kv_cache_spec"),
        Seam("vllm.v1.attention.backend:AttentionMetadataBuilder", has="layer_names vllm_config"),
        Seam(f"{_GDN}:GDNAttentionMetadata", has="spec_sequence_masks_cpu"),
        Seam(
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            has="block_table_tensor query_start_loc replace compute_num_computed_tokens",
        ),
        Seam(
            "vllm.v1.kv_cache_interface:MambaSpec",
            has="block_size mamba_cache_mode num_speculative_blocks",
        ),
        *each("vllm.config.vllm:VllmConfig", "use_v2_model_runner num_speculative_tokens"),
        Seam("vllm.config.compilation:CompilationConfig", has="static_forward_context"),
        Seam("vllm.utils.torch_utils:async_tensor_h2d"),
    ),
)
FLOAT16_RECORDS = Part.of(
    "records of drafts beside states in float16",
    (
        Seam(
            f"{_RECOVER}:cute_recoverssm_commit",
            takes="context state_indices batch align",
        ),
        Seam(f"{_CONTEXT}.commit", calls="cute_recoverssm_commit: * align"),
        Seam(
            _CONTEXT,
            has="commit_lens final_state_indices boundary_state_indices boundary_recovery_lens",
        ),
    ),
)
_GLM = "vllm.models.glm5next.common.kda:Glm5NextLinearAttention"
GLM = Part.of(
    "KDA layers of GLM-5.3-Flash",
    (
        *_METADATA,
        _OFFLOAD,
        Seam(f"{_GLM}.__init__", takes="config vllm_config prefix ..."),
        Seam(f"{_GLM}.forward", takes="hidden_states positions", body=True),
        Seam(
            _GLM,
            has=f"{_LAYER} local_num_heads local_projection_size kda_lower_bound in_proj_qkvbfg_a"
            " f_b_proj g_b_proj o_proj q_conv1d k_conv1d v_conv1d A_log dt_bias o_norm",
        ),
        _SPEC,
        _BREAK,
    ),
)
_LING = "vllm.model_executor.models.bailing_moe_v3:BailingMoeV3KimiDeltaAttention"
LING = Part.of(
    "KDA layers of Ling-V3",
    (
        *_METADATA,
        _OFFLOAD,
        Seam(f"{_LING}.forward", takes="hidden_states positions output", body=True),
        Seam(
            _LING,
            has=f"{_LAYER} local_num_heads projection_size_per_partition safe_gate lower_bound"
            " separate_b_proj qkv_proj b_proj qkvb_proj f_proj g_proj o_proj q_conv1d k_conv1d"
            " v_conv1d A_log dt_bias o_norm",
        ),
        *_STATES,
        Seam(
            "vllm.utils.torch_utils:direct_register_custom_op",
            given="op_name op_func mutates_args fake_impl",
        ),
    ),
)
SIZING = tuple(
    Part.of(
        f"pages of KDA states of {model}",
        (
            *_STATES,
            Seam(f"{module}:{name}.get_mamba_state_dtype_from_config", takes="vllm_config"),
        ),
    )
    for model, module, name in (
        ("AliceAI", "vllm.model_executor.models.alice_ai", "AliceAIForCausalLM"),
        ("Ling-V3", "vllm.model_executor.models.bailing_moe_v3", "BailingMoeV3ForCausalLM"),
        ("Kimi-Linear", "vllm.models.kimi_k3.nvidia.model", "KimiLinearForCausalLM"),
        ("Kimi-Linear on AMD", "vllm.models.kimi_k3.amd.linear", "KimiLinearForCausalLM"),
        ("GLM-5.3-Flash", "vllm.models.glm5next.common.model", "Glm5NextForCausalLM"),
    )
)
"""Classes of models that size pages, the last seam of each; other classes ask these."""
_MANAGER = "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager"
VLLM_GRAPHS = Part.of(
    "prefill graphs of KDA models",
    (
        Seam("vllm.config.vllm:VllmConfig._set_cudagraph_sizes", takes=""),
        *each("vllm.config.vllm:VllmConfig", "use_v2_model_runner lora_config"),
        Seam(
            "vllm.config.compilation:CompilationConfig",
            has="cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_mode",
        ),
        Seam("vllm.compilation.breakable_cudagraph:is_breakable_cudagraph_enabled", takes=""),
        Seam(f"{_MANAGER}._init_candidates", takes=""),
        Seam(_MANAGER, has="compilation_config _capture_descs _candidates"),
    ),
)
VLLM_CAPTURE = Part.of(
    "KDA layers inside of prefill graphs",
    (
        Seam(_MANAGER, has="breakable_cg_runner _graphs_captured device vllm_config"),
        Seam(f"{_MANAGER}.init_breakable_cg_runner", takes="model key_fn"),
        Seam(f"{_MANAGER}.run_pw_graph", takes="model model_inputs"),
        Seam(
            "vllm.forward_context:ForwardContext",
            has="cudagraph_runtime_mode moe_layer_index attn_metadata",
        ),
    ),
)
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_MLA = "vllm.model_executor.layers.attention.mla_attention"
VLLM_CUTS = Part.of(
    "cuts of prompts that keep bits",
    (
        Seam("vllm.config.vllm:VllmConfig.try_verify_and_update_config", takes=""),
        Seam("vllm.config.cache:CacheConfig", has="enable_prefix_caching"),
        Seam("vllm.config.model:ModelConfig", has="is_hybrid"),
        Seam(_SCHEDULER, has="need_mamba_block_aligned_split vllm_config"),
        Seam(
            f"{_SCHEDULER}._mamba_block_aligned_split",
            takes="request num_new_tokens num_new_local_computed_tokens"
            " num_external_computed_tokens",
        ),
        Seam(
            _SCHEDULER,
            calls="_mamba_block_aligned_split: request num_new_tokens"
            " num_new_local_computed_tokens? num_external_computed_tokens?",
        ),
        Seam(f"{_MLA}:MLACommonMetadataBuilder", has="query_len_support reorder_batch_threshold"),
        Seam(
            f"{_MLA}:MLACommonMetadataBuilder.__init__",
            takes="kv_cache_spec layer_names vllm_config ...",
        ),
        Seam(f"{_MLA}:QueryLenSupport", has="VARLEN"),
        Seam("vllm.v1.request:Request", has="num_computed_tokens num_prompt_tokens num_tokens"),
        Seam(
            "vllm.config.scheduler:SchedulerConfig",
            has="max_num_batched_tokens long_prefill_token_threshold",
        ),
        Seam("vllm.model_executor.layers.mamba.abstract:MambaBase.get_attn_backend", takes=""),
        Seam("vllm.v1.attention.backend:AttentionBackend.supports_batch_invariance"),
    ),
)
SEAMS = (
    *(
        KIMI_LINEAR,
        K3_NVIDIA,
        K3_AMD,
        K3_RECORDS,
        VLLM_RECORDS,
        FLOAT16_RECORDS,
        GLM,
        LING,
        *SIZING,
    ),
    *(VLLM_GRAPHS, VLLM_CAPTURE, VLLM_CUTS),
)
