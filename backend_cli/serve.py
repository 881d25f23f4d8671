"""``kda-dsv4 serve``: check that engine, platform and model fit, then run the engine."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_cli.errors import BadInputError, CliError
from backend_core.engines import ENGINES
from backend_core.target import detect_target

SERVERS = ("vllm", "sglang")
_FIRST_OWN_NAME = (0, 32)  # vLLM takes new names of backends from this release on
_TENSOR_PARALLEL = {
    "vllm": ("--tensor-parallel-size", "-tp"),
    "sglang": ("--tensor-parallel-size", "--tp-size", "--tp"),
}


def serve(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A folder, or a name on the hub.")],
    engine: Annotated[str, typer.Option(help=" or ".join(SERVERS))],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the command, run nothing.")
    ] = False,
) -> None:
    """Run vLLM or sglang with this backend; further arguments are the engine's own."""
    command, lines = prepare(engine, model, context.args)
    for line in lines:
        print(line)
    print(shlex.join(command), flush=True)
    if not dry_run:
        os.execvp(command[0], command)


def prepare(engine: str, model: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """The engine's command line, and what was chosen, in lines for the user.

    Raises:
        BadInputError: the engine, the model or an argument is not one that this backend serves.
        CliError: the engine is not installed in a supported release, or the platform has no path.
    """
    if engine not in SERVERS:
        raise BadInputError(f"--engine must be {' or '.join(SERVERS)}, got {engine!r}")
    if any(argument.split("=")[0] == "--attention-backend" for argument in arguments):
        raise BadInputError("--attention-backend is what serve adds: leave it out")
    ranks = _tensor_parallel(engine, arguments)
    version = _version(engine)
    config = read_config(model)
    family = family_of(config)
    if family is None:
        raise BadInputError(
            "MODEL must have Kimi Delta Attention or be a DeepSeek-V4, got a "
            f"{config.get('model_type')!r} model"
        )
    target = detect_target()
    if target.vendor == "cpu":
        raise CliError(f"{engine} needs a GPU for this model, and there is none here")
    lines = [f"{engine} {version} on {target.name} ({target.arch}), {ranks} GPUs"]
    lines += _kda_paths(target, config, ranks) if family == "kda" else _dsv4_paths(target)
    flag = _flag(engine, version, family)
    program = _program(engine)
    name = [model] if engine == "vllm" else ["--model-path", model]
    return [program, "serve", *name, "--attention-backend", flag, *arguments], lines


def read_config(model: str) -> dict[str, Any]:
    """``config.json`` of a folder, or of a model on Hugging Face's hub.

    Raises:
        BadInputError: it cannot be had, or is no JSON object.
    """
    if Path(model).is_dir():
        file = Path(model) / "config.json"
    elif importlib.util.find_spec("huggingface_hub") is None:
        raise BadInputError(f"MODEL must be a folder (no huggingface_hub here), got {model}")
    else:
        from huggingface_hub import hf_hub_download

        try:
            file = Path(hf_hub_download(model, "config.json"))
        except (OSError, ValueError) as error:
            raise BadInputError(
                f"MODEL must be a folder with config.json or a model on the hub, got {model} "
                f"({type(error).__name__})"
            ) from error
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInputError(f"cannot read {file}: {error.strerror}") from error
    except ValueError as error:
        raise BadInputError(f"{file} must be JSON, got {error}") from error
    if not isinstance(config, dict):
        raise BadInputError(f"{file} must be a JSON object, got {type(config).__name__}")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def family_of(config: dict[str, Any]) -> str | None:
    """``"kda"``, ``"dsv4"``, or ``None`` for any other model."""
    linear = config.get("linear_attn_config")
    if isinstance(linear, dict) and linear.get("kda_layers"):
        return "kda"
    return "dsv4" if config.get("model_type") == "deepseek_v4" else None


def _version(engine: str) -> str:
    supported = ENGINES[engine]
    version = supported.installed()
    if version is None:
        raise CliError(f"{engine} is not installed here (supported: {supported.supported})")
    if not supported.supports(version):
        raise CliError(
            f"{engine} must be {supported.supported}, got {version}: serve it without this backend"
        )
    return version


def _tensor_parallel(engine: str, arguments: list[str]) -> int:
    names = _TENSOR_PARALLEL[engine]
    found = "1"
    for place, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in names:
            found = value if equals else "".join(arguments[place + 1 : place + 2])
    if not found.isdigit() or int(found) < 1:
        raise BadInputError(f"{names[0]} must be a positive number, got {found!r}")
    return int(found)


def _kda_paths(target: Any, config: dict[str, Any], ranks: int) -> list[str]:
    """What the table chooses for a rank of this model."""
    from kda_backend.selection import KdaShape, select

    linear = config["linear_attn_config"]
    try:
        heads, dim = int(linear["num_heads"]), int(linear["head_dim"])
    except (KeyError, TypeError, ValueError) as error:
        raise BadInputError(
            f"linear_attn_config must have num_heads and head_dim: {error}"
        ) from error
    if heads % ranks:
        raise BadInputError(f"{heads} heads cannot be split over {ranks} GPUs")
    bounded = linear.get("gate_lower_bound", config.get("gate_lower_bound")) is not None
    shape = KdaShape(heads // ranks, heads // ranks, dim, dim, bounded)
    try:
        plan = select(target, shape)
    except LookupError as error:
        raise CliError(f"this machine has no kernel path for this model: {error}") from error
    except ValueError as error:
        raise BadInputError(str(error)) from error
    served = (
        row for phase in (plan.prefill, plan.decode) for row in phase.explain() if not row.refusal
    )
    return [f"{heads // ranks} heads a GPU", *map(str, served)]


def _dsv4_paths(target: Any) -> list[str]:
    """What the table holds for the compressors; every rank has all of each."""
    from backend_core.tables.select import load_table

    try:
        table = load_table("dsv4", target)
    except LookupError as error:
        raise CliError(f"this machine has no kernel path for this model: {error}") from error
    names = dict.fromkeys(f"{row.phase} {row.name}" for row in table.rows)
    return [f"compressors: {', '.join(names)}"]


def _flag(engine: str, version: str, family: str) -> str:
    if engine == "sglang":
        return family
    major, minor = (int(part) for part in version.split(".")[:2])
    # before, a plug-in has the one name that vLLM leaves free
    return "CUSTOM" if (major, minor) < _FIRST_OWN_NAME else family.upper()


def _program(engine: str) -> str:
    """The engine's own program, of this environment before any other on the path."""
    beside = Path(sys.executable).with_name(engine)
    program = str(beside) if beside.is_file() else shutil.which(engine)
    if program is None:
        raise CliError(f"{engine} is installed, but its program is not on the path")
    return program
