"""Times of the public calls on the host."""

from __future__ import annotations

from docs.performance_parts.page import load, section, table


def host_times() -> list[str]:
    """GPU and host time of each public call, before and after all of them went one way."""
    name = "one_way_pair_h200.json"
    report = load(name)
    keys = ("after_us", "before_us", "after_host_us", "before_host_us")
    cells = ([row["what"], *(f"{row[key]:,.1f}" for key in keys)] for row in report["rows"])
    return [
        *section("Host time of the calls", report, name),
        "",
        "Times of a call in µs, on the GPU and on the host; both sides were measured in turns."
        " *before* is commit 80bf8de, when each operator had a dispatch of its own.",
        "",
        *table(["call", "GPU", "before", "host", "before"], cells),
    ]
