"""One process of ``kda-dsv4 check``: reads the numbers of probes, answers each with a line of JSON.

A kernel that hangs, crashes the process or leaves the GPU unusable takes no other probe with it:
the process ends and ``check`` starts another.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable

import torch

from backend_cli.check.probes import Probe, probes
from backend_cli.worker import serve_answers
from backend_core.target import KNOWN_TARGETS, Target, detect_target


def answer(probe: Probe, target: Target, device: torch.device) -> dict[str, object]:
    """``status`` (``"ok"``, ``"wrong"`` or ``"failed"``), ``error``, ``allowed``, ``seconds`` and
    ``message``."""
    assert probe.run is not None, f"a skipped probe was asked for: {probe.skip}"
    start = time.perf_counter()
    error = allowed = message = None
    try:
        error, allowed = probe.run(target, device)
        status = "ok" if error <= allowed else "wrong"
        if status == "wrong":
            message = f"error {error:.2e}, allowed {allowed:.1e}"
            error = error if error < float("inf") else None
    except Exception as exception:  # whatever a compiler or a driver raises is the result
        status = "failed"
        message = " ".join(f"{type(exception).__name__}: {exception}".split())[:500]
    return {
        "status": status,
        "error": error,
        "allowed": allowed,
        "seconds": round(time.perf_counter() - start, 2),
        "message": message,
    }


def main() -> None:
    """Usage: worker [NAME], the part whose Triton paths are interpreted."""
    name = sys.argv[1] if len(sys.argv) > 1 else None
    device = torch.device("cuda" if name is None and torch.cuda.is_available() else "cpu")
    target = detect_target() if name is None else KNOWN_TARGETS[name]
    torch.set_num_threads(1)
    if name is not None:
        from backend_core.testing.interpreter import mend_the_interpreter

        mend_the_interpreter()
    todo: Callable[[], list[Probe]]
    todo = functools.cache(functools.partial(probes, target, interpreted=name is not None))

    serve_answers(lambda number: answer(todo()[int(number)], target, device))


if __name__ == "__main__":
    main()
