"""Putting our kernel into the KDA layers of a model that sglang has loaded."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.linear.kernels.kda_triton import TritonKDAKernel
from sglang.srt.layers.radix_linear_attention import RadixLinearAttention

from backend_core.engines.log import chosen
from backend_core.engines.sglang_flag import is_deterministic, say
from backend_core.strict import fallback
from kda_backend.engines import sglang_cuts, sglang_records, sglang_verify
from kda_backend.engines.sglang_kernel import (
    KdaKernel,
    conv_of,
    norm_handed_over,
    split_rows,
)
from kda_backend.engines.sglang_scratch import (
    gain_of_16_bits,
    note_asked_slots,
    state_dtype_of,
    take_scratch,
)
from kda_backend.prefill.arguments_sm90 import PrefillVariant, Track, variant_of_engine
from kda_backend.prefill.paths import begin_to_compile
from kda_backend.selection import (
    KdaSelection,
    KdaShape,
    deterministic_prefix,
    rounded_prefix,
    selection_for,
    warm_up,
)
from kda_backend.spec import Beta


def reserve(runner: Any) -> None:
    """Prepare a model's KDA layers before sglang sizes its pools: kernels begin to compile, and
    the records of drafts are counted."""
    layers = kda_layers(runner)
    device = torch.device(runner.device)
    selection = _selection(runner, layers, [], device) if layers else None
    if selection is None:
        return
    begin_to_compile(selection, _variants(selection, state_dtype_of(runner)))
    note_asked_slots(runner)
    sglang_records.reserve(runner, layers[0], selection, one_launch=_has_one_launch(layers[0]))


def _variants(selection: KdaSelection, state_dtype: torch.dtype) -> list[PrefillVariant]:
    """Variants of Hopper's prefill kernels: with states that are kept and without, for logits and
    for step sizes that the model has put through the sigmoid."""
    return [
        variant_of_engine(selection.shape.bounded_gate, state_dtype, track=track, beta=beta)
        for track in (Track.NONE, Track.IN_ORDER)
        for beta in (Beta.SIGMOID, Beta.GIVEN)
    ]


def kda_layers(runner: Any) -> list[Any]:
    """The KDA layers of the model that sglang's ModelRunner holds; a pipeline's stage may have
    none."""
    return [
        layer
        for layer in runner.model.modules()
        if isinstance(layer, RadixLinearAttention) and layer.A_log is not None
    ]


def install(backend: Any, runner: Any) -> Sequence[str]:
    """Exchange the kernels of ``backend``, sglang's KDAAttnBackend, and compile ours.

    ``runner`` is sglang's ModelRunner, with its weights loaded and its pools allocated. What
    cannot be served stays on upstream code, and is reported.

    Returns:
        The phases that ours serve: ``"prefill"``, ``"decode"``, ``"drafts"``.
    """
    layers = kda_layers(runner)
    device = torch.device(runner.device)
    pools = backend.req_to_token_pool
    states = [pools.mamba2_layer_cache(layer.layer_id).temporal for layer in layers]
    selection = _selection(runner, layers, states, device)
    if selection is None:
        return ()
    gain = gain_of_16_bits(runner)
    kernel = KdaKernel(selection, device, *take_scratch(runner, selection))
    cache = pools.mamba2_layer_cache(layers[0].layer_id)
    ours = exchange_kernels(backend.kernel_dispatcher, kernel, cache)
    fits = _has_one_launch(layers[0])
    one_launch = "decode" in ours and fits
    if one_launch:
        upstream = backend.forward_decode
        backend.forward_decode = functools.partial(decode_layer, kernel, backend, upstream)
    records = sglang_records.records_of(backend)
    if records is not None:
        records.serve(selection, layers)
    if sglang_verify.install(kernel, backend, layers[0], cache, one_launch=fits):
        ours.append("drafts")
    compile_kernels(kernel, layers[0], cache, ours, one_launch, records)
    say(*describe(selection, len(layers), cache.temporal.dtype, ours, one_launch))
    notes = gain, rounded_prefix(selection.shape, cache.temporal.dtype)
    say(*(note for note in notes if note is not None))
    return ours


def exchange_kernels(dispatcher: Any, kernel: KdaKernel, cache: Any) -> list[str]:
    """Put ``kernel`` in the place of Triton's in sglang's KDAKernelDispatcher; the phases it has.

    A registry of kernels in sglang (#40414) would stand in the place of this function alone.

    Args:
        cache: the states of one of the model's KDA layers.
    """
    ours = []
    for phase, name in (("prefill", "extend_kernel"), ("decode", "decode_kernel")):
        upstream = getattr(dispatcher, name)
        if phase == "decode" and cache.replayssm_d is not None:
            fallback(
                "decode is sglang's: --enable-linear-replayssm keeps states in a layout of its own"
            )
        elif type(upstream) is TritonKDAKernel:
            setattr(dispatcher, name, kernel)
            ours.append(phase)
        else:
            fallback(
                f"{phase} is on {type(upstream).__name__}, which sglang or a flag chose:"
                f" pass --linear-attn-{phase}-backend triton"
            )
    return ours


def decode_layer(
    kernel: KdaKernel,
    backend: Any,
    upstream: Callable[..., Any],
    *,
    layer: Any,
    forward_batch: Any,
    mixed_qkv: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    q: None = None,
    k: None = None,
    v: None = None,
    save_kv_cache: bool = True,
    **of_others: Any,
) -> Any:
    """KDAAttnBackend.forward_decode, with the convolution in the launch of the delta rule.

    ``mixed_qkv [N, C]``, raw gate ``a`` and step-size logits ``b``, of one token of each request;
    returns ``o [1, N, HV, V]``. Kimi-K3's layers also offer their output's norm, which then ends
    the same launch. q, k, v, save_kv_cache and ``of_others`` are of other layers.
    """
    cache = backend.req_to_token_pool.mamba2_layer_cache(layer.layer_id)
    indices = backend.forward_metadata.mamba_cache_indices
    norm = norm_handed_over(layer, mixed_qkv.shape[0])
    try:
        if getattr(layer, "_k3_deferred_f_b", False):
            raise ValueError("the gate's projection was left to a kernel of sglang's own")
        rows = split_rows(mixed_qkv, layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        o = kernel.step(
            kernel.selection,
            *rows,
            a,
            b,
            ssm_states=cache.temporal,
            cache_indices=indices,
            A_log=layer.A_log,
            dt_bias=layer.dt_bias,
            lower_bound=layer.lower_bound,
            replayssm_d=cache.replayssm_d,
            conv=conv_of(layer, cache),
            norm=norm,
        )
    except ValueError as error:
        fallback(f"decode: {error}")
        return upstream(
            layer=layer,
            forward_batch=forward_batch,
            mixed_qkv=mixed_qkv,
            a=a,
            b=b,
            q=q,
            k=k,
            v=v,
            save_kv_cache=save_kv_cache,
            **of_others,
        )
    if norm is not None:
        layer._k3_onorm_consumed = True
    backend._track_mamba_state_decode(
        forward_batch, cache.conv[0], cache.temporal, indices, layer.layer_id
    )
    return o.unsqueeze(0)


def compile_kernels(
    kernel: KdaKernel,
    layer: Any,
    cache: Any,
    phases: Sequence[str],
    one_launch: bool,
    records: sglang_records.DraftRecords | None = None,
) -> None:
    """Compile what serving can launch: small calls on the engine's pools, of padded rows alone.

    Decode reads views of one wide row, whose width need not be a multiple of 16 elements; prefill
    reads q, k and v from sglang's convolution. Kernels are compiled for each. A single request's
    rows need none of their own.
    """
    device, dtype = cache.temporal.device, kernel.selection.shape.dtype
    variants = _variants(kernel.selection, cache.temporal.dtype)
    for of_prefill in begin_to_compile(kernel.selection, variants):
        of_prefill.load()
    heads, key_dim, value_dim = layer.num_v_heads, layer.head_k_dim, layer.head_v_dim
    channels = layer.q_dim + layer.k_dim + layer.v_dim
    width = -(-(channels + heads) // 16) * 16
    padded = torch.full((2,), -1, dtype=torch.int32, device=device)
    common = {
        "ssm_states": cache.temporal,
        "A_log": layer.A_log,
        "dt_bias": layer.dt_bias,
        "lower_bound": layer.lower_bound,
    }
    shape = (1, *cache.temporal.shape[1:])
    snapshot = torch.empty(shape, dtype=torch.float32, device=device)
    tracked: dict[str, Any] = {"track_state": snapshot, "track_chunk_idx": padded[:1]}

    def inputs(tokens: int, extra: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        row = torch.zeros(tokens, width + extra, dtype=dtype, device=device)
        g = torch.zeros(tokens, heads, key_dim, dtype=dtype, device=device)
        return row[:, :channels], g, row[:, channels : channels + heads]

    def prefill(selection: KdaSelection) -> None:
        tokens = 65  # a full chunk and the start of another
        for extra, tracking, raw_beta in itertools.product((0, 1), ({}, tracked), (True, False)):
            mixed_qkv, g, beta = inputs(tokens, extra)
            if not raw_beta:  # a model may put the logits through the sigmoid
                beta = beta.float().sigmoid()
            q, k, v = split_rows(mixed_qkv, heads, key_dim, value_dim)
            kernel.prefill(
                selection,
                q.unsqueeze(0),
                k.unsqueeze(0),
                v.unsqueeze(0),
                g.unsqueeze(0),
                beta.unsqueeze(0),
                cache_indices=padded[:1],
                query_start_loc=torch.tensor([0, tokens], dtype=torch.int32, device=device),
                extend_seq_lens_cpu=[tokens],
                beta_is_raw=raw_beta,
                **common,
                **tracking,
            )

    def decode(selection: KdaSelection) -> None:
        conv = conv_of(layer, cache) if one_launch else None
        for extra in (0, 1):
            mixed_qkv, g, beta = inputs(2, extra)
            q, k, v = split_rows(mixed_qkv, heads, key_dim, value_dim)
            kernel.step(selection, q, k, v, g, beta, conv=conv, cache_indices=padded, **common)

    def drafts(selection: KdaSelection) -> None:
        rows, own = torch.zeros_like(padded), None
        if records is not None:
            own = records.of_layer(layer.layer_id)
            records.compile(selection)
        bounds = torch.tensor([0, 2], dtype=torch.int32, device=device)
        for extra in (0, 1):
            step = inputs(2, extra), padded[:1], rows, bounds
            sglang_verify.verify(selection, layer, cache, *step, records=own)

    def steps(selection: KdaSelection) -> None:
        if "decode" in phases:
            decode(selection)
        if "drafts" in phases:
            drafts(selection)

    ours = prefill if "prefill" in phases else lambda selection: None
    warm_up(kernel.selection, ours, steps)


def describe(
    selection: KdaSelection,
    num_layers: int,
    state_dtype: torch.dtype,
    phases: Sequence[str],
    one_launch: bool,
) -> list[str]:
    """Lines on what was chosen for a model."""
    shape = selection.shape
    gate = "bounded" if shape.bounded_gate else "unbounded"
    state = str(state_dtype).removeprefix("torch.")
    step = ", convolution in the decode step" if one_launch else ""
    served = " and ".join([*([", ".join(phases[:-1])] if phases[1:] else []), *phases[-1:]])
    return chosen(
        f"{served or 'nothing'} of {num_layers} KDA layers",
        selection.target,
        f"{shape.num_value_heads} heads on this rank, K = {shape.key_dim}, V = {shape.value_dim},"
        f" {gate} gate, {state} states{step}",
        selection.explain(),
        selection.operators,
    )


def _selection(
    runner: Any, layers: list[Any], states: list[torch.Tensor], device: torch.device
) -> KdaSelection | None:
    """The paths of a model's KDA layers; ``None``, and a report, where there are none.

    ``states``: the pool of each layer; before there are any they are taken to be aligned.
    """
    dtype, invariant = runner.dtype, is_deterministic(runner.server_args)
    if invariant:
        reason = sglang_cuts.refusal(runner.server_args, state_dtype_of(runner))
        if reason is not None:
            fallback(f"--enable-deterministic-inference is on, and {reason}")
            return None
    weights = [x for layer in layers for x in (layer.A_log, layer.dt_bias, layer.conv_weights)]
    if any(x is not None and x.device.type != device.type for x in weights):
        fallback("weights of KDA layers are kept in host memory: serve without --cpu-offload-gb")
        return None
    tensors = (*states, *(layer.conv_weights for layer in layers))
    aligned = all(x.data_ptr() % 16 == 0 for x in tensors) and all(
        pool.stride(0) * pool.element_size() % 16 == 0 for pool in states
    )
    shapes = {
        KdaShape(
            layer.num_k_heads,
            layer.num_v_heads,
            layer.head_k_dim,
            layer.head_v_dim,
            layer.lower_bound is not None,
            dtype,
            dtype,
            aligned,
            deterministic_prefix(),
            invariant,
        )
        for layer in layers
    }
    if len(shapes) != 1:
        fallback(f"the KDA layers of a model must have one shape, got {len(shapes)}")
        return None
    try:
        return selection_for(device, shapes.pop())
    except LookupError as error:
        fallback(str(error))
        return None


def _has_one_launch(layer: Any) -> bool:
    """Whether the decode step takes in the convolution: four taps, as many value as key heads."""
    channels = layer.q_dim + layer.k_dim + layer.v_dim
    return (
        layer.num_k_heads == layer.num_v_heads
        and tuple(layer.conv_weights.shape) == (channels, 4)
        and max(layer.head_k_dim, layer.head_v_dim) <= 128
    )
