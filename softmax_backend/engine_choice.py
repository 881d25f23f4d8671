"""Where this family's MLA is measured ahead of the kernel that an engine would choose.

`lead_over` answers from `MEASURED`, which `benchmarks/bench_mla_decode.py` gave: for the rows of a
request (query tokens times heads) the largest batch up to which, at every batch that was measured,
ours takes at most `MEAN` of the other kernel's time in the geometric mean over requests of 1k, 8k
and 64k tokens, and at none of the three more than `WORST`.

`sparse_lead_over` answers the same for sparse MLA from `SPARSE`, which
`benchmarks/bench_dsv4_attention.py` gave: for the heads of a rank the most query tokens of a step,
judged over lists of 512 and of 1,024 rows beside a window of 128.

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
            Sparse MLA counts query tokens, each of which has lists of its own.
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


@dataclass(frozen=True)
class MeasuredSparse:
    """One result file: sparse MLA beside the kernel ``kernel`` on a target.

    Attributes:
        target: `Target.key`; kernel: as the file's columns name it: ``"flashmla"``.
        max_tokens: for ``"decode"`` and ``"prefill"``, by heads of a rank, the most query tokens;
            ``None`` where the largest measured batch is still one in which ours is ahead.
    """

    target: str
    kernel: str
    source: str
    max_tokens: dict[str, dict[int, int | None]]


SPARSE = (
    MeasuredSparse(
        "nvidia_sm90",
        "flashmla",
        "benchmarks/results/dsv4_attention_h200.json",
        {"decode": {8: None, 16: None, 32: None, 64: 64}, "prefill": {16: None, 32: None}},
    ),
)


def sparse_leads_over(target: Target, kernel: str, heads: int) -> dict[str, Lead | str]:
    """`sparse_lead_over` for decodes and for prefills."""
    return {p: sparse_lead_over(target, kernel, p, heads) for p in ("decode", "prefill")}


def sparse_lead_over(target: Target, kernel: str, phase: str, heads: int) -> Lead | str:
    """The steps in which sparse MLA is ahead of ``kernel``; or why there are none, in words.

    Args:
        phase: ``"decode"``, over caches of records, or ``"prefill"``, over gathered rows of bf16.
        heads: of a rank. A number between two that were measured is judged as the larger.
    """
    found = [m for m in SPARSE if (m.target, m.kernel) == (target.key, kernel)]
    if not found:
        return f"no result compares this package's sparse {phase} with {kernel} on {target.arch}"
    tokens = found[0].max_tokens[phase]
    if heads > max(tokens):
        return (
            f"its sparse {phase} was compared with {kernel} at up to {max(tokens)} heads per rank,"
            f" and this rank has {heads}"
        )
    return Lead(tokens[min(n for n in tokens if n >= heads)], found[0].source)
