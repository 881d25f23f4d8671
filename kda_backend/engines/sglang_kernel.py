"""The kernel of sglang's KDA layers. Imports sglang's GPU modules, so only a scheduler imports it.

sglang's KDA layers hand over

- prefill: q, k, v and the raw gate as ``[1, T, H, D]``, the step size as fp32 or its logits
  (``beta_is_raw``) as ``[1, T, H]``, any of them strided;
- decode: one packed row of q, k and v for each request;
- ``ssm_states [slots, HV, V, K]``, read and written in place at ``cache_indices [N]``, -1 for a
  padded request;
- what the prefix cache is to keep: fp32 copies of the states at one chunk boundary of each request
  (``track_state [N, HV, V, K]`` at ``track_chunk_idx [N]``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel

from backend_core.launch.streams import is_capturing
from backend_core.strict import fallback
from kda_backend.contract.values import (
    LOG_DECAY,
    ConvInputs,
    GateSpec,
    NormInputs,
    StateRef,
    TokenInputs,
)
from kda_backend.engines.prefill_calls import divided
from kda_backend.operators import kda_decode_step, kda_prefill
from kda_backend.scratch import Scratch
from kda_backend.selection import KdaSelection
from kda_backend.spec import Beta
from kda_backend.step_plan import StepPlan, build_step_plan


class _Part(NamedTuple):
    """The prefills of one call: its requests and tokens among those of the step."""

    requests: slice
    tokens: slice
    step_plan: StepPlan


@dataclass(frozen=True, slots=True)
class _Pass:
    """The calls of one forward pass, and which layer planned them.

    A pass visits a layer once: where that layer comes again a new pass has begun, also with the
    very same tensors, which sglang's CUDA graphs refill.
    """

    cu_seqlens: torch.Tensor
    num_tokens: int
    parts: Sequence[_Part]
    first_layer: int
    capturing: bool


class KdaKernel(TritonKDAKernel):  # type: ignore[misc]
    """sglang's KDA kernel on this backend; drafts are `sglang_verify`'s.

    A batch that the operators refuse runs on the upstream kernel and is reported: they refuse
    before they write anything.
    """

    supports_track_state_snapshot = True

    def __init__(
        self,
        selection: KdaSelection,
        device: torch.device,
        scratch: Scratch | None = None,
        most_chunks: int | None = None,
    ) -> None:
        """``most_chunks``: of 64 tokens, in one call for requests whose lengths the host knows; a
        request that has more is a call by itself."""
        self.selection = selection
        self._scratch = Scratch(device) if scratch is None else scratch
        self._most_chunks = most_chunks
        self._pass: _Pass | None = None

    def extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        **call: Any,
    ) -> Any:
        """Prefill; ``call`` as `prefill` takes it."""
        # a model that applies the sigmoid itself hands over fp32; sglang calls the logits beside an
        # unflattened gate (Kimi-Linear, Kimi-K3) step sizes in a captured prefill, and there alone.
        # Upstream's kernel needs to know it as ours does
        if call.get("chunk_indices") is not None and q.dtype != torch.float32:
            call["beta_is_raw"] = beta.dtype == q.dtype
        try:
            return self.prefill(self.selection, q, k, v, g, beta, **call)
        except ValueError as error:
            fallback(f"prefill: {error}")
        return super().extend(q, k, v, g, beta, **call)

    def packed_decode(
        self, mixed_qkv: torch.Tensor, a: torch.Tensor, b: torch.Tensor, **call: Any
    ) -> Any:
        """Decode of convolved rows ``[N, C]`` of q, k and v; returns ``[1, N, HV, V]``."""
        try:
            value_heads, value_dim = call["num_v_heads"], call["head_v_dim"]
            q, k, v = split_rows(mixed_qkv, value_heads, call["ssm_states"].shape[-1], value_dim)
            return self.step(self.selection, q, k, v, a, b, **call).unsqueeze(0)
        except ValueError as error:
            fallback(f"decode: {error}")
        return super().packed_decode(mixed_qkv, a, b, **call)

    def decode(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        **call: Any,
    ) -> Any:
        """Decode of convolved q, k and v ``[1, N, H, D]``; returns ``[1, N, HV, V]``."""
        try:
            return self.step(self.selection, q[0], k[0], v[0], a, b, **call).unsqueeze(0)
        except ValueError as error:
            fallback(f"decode: {error}")
        return super().decode(q, k, v, a, b, **call)

    def prefill(
        self,
        selection: KdaSelection,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        query_start_loc: torch.Tensor,
        A_log: torch.Tensor | None = None,
        dt_bias: torch.Tensor | None = None,
        lower_bound: float | None = None,
        beta_is_raw: bool = False,
        return_intermediate_states: bool = False,
        extend_seq_lens_cpu: Sequence[int] | None = None,
        is_spec_decode: bool = False,
        track_state: torch.Tensor | None = None,
        track_chunk_idx: torch.Tensor | None = None,
        chunk_indices: torch.Tensor | None = None,
        num_state_checkpoints: Any = None,
        **of_others: Any,
    ) -> Any:
        """Packed sequences of any length.

        Args:
            q, k: ``[1, T, H, K]``; v: ``[1, T, HV, V]``; g: ``[1, T, HV, K]`` raw gate, or log
                decay without ``A_log``; beta: ``[1, T, HV]``.
            query_start_loc: ``[N + 1]`` int32; may end before T.
            extend_seq_lens_cpu: the N lengths, where the host knows them; left aside in a CUDA
                graph's capture, which is replayed with other lengths.
            chunk_indices: given for a bucket of a captured graph and for its warm-up, after which
                sglang clears padded rows.
            num_state_checkpoints: for kernels that write checkpoints, which this one does not claim
                to.
            is_spec_decode: leave the states as they are.
            of_others: what sglang passes to other kernels, and what shapes say (`sglang_seams`).

        Returns:
            ``o [1, T, HV, V]``, or ``(o, None)`` with ``return_intermediate_states``: where sglang
            reads states inside of the prefill it passes ``track_state``.

        Raises:
            ValueError: the operator refuses; nothing has been written.
        """
        if num_state_checkpoints:
            raise ValueError(f"{num_state_checkpoints} checkpoints of the state are asked for")
        tokens = q.shape[1]
        capturing = is_capturing(q.device)
        lengths = None if capturing else extend_seq_lens_cpu
        parts = self._parts(
            query_start_loc,
            tokens,
            lengths,
            ssm_states.data_ptr(),
            capturing,
            is_bucket=chunk_indices is not None,
        )
        out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        if parts[0].step_plan.cu_seqlens_cpu is None and chunk_indices is None:
            out.zero_()
        gate = LOG_DECAY if A_log is None else GateSpec.of(A_log, dt_bias, lower_bound)
        beta_kind = Beta.SIGMOID if beta_is_raw else Beta.GIVEN
        for part in parts:
            slots, asked = cache_indices, track_chunk_idx
            of_part = [x[:, part.tokens] for x in (q, k, v, g, beta)]
            if len(parts) > 1:  # copies, which are aligned; rows of beta may have few bytes
                slots = cache_indices[part.requests].clone()
                asked = None if asked is None else asked[part.requests].clone()
                of_part[-1] = of_part[-1].clone()
            state = StateRef.pool(ssm_states, slots)
            if is_spec_decode:
                rows = ssm_states[slots.clamp(min=0).long()].float()
                rows.masked_fill_((slots < 0).view(-1, 1, 1, 1), 0.0)  # slot 0 may hold a NaN
                state = StateRef.functional(rows, v_first=True)
            if track_state is not None and asked is not None:
                kept = track_state[part.requests].unsqueeze(1)
                state = state.with_snapshots(asked.unsqueeze(1), kept)
            kda_prefill(
                TokenInputs.of(*of_part, beta_kind=beta_kind),
                gate,
                state,
                part.step_plan,
                out=out[:, part.tokens],
                scratch=self._scratch,
                selection=selection,
            )
        if track_state is not None and ssm_states.dtype == torch.float16:
            # sglang rounds it to float16, where what lies beyond the range becomes infinite
            most = torch.finfo(torch.float16).max
            track_state.clamp_(-most, most)
        return (out, None) if return_intermediate_states else out

    def step(
        self,
        selection: KdaSelection,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        ssm_states: torch.Tensor,
        cache_indices: torch.Tensor,
        A_log: torch.Tensor,
        dt_bias: torch.Tensor,
        lower_bound: float | None = None,
        scale: float | None = None,
        replayssm_d: torch.Tensor | None = None,
        conv: ConvInputs | None = None,
        norm: NormInputs | None = None,
        **of_others: Any,
    ) -> torch.Tensor:
        """One token of each request.

        Args:
            q, k: ``[N, H, K]``; v: ``[N, HV, V]``; a: raw gate and b: step-size logits, of
                ``N * HV * K`` and ``N * HV`` elements.
            scale: K ** -0.5, which is what the kernels multiply by.
            replayssm_d: given with --enable-linear-replayssm.
            conv: for inputs that are not convolved yet.
            norm: of the output.
            of_others: what sglang passes to other kernels, and what shapes say (`sglang_seams`).

        Returns:
            ``[N, HV, V]``; zeros for a padded request.

        Raises:
            ValueError: the operator refuses; nothing has been written.
        """
        if replayssm_d is not None:
            raise ValueError("--enable-linear-replayssm keeps states in a layout of sglang's own")
        if scale is not None and abs(scale * q.shape[-1] ** 0.5 - 1) > 1e-6:
            raise ValueError(f"scale must be K ** -0.5, got {scale} for K = {q.shape[-1]}")
        return kda_decode_step(
            step_tokens(q, k, v, a, b),
            GateSpec.of(A_log, dt_bias, lower_bound),
            # slot 0 is never given out; sglang fills a CUDA graph's batch with it
            StateRef.pool(ssm_states, cache_indices, null_slot=0),
            conv=conv,
            norm=norm,
            selection=selection,
            pdl_prefetch_safe=True,  # projections or the convolution come before
        )

    def _parts(
        self,
        cu_seqlens: torch.Tensor,
        tokens: int,
        lengths: Sequence[int] | None,
        layer: int,
        capturing: bool,
        *,
        is_bucket: bool,
    ) -> Sequence[_Part]:
        """The calls of this pass, planned by its first layer.

        Args:
            layer: its pool's address.
            is_bucket: most of the sequences are empty, and the host does not know which.
        """
        last = self._pass
        if (
            last is not None
            and last.cu_seqlens is cu_seqlens
            and last.num_tokens == tokens
            and last.first_layer != layer
            and last.capturing == capturing
        ):
            return last.parts
        tables = self.selection.target.vendor != "cpu"
        # without lengths that cover every token, launches take a bound on the number of chunks
        if lengths is None or len(lengths) + 1 != len(cu_seqlens) or sum(lengths) != tokens:
            step_plan = build_step_plan(cu_seqlens, tokens, chunk_table=tables, any_batch=is_bucket)
            parts = [_Part(slice(None), slice(None), step_plan)]
        else:
            parts = []
            host = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
            for own in divided(lengths, self._most_chunks):
                bounds, bounds_cpu = cu_seqlens, host
                begin, end = int(host[own.start]), int(host[own.stop])
                if end - begin < tokens:
                    both = slice(own.start, own.stop + 1)
                    bounds, bounds_cpu = (x[both] - begin for x in (cu_seqlens, host))
                step_plan = build_step_plan(
                    bounds, end - begin, cu_seqlens_cpu=bounds_cpu, chunk_table=tables
                )
                parts.append(_Part(own, slice(begin, end), step_plan))
        self._pass = _Pass(cu_seqlens, tokens, parts, layer, capturing)
        return parts


def split_rows(
    mixed_qkv: torch.Tensor, value_heads: int, key_dim: int, value_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k ``[N, H, K]`` and v ``[N, HV, V]`` as views of packed rows ``[N, C]``."""
    number, values = mixed_qkv.shape[0], value_heads * value_dim
    keys = (mixed_qkv.shape[1] - values) // 2
    return (
        mixed_qkv[:, :keys].view(number, -1, key_dim),
        mixed_qkv[:, keys : 2 * keys].view(number, -1, key_dim),
        mixed_qkv[:, 2 * keys :].view(number, value_heads, value_dim),
    )


def step_tokens(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, a: torch.Tensor, b: torch.Tensor
) -> TokenInputs:
    """q, k ``[N, H, K]``, v ``[N, HV, V]``, raw gate ``a`` and step-size logits ``b``."""
    number, heads = v.shape[:2]
    return TokenInputs.of(q, k, v, a.reshape(number, heads, -1), b.reshape(number, heads))


def conv_of(layer: Any, cache: Any) -> ConvInputs:
    """The convolution of a layer: its pool is ``[slots, 3, C]``."""
    return ConvInputs(cache.conv[0].transpose(-1, -2), layer.conv_weights, layer.bias)


def norm_handed_over(layer: Any, rows: int) -> NormInputs | None:
    """The output's norm, which Kimi-K3's model leaves on a layer for kernels that end with it;
    ``_k3_onorm_consumed`` tells the model that one did."""
    # of sglang's own fused kernel; norm weight and epsilon are the last two entries
    static = getattr(layer, "_k3_fused_decode_args", None)
    gate = getattr(layer, "_k3_onorm_gate", None)
    if static is None or gate is None:
        return None
    return NormInputs(static[-2], gate.view(rows, layer.num_v_heads, layer.head_v_dim), static[-1])
