"""What our KDA layers rely on in vLLM: parameters of what they override, fields of its metadata."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata, GDNAttentionMetadataBuilder
from vllm.v1.attention.backends.utils import CommonAttentionMetadata

from backend_core.engines.calls import odd_arguments, odd_signature

_METADATA = {
    *("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens"),
    *("num_spec_decodes", "has_initial_state", "spec_query_start_loc"),
    *("non_spec_query_start_loc", "spec_state_indices_tensor", "non_spec_state_indices_tensor"),
    *("spec_sequence_masks", "spec_token_indx", "non_spec_token_indx", "num_accepted_tokens"),
    *("prefill_query_start_loc", "prefill_state_indices", "prefill_has_initial_state"),
}


def changed(upstream: Any, method: str, needed: Set[str]) -> str | None:
    """Why a layer of this release cannot be served, asked as it is built.

    Args:
        upstream: vLLM's class.
        method: of the class, which ours overrides; needed: its parameters.
    """
    builder = GDNAttentionMetadataBuilder
    fields = GDNAttentionMetadata.__dataclass_fields__.keys()
    return (
        odd_signature(getattr(upstream, method), needed, set())
        or odd_arguments("GDNAttentionMetadata", fields, _METADATA, fields)
        or odd_signature(builder.build, {"common_prefix_len", "common_attn_metadata"})
        or odd_signature(builder.update_block_table, {"metadata"})
        or _without_host_lengths()
    )


def _without_host_lengths() -> str | None:
    if "query_start_loc_cpu" in CommonAttentionMetadata.__dataclass_fields__:
        return None
    if hasattr(CommonAttentionMetadata, "query_start_loc_cpu"):
        return None
    return "CommonAttentionMetadata must have query_start_loc_cpu, and has not"
