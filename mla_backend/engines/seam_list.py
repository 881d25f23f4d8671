"""Seams of MLA's adapters in vLLM and sglang."""

from __future__ import annotations

from backend_core.engines.seams import Part, Seam, each

DECODE, PREFILL = "flash_mla_with_kvcache", "flash_mla_sparse_fwd"
_DECODE_CALL = (
    "q k_cache indices topk_length softmax_scale attn_sink extra_k_cache extra_indices_in_kvcache"
    " extra_topk_length block_table? cache_seqlens? head_dim_v? is_fp8_kvcache?"
    " tile_scheduler_metadata? out?"
)
_PREFILL_CALL = "q kv indices topk_length sm_scale attn_sink d_v? out?"
# of those with a question mark only "out" is read here, and the others hold no choice for these
# layers
_FLASHATTN = "vllm.v1.attention.backends.mla.flashattn_mla"
VLLM_DENSE = Part.of(
    "decode of MLA layers",
    (
        Seam(f"{_FLASHATTN}:FlashAttnMLABackend", has="get_name get_builder_cls get_impl_cls"),
        Seam(
            f"{_FLASHATTN}:FlashAttnMLAMetadataBuilder.__init__",
            given="kv_cache_spec layer_names vllm_config device",
        ),
        Seam(
            f"{_FLASHATTN}:FlashAttnMLAMetadataBuilder._build_decode",
            takes="block_table_tensor seq_lens_device max_seq_len query_start_loc_cpu"
            " query_start_loc_device num_decode_tokens dcp_tot_seq_lens_device max_query_len?",
        ),
        Seam(
            f"{_FLASHATTN}:FlashAttnMLADecodeMetadata",
            given="block_table seq_lens dcp_tot_seq_lens query_start_loc max_query_len max_seq_len",
        ),
        Seam(
            f"{_FLASHATTN}:FlashAttnMLAImpl.forward_mqa",
            takes="q kv_c_and_k_pe_cache attn_metadata layer",
            body=True,
        ),
        Seam(f"{_FLASHATTN}:FlashAttnMLAImpl", has="scale num_heads"),
    ),
)


def _sparse(model: str) -> tuple[Seam, ...]:
    module = f"vllm.models.deepseek_{model}.nvidia.flashmla"
    layer = f"{module}:DeepseekV4FlashMLAAttention"
    return (
        Seam(f"vllm.models.deepseek_{model}.attention:DeepseekV4Attention.__init__"),
        Seam(
            layer,
            has="padded_heads n_local_heads attn_sink compress_ratio swa_cache_layer window_size"
            " kv_cache_dtype head_dim get_attn_backend",
        ),
        Seam(f"{layer}.forward_mqa", takes="q kv positions output", body=True),
        Seam(f"{module}:{DECODE}", given=_DECODE_CALL),
        Seam(f"{module}:{PREFILL}", given=_PREFILL_CALL),
        Seam(f"{layer}._forward_decode", calls=f"{DECODE}: {_DECODE_CALL}"),
        Seam(f"{layer}._forward_prefill", calls=f"{PREFILL}: {_PREFILL_CALL}"),
    )


VLLM_V4 = Part.of("attention of DeepSeek-V4", (*_sparse("v4"),))
VLLM_V41 = Part.of(
    "attention of DeepSeek-V4.1",
    (
        *_sparse("v41"),
        Seam(
            "vllm.models.deepseek_v41.attention:DeepseekV4Attention",
            has="kv_mxfp8 compressed_cache_prefix",
        ),
    ),
)

_FA = "sglang.srt.layers.attention.flashattention_backend"
_FLASH_ATTENTION = (
    "q qv k_cache v_cache softmax_scale page_table cache_seqlens cu_seqlens_q? cu_seqlens_k_new?"
    " max_seqlen_q? causal? softcap? num_splits? ver? k_descale? v_descale? return_softmax_lse?"
    " window_size?"
)
SGLANG_DENSE = Part.of(
    "decode of MLA layers",
    (
        Seam(f"{_FA}:FlashAttentionBackend.init_forward_metadata", takes="forward_batch"),
        Seam(
            f"{_FA}:FlashAttentionBackend.init_forward_metadata_out_graph",
            takes="forward_batch in_capture",
        ),
        Seam(
            f"{_FA}:FlashAttentionBackend.forward_decode",
            takes="q k v layer forward_batch save_kv_cache ...",
            calls=f"flash_attn_with_kvcache[qv]: {_FLASH_ATTENTION}",
            body=True,
        ),
        Seam(f"{_FA}:FlashAttentionMetadata", has="cache_seqlens_int32 page_table"),
        Seam(f"{_FA}:flash_attn_with_kvcache", given=_FLASH_ATTENTION),
        Seam(
            f"{_FA}:FlashAttentionBackend",
            has="fa_impl_ver attn_cp_size kv_index_translator forward_metadata page_size device"
            " kv_cache_dtype _kv_shard_pool",
        ),
        *each("sglang.srt.runtime_context", "get_parallel get_spec", takes=""),
    ),
)
_V4 = "sglang.srt.layers.attention.deepseek_v4_backend:DeepseekV4AttnBackend"
_INTERFACE = "sglang.kernels.ops.attention.flash_mla_interface"
SGLANG_SPARSE = Part.of(
    "attention of DeepSeek-V4",
    (
        Seam(_V4, has="_flash_mla_with_kvcache trtllm_attn token_to_kv_pool max_context_len"),
        Seam(
            f"{_V4}._forward_prefill_sparse",
            takes="compress_ratio ...",
            calls=f"{PREFILL}: {_PREFILL_CALL}",
            imports=f"{_INTERFACE}:{PREFILL}",
            body=True,
        ),
        Seam(f"{_V4}._forward_attention", calls=f"{DECODE}: {_DECODE_CALL}"),
        Seam(f"{_INTERFACE}:{DECODE}"),
        Seam(
            "sglang.srt.models.deepseek_v4:MQALayer",
            has="compress_ratio n_local_heads layer_id use_mega_attention _kernel_num_heads",
        ),
        *each(
            "sglang.srt.runtime_context", "get_schedule max_speculative_num_draft_tokens", takes=""
        ),
    ),
)

SEAMS = (VLLM_DENSE, VLLM_V4, VLLM_V41, SGLANG_DENSE, SGLANG_SPARSE)
