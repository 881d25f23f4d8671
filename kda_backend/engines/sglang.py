"""sglang: its KDA layers on this backend, its full-attention layers on its own choice.

    sglang serve --model-path MODEL --attention-backend kda

The flag is `backend_core.engines.sglang_flag`'s: sglang chooses its full-attention backend as
without it, and ``--prefill-attention-backend`` and ``--decode-attention-backend`` still choose it
by name. Once it is built, the two kernels of the model's KDA layers are exchanged
(`sglang_layer`). ``--linear-attn-backend`` stays ``triton``: sglang ties its prefix cache of
recurrent states to that name.
"""

from __future__ import annotations

from typing import Any

from backend_core.engines.sglang_flag import models_of, register_flag
from backend_core.strict import fallback


def register() -> None:
    """Make ``kda`` known to sglang; see `sglang_flag.register_flag` for what it raises."""
    register_flag("kda", exchange_kernels)


def exchange_kernels(backend: Any, runner: Any) -> None:
    """Put our kernels into the KDA layers of sglang's ``backend``.

    A draft model of speculative decoding need not have KDA layers.
    """
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

    from kda_backend.engines import sglang_layer

    linear = getattr(backend, "linear_attn_backend", None)
    if isinstance(linear, KDAAttnBackend):
        sglang_layer.install(linear, runner)
    elif not runner.is_draft_worker:
        fallback(f"{models_of(runner)} has no KDA layers")
