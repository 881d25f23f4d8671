"""One process of the fuzzer: reads families and numbers of batches, and answers each with a line of
JSON. A kernel that hangs, crashes or leaves the GPU unusable ends this process alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping

import torch

from backend_cli.worker import serve_answers
from backend_core.target import Target, detect_target
from tools.fuzz import block_sparse, dsv4, kda, kda_records, kda_same_bits, kda_steps, mla
from tools.fuzz.batches import FuzzCase, run_batch

CASES: Mapping[str, Mapping[str, FuzzCase]] = {
    "kda": {**kda.CASES, **kda_steps.CASES, **kda_records.CASES, **kda_same_bits.CASES},
    "dsv4": dsv4.CASES,
    "mla": mla.CASES,
    "block_sparse": block_sparse.CASES,
}
"""For each family and operator, the function that draws a batch of it."""


def batch(family: str, seed: int, target: Target, device: torch.device) -> dict[str, object]:
    """``status`` (``"ok"``, ``"wrong"`` or ``"failed"``), ``operator``, ``used`` (the share of the
    allowed error, ``None`` of a batch that is not right), ``seconds`` and ``message``."""
    start = time.perf_counter()
    others = {f"{name} {x}": case for name, cases in CASES.items() for x, case in cases.items()}
    outcome = run_batch(seed, CASES[family], others, target, device)
    return {
        "status": outcome.status,
        "operator": outcome.operator,
        "used": outcome.used if outcome.status == "ok" else None,
        "seconds": time.perf_counter() - start,
        "message": outcome.message,
    }


def main() -> None:
    """Answer every line of stdin."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target = detect_target()
    torch.set_num_threads(1)

    def answer(line: str) -> dict[str, object]:
        asked = json.loads(line)
        return batch(asked["family"], asked["seed"], target, device)

    serve_answers(answer)


if __name__ == "__main__":
    main()
