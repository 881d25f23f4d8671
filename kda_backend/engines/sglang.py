"""sglang: its KDA layers on this backend.

    sglang serve --model-path MODEL --attention-backend kda

The flag is `backend_core.engines.sglang_flag`'s: sglang chooses its full-attention backend as
without it, unless another family claims those layers; ``--prefill-attention-backend`` and
``--decode-attention-backend`` still choose it by name. Once it is built, the two kernels of the
model's KDA layers are exchanged (`sglang_layer`). ``--linear-attn-backend`` stays ``triton``:
sglang ties its prefix cache of recurrent states to that name.
"""

from __future__ import annotations

from typing import Any

from backend_core.engines import seams
from backend_core.engines.sglang_flag import SglangLayerClaim, register_family, say
from kda_backend.engines import sglang_seams
from kda_backend.family import model_refusal


def register() -> None:
    """Make ``kda`` known to sglang; see `sglang_flag.register_family` for what it raises."""
    claim = SglangLayerClaim(
        kind="linear_attention",
        title="Kimi Delta Attention",
        part=sglang_seams.SGLANG_LAYERS,
        of_model=lambda config: model_refusal(config) is None,
        present=_present,
        install=_install,
        reserve=_reserve,
        deterministic=True,
    )
    if not register_family("kda", [claim]):
        return
    if seams.difference(sglang_seams.SGLANG_GRAPHS) is None:
        from kda_backend.engines import sglang_prefill_graphs

        sglang_prefill_graphs.register()
    if seams.difference(sglang_seams.SGLANG_CUTS) is None:
        from kda_backend.engines import sglang_cuts

        sglang_cuts.register()


def _present(backend: Any, runner: Any) -> bool:
    from sglang.srt.layers.attention.linear.kda_backend import KDAAttnBackend

    return isinstance(getattr(backend, "linear_attn_backend", None), KDAAttnBackend)


def _install(backend: Any, runner: Any) -> None:
    from kda_backend.engines import (
        sglang_layer,
        sglang_ngram,
        sglang_prefill_graphs,
        sglang_records,
    )

    if runner.is_draft_worker:
        return  # Ling-V3's draft layer, softmax attention beside the pools of the model's own
    if runner.server_args.pp_size > 1 and not sglang_layer.kda_layers(runner):
        say("this stage of the pipeline has no KDA layers")
        return
    sglang_ngram.keep_one_path()
    ours = sglang_layer.install(backend.linear_attn_backend, runner)
    sglang_records.install_commit(backend, verifies="drafts" in ours)
    if seams.refusal(sglang_seams.SGLANG_GRAPHS) is None:
        sglang_prefill_graphs.prepare(backend, runner, ours="prefill" in ours)


def _reserve(runner: Any) -> None:
    from kda_backend.engines import sglang_layer

    sglang_layer.reserve(runner)
