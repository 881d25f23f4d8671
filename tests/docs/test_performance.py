from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engines import serve_sides
from docs import performance
from docs.performance_parts import engines, kda, page

GENERATORS = [
    *Path(performance.__file__).parent.glob("*.py"),
    *Path(performance.__file__).parent.glob("performance_parts/*.py"),
]

# a number with the unit of a measurement: it has to come from a file
FIGURE = re.compile(r"\d\s*(?:µs|ms|ns|%|×|GB|MB|KiB|GiB|times)(?!\w)")

FORMAT = re.compile(r"\.\d+%")  # of a share, in an f-string


def test_the_pages_are_what_the_files_say() -> None:
    rendered = performance.render()
    for file, text in rendered.items():
        assert file.read_text(encoding="utf-8") == text, "run python docs/performance.py"
    written = {
        *(performance.DOCS / "performance").glob("*.md"),
        performance.DOCS / "performance.md",
    }
    assert set(rendered) == written


def test_readmes_table_is_what_the_files_say() -> None:
    assert performance.README.read_text(encoding="utf-8") == performance.headline(), (
        "run python docs/performance.py"
    )


def typed_figures(source: str) -> list[str]:
    """The strings of a generator that hold a figure."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return [text for text in strings if FIGURE.search(text) and not FORMAT.fullmatch(text)]


@pytest.mark.parametrize("generator", GENERATORS, ids=lambda path: path.stem)
def test_no_figure_is_typed_into_a_generator(generator: Path) -> None:
    assert typed_figures(generator.read_text(encoding="utf-8")) == []


@pytest.mark.parametrize("text", ["58 % of it", "1.02 µs", "786 MB", "2.1× as fast", "4 times"])
def test_a_typed_figure_is_found(text: str) -> None:
    assert typed_figures(f"x = 'K = 128, {text}'") and not typed_figures("x = 'K = V = 128, µs'")


def side_of_glm(ms: float) -> dict[str, Any]:
    """A side's file, of a model with four layers."""
    answer = {"tokens": [5] * 16, "best": [[5, 9]] * 16, "logprobs": [[-1.0, -1.5]] * 16}
    many = [{**answer, "cached": 64}] * 16
    tokens = {"lengths": [300], "together": many, "apart": many}
    versions = {"torch": "2.14.1", "triton": "3.8.0", "date": "2026-11-24"}
    return {
        "head": {"gpu": "H200", "engine": "sglang 0.5.23", **versions},
        "environment": {"layers": 4, "heads": None, "experts": 64},
        "engine": {"page_size": 1},
        "rows": [{"what": "1 × 512", "kind": "call", "ms": ms, "least_ms": ms}],
        "paths": {"two_stage_sm90": {"captured": [256, 512], "eager": [8192]}},
        "prefill_steps": {"steps": 90, "in_graphs": 80, "replayed": 70},
        "tokens": tokens,
        "long_tokens": {**tokens, "resumed": many},
        "left_out": [],
        "failed": {},
    }


def test_a_cut_models_file_has_a_section_once_it_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (engines, page):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert engines.cut_models() == []
    sides = {"flag": side_of_glm(2.0), "upstream": side_of_glm(3.0)}
    sides["no_prefill_graphs"] = side_of_glm(2.5)
    memory = {"blocks_kib": 4096.0, "records_kib": 64.0}
    sides["flag"]["drafts"] = {"draft": 4000, "accepted": 3000, **memory}
    report = {**serve_sides.join(sides), "beside": True}
    (tmp_path / "sglang_glm_5_3_flash.json").write_text(json.dumps(report))
    text = "\n".join(engines.cut_models())
    assert "## GLM-5.3-Flash's layers in sglang\n" in text
    assert (
        "sglang 0.5.23 in its default mode, the configuration with 4 layers, 64 experts, and random"
        in text
    )
    assert "| ms | upstream | with the flag | the flag, no prefill graphs | × |" in text
    assert "| 1 × 512 | 3.0 | 2.0 | 2.5 | 1.50 |" in text
    assert "- Drafts, flag: 3,000 of 4,000 accepted; a request takes 4,096 KiB of the cache" in text
    assert "flag and no prefill graphs, apart 16 of 16 the same" in text
    assert "upstream and flag, resumed 16 of 16 the same" in text
    assert "`two_stage_sm90`: 2 captured sizes of up to 512, 1 eager sizes of up to 8,192" in text
    assert "80 of 90 prefill steps" in text and "70 of them" in text


def test_the_price_of_same_bits_is_shown_once_it_is_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (kda, page):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert kda.same_bits() == []
    kinds = ("decode", "prefill", "layer")
    rows = [
        {"what": what, "H": 4, "size": size, "free_us": 10.0, "invariant_us": 10.0 + n}
        for n, (what, size) in enumerate((what, size) for what in kinds for size in ("a", "b"))
    ]
    report = dict.fromkeys(("torch", "triton", "gpu", "date"), "x")
    (tmp_path / "kda_same_bits_h200.json").write_text(
        json.dumps({**report, "requests": 500, "ways": 24, "equal": 500, "rows": rows})
    )
    lines = kda.same_bits()
    assert "| prefill | 2 | 1.249 | 1.300 | 4 heads, b |" in lines
    assert any(
        "500 of 500 random requests had the same bits alone and 24 times" in line for line in lines
    )
