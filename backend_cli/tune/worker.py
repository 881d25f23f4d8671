"""One process of ``kda-dsv4 tune``: checks and times candidate rows of a table on this GPU.

Its tables are those of ``KDA_DSV4_CONFIG_DIR``, which ``tune`` rewrites between two questions.
"""

from __future__ import annotations

import json
from typing import Any

import torch

from backend_cli.worker import serve_answers
from backend_core.family import Family, families
from backend_core.tables.load import load_table
from backend_core.tables.schema import Row
from backend_core.target import Target, detect_target
from backend_core.testing.timing import graph_time_ms

QUICK = 2
"""How many calls of ``kda-dsv4 check`` a candidate has to get right before its time is taken."""


def answer(line: str) -> dict[str, Any]:
    """For ``{"family", "row", "measure", "grid", "heads", "check"}``: ``ms``, or ``message`` with
    the reason why the row cannot be used.

    ``row`` counts the table's rows from 0; ``measure`` is one of the family's ``tune_space``. A row
    has to be right before it is timed: in every call of ``kda-dsv4 check`` with ``check``
    ``"all"``, else in the first `QUICK`.
    """
    asked = json.loads(line)
    target = detect_target()
    try:
        family = families()[asked["family"]]
        path = load_table(family.tables, target).rows[asked["row"]]
        _check(family, path, target, None if asked["check"] == "all" else QUICK)
        call = family.measure(path, target, asked["measure"], asked["grid"], asked["heads"])
        return {"ms": graph_time_ms(call), "message": None}
    except Exception as error:  # whatever a compiler or a driver raises is the result
        return {"ms": None, "message": f"{type(error).__name__}: {error}"[:300]}


def _check(family: Family, row: Row, target: Target, count: int | None) -> None:
    """Raises ValueError where one of the row's first ``count`` calls is wrong; all for ``None``."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for name, case in list(family.check_cases(row).items())[:count]:
        error, allowed = case(target, device)
        if not error <= allowed:
            raise ValueError(f"{name}: error {error:.1e}, allowed {allowed:.1e}")


def main() -> None:
    """Answer until there are no more questions."""
    serve_answers(answer)


if __name__ == "__main__":
    main()
