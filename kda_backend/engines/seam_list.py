"""What the adapters of KDA layers rely on in vLLM and sglang."""

from __future__ import annotations

from backend_core.engines.seams import Part, Seam

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
    Seam("vllm.v1.attention.backends.utils:CommonAttentionMetadata", has="query_start_loc_cpu"),
    Seam("vllm.v1.attention.backends.utils:NULL_BLOCK_ID"),
    Seam("vllm.model_executor.custom_op:PluggableLayer.register_oot"),
    Seam("vllm.model_executor.custom_op:op_registry_oot"),
    Seam("vllm.model_executor.layers.mamba.mamba_utils:is_conv_state_dim_first"),
    Seam("vllm.forward_context:get_forward_context"),
    Seam("vllm.forward_context:is_forward_context_available"),
    Seam("vllm.forward_context:ForwardContext", has="attn_metadata no_compile_layers"),
    Seam(
        "vllm.config.cache:CacheConfig", has="mamba_page_size_padded mamba_cache_mode use_replayssm"
    ),
)
_LAYER = "get_state_shape get_state_dtype get_attn_backend prefix kv_cache head_dim conv_size"
_CALCULATOR = "vllm.model_executor.layers.mamba.mamba_utils:MambaStateDtypeCalculator"
_STATES = (
    Seam(
        f"{_CALCULATOR}.kda_state_dtype",
        given="model_dtype mamba_cache_dtype mamba_ssm_cache_dtype",
    ),
    Seam("vllm.config.cache:CacheConfig", has="mamba_cache_dtype mamba_ssm_cache_dtype"),
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
        Seam(
            f"{module}:{name}.forward",
            calls="_forward: mixed_qkv g1 g2 beta core_attn_out",
        ),
        Seam(
            f"{module}:{name}",
            has=f"{_LAYER} local_num_heads gate_lower_bound conv1d A_log dt_bias o_norm",
        ),
        _SPEC,
        _BREAK,
        *_STATES,
    )


KIMI_LINEAR, K3_NVIDIA, K3_AMD = (
    Part("vllm", f"KDA layers of {model}", (*_METADATA, *_packed(module, name)))
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
    Seam(f"{_STATE}.recoverssm:RecoverSSMState.record_step", body=True),
    Seam(f"{_STATE}.recoverssm:RecoverSSMState.commit_step", body=True),
)
K3_RECORDS = Part(
    "vllm",
    "records of drafts of Kimi-K3",
    (
        Seam(f"{_RECOVER}:KDARecoverSSMRecords", has="correction key_gate"),
        Seam(f"{_RECOVER}:_kda_recoverssm_verify_kernel", body=True),
        Seam(f"{_RECOVER}:_commit_kda_state_kernel", body=True),
        Seam(f"{_RECOVER}:_compact_conv_state_kernel", body=True),
        Seam(
            "vllm.models.kimi_k3.nvidia.kda:KimiK3DeltaAttention",
            has="recoverssm_records recoverssm_backend",
        ),
        Seam(
            "vllm.models.kimi_k3.nvidia.kda:KimiK3DeltaAttention._recoverssm_verify",
            body=True,
        ),
        Seam(
            "vllm.models.kimi_k3.nvidia.kda_metadata:KimiK3KDAMetadata",
            has="recoverssm_commit commit_recoverssm_state",
        ),
        *_COMMIT,
    ),
)
_CONTEXT = f"{_RECOVER}:KDARecoverSSMCommitContext"
VLLM_RECORDS = Part(
    "vllm",
    "records of drafts of other KDA layers",
    (
        # Kimi-K3's commit, of layers that look like its own
        Seam(f"{_RECOVER}:KDARecoverSSMRecords", has="correction key_gate"),
        Seam(
            f"{_CONTEXT}.create",
            given="layers spec_query_len max_num_reqs",
            body=True,
        ),
        Seam(
            f"{_CONTEXT}.commit",
            given="num_accepted_tokens state_indices query_start_loc request_indices block_table"
            " num_computed_tokens mamba_block_size",
            body=True,
        ),
        Seam(_CONTEXT, has="A_log dt_bias"),
        Seam(f"{_RECOVER}:_prepare_commit_plan_kernel", body=True),
        Seam(f"{_RECOVER}:_commit_kda_state_kernel", body=True),
        Seam(f"{_RECOVER}:_compact_conv_state_kernel", body=True),
        *_COMMIT,
        Seam(f"{_STATE}.mamba_hybrid:MambaHybridModelState", has="recoverssm"),
        Seam(
            f"{_STATE}.mamba_hybrid:MambaHybridModelState.__init__",
            takes="vllm_config model ...",
        ),
        Seam(f"{_STATE}.mamba_hybrid:MambaHybridModelState.prepare_attn", body=True),
        Seam(f"{_STATE}.mamba_hybrid:MambaHybridModelState.postprocess_state", body=True),
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
        Seam(
            f"{_GDN}:GDNAttentionMetadataBuilder",
            has="spec_state_indices_tensor kv_cache_spec",
        ),
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
        Seam("vllm.config.vllm:VllmConfig.use_v2_model_runner"),
        Seam("vllm.config.vllm:VllmConfig.num_speculative_tokens"),
        Seam("vllm.config.compilation:CompilationConfig", has="static_forward_context"),
        Seam("vllm.utils.torch_utils:async_tensor_h2d"),
    ),
)
_GLM = "vllm.models.glm5next.common.kda:Glm5NextLinearAttention"
GLM = Part(
    "vllm",
    "KDA layers of GLM-5.3-Flash",
    (
        *_METADATA,
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
LING = Part(
    "vllm",
    "KDA layers of Ling-V3",
    (
        *_METADATA,
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
    Part(
        "vllm",
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
VLLM_GRAPHS = Part(
    "vllm",
    "prefill graphs of KDA models",
    (
        Seam("vllm.config.vllm:VllmConfig._set_cudagraph_sizes", takes=""),
        Seam("vllm.config.vllm:VllmConfig.use_v2_model_runner"),
        Seam("vllm.config.vllm:VllmConfig.lora_config"),
        Seam(
            "vllm.config.compilation:CompilationConfig",
            has="cudagraph_capture_sizes max_cudagraph_capture_size cudagraph_mode",
        ),
        Seam("vllm.compilation.breakable_cudagraph:is_breakable_cudagraph_enabled", takes=""),
        Seam("vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager._init_candidates", takes=""),
        Seam(
            "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
            has="compilation_config _capture_descs _candidates",
        ),
    ),
)

VLLM_CAPTURE = Part(
    "vllm",
    "KDA layers inside of prefill graphs",
    (
        Seam(
            "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager",
            has="breakable_cg_runner _graphs_captured device vllm_config",
        ),
        Seam(
            "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.init_breakable_cg_runner",
            takes="model key_fn",
        ),
        Seam(
            "vllm.v1.worker.gpu.cudagraph_utils:CudaGraphManager.run_pw_graph",
            takes="model model_inputs",
        ),
        Seam(
            "vllm.forward_context:ForwardContext",
            has="cudagraph_runtime_mode moe_layer_index attn_metadata",
        ),
    ),
)

VLLM_CUTS = Part(
    "vllm",
    "cuts of prompts that keep bits",
    (
        Seam("vllm.config.vllm:VllmConfig.try_verify_and_update_config", takes=""),
        Seam("vllm.config.cache:CacheConfig", has="enable_prefix_caching"),
        Seam("vllm.config.model:ModelConfig", has="is_hybrid"),
        Seam(
            "vllm.v1.core.sched.scheduler:Scheduler",
            has="need_mamba_block_aligned_split vllm_config",
        ),
        Seam(
            "vllm.v1.core.sched.scheduler:Scheduler._mamba_block_aligned_split",
            takes="request num_new_tokens num_new_local_computed_tokens"
            " num_external_computed_tokens",
        ),
        Seam(
            "vllm.v1.core.sched.scheduler:Scheduler",
            calls="_mamba_block_aligned_split: request num_new_tokens"
            " num_new_local_computed_tokens? num_external_computed_tokens?",
        ),
        Seam(
            "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder",
            has="query_len_support reorder_batch_threshold",
        ),
        Seam(
            "vllm.model_executor.layers.attention.mla_attention:MLACommonMetadataBuilder.__init__",
            takes="kv_cache_spec layer_names vllm_config ...",
        ),
        Seam("vllm.model_executor.layers.attention.mla_attention:QueryLenSupport", has="VARLEN"),
        Seam("vllm.v1.request:Request", has="num_computed_tokens num_prompt_tokens num_tokens"),
        Seam(
            "vllm.config.scheduler:SchedulerConfig",
            has="max_num_batched_tokens long_prefill_token_threshold",
        ),
        Seam("vllm.model_executor.layers.mamba.abstract:MambaBase.get_attn_backend", takes=""),
        Seam("vllm.v1.attention.backend:AttentionBackend.supports_batch_invariance"),
    ),
)

_LINEAR = "sglang.srt.layers.attention.linear"
_KDA, _GRAPH = f"{_LINEAR}.kda_backend:KDAAttnBackend", f"{_LINEAR}.kda_prefill_graph"
_DISPATCHER = f"{_LINEAR}.kda_backend:KDAKernelDispatcher"
_POOL = "ssm_states cache_indices query_start_loc? A_log? dt_bias? lower_bound?"
_PREFILL = (
    f"q k v g beta {_POOL} beta_is_raw? return_intermediate_states? extend_seq_lens_cpu?"
    " is_spec_decode? track_state? track_chunk_idx? chunk_indices? num_state_checkpoints?"
    " track_ssm_h_src? track_ssm_h_batch_src? chunk_offsets? extend_prefix_lens? layer_id?"
    " state_checkpoint_cu_starts? state_checkpoint_every_n_tokens? state_checkpoint_indices?"
)
_STEP = (
    f"a b {_POOL} scale? num_v_heads? head_v_dim? replayssm_d? replayssm_k? replayssm_g?"
    " replayssm_write_pos? replayssm_force_flush?"
)
_RADIX = "sglang.srt.layers.radix_linear_attention"
SGLANG_LAYERS = Part(
    "sglang",
    "KDA layers",
    (
        Seam(_KDA, has="kernel_dispatcher req_to_token_pool forward_metadata topk"),
        Seam(_DISPATCHER, has="extend_kernel decode_kernel verify_kernel verify_backend"),
        Seam(f"{_KDA}.forward_extend", calls=f"extend: {_PREFILL}"),
        Seam(
            f"{_KDA}.forward_decode",
            takes="layer forward_batch mixed_qkv a b ...",
            calls=f"packed_decode: mixed_qkv {_STEP}",
            body=True,
        ),
        Seam(f"{_KDA}.forward_decode", calls=f"decode: q k v {_STEP}"),
        Seam(f"{_DISPATCHER}.extend", takes=f"q k v g beta {_POOL} ..."),
        Seam(f"{_LINEAR}.kernels.kda_triton:TritonKDAKernel.extend", body=True),
        Seam(f"{_LINEAR}.kernels.kda_triton:TritonKDAKernel.packed_decode"),
        Seam(f"{_LINEAR}.kernels.kda_triton:TritonKDAKernel.decode"),
        Seam(
            f"{_KDA}._track_mamba_state_decode",
            given="forward_batch conv_states ssm_states cache_indices layer_id",
        ),
        Seam(
            f"{_RADIX}:RadixLinearAttention",
            has="A_log dt_bias conv_weights bias lower_bound num_k_heads num_v_heads head_k_dim"
            " head_v_dim q_dim k_dim v_dim layer_id",
        ),
        Seam(
            f"{_RADIX}:RadixLinearAttention.forward",
            calls="forward[mixed_qkv]: layer forward_batch mixed_qkv a b",
        ),
        Seam(
            f"{_RADIX}:_linear_attention_with_output_impl",
            calls="forward[mixed_qkv]: layer forward_batch mixed_qkv a b linear_attn_output?",
        ),
        # its memory
        *(
            Seam(f"sglang.srt.runtime_context:{name}", takes="")
            for name in ("get_schedule", "get_parallel")
        ),
        Seam("sglang.srt.configs.hybrid_arch:mambaish_config"),
        Seam("sglang.srt.model_executor.cuda_graph_config:check_cuda_graph_backend"),
    ),
)
SGLANG_DRAFTS = Part(
    "sglang",
    "drafts of KDA layers",
    (
        Seam(
            f"{_KDA}._forward_target_verify",
            takes="layer forward_batch mixed_qkv a b",
            body=True,
        ),
        Seam(_KDA, has="verify_intermediate_state_indices topk _fused_chain_verify_fn"),
        Seam(f"{_LINEAR}.utils:pp_spec_stable_rows_enabled", takes=""),
        Seam(
            "sglang.srt.mem_cache.memory_pool:MambaPool.SpeculativeState",
            has="intermediate_ssm intermediate_conv_window",
        ),
    ),
)
_HYBRID = "sglang.srt.layers.attention.hybrid_linear_attn_backend"
_MEMORY = "sglang.srt.mem_cache.memory_pool"
SGLANG_RECORDS = Part(
    "sglang",
    "records of drafts of KDA layers",
    (
        Seam(
            f"{_HYBRID}:HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
            takes="last_correct_step_indices mamba_track_indices mamba_steps_to_track model"
            " req_pool_indices?",
            body=True,
        ),
        Seam(f"{_HYBRID}:fused_conv_window_scatter_with_mask"),
        Seam(f"{_KDA}._translate_mamba_indices", given="mamba_indices"),
        Seam(f"{_MEMORY}:HybridReqToTokenPool", has="mamba_pool_cls mamba_pool"),
        Seam(f"{_MEMORY}:MambaPool.__init__", takes="...", body=True),
        Seam(
            f"{_MEMORY}:MambaPool",
            has="mamba_cache mamba_layer_ids mem_usage SpeculativeState",
        ),
        Seam(f"{_MEMORY}:MambaPool.get_speculative_mamba2_params_all_layers", takes=""),
        # one commit for all algorithms, by the pool's own words
        Seam("sglang.srt.speculative.spec_utils:commit_mamba_states_after_verify", body=True),
        # its memory
        Seam(
            "sglang.srt.configs.mamba_utils:BaseLinearStateParams.replayssm_ring_bytes_per_req",
            takes="record_len",
        ),
        Seam(
            "sglang.srt.mem_cache.kv_cache_configurator:"
            "KVCacheConfigurator._handle_max_mamba_cache",
            body=True,
        ),
        Seam("sglang.srt.runtime_context:max_speculative_num_draft_tokens", takes=""),
        Seam("sglang.srt.runtime_context:get_exec", takes=""),
        Seam("sglang.srt.runtime_context:get_disagg", takes=""),
    ),
)
_HOOK = "sglang.srt.arg_groups.cuda_graph_hook"
SGLANG_GRAPHS = Part(
    "sglang",
    "prefill graphs of KDA models",
    (
        Seam("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook"),
        *(
            Seam(f"{_HOOK}:{name}")
            for name in (
                *("model_config_of", "resolving_view", "with_phase", "declare_resolution"),
                *("Phase", "Backend", "apply_cuda_graph_compatibility"),
                *("apply_deepep_adjustments", "apply_cuda_graph_disaggregation_roles"),
            )
        ),
        Seam("sglang.srt.arg_groups.memory_hook:reserve_for_graph_mb"),
        Seam("sglang.srt.arg_groups.memory_hook:use_mla_backend"),
        Seam("sglang.srt.configs.model_config:uses_kda_attention"),
        Seam(f"{_GRAPH}:kda_extend_in_graph", calls=f"extend: {_PREFILL}"),
        Seam(_KDA, has="prefill_graph_max_seqs"),
        Seam(
            "sglang.srt.layers.attention.hybrid_linear_attn_backend:HybridLinearAttnBackend",
            has="use_captured_forward_metadata_for_breakable_cuda_graph"
            " prefill_cuda_graph_max_batch_size linear_attn_backend",
        ),
    ),
)
SGLANG_CUTS = Part(
    "sglang",
    "cuts of prompts that keep bits",
    (
        Seam("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook"),
        *(
            Seam(f"{_HOOK}:{name}")
            for name in ("model_config_of", "resolving_view", "declare_resolution")
        ),
        Seam("sglang.srt.configs.model_config:uses_kda_attention"),
        *(
            Seam(f"sglang.srt.arg_groups.fields.{where}", has=fields)
            for where, fields in (
                ("exec_:ExecDeterministic", "enable_deterministic_inference"),
                (
                    "exec_:ExecMamba",
                    "mamba_radix_cache_strategy mamba_track_interval enable_int8_mamba_checkpoint",
                ),
                ("memory:Memory", "disable_radix_cache"),
                (
                    "schedule:Schedule",
                    "page_size chunked_prefill_size enable_mixed_chunk enable_dynamic_chunking"
                    " schedule_policy",
                ),
            )
        ),
    ),
)
SGLANG_NGRAM = Part(
    "sglang",
    "n-gram drafts as chains",
    (
        Seam(
            "sglang.srt.speculative.cpp_ngram.ngram_corpus:NgramCorpus.batch_get",
            takes="...",
            body=True,
        ),
        Seam("sglang.srt.speculative.cpp_ngram.ngram_corpus:NgramCorpus", has="draft_token_num"),
    ),
)
_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
SGLANG_MLA_BREAKS = Part(
    "sglang",
    "MLA layers outside of prefill graphs",
    (
        Seam(f"{_BREAKS}:eager_on_graph"),
        Seam(f"{_BREAKS}.context:_in_breakable_cuda_graph"),
        Seam(f"{_BREAKS}:is_in_breakable_cuda_graph", takes=""),
        Seam("sglang.srt.model_executor.runner_utils.forward_batch:get_forward_batch", takes=""),
        Seam(
            "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA.forward",
            takes="positions hidden_states forward_batch zero_allocator ...",
        ),
    ),
)
SEAMS = (
    *(KIMI_LINEAR, K3_NVIDIA, K3_AMD, K3_RECORDS, VLLM_RECORDS, GLM, LING, *SIZING),
    *(
        VLLM_GRAPHS,
        VLLM_CAPTURE,
        VLLM_CUTS,
        SGLANG_LAYERS,
        SGLANG_DRAFTS,
        SGLANG_RECORDS,
        SGLANG_GRAPHS,
        SGLANG_CUTS,
    ),
    *(SGLANG_NGRAM, SGLANG_MLA_BREAKS),
)
