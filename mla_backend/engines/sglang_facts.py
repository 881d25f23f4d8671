"""Facts by which sglang's MLA layers are chosen and served."""

from __future__ import annotations

from typing import Any

from mla_backend.spec import LATENT_DIM, ROPE_DIM

KERNELS = {"FlashAttentionBackend": "fa3"}
"""sglang's backends for which a subclass exists, and the path tables' name of their decode."""
PAGE_MULTIPLE = 16
"""Hopper's path reads pages of a multiple of so many tokens."""


def mla_layers(model: Any) -> list[Any]:
    """A model's layers of absorbed MLA, which decodes run."""
    return [
        module
        for module in model.modules()
        if getattr(module, "tp_k_head_num", None) == 1
        and (module.head_dim, module.v_head_dim) == (LATENT_DIM + ROPE_DIM, LATENT_DIM)
    ]
