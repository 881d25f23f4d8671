"""One process of ``kda-dsv4 tune``: checks and times candidate rows of a table on this GPU.

Its tables are those of ``KDA_DSV4_CONFIG_DIR``, which ``tune`` rewrites between two questions.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from backend_cli import check_dsv4, check_kda
from backend_cli.bench import scripts_folder
from backend_cli.check_engine import Engine, make_engine
from backend_cli.check_worker import probes_of
from backend_cli.worker import serve_answers
from backend_core.tables.schema import KernelPath
from backend_core.tables.select import explain, load_table
from backend_core.target import Target, detect_target
from dsv4_backend import compress_decode_, compress_decode_pair_, compress_prefill_
from dsv4_backend import selection as paths
from kda_backend import chunk_kda, fused_recurrent_kda, kda_decode_step
from kda_backend.scratch import Workspace
from kda_backend.step_plan import build_metadata

Call = Callable[[], object]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def answer(line: str) -> dict[str, Any]:
    """For ``{"family", "row", "measure", "grid", "heads", "check"}``: ``ms``, or ``message`` with
    the reason why the row cannot be used.

    ``row`` counts the table's rows; ``measure`` is one of `MEASURES` for KDA, and the kind of
    compressor for dsv4. Before its time a row has to be right: in every call of ``kda-dsv4 check``
    with ``check`` ``"all"``, else in the first two.
    """
    asked = json.loads(line)
    target = detect_target()
    try:
        path = _row(asked["family"], target, asked["row"])
        _check(asked, path, target, torch.device(DEVICE))
        timing: Any = importlib.import_module("benchmarks.timing")
        return {"ms": timing.graph_time_ms(_call(asked, path, target)), "message": None}
    except Exception as error:  # whatever a compiler or a driver raises is the result
        return {"ms": None, "message": f"{type(error).__name__}: {error}"[:300]}


def _row(family: str, target: Target, number: int) -> KernelPath:
    for cached in (
        paths.in_place_paths,
        paths.decode_paths,
        paths.pair_paths,
        paths.prefill_paths,
    ):
        cached.cache_clear()  # they hold launches of the table before
    table = load_table(family, target)
    path = table.rows[number]
    assert any(row.path is path for row in explain(table, path.phase))
    return path


def _check(asked: dict[str, Any], path: KernelPath, target: Target, device: torch.device) -> None:
    """Raises ValueError where a call is wrong on the row."""
    todo = probes_of(asked["family"], path, "", interpreted=False)
    if asked["measure"] in ("step", "bare_step"):
        todo = [probe for probe in todo if probe.case.startswith("one launch")]
    for probe in todo if asked["check"] == "all" else todo[:2]:
        error, allowed = probe.run(target, device)
        if not error <= allowed:
            raise ValueError(f"{probe.case}: error {error:.1e}, allowed {allowed:.1e}")


def _call(asked: dict[str, Any], path: KernelPath, target: Target) -> Call:
    if asked["family"] == "dsv4":
        return _compressor(asked["measure"], asked["grid"], path, target)
    return MEASURES[asked["measure"]](path, target, asked["grid"], asked["heads"])


def _tokens(lead: tuple[int, ...], heads: int) -> list[torch.Tensor]:
    """q, k, v, g and beta, bf16, standard normal."""
    shapes = [(*lead, heads, 128)] * 4 + [(*lead, heads)]
    return [torch.randn(shape, device=DEVICE).bfloat16() for shape in shapes]


def _arguments(path: KernelPath, target: Target, heads: int, slots: int) -> dict[str, Any]:
    """A pool with a slot for each row, the gate of the model and the plan of one path."""
    shape = check_kda.make_call((1,), heads, heads).shape()
    return {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
        "A_log": (1 + 15 * torch.rand(heads, device=DEVICE)).log(),
        "dt_bias": torch.randn(heads * 128, device=DEVICE),
        "state_pool": torch.randn(slots, heads, 128, 128, device=DEVICE),
        "state_indices": torch.arange(slots, dtype=torch.int32, device=DEVICE),
        "plan": check_kda.only(path, target, shape),
    }


def _prefill(path: KernelPath, target: Target, grid: int, heads: int) -> Call:
    """One sequence of ``grid / heads`` chunks of 64 tokens."""
    tokens = 64 * max(1, grid // heads)
    q, k, v, g, beta = _tokens((1, tokens), heads)
    offsets = torch.tensor([0, tokens], dtype=torch.int32)
    meta = build_metadata(offsets.to(DEVICE), tokens, cu_seqlens_cpu=offsets)
    arguments = _arguments(path, target, heads, 1)
    arguments |= {"metadata": meta, "workspace": Workspace(q.device), "out": torch.empty_like(v)}
    return lambda: chunk_kda(q, k, v, g, beta, **arguments)


def _recurrent(path: KernelPath, target: Target, grid: int, heads: int) -> Call:
    rows = max(1, grid // heads)
    q, k, v, g, beta = _tokens((rows, 1), heads)
    arguments = _arguments(path, target, heads, rows) | {"out": torch.empty_like(v)}
    return lambda: fused_recurrent_kda(q, k, v, g, beta, **arguments)


def _step(path: KernelPath, target: Target, grid: int, heads: int, *, whole: bool) -> Call:
    rows = max(1, grid // heads)
    names = ("q", "k", "v", "g", "beta")
    tokens = dict(zip(names, _tokens((rows,), heads), strict=True))
    arguments = _arguments(path, target, heads, rows) | tokens
    if whole:
        channels = 3 * heads * 128
        arguments |= {
            "conv_state": torch.randn(rows, 3, channels, device=DEVICE).bfloat16().transpose(1, 2),
            "conv_weight": torch.randn(channels, 4, device=DEVICE),
            "norm_weight": torch.ones(128, device=DEVICE),
            "norm_gate": torch.randn(rows, heads, 128, device=DEVICE).bfloat16(),
        }
    arguments["out"] = torch.empty_like(tokens["v"])
    return lambda: kda_decode_step(**arguments)


MEASURES: dict[str, Callable[[KernelPath, Target, int, int], Call]] = {
    "prefill": _prefill,
    "recurrent": _recurrent,
    "step": lambda *args: _step(*args, whole=True),
    "bare_step": lambda *args: _step(*args, whole=False),
}


def _compressor(kind: str, grid: int, path: KernelPath, target: Target) -> Call:
    """``grid`` requests that decode, each at the end of a window, or windows of one prompt."""
    kinds = ("main_c4", "indexer") if kind == "pair" else (kind,)
    ratio = 128 if kind == "main_c128" else 4
    lengths = (grid * ratio,) if path.phase == "prefill" else (2 * ratio,) * grid
    engines = [make_engine(name, "paged", False, lengths=lengths) for name in kinds]
    for engine in engines:
        engine.state.nan_to_num_(0.5)
    parts, plans = zip(*(_on_device(engine, path.phase) for engine in engines), strict=True)
    check_dsv4.force(path, target, tuple(engines), plans)
    if kind == "pair":
        object.__setattr__(parts[1][0], "rope_table", parts[0][0].rope_table)
        object.__setattr__(plans[1], "requests", plans[0].requests)
        return lambda: compress_decode_pair_(*parts, *plans, target=target)
    operator: Any = compress_decode_ if path.phase == "decode" else compress_prefill_
    return lambda: operator(*parts[0], plans[0], target=target)


def _on_device(engine: Engine, phase: str) -> tuple[Any, Any]:
    whole = [(0, length) for length in engine.lengths]
    plan: Any
    if phase == "prefill":
        plan, rows = engine.prefill_plan(whole), engine.rows(whole)
    else:
        last = [length - 1 for length in engine.lengths]
        plan = dataclasses.replace(engine.decode_plan(list(last)), is_settled=True)
        rows = engine.rows([(position, position + 1) for position in last])
    ((part, moved),) = check_dsv4.to_device((engine,), (plan,), [rows], torch.device(DEVICE))
    return part, moved


def main() -> None:
    """Answer until there are no more questions."""
    sys.path.append(str(scripts_folder().parent))
    serve_answers(answer)


if __name__ == "__main__":
    main()
