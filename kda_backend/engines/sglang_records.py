"""Drafts of sglang's KDA layers as records in place of states: less memory, so more requests.

sglang keeps the state after each drafted token, `intermediate_ssm`, or under a flag of its own what
it needs to compute the tokens once more, in every slot of its pool. Here there are `Records` of the
drafts that a step can verify, 1 KiB per token and head, and none in slots. As sglang's own, they
live from a verification to the end of its step: once tokens are accepted their states are made of
them, so the pool is up to date whenever sglang reads it.

What decides the memory is asked before the pools are sized: where records are kept sglang's flag is
set, which its sizing reads, and a refusal leaves a flag that the user gave to sglang.
"""

from __future__ import annotations

import functools
import importlib
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE
from sglang.srt.environ import envs
from sglang.srt.layers.attention import hybrid_linear_attn_backend
from sglang.srt.layers.attention.linear.utils import pp_spec_stable_rows_enabled
from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool
from sglang.srt.runtime_context import (
    get_context,
    get_disagg,
    get_exec,
    get_memory,
    get_spec,
    max_speculative_num_draft_tokens,
)

from backend_core.engines import seams
from backend_core.engines.sglang_flag import say
from backend_core.strict import decline, fallback
from kda_backend.contract.values import GateSpec, Records, StateRef
from kda_backend.engines import draft_records
from kda_backend.engines.draft_records import LayerGates
from kda_backend.engines.sglang_seams import SGLANG_DRAFTS, SGLANG_RECORDS
from kda_backend.operators import kda_commit_
from kda_backend.selection import KdaSelection

FLAG = "--enable-linear-replayssm-spec"
FEWEST_TOKENS = 2
"""Tokens of a draft: sglang copies an accepted state, where it keeps them, to its slot."""
_KEPT = "kda_draft_records"  # on a pool of states
_FEWEST_SLOTS = 3
"""State slots that sglang counts at least for a request where prefixes are cached."""


class DraftRecords:
    """The records of the drafts that one step verifies, in all KDA layers of a model.

    Attributes:
        records: ``[L, rows, HV, T, ..]``; the row is the request's in its batch.
    """

    def __init__(self, pool: Any, records: Records) -> None:
        self.records = records
        self._pool = pool
        self._served: tuple[KdaSelection, LayerGates, float | None] | None = None

    def of_layer(self, layer_id: int) -> Records:
        """Records of a layer, by its number in the model."""
        return self.records.of_layer(self._pool.mamba_layer_ids.index(layer_id))

    def serve(self, selection: KdaSelection, layers: list[Any]) -> None:
        """Commit with these layers' gates from now on.

        What is made here outlives a release of the pools' memory.
        """
        of_number = {layer.layer_id: layer for layer in layers}
        gates = LayerGates.of([of_number[number] for number in self._pool.mamba_layer_ids])
        self._served = selection, gates, layers[0].lower_bound
        rows, device = self.records.correction.shape[1], self.records.correction.device
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        self._counts = torch.empty(2, rows, dtype=torch.int32, device=device)
        self._no_states = torch.empty(0, device=device)

    def compile(self, selection: KdaSelection) -> None:
        """Compile what `commit` launches with a selection, on padded requests alone."""
        none = torch.full((1,), -1, dtype=torch.int32, device=self.records.correction.device)
        for track in (None, none):
            self._fold(selection, none, none, track, track)

    def commit(
        self,
        slots: torch.Tensor,
        last: torch.Tensor,
        track_slots: torch.Tensor | None,
        track_steps: torch.Tensor | None,
    ) -> None:
        """Bring states and windows of ``slots [N]`` up to date.

        Args:
            last: ``[N]``, the last accepted token of each draft.
            track_slots, track_steps: ``[N]``, where the prefix cache keeps the state after a token
                of the draft; -1 for none.
        """
        assert self._served is not None
        cache = self._fold(self._served[0], slots, last, track_slots, track_steps)
        windows = SimpleNamespace(  # as of a model that has no states beside them
            temporal=self._no_states,
            intermediate_ssm=None,
            conv=cache.conv,
            intermediate_conv_window=cache.intermediate_conv_window,
        )
        scatter = hybrid_linear_attn_backend.scatter_mamba_states_after_mtp_verify
        scatter(windows, slots, last, track_slots, track_steps)

    def _fold(
        self,
        selection: KdaSelection,
        slots: torch.Tensor,
        last: torch.Tensor,
        track_slots: torch.Tensor | None,
        track_steps: torch.Tensor | None,
    ) -> Any:
        """The states' part of `commit`; returns the pool's tensors."""
        assert self._served is not None
        _, gates, lower_bound = self._served
        cache, number = self._pool.get_speculative_mamba2_params_all_layers(), len(last)
        accepted, counts = self._counts[:, :number]
        kept = None
        if track_slots is not None and track_steps is not None:
            kept = track_slots.to(torch.int32), torch.add(track_steps, 1, out=counts)
        kda_commit_(
            GateSpec.of(*gates.read(), lower_bound),
            StateRef.pool(cache.temporal, slots, null_slot=0),
            self.records,
            self._rows[:number],
            torch.add(last, 1, out=accepted),
            kept=kept,
            selection=selection,
        )
        return cache


def reserve(runner: Any, layer: Any, selection: KdaSelection, *, one_launch: bool) -> None:
    """Have a ModelRunner's pools made with records, where drafts are faster from them or its user
    asks for them, and they are served.

    Weights are loaded, pools are not sized.

    Args:
        layer: one of the model's KDA layers.
        one_launch: the convolution of such layers fits into the launch.
    """
    flag_given, asked = get_exec().mamba.enable_linear_replayssm_spec, draft_records.asked()
    drafts = max_speculative_num_draft_tokens() or 0
    if runner.is_draft_worker or not (flag_given or drafts):
        return
    if not flag_given and not draft_records.wanted(selection.target, drafts, FEWEST_TOKENS):
        return
    reason = seams.refusal(SGLANG_DRAFTS) or seams.refusal(SGLANG_RECORDS)
    reason = reason or refusal(layer, selection, one_launch)
    if reason is None and not flag_given:
        reason = _refusal_of_flag()
    if reason is not None:
        if flag_given:
            fallback(f"{FLAG} is served by sglang: {reason}")
        elif asked:
            decline(f"{draft_records.VARIABLE}=1: drafts keep states and no records: {reason}")
        return
    if not flag_given:
        get_context().override("kda-dsv4", enable_linear_replayssm_spec=True)
    params = mambaish_config(runner.model_config).mamba2_cache_params
    row = bytes_of_row(params, drafts, runner.dtype)
    type(params).replayssm_ring_bytes_per_req = functools.partialmethod(
        _bytes_of_slot, drafts=drafts, dtype=runner.dtype
    )
    HybridReqToTokenPool.mamba_pool_cls = pool_class(runner.dtype)
    states = params.mamba_cache_per_req * drafts
    say(
        f"drafts are kept as records: a request that drafts {drafts} tokens takes"
        f" {row / 2**20:.1f} MiB beside its slots, where the states after each token take"
        f" {states / 2**20:.0f}"
    )


def refusal(layer: Any, selection: KdaSelection, one_launch: bool) -> str | None:
    """Why the drafts of a server are not kept as records of ours, or ``None``."""
    mamba, memory = get_exec().mamba, get_memory()
    if get_spec().speculative_algorithm is None:
        return "the server does not draft"
    verify = mamba.linear_attn_verify_backend
    if verify is None:
        decode = mamba.linear_attn_decode_backend or mamba.linear_attn_backend
        verify = decode if decode == "flashinfer" else "triton"
    cutedsl = verify == "nv_cutedsl" and not selection.target.arch.startswith("sm10")
    if verify != "triton" and not cutedsl:
        return f"{verify} was chosen: pass --linear-attn-verify-backend triton"
    if envs.SGLANG_OPT_FUSED_KDA_VERIFY.get():
        return "SGLANG_OPT_FUSED_KDA_VERIFY asks for a kernel of sglang's own"
    if memory.enable_unified_memory or memory.enable_page_major_kv_layout:
        return "states share pages with the KV cache"
    if get_disagg().disaggregation_mode != "null":
        return "prefill and decode are on different servers"
    if pp_spec_stable_rows_enabled():
        return "SGLANG_ENABLE_PP_SPEC gives each request a row of the buffers, not each batch's"
    if not one_launch:
        return "the convolution has another width, or there are fewer key than value heads"
    if layer.A_log is None or layer.dt_bias is None:
        return "the gate has no A_log or no dt_bias"
    return None


def _refusal_of_flag() -> str | None:
    """Why sglang would refuse its flag, which its user has not given."""
    if (topk := get_spec().speculative_eagle_topk) not in (None, 1):
        return f"they form a tree (--speculative-eagle-topk {topk}), not a chain"
    ragged = importlib.import_module("sglang.srt.speculative.ragged_verify")
    if (mode := ragged.read_ragged_verify_mode()) is not ragged.RaggedVerifyMode.STATIC:
        return f"SGLANG_RAGGED_VERIFY_MODE={mode.value} verifies drafts of several lengths"
    if get_exec().mamba.enable_linear_replayssm:
        return "--enable-linear-replayssm keeps records of decodes"
    return None


def bytes_of_row(params: Any, drafts: int, dtype: torch.dtype) -> int:
    """Memory of the records and windows of one request's draft in all layers of ``params``,
    sglang's description of a model's states."""
    heads, value_dim, key_dim = params.shape.temporal
    ((width, channels),) = params.shape.conv
    records = heads * drafts * (4 * value_dim + 2 * key_dim * dtype.itemsize)
    windows = (drafts + width - 1) * channels * params.dtype.conv.itemsize
    return int(records + windows) * len(params.layers)


def _bytes_of_slot(params: Any, record_len: int, *, drafts: int, dtype: torch.dtype) -> int:
    """Bytes that sglang adds to each slot as it sizes its pool: a row, divided by the fewest slots
    of a request."""
    fewest = 1 if get_memory().disable_radix_cache else _FEWEST_SLOTS
    return -(-bytes_of_row(params, drafts, dtype) // fewest)


def pool_class(dtype: torch.dtype) -> type[MambaPool]:
    """A MambaPool that keeps records of tokens in ``dtype`` where it would keep sglang's own."""

    class RecordsPool(MambaPool):  # type: ignore[misc]
        def __init__(self, **arguments: Any) -> None:
            drafts = arguments["speculative_num_draft_tokens"]
            params = arguments["cache_params"]
            asked = arguments.get("enable_linear_replayssm_spec", False)
            if drafts is None or not asked or not params.is_kda:
                super().__init__(**arguments)
                return
            rows = arguments["spec_state_size"] + 1
            arguments["speculative_num_draft_tokens"] = None  # no buffers of sglang's
            arguments["enable_linear_replayssm_spec"] = False
            super().__init__(**arguments)
            with self.memory_saver_adapter.region(GPU_MEMORY_TYPE_KV_CACHE):  # freed as states are
                _add_buffers(self, rows, drafts, dtype)

    return RecordsPool


def _add_buffers(pool: Any, rows: int, drafts: int, dtype: torch.dtype) -> None:
    """The records and windows of ``rows`` drafts of so many tokens."""
    conv, temporal = pool.mamba_cache.conv, pool.mamba_cache.temporal
    layers, _, heads, value_dim, key_dim = temporal.shape
    width, channels = conv[0].shape[2:]
    device = temporal.device
    # the windows of neighbouring tokens overlap
    shape = (layers, rows, drafts + width - 1, channels)
    inputs = torch.zeros(shape, dtype=conv[0].dtype, device=device)
    of_layer, of_row, of_input, of_channel = inputs.stride()
    windows = inputs.as_strided(
        (layers, rows, drafts, width, channels), (of_layer, of_row, of_input, of_input, of_channel)
    )
    pool.mamba_cache = pool.SpeculativeState(
        conv=conv, temporal=temporal, intermediate_ssm=None, intermediate_conv_window=[windows]
    )
    records = Records.empty(
        (layers, rows),
        drafts,
        heads=heads,
        key_dim=key_dim,
        value_dim=value_dim,
        dtype=dtype,
        device=device,
    )
    added = sum(x.nbytes for x in (inputs, *records[:2]))
    pool.mem_usage += added / 2**30
    setattr(pool, _KEPT, DraftRecords(pool, records))


def records_of(linear_backend: Any) -> DraftRecords | None:
    """Records of sglang's KDAAttnBackend, or ``None`` where its pool has none of ours."""
    pool = getattr(linear_backend.req_to_token_pool, "mamba_pool", None)
    found: DraftRecords | None = getattr(pool, _KEPT, None)
    return found


def install_commit(backend: Any, *, verifies: bool) -> None:
    """Commit drafts of ``backend``, sglang's HybridLinearAttnBackend, from records of ours, if its
    pool has them.

    Raises:
        RuntimeError: it has them, and our verification is not installed.
    """
    records = records_of(backend.linear_attn_backend)
    if records is not None:
        if not verifies:
            raise RuntimeError(
                "the pools have records of drafts, which nothing here can write; serve with"
                f" {draft_records.VARIABLE}=0 and without {FLAG}"
            )
        backend.update_mamba_state_after_mtp_verify = functools.partial(commit, backend, records)


def commit(
    backend: Any,
    records: DraftRecords,
    last_correct_step_indices: torch.Tensor,
    mamba_track_indices: torch.Tensor | None,
    mamba_steps_to_track: torch.Tensor | None,
    model: Any,
    req_pool_indices: torch.Tensor | None = None,
) -> None:
    """HybridLinearAttnBackend.update_mamba_state_after_mtp_verify, of a batch that was verified."""
    linear = backend.linear_attn_backend
    number = last_correct_step_indices.shape[0]
    if not number:
        return
    if mamba_track_indices is not None:
        mamba_track_indices = linear._translate_mamba_indices(mamba_track_indices)
    slots = linear.forward_metadata.mamba_cache_indices[:number]
    records.commit(slots, last_correct_step_indices, mamba_track_indices, mamba_steps_to_track)
