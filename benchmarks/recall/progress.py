"""Where a training run is, on disk: weights, the optimizer's moments, the log."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Progress:
    """The state of a run in the folder ``out``, of the run with these ``arguments`` alone.

    Attributes:
        steps: taken so far.
        seconds: that they took.
        log: of them.

    Raises:
        ValueError: the folder holds the state of a run with other arguments.
    """

    def __init__(self, out: Path, arguments: dict[str, Any]) -> None:
        self.steps, self.seconds, self.log = 0, 0.0, list[dict[str, Any]]()
        self.arguments = json.loads(json.dumps(arguments))
        self.file = out / "progress.safetensors"
        if self.file.exists():
            with safe_open(self.file, "pt") as kept:
                said = json.loads(kept.metadata()["progress"])
            if said["arguments"] != self.arguments:
                raise ValueError(
                    f"{self.file} must be of a run with the arguments {self.arguments},"
                    f" got {said['arguments']}"
                )
            self.steps, self.seconds, self.log = said["steps"], said["seconds"], said["log"]

    def load_into(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Nothing where no step was taken."""
        if not self.steps:
            return
        kept = load_file(self.file)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(kept[f"model.{name}"])
                state = optimizer.state[parameter]
                for moment in _MOMENTS:
                    state[moment] = kept[f"{moment}.{name}"].to(parameter)
                fused = optimizer.defaults.get("fused")
                place = parameter.device if fused else torch.device("cpu")
                state["step"] = torch.tensor(float(self.steps), device=place)

    def save(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        steps: int,
        seconds: float,
        log: list[dict[str, Any]],
    ) -> None:
        """Write the file whole, or leave the one that is there."""
        tensors = {}
        for name, parameter in model.named_parameters():
            tensors[f"model.{name}"] = parameter.detach().contiguous()
            for moment in _MOMENTS:
                tensors[f"{moment}.{name}"] = optimizer.state[parameter][moment].contiguous()
        said = {"arguments": self.arguments, "steps": steps, "seconds": seconds, "log": log}
        new = self.file.with_suffix(".new")
        save_file(tensors, new, metadata={"progress": json.dumps(said)})
        new.replace(self.file)

    def remove(self) -> None:
        """The run is over."""
        self.file.unlink(missing_ok=True)
