"""Greedy tokens of two runs of one model: where they part, and how close the two best tokens were.

The same comparison is made between two ways to batch the prompts in one run, which differ only by
rounding. A difference between upstream and flag is explained if upstream's two best tokens are no
further apart than rounding moved them anywhere between those two batchings of upstream: it moved
those with another best token by at least their margin.
"""

from __future__ import annotations

import math
from statistics import median_high as median
from typing import Any

PROMPTS, LONG_PROMPTS, NEW_TOKENS = 64, 16, 16


def tokens_of(output: Any) -> dict[str, Any]:
    """Greedy tokens of one prompt, at each the two best tokens and their log-probabilities, and how
    many of the prompt came from the prefix cache."""
    completion = output.outputs[0]
    best = [
        sorted(((entry.logprob, token) for token, entry in at.items()), reverse=True)[:2]
        for at in completion.logprobs
    ]
    return {
        "tokens": list(completion.token_ids),
        "best": [[token for _, token in pair] for pair in best],
        "logprobs": [[round(logprob, 5) for logprob, _ in pair] for pair in best],
        "cached": output.num_cached_tokens or 0,
    }


def rounding(upstream: list[dict[str, Any]]) -> float:
    """The most that rounding moved upstream's two best tokens, in nats, in all parts of a run."""
    pairs = (differences(part["together"], part["apart"]) for part in upstream)
    return max((value for moved, _ in pairs for value in moved), default=0.0)


def compared(
    upstream: dict[str, Any], flag: dict[str, Any], limit: float, **variants: dict[str, Any]
) -> dict[str, Any]:
    """All sides' tokens, and each side's own two ways to batch.

    Args:
        upstream, flag: what a side's ``tokens`` part kept: lengths, together, apart, and resumed
            where prompts were.
        limit: what `rounding` moves, in nats.
        variants: of the flag's side, which is compared with each.

    Raises:
        ValueError: the sides were asked different prompts.
    """
    if any(upstream["lengths"] != other["lengths"] for other in (flag, *variants.values())):
        raise ValueError("expected two runs of the same prompts, got other lengths")
    found = {
        f"{name} together and apart": agreement(side["together"], side["apart"], limit)
        for name, side in (("upstream", upstream), ("flag", flag))
    }
    pairs = [("upstream and flag", upstream, flag)]
    pairs += [(f"flag and {name}", flag, variant) for name, variant in variants.items()]
    for name, a, b in pairs:
        for how in ("together", "apart", "resumed"):
            if how in a and how in b:
                found[f"{name}, {how}"] = agreement(a[how], b[how], limit)
    margins = [margin(row, i) for row in upstream["together"] for i in range(NEW_TOKENS)]
    return {
        "new_tokens": NEW_TOKENS,
        **found,
        "all margins of upstream, median": median(margins),
    }


def said(found: dict[str, Any]) -> list[str]:
    """A line per comparison of `compared`."""
    return [
        f"{name}: of {value['prompts']} prompts {value['same']} the same, first token"
        f" {value['first_token_same']}; {value['explained']} of {len(value['partings'])}"
        f" partings explained by rounding of {value['limit_nats']:.3f} nats"
        for name, value in found.items()
        if isinstance(value, dict)
    ]


def collapse(greedy: dict[str, Any]) -> dict[str, Any]:
    """Whether a run's tokens say anything: how many differ, and whether all are numbers."""
    rows = greedy["together"]
    resumed = {"cached": [row["cached"] for row in greedy.get("resumed", [])]}
    return {
        **(resumed if "resumed" in greedy else {}),
        "prompts": len(rows),
        "distinct_first_tokens": len({row["tokens"][0] for row in rows}),
        "distinct_tokens": len({token for row in rows for token in row["tokens"]}),
        "tokens": sum(len(row["tokens"]) for row in rows),
        "not_finite": sum(
            not math.isfinite(x) for row in rows for at in row["logprobs"] for x in at
        ),
    }


def agreement(a: list[dict[str, Any]], b: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    """How many prompts have the same tokens, and why the others part.

    ``partings`` has a's margin in nats at each; one of at most ``limit`` is explained.
    """
    moved, margins = differences(a, b)
    return {
        "prompts": len(a),
        "same": len(a) - len(margins),
        "first_token_same": sum(
            x["tokens"][0] == y["tokens"][0] for x, y in zip(a, b, strict=True)
        ),
        "rounding_nats": {
            "positions": len(moved),
            "median": median(moved) if moved else 0.0,
            "max": max(moved, default=0.0),
        },
        "limit_nats": limit,
        "explained": sum(one <= limit for one in margins),
        "partings": margins,
    }


def differences(
    a: list[dict[str, Any]], b: list[dict[str, Any]]
) -> tuple[list[float], list[float]]:
    """By how much the margin between two best tokens differs, and a's margin where a prompt's
    tokens part.

    Up to there both have read the same tokens, so that nothing but rounding differs. The margin is
    between the same two tokens; between the best of each run it has moved by at least both margins.
    """
    moved, partings = [], []
    for x, y in zip(a, b, strict=True):
        for i in range(NEW_TOKENS):
            if set(x["best"][i]) == set(y["best"][i]):
                same_order = x["best"][i] == y["best"][i]
                moved.append(abs(margin(x, i) - (1 if same_order else -1) * margin(y, i)))
            elif x["tokens"][i] != y["tokens"][i]:
                moved.append(margin(x, i) + margin(y, i))
            if x["tokens"][i] != y["tokens"][i]:
                partings.append(margin(x, i))
                break
    return moved, partings


def margin(row: dict[str, Any], i: int) -> float:
    """How far the second best token is behind the best, in nats."""
    first, second = row["logprobs"][i]
    return float(first - second)
