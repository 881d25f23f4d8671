"""vLLM: where prompts are cut under ``VLLM_BATCH_INVARIANT=1``, and what is not cached there.

A step takes as many tokens of a prompt as the other requests of the step leave it. The bits of a
KDA layer stay the same if every cut lies at a multiple of 64 tokens (docs/reliability.md), so
vLLM's scheduler cuts there, as it does at blocks for its prefix cache. That cache is off: it also
keeps states that decodes have left, and vLLM has no option against that.

vLLM's MLA layers have two forms, by the number of tokens that a step has of a prompt. The one for
few reads keys and values from the cache alone, so that its bits do not depend on cuts; here it
takes all prompts.

With drafts and without that variable a prompt of one token runs by itself here. Beside other
requests vLLM adds drafts to it that it knows to be wrong, so that all requests have as many tokens.
As nothing lies before them they run as a prompt's, and no state takes them back.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

from backend_core.engines import seams
from backend_core.engines.in_place import in_place_of
from backend_core.engines.vllm_flag import batch_invariant, requested, say
from backend_core.strict import fallback
from kda_backend.engines.vllm_seams import VLLM_CUTS
from kda_backend.spec import CHUNK

LEAST = 2 * CHUNK
"""Tokens that a step must be able to take of a prompt: the last cut leaves two tokens or more."""


def leave_prefixes(module: ModuleType) -> None:
    """Let ``VllmConfig`` of vLLM's module ``vllm.config.vllm`` turn its prefix cache off before it
    decides what follows from it; a second call changes nothing."""
    if seams.difference(VLLM_CUTS) is not None:
        return
    upstream = module.VllmConfig.try_verify_and_update_config

    @in_place_of(module.VllmConfig, "try_verify_and_update_config")
    def verify_and_update(self: Any) -> None:
        if wanted(self) and self.cache_config.enable_prefix_caching:
            self.cache_config.enable_prefix_caching = False
            say(
                "VLLM_BATCH_INVARIANT is set, so the prefix cache is off: of KDA layers it also"
                " keeps states that decodes have left, whose bits are not those of a prefill"
            )
        upstream(self)


def cut_prompts(module: ModuleType) -> None:
    """Let ``Scheduler`` of vLLM's module ``vllm.v1.core.sched.scheduler`` cut prompts at multiples
    of 64 tokens, or run those of one token by themselves; a second call changes nothing."""
    if seams.difference(VLLM_CUTS) is not None:
        return
    upstream = module.Scheduler.__init__

    @in_place_of(module.Scheduler, "__init__")
    def init(self: Any, *args: Any, **options: Any) -> None:
        upstream(self, *args, **options)
        if wanted(self.vllm_config) and refusal(self.vllm_config) is None:
            self.need_mamba_block_aligned_split = True
            self._mamba_block_aligned_split = tokens_to_cut
            say(f"prompts are cut at multiples of {CHUNK} tokens (VLLM_BATCH_INVARIANT)")
        elif _serves_states(self.vllm_config) and self.vllm_config.speculative_config is not None:
            self._mamba_block_aligned_split = first_token_alone(self)
            self.need_mamba_block_aligned_split = True


def read_from_the_cache(module: ModuleType) -> None:
    """Let builders of vLLM's module ``vllm.model_executor.layers.attention.mla_attention``
    give all prompts the form that reads keys and values from the cache, where their backend has one
    for any number of tokens; a second call changes nothing."""
    if seams.difference(VLLM_CUTS) is not None:
        return
    upstream = module.MLACommonMetadataBuilder.__init__

    @in_place_of(module.MLACommonMetadataBuilder, "__init__")
    def init(
        self: Any,
        kv_cache_spec: Any,
        layer_names: Any,
        vllm_config: Any,
        *args: Any,
        **options: Any,
    ) -> None:
        upstream(self, kv_cache_spec, layer_names, vllm_config, *args, **options)
        if not wanted(vllm_config) or refusal(vllm_config) is not None:
            return
        if self.query_len_support != module.QueryLenSupport.VARLEN:
            fallback(
                f"{type(self).__name__} adds up the parts of a prompt that a step has cut, so that"
                " its bits depend on other requests also under VLLM_BATCH_INVARIANT"
            )
            return
        self.reorder_batch_threshold = vllm_config.scheduler_config.max_num_batched_tokens


def wanted(vllm_config: Any) -> bool:
    """Whether a model with recurrent states is served under the flag and the variable. That these
    are KDA's not every configuration says (AliceAI's), and others vLLM refuses there."""
    return batch_invariant() and _serves_states(vllm_config)


def _serves_states(vllm_config: Any) -> bool:
    """Whether a model with recurrent states is served under the flag."""
    if requested(vllm_config) is None or vllm_config.model_config is None:
        return False
    return bool(vllm_config.model_config.is_hybrid)


def first_token_alone(scheduler: Any) -> Callable[..., int]:
    """A function for the place of ``_mamba_block_aligned_split`` of a ``Scheduler``, upstream's but
    for prompts of one token, which get no drafts in their first step."""
    upstream = None
    if scheduler.need_mamba_block_aligned_split:  # with a prefix cache
        upstream = scheduler._mamba_block_aligned_split

    def split(
        request: Any,
        num_new_tokens: int,
        num_new_local_computed_tokens: int = 0,
        num_external_computed_tokens: int = 0,
    ) -> int:
        before = num_new_local_computed_tokens, num_external_computed_tokens
        if request.num_tokens == 1 and request.num_computed_tokens + sum(before) == 0:
            return 1
        if upstream is None:
            return num_new_tokens
        return int(upstream(request, num_new_tokens, *before))

    return split


def tokens_to_cut(
    request: Any,
    num_new_tokens: int,
    num_new_local_computed_tokens: int = 0,
    num_external_computed_tokens: int = 0,
) -> int:
    """In the place of upstream's ``Scheduler._mamba_block_aligned_split``: the tokens of a request
    in this step, of the ``num_new_tokens`` that there is room for; 0 lets it wait.

    A last token by itself would run on the kernel of decodes, so that it is never cut off.
    """
    begin = request.num_computed_tokens + num_new_local_computed_tokens
    begin += num_external_computed_tokens
    # as upstream: a request that was preempted runs what it has answered as a prompt
    last = max(request.num_prompt_tokens, request.num_tokens - 1)
    end = begin + num_new_tokens
    if begin >= last or end >= last:
        return num_new_tokens
    end -= end % CHUNK
    if last - end == 1:
        end -= CHUNK
    return int(max(0, end - begin))


def refusal(vllm_config: Any) -> str | None:
    """Why the bits of a request would depend on others in such a server; the end of a sentence."""
    if (reason := seams.refusal(VLLM_CUTS)) is not None:
        return reason
    scheduler = vllm_config.scheduler_config
    if vllm_config.speculative_config is not None:
        return "whether a token runs as a decode or as a prefill depends on the drafts of others"
    if vllm_config.cache_config.enable_prefix_caching:
        return "the prefix cache keeps states that decodes have left"
    if vllm_config.kv_transfer_config is not None:
        return "a KV connector hands over states wherever another server has cut"
    room = scheduler.max_num_batched_tokens
    room = min(room, scheduler.long_prefill_token_threshold or room)
    if room < LEAST:
        return (
            f"a step must have room for {LEAST} tokens of a prompt, got {room}"
            " (--max-num-batched-tokens, --long-prefill-token-threshold)"
        )
    return None
