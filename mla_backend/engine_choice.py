"""Where this family's MLA is measured ahead of the kernel that an engine would choose.

The path tables' rows ``upstream`` leave sizes to an engine's kernel, and name the result file that
they follow from: a size is ours up to the largest batch at which, as at every smaller one that was
measured, ours takes at most `MEAN` of the other kernel's time in the geometric mean over contexts,
and at none of them more than `WORST`.

Imports no engine.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from backend_core.operator import select
from backend_core.tables.schema import UPSTREAM, KernelPath
from backend_core.target import Target
from mla_backend.launch_params import TABLES
from mla_backend.spec_sparse_mla import MAX_HEADS, SparseMlaSpec

MEAN, WORST = 0.97, 1.02
"""2 % is what two runs differ by."""


@dataclass(frozen=True)
class Lead:
    """Steps in which ours is ahead.

    Attributes:
        max_requests: the largest batch, or ``None`` where the largest measured batch is still one.
            Sparse MLA counts query tokens, each of which has lists of its own.
        source: the result file.
        shared: the fewest and most requests of larger steps that are ours too, for the prompts that
            they may share.
    """

    max_requests: int | None
    source: str
    shared: tuple[int, int] | None = None

    def covers(self, requests: int) -> bool:
        if self.max_requests is None or requests <= self.max_requests:
            return True
        return self.shared is not None and self.shared[0] <= requests <= self.shared[1]

    def __str__(self) -> str:
        if self.max_requests is None:
            return "of any number of requests"
        shared = "" if self.shared is None else " and of {} to {}".format(*self.shared)
        return f"of up to {self.max_requests}{shared} requests"


def lead_over(target: Target, kernel: str, query_rows: int) -> Lead | str:
    """The steps in which ours is ahead of ``kernel``; or why there are none, in words.

    Args:
        query_rows: of a request: query tokens times heads of a rank. A number between two that
            were measured is judged as the larger.
    """
    from mla_backend.spec import ROW_CLASSES, MlaSpec  # which needs torch

    rows = next((most for most in ROW_CLASSES if query_rows <= most), ROW_CLASSES[-1])
    spec = MlaSpec(min(rows, 128), 16, query_tokens=-(-rows // 128))
    return _lead("mla_decode", target, spec, kernel, "decode", rows, query_rows)


def sparse_leads_over(target: Target, kernel: str, heads: int) -> dict[str, Lead | str]:
    """The same of sparse MLA: of ``"decode"`` over caches of records, and of ``"prefill"`` over
    gathered rows of bf16. A request is a query token, which has lists of its own.

    Args:
        heads: of a rank. A number between two that were measured is judged as the larger.
    """
    judged = next((most for most in (16, 32, 64) if heads <= most), MAX_HEADS)
    specs = {
        "decode": SparseMlaSpec(judged, page_size=64, extra_page_size=64),
        "prefill": SparseMlaSpec(judged, "bf16_rows"),
    }
    return {
        phase: _lead("sparse_mla", target, spec, kernel, f"sparse {phase}", judged, heads)
        for phase, spec in specs.items()
    }


def _lead(
    operator: str, target: Target, spec: object, kernel: str, what: str, judged: int, count: int
) -> Lead | str:
    """``judged``: units of the grid in one request; ``count``: what the rank has."""
    try:
        selection = select(TABLES, operator, target, spec, kernel)
    except LookupError as error:
        return str(error)
    rows = [row.path for row in selection.explained if row.path.name == UPSTREAM]
    rows = [row for row in rows if row.params.kernel == kernel]
    if not rows:
        return f"no result compares this package's {what} with {kernel} on {target.arch}"
    most = selection.most
    if most == 0:
        why = selection.rows[0].provenance.removeprefix("not measured, ")
        return f"{why}, and this rank has {count}"
    source = next(row.provenance for row in rows if row.measured).rpartition(", ")[2]
    if most is None:
        return Lead(None, source)
    return Lead(most // judged, source, _shared(selection.rows, judged))


def _shared(rows: tuple[KernelPath, ...], judged: int) -> tuple[int, int] | None:
    """The requests of the row that takes larger steps back for the prompts that they may share."""
    for before, row in itertools.pairwise(rows):
        if before.name == UPSTREAM and row.name != UPSTREAM:
            assert before.max_grid is not None and row.max_grid is not None
            return before.max_grid // judged + 1, row.max_grid // judged
    return None
