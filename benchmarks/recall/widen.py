"""The recall checkpoint with more heads, so that more GPUs can share it by tensor parallelism.

    python -m benchmarks.recall.widen OUT_FOLDER --heads 4 [--checkpoint FOLDER]

Each head of a KDA or MLA layer is repeated, and the columns of ``o_proj`` that read it are divided
by the number of its copies: the model computes the same function. Copies lie beside each other, so
that each rank has heads of its own.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RECALL = Path(__file__).parent
# parts of names of what has a row for each head or channel of a head, in the order of the heads
OF_HEADS = (
    *("q_proj", "k_proj", "v_proj", "q_conv1d", "k_conv1d", "v_conv1d", "kv_b_proj"),
    *("b_proj.weight", "f_b_proj", "g_b_proj", "g_proj", "dt_bias"),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--heads", type=int, required=True)
    parser.add_argument("--checkpoint", type=Path, default=RECALL / "checkpoint")
    args = parser.parse_args()
    widen(args.checkpoint, args.out, args.heads)
    return 0


def widen(checkpoint: Path, out: Path, heads: int) -> None:
    """Write a checkpoint with ``heads`` heads in every attention layer into the folder ``out``.

    Raises:
        ValueError: ``heads`` is no multiple of the checkpoint's.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    own = config["num_attention_heads"]
    if heads % own:
        raise ValueError(f"heads must be a multiple of {own}, got {heads}")
    shutil.copytree(checkpoint, out)
    config["num_attention_heads"] = config["num_key_value_heads"] = heads
    config["linear_attn_config"]["num_heads"] = heads
    (out / "config.json").write_text(json.dumps(config))
    weights = load_file(checkpoint / "model.safetensors")
    wide = {name: widened(name, x, own, heads // own) for name, x in weights.items()}
    save_file(wide, out / "model.safetensors", {"format": "pt"})


def widened(name: str, x: torch.Tensor, heads: int, copies: int) -> torch.Tensor:
    """A parameter of which each of ``heads`` heads has so many ``copies``."""
    part = name.partition(".self_attn.")[2]
    if part.startswith("A_log"):
        return x.repeat_interleave(copies, 2)
    if part.startswith(OF_HEADS):
        rows = x.unflatten(0, (heads, -1)).repeat_interleave(copies, 0)
        return rows.flatten(0, 1).contiguous()
    if part.startswith("o_proj"):
        columns = x.unflatten(1, (heads, -1)).repeat_interleave(copies, 1) / copies
        return columns.flatten(1, 2).contiguous()
    return x


if __name__ == "__main__":
    raise SystemExit(main())
