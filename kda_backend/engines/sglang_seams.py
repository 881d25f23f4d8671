"""Seams of KDA's adapters in sglang."""

from __future__ import annotations

from backend_core.engines.seams import Part, Seam, each

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
_TRITON = f"{_LINEAR}.kernels.kda_triton:TritonKDAKernel"
_RADIX = "sglang.srt.layers.radix_linear_attention"
_CONTEXT = "sglang.srt.runtime_context"
SGLANG_LAYERS = Part.of(
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
        Seam(f"{_TRITON}.extend", body=True),
        *each(_TRITON, "packed_decode decode"),
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
        *each(_CONTEXT, "get_schedule get_parallel", takes=""),
        Seam("sglang.srt.configs.hybrid_arch:mambaish_config"),
        Seam("sglang.srt.layers.moe.utils:is_tbo_enabled", takes=""),
        Seam("sglang.srt.model_executor.cuda_graph_config:check_cuda_graph_backend"),
    ),
)
SGLANG_DRAFTS = Part.of(
    "drafts of KDA layers",
    (
        Seam(
            f"{_KDA}._forward_target_verify", takes="layer forward_batch mixed_qkv a b", body=True
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
SGLANG_RECORDS = Part.of(
    "records of drafts of KDA layers",
    (
        Seam(
            f"{_HYBRID}:HybridLinearAttnBackend.update_mamba_state_after_mtp_verify",
            takes="last_correct_step_indices mamba_track_indices mamba_steps_to_track model"
            " req_pool_indices?",
            body=True,
        ),
        Seam(
            f"{_HYBRID}:scatter_mamba_states_after_mtp_verify",
            takes="mamba_caches state_indices_tensor last_correct_step_indices"
            " mamba_track_indices mamba_steps_to_track ...",
            body=True,
        ),
        Seam(f"{_KDA}._translate_mamba_indices", given="mamba_indices"),
        Seam(f"{_MEMORY}:HybridReqToTokenPool", has="mamba_pool_cls mamba_pool"),
        Seam(f"{_MEMORY}:MambaPool.__init__", takes="...", body=True),
        Seam(
            f"{_MEMORY}:MambaPool",
            has="mamba_cache mamba_layer_ids mem_usage SpeculativeState memory_saver_adapter",
        ),
        Seam("sglang.srt.constants:GPU_MEMORY_TYPE_KV_CACHE"),
        Seam(f"{_MEMORY}:MambaPool.get_speculative_mamba2_params_all_layers", takes=""),
        # one commit for all algorithms, by the pool's own words
        Seam("sglang.srt.speculative.spec_utils:commit_mamba_states_after_verify", body=True),
        # its memory
        Seam(
            "sglang.srt.configs.mamba_utils:BaseLinearStateParams.replayssm_ring_bytes_per_req",
            takes="record_len",
        ),
        Seam(
            "sglang.srt.mem_cache.kv_cache_configurator:KVCacheConfigurator._handle_max_mamba_cache",
            body=True,
        ),
        Seam(f"{_CONTEXT}:max_speculative_num_draft_tokens", takes=""),
        Seam(f"{_CONTEXT}:RuntimeContext.override", given="source"),
        Seam(f"{_CONTEXT}:get_context", takes=""),
        Seam("sglang.srt.speculative.ragged_verify:read_ragged_verify_mode", takes=""),
        Seam("sglang.srt.speculative.ragged_verify:RaggedVerifyMode", has="STATIC"),
        *each(_CONTEXT, "get_exec get_disagg", takes=""),
    ),
)
_FIELDS = "sglang.srt.arg_groups.fields"
_HOOK = "sglang.srt.arg_groups.cuda_graph_hook"
SGLANG_GRAPHS = Part.of(
    "prefill graphs of KDA models",
    (
        Seam("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook"),
        *each(
            _HOOK,
            "model_config_of resolving_view with_phase declare_resolution Phase Backend"
            " apply_cuda_graph_compatibility apply_deepep_adjustments"
            " apply_cuda_graph_disaggregation_roles",
        ),
        *each("sglang.srt.arg_groups.memory_hook", "reserve_for_graph_mb use_mla_backend"),
        Seam("sglang.srt.configs.model_config:uses_kda_attention"),
        Seam("sglang.srt.configs.hybrid_arch:hybrid_kda_config", takes="model_config"),
        Seam(f"{_FIELDS}.exec_:ExecOffload", has="cpu_offload_gb offload_group_size"),
        Seam(f"{_GRAPH}:kda_extend_in_graph", calls=f"extend: {_PREFILL}"),
        Seam(_KDA, has="prefill_graph_max_seqs"),
        Seam(
            f"{_HYBRID}:HybridLinearAttnBackend",
            has="use_captured_forward_metadata_for_breakable_cuda_graph"
            " prefill_cuda_graph_max_batch_size linear_attn_backend",
        ),
    ),
)
_LING = "sglang.srt.models.bailing_moe_v3"
SGLANG_LING_GRAPHS = Part.of(
    "prefill graphs of Ling-V3",
    (
        Seam(
            "sglang.srt.model_executor.model_runner:ModelRunner.get_cuda_graph_layers",
            takes="layer_model",
        ),
        Seam(
            "sglang.srt.model_executor.model_runner_components.layer_setup:AttentionAndMoeLayers",
            has="attention_layers mha_companion_layers",
        ),
        Seam(f"{_LING}:BailingMoELinearDecoderLayer.forward", body=True),
        Seam(f"{_LING}:BailingMoELinearModel", has="layers capture_aux_hidden_states"),
    ),
)
SGLANG_CUTS = Part.of(
    "cuts of prompts that keep bits",
    (
        Seam("sglang.srt.arg_groups.resolution_hooks:register_resolution_hook"),
        *each(_HOOK, "model_config_of resolving_view declare_resolution"),
        Seam("sglang.srt.configs.hybrid_arch:hybrid_kda_config", takes="model_config"),
        Seam(f"{_FIELDS}.exec_:ExecDeterministic", has="enable_deterministic_inference"),
        Seam(
            f"{_FIELDS}.exec_:ExecMamba",
            has="mamba_radix_cache_strategy mamba_track_interval enable_int8_mamba_checkpoint",
        ),
        Seam(f"{_FIELDS}.memory:Memory", has="disable_radix_cache"),
        Seam(
            f"{_FIELDS}.schedule:Schedule",
            has="page_size chunked_prefill_size enable_mixed_chunk enable_dynamic_chunking"
            " schedule_policy",
        ),
    ),
)
_CORPUS = "sglang.srt.speculative.cpp_ngram.ngram_corpus:NgramCorpus"
SGLANG_NGRAM = Part.of(
    "n-gram drafts as chains",
    (
        Seam(f"{_CORPUS}.batch_get", takes="...", body=True),
        Seam(_CORPUS, has="draft_token_num"),
    ),
)
_BREAKS = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
SGLANG_MLA_BREAKS = Part.of(
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
    *(SGLANG_LAYERS, SGLANG_DRAFTS, SGLANG_RECORDS, SGLANG_GRAPHS, SGLANG_LING_GRAPHS, SGLANG_CUTS),
    *(SGLANG_NGRAM, SGLANG_MLA_BREAKS),
)
