"""Hugging Face transformers: its own ``deepseek_v4`` model on this backend.

    from dsv4_backend.engines import transformers as dsv4

    dsv4.enable()     # from here on every DeepSeek-V4 model of the process runs on this backend
    model.generate(...)
    dsv4.disable()    # upstream code again

transformers' compressors (C128, C4 and the C4 layers' indexer) pool a window, norm the row through
their module ``kv_norm`` and rotate it with the module-level ``apply_rotary_pos_emb``. Inside a
compressor's forward the norm lets its rows pass, and the RoPE that follows runs both, in place, in
one call of ``compress_norm_rope_hadamard_``. transformers applies no Walsh-Hadamard rotation to the
indexer's queries, so none is applied to its keys. Pooling, weights, angles, caches and masks stay
transformers' own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

import dsv4_backend
from backend_core.engines import transformers_patch
from backend_core.strict import fallback

_MODULE = "transformers.models.deepseek_v4.modeling_deepseek_v4"
_COMPRESSORS = ("DeepseekV4HCACompressor", "DeepseekV4CSACompressor", "DeepseekV4Indexer")
_LAYER_TYPES = ("compressed_sparse_attention", "heavily_compressed_attention")
_NORM = "DeepseekV4RMSNorm"
_ROPE = "apply_rotary_pos_emb"

_replaced = transformers_patch.Replacements()


@dataclass
class _Call:
    """A forward of one compressor; ``rows`` [B, n, d] wait here from the norm to the RoPE."""

    compressor: Any
    rows: torch.Tensor | None = None


_call: ContextVar[_Call | None] = ContextVar("dsv4_compressor_call", default=None)


def enable() -> None:
    """Run transformers' ``deepseek_v4`` models of this process through this backend.

    Takes effect at the next forward, for models loaded before and after; a second call changes
    nothing. The backend has no backward pass: inputs that need gradients raise ValueError.

    Raises:
        ImportError: transformers is not installed, or its release has no such functions.
    """
    if _replaced:
        return
    modeling = _modeling()
    norm, rope = getattr(modeling, _NORM).forward, getattr(modeling, _ROPE)
    _replaced.replace(modeling, _ROPE, _rope(rope, norm))
    _replaced.replace(getattr(modeling, _NORM), "forward", _norm(norm))
    for name in _COMPRESSORS:
        compressor = getattr(modeling, name)
        _replaced.replace(compressor, "forward", _compressor(compressor.forward))


def disable() -> None:
    """Put back the very functions that `enable` replaced; without `enable` it does nothing."""
    _replaced.restore()


def is_enabled() -> bool:
    """Whether ``deepseek_v4`` models run through this backend now."""
    return bool(_replaced)


def tiny_model(device: torch.device) -> Any:
    """transformers' ``DeepseekV4ForCausalLM`` with random weights, fp32, in eval mode.

    Four layers (window only, C4, C128, C4) around the released head dimensions: rows of 512
    channels, indexer rows of 128, RoPE on 64. Always the same weights; vocabulary 97, 7 million
    parameters. The indexer keeps 8 windows. Raises ImportError as `enable`.
    """
    _modeling()
    library = importlib.import_module("transformers")
    config = library.DeepseekV4Config(
        vocab_size=97,
        hidden_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=2,
        q_lora_rank=32,
        num_experts_per_tok=2,
        n_routed_experts=4,
        layer_types=["sliding_attention", *_LAYER_TYPES, _LAYER_TYPES[0]],
        mlp_layer_types=["moe"] * 4,
        sliding_window=16,
        o_groups=2,
        o_lora_rank=32,
        index_n_heads=16,  # fewer leave scores of exactly 0 after ReLU, and top-k ties
        index_topk=8,
        hc_mult=2,
        initializer_range=0.2,
        max_position_embeddings=4096,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = library.DeepseekV4ForCausalLM(config).eval()
        for name, parameter in model.named_parameters():  # what a new model has constant
            if name.endswith("position_bias"):
                parameter.normal_()
            elif name.endswith("kv_norm.weight"):
                parameter.normal_(1.0, 0.2)
    return model.to(device)


def _modeling() -> ModuleType:
    return transformers_patch.modeling(_MODULE, (*_COMPRESSORS, _NORM, _ROPE))


def _compressor(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """A compressor's forward: upstream's, in which norm and RoPE know whose rows they get."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        q_residual: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: Any,
        layer_idx: int,
    ) -> Any:
        arguments = (self, hidden_states, q_residual, position_ids, past_key_values, layer_idx)
        if not _replaced:  # kept by a hook on the module after `disable`
            return upstream(*arguments)
        if "forward" in vars(self.kv_norm):
            fallback("kv_norm of a DeepSeek-V4 compressor has a forward of its own")
            return upstream(*arguments)
        call = _Call(self)
        token = _call.set(call)
        try:
            result = upstream(*arguments)
        finally:
            _call.reset(token)
        if call.rows is not None:
            raise RuntimeError(f"{type(self).__name__} must rotate its rows, got rows without RoPE")
        return result

    return forward


def _norm(upstream: Callable[..., Any]) -> Callable[..., Any]:
    """An RMSNorm's forward: a compressor's rows pass unchanged, in the dtype of its result."""

    def forward(self: Any, hidden_states: torch.Tensor) -> Any:
        call = _call.get()
        if call is None or self is not call.compressor.kv_norm:
            return upstream(self, hidden_states)
        if torch.is_grad_enabled() and (hidden_states.requires_grad or self.weight.requires_grad):
            raise ValueError("dsv4_backend has no backward pass: call it under torch.no_grad()")
        call.rows = hidden_states.to(upstream(self, hidden_states[:0]).dtype)
        return call.rows

    return forward


def _rope(upstream: Callable[..., Any], norm: Callable[..., Any]) -> Callable[..., Any]:
    """``apply_rotary_pos_emb``: for a compressor's rows, norm and RoPE; x is rewritten in place."""

    def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1) -> Any:
        call = _call.get()
        if call is None or call.rows is None:
            return upstream(x, cos, sin, unsqueeze_dim)
        rows, call.rows = call.rows, None
        if x.data_ptr() != rows.data_ptr() or x.numel() != rows.numel():
            raise RuntimeError(
                f"{type(call.compressor).__name__} must rotate the rows {list(rows.shape)} of its "
                f"kv_norm next, got another tensor {list(x.shape)}"
            )
        try:
            _finish(rows, cos, sin, call.compressor)
        except (LookupError, ValueError) as error:  # raised before anything is written
            fallback(str(error))
            return upstream(norm(call.compressor.kv_norm, rows).view_as(x), cos, sin, unsqueeze_dim)
        return x

    return rope


def _finish(rows: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, compressor: Any) -> None:
    """Norm and RoPE of pooled rows [B, n, d], in place, by the angles cos, sin [B, n, 32].

    Row k of the B·n rows is given the position k · ratio, where its own angles lie in the table:
    the operator uses a position for nothing else.
    """
    ratio, norm = compressor.compress_rate, compressor.kv_norm
    angles = torch.stack((cos, sin), -1).flatten(-2).flatten(0, 1)  # [B·n, 64]
    table = angles.new_empty(ratio * angles.shape[0], angles.shape[1])
    table[::ratio] = angles
    seq_lens = torch.arange(1, angles.shape[0] + 1, device=rows.device) * ratio
    dsv4_backend.compress_norm_rope_hadamard_(
        rows.view(-1, rows.shape[-1]),
        norm.weight,
        norm.variance_epsilon,
        table,
        dsv4_backend.SeqLens(seq_lens),
        head_dim=rows.shape[-1],
        compress_ratio=ratio,
        rotate=False,
    )
