"""Where this family's MLA decode is measured ahead of the kernel that an engine would choose.

`lead_over` answers from `MEASURED`, which `benchmarks/bench_mla_decode.py` gave: for the rows of a
request (query tokens times heads) the largest batch up to which, at every batch that was measured,
ours takes at most `MEAN` of the other kernel's time in the geometric mean over requests of 1k, 8k
and 64k tokens, and at none of the three more than `WORST`.

Imports neither torch nor an engine.
"""

from __future__ import annotations

from dataclasses import dataclass

from backend_core.target import Target

MEAN, WORST = 0.97, 1.02
"""2 % is what two runs differ by."""


@dataclass(frozen=True)
class Lead:
    """Steps in which ours is ahead.

    Attributes:
        max_requests: the largest batch, or ``None`` where the largest measured batch is still one.
        source: the result file.
    """

    max_requests: int | None
    source: str

    def covers(self, requests: int) -> bool:
        return self.max_requests is None or requests <= self.max_requests

    def __str__(self) -> str:
        if self.max_requests is None:
            return "of any number of requests"
        return f"of up to {self.max_requests} requests"


@dataclass(frozen=True)
class Measured:
    """One result file: ours beside the kernel ``kernel`` on a target.

    Attributes:
        target: `Target.key`; kernel: as the file's columns name it: ``"fa3"``.
        max_requests: by query rows; 0 where ours is ahead in no batch.
    """

    target: str
    kernel: str
    source: str
    max_requests: dict[int, int | None]


MEASURED = (
    Measured(
        "nvidia_sm90",
        "fa3",
        "benchmarks/results/mla_decode_h200.json",
        {4: None, 8: None, 16: 4, 32: 16},
    ),
)


def lead_over(target: Target, kernel: str, query_rows: int) -> Lead | str:
    """The steps in which ours is ahead of ``kernel``; or why there are none, in words.

    Args:
        query_rows: of a request: query tokens times heads of a rank. A number between two that
            were measured is judged as the larger.
    """
    found = [m for m in MEASURED if (m.target, m.kernel) == (target.key, kernel)]
    if not found:
        return f"no result compares this package's decode with {kernel} on {target.arch}"
    rows = found[0].max_requests
    if query_rows > max(rows):
        return (
            f"its decode was compared with {kernel} at up to {max(rows)} query rows per request,"
            f" and this rank has {query_rows}"
        )
    limit = rows[min(n for n in rows if n >= query_rows)]
    if limit == 0:
        return f"{kernel} is ahead at {query_rows} query rows per request ({found[0].source})"
    return Lead(limit, found[0].source)
