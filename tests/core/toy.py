"""A family in a package of its own, installed beside ours: what its author would write."""

from __future__ import annotations

from pathlib import Path

FAMILY = """
import os
from dataclasses import dataclass
from pathlib import Path

from backend_core.family import Family
from backend_core.tables.schema import NoParams, Operator, TableSchema


@dataclass(frozen=True)
class TileParams:
    block: int
    num_warps: int = 4


def refusal(config):
    return None if config.get("model_type") == "toy" else "Toy attention needs the model_type toy"


def cases(path):
    return {"small": lambda target, device: (0.25 * (path.name == "torch"), 0.5)}


def draw_sum(draw, target, device):
    import torch
    from backend_core.testing.fuzz import FuzzBatch

    x = torch.empty(draw.integer("rows", 1, 9), dtype=torch.float64, device=device)
    result = []

    def fill(seed):
        x.copy_(torch.arange(seed % 7, seed % 7 + len(x)))

    def run():
        if len(x) > 6 and os.environ.get("TOY_DIES"):
            os._exit(3)
        result[:] = [x[:4].sum() if os.environ.get("TOY_WRONG") else x.sum()]

    return FuzzBatch(fill, run, lambda: (abs(float(result[0] - sum(x.tolist()))), 0.5))


FAMILY = Family(
    name="toy",
    title="Toy attention",
    tables=TableSchema(
        "toy",
        (Operator("sum", "rows", {"tiled": TileParams, "torch": NoParams}),),
        folder=Path(__file__).parent / "tables",
    ),
    layer_kinds=frozenset({"mla"}),
    model_refusal=refusal,
    describe_model=lambda target, config, ranks: [f"toy paths of {ranks} ranks"],
    check_cases=cases,
    fuzz_cases=lambda: {} if os.environ.get("TOY_HAS_NO_FUZZ") else {"sum": draw_sum},
    interpretable=frozenset({"tiled"}),
    tune_space=lambda path: {"total": {"block": (16, 64)}} if path.name == "tiled" else {},
    measure=lambda path, target, name, grid, heads: lambda: 1.0 / path.params.block,
    open_grid={"sum": 128},
    benchmarks={"toy-sum": str(Path(__file__).parent / "bench_sum.py")},
)
"""

TABLE = """
[table]
family = "toy"
vendor = "{vendor}"
arch = "{arch}"

[[path]]
operator = "sum"
name = "{name}"
features = []
measured = false
source = "a guess"
"""

BENCH = """
import argparse, json
parser = argparse.ArgumentParser()
parser.add_argument("--output")
args = parser.parse_args()
rows = [{"H": 1, "batch": 1, "ours_gpu_ms": 1.0, "peer_gpu_ms": 2.0}]
json.dump({"gpu": "G", "rows": rows}, open(args.output, "w"))
"""


def install(folder: Path) -> Path:
    """The package and its metadata, as pip would leave them in ``folder``, which is returned."""
    package = folder / "toy_backend"
    tables = package / "tables" / "toy"
    tables.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "family.py").write_text(FAMILY)
    (package / "bench_sum.py").write_text(BENCH)
    (tables / "cpu.toml").write_text(TABLE.format(vendor="cpu", arch="cpu", name="torch"))
    tiled = TABLE.format(vendor="nvidia", arch="sm90", name="tiled")
    (tables / "nvidia_sm90.toml").write_text(f"{tiled}[path.params]\nblock = 32\n")
    metadata = folder / "toy_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-backend\nVersion: 1.0\n")
    entry = "[kda_dsv4.families]\ntoy = toy_backend.family:FAMILY\n"
    (metadata / "entry_points.txt").write_text(entry)
    return folder
