"""Whether vLLM's KDA layers keep records of drafts or states after each of their tokens."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from backend_core.engines import seams
from backend_core.engines.vllm_flag import offloads_weights
from backend_core.strict import decline
from backend_core.target import Target
from kda_backend.engines import draft_records
from kda_backend.engines.vllm_seams import FLOAT16_RECORDS, K3_RECORDS, VLLM_RECORDS

FEWEST_TOKENS = 4
"""Tokens of a draft: vLLM keeps states without a commit, and records with one."""
_KIMI_LINEAR = "KimiGatedDeltaNetAttention"


def refusal(vllm_config: Any, module: Any) -> str | None:
    """Why a layer is upstream's where ``--use-replayssm`` is given: what vLLM keeps then is not
    served here."""
    if not vllm_config.cache_config.use_replayssm:
        return None
    if vllm_config.speculative_config is not None:
        if _is_kimi_linears(module):
            return None  # upstream keeps none: `keep_records` decides
        if module.recoverssm_records is not None:
            return _refusal_of_folds(module)
    return "--use-replayssm asks for records that upstream's layers keep"


def _refusal_of_folds(module: Any) -> str | None:
    if (backend := module.recoverssm_backend) != "triton":
        return f"--use-replayssm folds records by upstream's kernels in {backend}"
    if module.get_state_dtype()[1] == torch.float16:
        return "--use-replayssm does not cut off Kimi-K3's states beyond float16's range"
    return seams.refusal(K3_RECORDS)


def warning(vllm_config: Any, module: Any) -> str:
    """A warning where upstream's code serves a layer: under this pair of options its
    table has one column, of which Kimi-Linear's reads the accepted token's."""
    drafts = vllm_config.cache_config.use_replayssm and vllm_config.speculative_config is not None
    if not drafts or not _is_kimi_linears(module):
        return ""
    return (
        "; and --use-replayssm with drafts reads states of other requests in vLLM's"
        f" {_KIMI_LINEAR}, which serves here: its answers are wrong, so serve without"
        " --use-replayssm or without drafts"
    )


def _is_kimi_linears(module: Any) -> bool:
    return any(kind.__name__ == _KIMI_LINEAR for kind in type(module).__mro__)


def keep_records(vllm_config: Any, module: Any, lower_bound: float | None, target: Target) -> None:
    """Give a layer of ours memory for records, where drafts are faster from them or its user asks
    for them, and they are served; else it keeps states of drafted tokens.

    Args:
        lower_bound: of its gate; ``None`` without one.

    Raises:
        ValueError: `draft_records.VARIABLE` has another value than 0 or 1.
        FallbackError: they are asked for and not served, in strict mode.
    """
    asked, replays = draft_records.asked(), vllm_config.cache_config.use_replayssm
    tokens = 1 + vllm_config.num_speculative_tokens
    if not replays and not draft_records.wanted(target, tokens, FEWEST_TOKENS):
        return
    if not (replays or asked) and module.get_state_dtype()[1] == torch.float16:
        return  # steps of these have not been timed beside states of 16 bits
    if module.recoverssm_records is not None:
        return  # Kimi-K3's, which vLLM has made
    reason = seams.refusal(VLLM_RECORDS) or _not_served(vllm_config, module)
    if reason is not None:
        if asked or replays:
            option = f"{draft_records.VARIABLE}=1" if asked else "--use-replayssm"
            decline(f"{option}: drafts of KDA layers keep states and no records: {reason}")
        return
    from kda_backend.engines.vllm_records import records_for

    module.recoverssm_records = records_for(vllm_config, module, lower_bound)


def _not_served(vllm_config: Any, module: Any) -> str | None:
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    if speculative is None:
        return "the server does not draft"
    if model is speculative.draft_model_config and model is not speculative.target_model_config:
        return "this model proposes drafts, and verifies none"
    if hasattr(module, "recoverssm_backend"):
        return "Kimi-K3 has them in vLLM, under --use-replayssm"
    if not vllm_config.use_v2_model_runner:
        return "vLLM's first model runner commits none (VLLM_USE_V2_MODEL_RUNNER=1 asks for V2)"
    parallel = vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        return "a pipeline's later steps begin before the drafts of a step are accepted"
    if parallel.use_ubatching:
        return "two micro-batches of a step would share them"
    if offloads_weights(vllm_config):
        return "weights are kept in host memory, and a commit reads gates after the layers have run"
    if module.get_state_dtype()[1] == torch.float16:
        reason = seams.refusal(FLOAT16_RECORDS)
        if reason is not None:
            return reason
    try:
        importlib.import_module("vllm.models.kimi_k3.nvidia.ops.recoverssm")
    except ImportError as error:
        return f"vLLM's commit of Kimi-K3's records cannot be imported here: {error}"
    return None
