"""``kda-dsv4 serve``: check that engine, platform and model fit, then run the engine."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from backend_cli.errors import BadInputError, CliError
from backend_cli.files import read_json
from backend_cli.rows import columns, facts, short_rows
from backend_cli.terminal import shown_command, wrapped
from backend_core.bounded import CONFIG_BYTES
from backend_core.engines import ENGINES, flag_name, seams
from backend_core.engines.seam_list import SGLANG_FLAG, VLLM_FLAG
from backend_core.family import Family, families
from backend_core.target import Target, detect_target

SERVERS = ("vllm", "sglang")
_TENSOR_PARALLEL = {
    "vllm": ("--tensor-parallel-size", "-tp"),
    "sglang": ("--tensor-parallel-size", "--tp-size", "--tp"),
}
_DATA_PARALLEL = ("--data-parallel-size", "--dp-size", "--dp")
_ATTENTION_DATA_PARALLEL = ("--attention-data-parallel-size", "--attn-dp-size")
_ATTENTION_CONTEXT_PARALLEL = ("--attention-context-parallel-size", "--attn-cp-size")


def serve(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, or a name on Hugging Face's hub.")
    ],
    engine: Annotated[str, typer.Option(help=f"The engine: {' or '.join(SERVERS)}.")],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and print the command without running it.")
    ] = False,
) -> None:
    """Run vLLM or sglang with this package; further arguments go to the engine."""
    command, lines = prepare(engine, model, context.args)
    print(*lines, "", shown_command(shlex.join(command)), sep="\n", flush=True)
    if not dry_run:
        os.execvp(command[0], command)


def prepare(engine: str, model: str, arguments: list[str]) -> tuple[list[str], list[str]]:
    """The engine's command line, and what was chosen, in lines for the user.

    Raises:
        BadInputError: the engine, the model or an argument is not one that this backend serves.
        CliError: the engine is not installed, does not know the flag, or the platform has no path.
    """
    if engine not in SERVERS:
        raise BadInputError(f"--engine must be {' or '.join(SERVERS)}, got {engine!r}")
    if any(_option(argument)[0] == "--attention-backend" for argument in arguments):
        raise BadInputError("--attention-backend is what serve adds: leave it out")
    ranks = _size(arguments, _TENSOR_PARALLEL[engine])
    sharing = _ranks_of_a_layer(engine, arguments, ranks)
    version = _version(engine)
    config = read_config(model)
    candidates = _families_of(config)
    target = detect_target()
    if target.vendor == "cpu":
        raise CliError(f"{engine} needs a GPU for this model, and there is none here")
    serving, paths = _describe(candidates, target, config, sharing, engine)
    gpus = f"{ranks} GPU{'s' if ranks > 1 else ''}"
    lines = [
        f"{engine} {version} on {target.name} ({target.arch}), {gpus}",
        seams.in_words(engine),
        *paths,
    ]
    flag = flag_name(engine, serving.name)
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
    config = read_json(file, "the model's", CONFIG_BYTES)
    if not isinstance(config, dict):
        raise BadInputError(f"{file} must be a JSON object, got {type(config).__name__}")
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, dict) else config


def _families_of(config: dict[str, Any]) -> list[Family]:
    """The families that serve layers of the model.

    Raises:
        BadInputError: there is none.
    """
    refusals = {name: family.model_refusal(config) for name, family in families().items()}
    serving = [family for name, family in families().items() if refusals[name] is None]
    if not serving:
        raise BadInputError(
            f"MODEL must have layers of a family, got a {config.get('model_type')!r} model: "
            f"{'; '.join(str(refusal) for refusal in refusals.values())}"
        )
    return serving


def _describe(
    candidates: list[Family], target: Target, config: dict[str, Any], ranks: int, engine: str
) -> tuple[Family, list[str]]:
    """The first family that has kernel paths for the model here, and every family's paths in lines.

    Raises:
        CliError: no family has any.
        BadInputError: the configuration cannot be read, or the model not be split.
    """
    serving: list[Family] = []
    lines: list[str] = []
    reasons: list[str] = []
    for family in candidates:
        try:
            described = family.describe_model(target, config, ranks, engine)
        except LookupError as error:
            reasons.append(str(error))
            lines += ["", family.title, wrapped(f"upstream's code, since {error}", 2)]
            continue
        except ValueError as error:
            raise BadInputError(str(error)) from error
        serving.append(family)
        lines += ["", family.title, *(wrapped(note, 2) for note in described.notes)]
        rows = described.rows.items()
        lines += columns(
            [(name, *row) for name, found in rows for row in short_rows(map(facts, found))], 2
        )
    if not serving:
        raise CliError(f"this machine has no kernel path for this model: {'; '.join(reasons)}")
    return serving[0], lines


def _version(engine: str) -> str:
    version = ENGINES[engine].installed()
    if version is None:
        raise CliError(f"{engine} is not installed here")
    flag = VLLM_FLAG if engine == "vllm" else SGLANG_FLAG
    if (reason := seams.difference(flag)) is not None:
        raise CliError(f"{reason}: serve it without this backend")
    return version


def _ranks_of_a_layer(engine: str, arguments: list[str], ranks: int) -> int:
    """GPUs that share the heads of a layer: with attention in data or context parallel, sglang's
    tensor-parallel ``ranks`` are several groups, each with all heads."""
    if engine != "sglang":
        return ranks
    groups = _size(arguments, _ATTENTION_DATA_PARALLEL)
    if groups == 1 and any(_option(x)[0] == "--enable-dp-attention" for x in arguments):
        groups = _size(arguments, _DATA_PARALLEL)
    return max(1, ranks // groups // _size(arguments, _ATTENTION_CONTEXT_PARALLEL))


def _size(arguments: list[str], names: tuple[str, ...]) -> int:
    """The number that an option of these names is given, by default 1."""
    found = "1"
    for place, argument in enumerate(arguments):
        name, equals, value = _option(argument)
        if name in names:
            found = value if equals else "".join(arguments[place + 1 : place + 2])
    if not found.isdecimal() or int(found) < 1:
        raise BadInputError(f"{names[0]} must be a positive number, got {found!r}")
    return int(found)


def _option(argument: str) -> tuple[str, str, str]:
    """Name, ``=`` and value; vLLM takes underscores for dashes in a name."""
    name, equals, value = argument.partition("=")
    return name.replace("_", "-"), equals, value


def _program(engine: str) -> str:
    """The engine's own program, of this environment before any other on the path."""
    beside = Path(sys.executable).with_name(engine)
    program = str(beside) if beside.is_file() else shutil.which(engine)
    if program is None:
        raise CliError(f"{engine} is installed, but its program is not on the path")
    return program
