"""Changes to sglang's scheduler process for `dsv4_sglang_side`.

`install` is the entry point of a plug-in. Weights are drawn as sglang initialises its dummies, and
what the machine may lack is replaced by torch on every side alike:

- the Sinkhorn step of mHC, whose kernel is TileLang's, by its equations; the rest of mHC has torch
  functions of sglang's own, which environment variables choose;
- without DeepGEMM, the logits of the indexer by sglang's own torch function.

The scheduler gets a method ``dsv4_benchmark``, which the engine's ``collective_rpc`` calls.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from backend_core.engines.after_import import after_import


def install() -> None:
    """In each process of the engine; acts in the one that loads the model."""
    after_import("sglang.srt.model_loader.loader", _draw)
    after_import("sglang.kernels.ops.layernorm.mhc", _replace_sinkhorn)
    if importlib.util.find_spec("deep_gemm") is None:
        after_import("sglang.srt.layers.attention.dsv4.indexer", _replace_logits)
    after_import("sglang.srt.managers.scheduler", _add_method)


def _draw(loader: ModuleType) -> None:
    from benchmarks.engines.dsv4_vllm_side import draw_weights

    loader.initialize_dummy_weights = draw_weights  # type: ignore[attr-defined]


def _replace_sinkhorn(mhc: ModuleType) -> None:
    mhc.hc_split_sinkhorn = split_sinkhorn  # type: ignore[attr-defined]


def _replace_logits(indexer: ModuleType) -> None:
    # the one for other GPUs asserts lengths of one dimension, which its caller does not pass
    indexer.fp8_paged_mqa_logits_torch = indexer.fp8_paged_mqa_logits_torch_sm120  # type: ignore[attr-defined]


def _add_method(scheduler: ModuleType) -> None:
    scheduler.Scheduler.dsv4_benchmark = command


def split_sinkhorn(
    mixes: torch.Tensor,
    hc_scale: torch.Tensor,
    hc_base: torch.Tensor,
    hc_mult: int = 4,
    sinkhorn_iters: int = 20,
    eps: float = 1e-6,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """``mixes [B, S, (2 + n)·n]`` fp32 as pre ``[B, S, n]``, post ``[B, S, n]`` and the combination
    ``[B, S, n, n]``, whose rows and columns sum up to about 1."""
    n = hc_mult
    pre, post, comb = mixes.split([n, n, n * n], dim=-1)
    pre = torch.sigmoid(pre * hc_scale[0] + hc_base[:n]) + eps
    post = 2 * torch.sigmoid(post * hc_scale[1] + hc_base[n : 2 * n])
    comb = (comb * hc_scale[2] + hc_base[2 * n :]).unflatten(-1, (n, n)).softmax(-1) + eps
    comb = comb / (comb.sum(-2, keepdim=True) + eps)
    for _ in range(sinkhorn_iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + eps)
        comb = comb / (comb.sum(-2, keepdim=True) + eps)
    return pre, post, comb


def command(scheduler: Any, what: str, path: str = "") -> None:
    """A method of sglang's scheduler.

    Args:
        what: ``"halve"`` main compressed rows by their norm's weight; ``"report"`` into ``path``.

    Raises:
        ValueError: another ``what``.
    """
    runner = scheduler.tp_worker.model_runner
    if what == "halve":
        for name, parameter in runner.model.named_parameters():
            if "compressor.norm" in name and "indexer" not in name:
                parameter.data.mul_(0.5)
    elif what == "report":
        Path(path).write_text(json.dumps(engine_of(runner)) + "\n")
    else:
        raise ValueError(f"what must be halve or report, got {what}")


def engine_of(runner: Any) -> dict[str, Any]:
    """The engine's choices, and by kind the number of compressors with each step."""
    graphs = runner.decode_cuda_graph_runner
    sizes = sorted(getattr(graphs, "capture_bs", None) or [])
    step = vars(runner.attn_backend).get("_forward_compress_all_in_one")
    bound = getattr(step, "_bound", {}).values()
    return {
        "capture_sizes": sizes,
        "tokens_per_request": getattr(graphs, "captured_req_width", 1),
        "attention_backend": type(runner.attn_backend).__name__,
        "compressor_step": type(step).__name__ if step is not None else "upstream",
        "served": sum(one.layer is not None for one in bound),
        "unserved": sum(one.layer is None for one in bound),
        "deep_gemm": importlib.util.find_spec("deep_gemm") is not None,
    }
