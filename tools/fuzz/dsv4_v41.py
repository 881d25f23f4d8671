"""Random steps of a few requests with DeepSeek-V4.1's compressors, against the definition."""

from __future__ import annotations

import torch

from backend_core.operator import forced
from backend_core.tables.load import load_table
from backend_core.tables.schema import UPSTREAM
from backend_core.target import Target
from dsv4_backend import compress_v41_
from dsv4_backend.launch_params import TABLES
from dsv4_backend.testing.engine import POISON, Chunk, move_plan
from dsv4_backend.testing.v41 import (
    CPU,
    FORMATS,
    SGLANG,
    V41Engine,
    judge,
    make_history,
    make_layer,
    make_spec,
    to_device,
)
from dsv4_backend.v41.torch import step
from dsv4_backend.v41_step import OPERATOR
from tools.fuzz.batches import Draw, FuzzBatch, MismatchError

FORMATS_OF_ALL = (*FORMATS, SGLANG[:2])


def v41_case(draw: Draw, target: Target, device: torch.device) -> FuzzBatch:
    """A random step of a few requests, after random steps before it by the definition."""
    ratio, (main, index) = draw.choice("ratio", (1, 2)), draw.choice("formats", FORMATS_OF_ALL)
    rounding = "sglang_v41" if (main, index) == SGLANG[:2] else "vllm"
    spec = make_spec(ratio, main, index, draw.choice("page tokens", (16, 48)), rounding)
    rows = {
        f"{row.name} to {row.max_grid}": row
        for row in load_table(TABLES, target).rows
        if row.operator == OPERATOR and row.name != UPSTREAM
    }
    path = rows[draw.choice("path", tuple(rows))]
    ring_rows = draw.choice("ring rows", (8, 16) if rounding == "vllm" else (2, 4, 8))
    # what is limited in length is in rings, too
    most = min(path.max_longest, ring_rows - 1) if path.max_longest else 40
    count = draw.integer("requests", 1, 5)
    lengths = draw.lengths("lengths", count, (1, 2, 7, 8, 9), most)
    chunks: list[Chunk] = []
    for n in draw.shuffled(range(count)):
        before = draw.integer(f"before {n}", 0, 20)
        chunks.append((n, before, before + min(max(lengths[n], 1), most)))
    longest = max(end for _, _, end in chunks)
    layer = make_layer(spec, draw.seed() % 1000, CPU)
    engine = V41Engine(spec, count, longest, ring_rows)
    plan = engine.plan(chunks, draw.integer("padding", 0, 3))
    rows_of = torch.full((plan.num_tokens + 3, spec.row_width), torch.nan)
    call = engine.call(layer, rows_of)
    moved, plan_here = to_device(call, device), move_plan(plan, device)
    is_adversarial = draw.chance("adversarial", 0.4)
    selection = forced(TABLES, target, None, path)

    def fill(seed: int) -> None:
        histories = [
            make_history(spec, longest, (seed + n) % 2**40, is_adversarial) for n in range(count)
        ]
        if engine.state is not None:
            engine.state.fill_(torch.nan)
        for cache in engine.caches:
            cache.fill_(POISON)
        for n, begin, _ in chunks:
            if begin:
                step(engine.call(layer, histories[n][:begin]), engine.plan([(n, 0, begin)], 0))
        rows = torch.cat([histories[n][begin:end] for n, begin, end in chunks])
        rows_of[: len(rows)] = rows
        fresh = engine.call(layer, rows_of)
        for one in (call, moved):
            one.kv_score.copy_(fresh.kv_score)
            if one.score is not None and fresh.score is not None:
                one.score.copy_(fresh.score)
        moved.cache.copy_(call.cache)
        moved.index_cache.copy_(call.index_cache)
        if moved.state is not None and call.state is not None:
            moved.state.copy_(call.state)

    def run() -> None:
        compress_v41_(
            *(moved.layer, moved.kv_score, moved.state, moved.cache, moved.index_cache),
            plan_here,
            score=moved.score,
            target=target,
            selection=selection,
        )

    def error() -> tuple[float, float]:
        try:
            return judge(engine, call, plan, moved), 0.2
        except RuntimeError as error:
            raise MismatchError(str(error)) from error

    return FuzzBatch(fill, run, error)
