"""The recall model with a bounded forget gate, as Kimi-K3 has it.

Its log decay is b·sigmoid(exp(A_log)·(f + dt_bias)) with the lower bound b = -5, where Kimi-Linear
has -exp(A_log)·softplus(f + dt_bias), and its output gate is one full matrix instead of two of low
rank. vLLM builds Kimi-K3's own KDA layer from the configuration that `configuration` returns.
transformers has no such model: `bound_gates` changes transformers' Kimi-Linear while it is trained,
and the saved checkpoint is for engines.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import KimiLinearForCausalLM
from transformers.models.kimi_linear import modeling_kimi_linear as modeling

LOWER_BOUND = -5.0


def configuration(plain: dict[str, Any]) -> dict[str, Any]:
    """The ``config.json`` of a Kimi-Linear model with Kimi-K3's gates."""
    gates = {"use_full_rank_gate": True, "gate_lower_bound": LOWER_BOUND}
    return {**plain, "linear_attn_config": {**plain["linear_attn_config"], **gates}}


def log_decay(raw: torch.Tensor, dt_bias: torch.Tensor, rate: torch.Tensor) -> torch.Tensor:
    """The bounded gate of ``raw [..., H K]``; ``rate`` is exp(A_log), in (``LOWER_BOUND``, 0)."""
    return LOWER_BOUND * torch.sigmoid(rate * (raw.float() + dt_bias))


def decay_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Forward of the forget gate: ``x [B, T, hidden]`` to ``[B, T, H, K]``."""
    rate = self.A_log.float().exp().view(-1).repeat_interleave(self.head_dim)
    decay = log_decay(self.f_b_proj(self.f_a_proj(x)), self.dt_bias.float(), rate)
    return decay.view(*x.shape[:-1], -1, self.head_dim)


def bound_gates(model: KimiLinearForCausalLM) -> None:
    """Give a model bounded gates that decay as its own gates do where those decay slowly.

    With e = dt_bias + A_log - log(5) and x = f + dt_bias, 5·sigmoid(f + e) is exp(A_log)·exp(x) for
    small exp(x), as exp(A_log)·softplus(x) is; they part where a gate forgets within few tokens.
    The output gate's two matrices become their product.
    """
    for layer in model.modules():
        if isinstance(layer, modeling.KimiLinearDeltaAttention):
            gate = layer.forget_gate
            with torch.no_grad():
                shift = gate.A_log.float().view(-1) - math.log(-LOWER_BOUND)
                gate.dt_bias += shift.repeat_interleave(gate.head_dim).to(gate.dt_bias)
                gate.A_log.zero_()
                low, high = layer.g_a_proj.weight, layer.g_b_proj.weight
                full = nn.Linear(low.shape[1], high.shape[0], bias=False)
                full.weight.copy_(high.float() @ low.float())
            layer.g_a_proj, layer.g_b_proj = nn.Identity(), full.to(high)
    modeling.KimiLinearForgetGate.forward = decay_forward


def published_name(name: str) -> str:
    """The name under which Kimi-K3's checkpoint stores a parameter of such a model."""
    return name.replace("self_attn.g_b_proj.", "self_attn.g_proj.")


def unbounded_forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The bug that a bounded checkpoint must see: its gate read as Kimi-Linear's."""
    raw = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias.float()
    rate = self.A_log.float().exp().view(-1).repeat_interleave(self.head_dim)
    return (-rate * functional.softplus(raw)).view(*x.shape[:-1], -1, self.head_dim)
