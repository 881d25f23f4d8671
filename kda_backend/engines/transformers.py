"""Hugging Face transformers: its own ``kimi_linear`` model on this backend.

    from kda_backend.engines import transformers as kda

    kda.enable()      # from here on every KimiLinear model of the process runs on this backend
    model.generate(...)
    kda.disable()     # upstream code again

transformers' KDA layer finds its two operators by their module-level names, at each call: that is
where they are exchanged. Weights, caches and masks stay transformers' own; the layer hands over
activated inputs (g is the log decay, beta lies in (0, 1)) and a recurrent state [B, H, K, V] fp32.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import kda_backend
from backend_core.engines import transformers_patch
from backend_core.strict import fallback
from kda_backend.selection import KdaShape, selection_for

_MODULE = "transformers.models.kimi_linear.modeling_kimi_linear"
_CHUNK = "chunk_kimi_delta_attention"
_RECURRENT = "recurrent_kimi_delta_attention"

_replaced = transformers_patch.Replacements()


def enable() -> None:
    """Run transformers' ``kimi_linear`` models of this process through this backend.

    Takes effect at the next forward, for models loaded before and after; a second call changes
    nothing. The backend has no backward pass: inputs that need gradients raise ValueError.

    Raises:
        ImportError: transformers is not installed, or its release has no such operators.
    """
    if _replaced:
        return
    modeling = transformers_patch.modeling(_MODULE, (_CHUNK, _RECURRENT))
    chunk, recurrent = getattr(modeling, _CHUNK), getattr(modeling, _RECURRENT)
    _replaced.replace(modeling, _CHUNK, _on_backend(chunk, kda_backend.chunk_kda))
    _replaced.replace(modeling, _RECURRENT, _on_backend(recurrent, kda_backend.fused_recurrent_kda))


def disable() -> None:
    """Put back the very functions that `enable` replaced; without `enable` it does nothing."""
    _replaced.restore()


def is_enabled() -> bool:
    """Whether ``kimi_linear`` models run through this backend now."""
    return bool(_replaced)


def load_model(checkpoint: str | Path, device: torch.device) -> Any:
    """transformers' ``KimiLinearForCausalLM`` in eval mode: bf16 on a GPU, fp32 on a CPU.

    Raises ImportError as `enable`, and OSError where ``checkpoint`` holds no such model.
    """
    transformers_patch.modeling(_MODULE, (_CHUNK, _RECURRENT))
    transformers = importlib.import_module("transformers")
    model_class = transformers.KimiLinearForCausalLM
    kind = transformers.PreTrainedConfig.get_config_dict(checkpoint)[0].get("model_type")
    if kind != "kimi_linear":  # what from_pretrained would load under another model's names
        raise OSError(f"transformers' layers are replaced in kimi_linear models, got {kind!r}")
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return model_class.from_pretrained(checkpoint, dtype=dtype).to(device).eval()


def _on_backend(upstream: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    """Make a stand-in for transformers' operator that takes what the layer passes. A model that is
    compiled calls it as it is, as FLA's: torch would trace checks and launches piece by piece.

    q, k, v, g ``[B, T, H, D]``, beta ``[B, T, H]``, state ``[B, H, K, V]`` fp32.
    ``model_arguments`` are those of the model's forward, which transformers hands to every
    operator; no operator, upstream's included, has a use for them.
    """

    def operator(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor | None = None,
        output_final_state: bool = False,
        use_qk_l2norm_in_kernel: bool = False,
        **model_arguments: Any,
    ) -> Any:
        call = ours if _has_path(query, value, g) else upstream
        return call(
            query,
            key,
            value,
            g=g,
            beta=beta,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
        )

    opaque: Callable[..., Any] = torch.compiler.disable(operator)  # type: ignore[no-untyped-call]
    return opaque


def _has_path(query: torch.Tensor, value: torch.Tensor, g: torch.Tensor) -> bool:
    """Whether a kernel path serves these heads on this device; if not, say so once."""
    heads, key_dim = query.shape[2:]
    value_heads, value_dim = value.shape[2:]
    try:
        selection_for(
            query.device,
            KdaShape(heads, value_heads, key_dim, value_dim, dtype=query.dtype, gate_dtype=g.dtype),
        )
    except LookupError as error:
        fallback(str(error))
        return False
    return True
