"""Seams of the adapters of DeepSeek-V4's compressors in vLLM and sglang."""

from __future__ import annotations

from backend_core.engines.seams import Part, Seam, each

_V4, _V41 = "vllm.models.deepseek_v4", "vllm.models.deepseek_v41"
_BUILD = "common_prefix_len common_attn_metadata fast_build"


def _metadata(model: str) -> tuple[Seam, ...]:
    module = f"{model}.compressor"
    return (
        Seam(f"{module}:CompressorMetadataBuilder.build", takes=_BUILD, body=True),
        Seam(
            f"{module}:CompressorMetadataBuilder.build_for_cudagraph_capture",
            takes="common_attn_metadata",
        ),
        Seam(f"{module}:CompressorStateCache.get_attn_backend", takes=""),
        Seam(f"{module}:CompressorBackend.get_builder_cls", takes=""),
        Seam(
            "vllm.v1.attention.backend:CommonAttentionMetadata",
            has="query_start_loc query_start_loc_cpu max_query_len",
        ),
    )


VLLM_V4 = Part.of(
    "compressors of DeepSeek-V4",
    (
        Seam(
            f"{_V4}.compressor:DeepseekCompressor.forward",
            takes="kv_score positions rotary_emb",
            body=True,
        ),
        Seam(
            f"{_V4}.compressor:DeepseekCompressor",
            has="ape norm compress_ratio head_dim rope_head_dim rms_norm_eps state_cache"
            " k_cache_prefix use_fp4_cache _static_forward_context",
        ),
        Seam(
            f"{_V4}.compressor:CompressorMetadata",
            has="block_table slot_mapping token_to_req_indices",
        ),
        *_metadata(_V4),
    ),
)
VLLM_V41 = Part.of(
    "compressors of DeepSeek-V4.1",
    (
        Seam(f"{_V41}.attention:DeepseekV4Attention.__init__"),
        Seam(
            f"{_V41}.attention:DeepseekV4Attention",
            has="compressor indexer layer_id compress_ratio rotary_emb kv_cache_dtype"
            " kv_cache_torch_dtype compressed_bytes_per_token",
        ),
        Seam(
            f"{_V41}.attention:DeepseekV4Indexer._produce_k",
            takes="latent positions rotary_emb",
            body=True,
        ),
        Seam(
            f"{_V41}.attention:DeepseekV4Indexer",
            has="owns_k rope_dim k_norm wk k_cache use_fp4_kv",
        ),
        Seam(
            f"{_V41}.compressor:DeepseekCompressor.forward", takes="kv_score positions", body=True
        ),
        Seam(
            f"{_V41}.compressor:DeepseekCompressor.insert_cache",
            takes="latent positions rotary_emb",
            body=True,
        ),
        Seam(
            f"{_V41}.compressor:DeepseekCompressor",
            has="norm compress_ratio rope_head_dim rms_norm_eps state_cache k_cache_prefix pcp_size"
            " prefix",
        ),
        Seam(f"{_V41}.compressor:CompressorMetadata", has="slot_mapping query_start_loc"),
        Seam("vllm.utils.deep_gemm:mqa_logits_use_mx_scales", takes=""),
        *_metadata(_V41),
    ),
)
VLLM_AMD = Part.of(
    "fp8 records of the indexer on AMD",
    # they lie one after another where it says so of ratio 4
    (Seam("vllm.v1.attention.ops.rocm_aiter_mla_sparse:_indexer_k_is_c4a_block_flat", body=True),),
)

_SRT = "sglang.srt.layers.attention"
_MIXIN = f"{_SRT}.dsv4.compressor_v2:CompressorBackendMixin"
_PLANS = "sglang.kernels.ops.attention.dsv4.compress"
_STEP = (
    "kv_score_buffer kv_score_input ape head_dim norm freqs_cis_cache kv_cache is_indexer rotate"
    " compress_ratio page_size out_loc use_fp4_indexer bf16_store kv_scale_cache rope_cache"
    " fp8_2buff kv_cache_rope kv_layout?"
)
SGLANG_V4 = Part.of(
    "compressors of DeepSeek-V4",
    (
        Seam(f"{_MIXIN}._forward_compress_all_in_one", takes=_STEP, body=True),
        Seam(f"{_MIXIN}.forward_unified", calls=f"_forward_compress_all_in_one: {_STEP}"),
        *each(_MIXIN, "_get_paged_compress_metadata _get_out_loc", given="compress_ratio"),
        Seam(f"{_PLANS}:CompressorDecodePlan", has="plan_d is_decode"),
        Seam(f"{_PLANS}:CompressorPrefillPlan", has="plan_c plan_w is_decode"),
        Seam(f"{_SRT}.dsa.utils:aiter_can_use_preshuffle_paged_mqa"),
        Seam("sglang.srt.environ:envs"),
    ),
)
_BACKEND = f"{_SRT}.deepseek_v4_backend:DeepseekV4AttnBackend"
_SPARSE = f"{_SRT}.dsv4.dsv41_sparse"
SGLANG_V41 = Part.of(
    "compressors of DeepSeek-V4.1",
    (
        Seam(f"{_BACKEND}._low_ratio_compress", takes="layer x req pos forward_batch", body=True),
        Seam(
            f"{_BACKEND}._low_ratio_compress_torch",
            takes="layer x req pos projected fuse_index_store",
            body=True,
        ),
        Seam(
            f"{_BACKEND}._low_ratio_compress_fused",
            takes="layer x req pos draft_len extend_offsets projected",
            body=True,
        ),
        Seam(f"{_BACKEND}", has="low_ratios token_to_kv_pool forward_metadata is_draft_runner"),
        Seam(f"{_SPARSE}:DeepseekV41Compressor", has="project project_fused use_fused_gate norm"),
        Seam(f"{_SPARSE}:DeepseekV41Indexer", has="owns_k k_norm wk rope_head_dim"),
        Seam(f"{_SPARSE}:RMSNorm", has="eps weight"),
        Seam("sglang.srt.runtime_context:get_parallel", takes=""),
    ),
)

SEAMS = (VLLM_V4, VLLM_V41, VLLM_AMD, SGLANG_V4, SGLANG_V41)
