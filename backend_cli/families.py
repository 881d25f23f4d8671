"""The families that the commands loop over."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from backend_cli.errors import BadInputError, CliError
from backend_cli.files import read_json
from backend_core.family import Family, families
from backend_core.tables.load import PathTable, load_table
from backend_core.target import Target


def no_gpu() -> str:
    """Why no GPU was found: the end of a sentence."""
    if importlib.util.find_spec("torch") is None:
        return "torch, which finds it, is not installed here"
    return "there is none here"


def chosen_families(names: Sequence[str]) -> list[Family]:
    """The families of those names; all of them where there are no names.

    Raises:
        BadInputError: there is no family of a name.
    """
    known = families()
    if unknown := [name for name in names if name not in known]:
        raise BadInputError(f"--family must be one of {', '.join(known)}, got {unknown[0]!r}")
    return [known[name] for name in names or known]


def table_of(family: Family, target: Target) -> PathTable:
    """The table that ``family`` uses on ``target``: the user's, else the shipped one.

    Raises:
        LookupError: there is none.
        BadInputError: the table is malformed.
    """
    try:
        return load_table(family.tables, target)
    except ValueError as error:
        raise BadInputError(str(error)) from error


def family_of_checkpoint(checkpoint: Path) -> Family:
    """The family that serves a checkpoint's model in transformers.

    Raises:
        BadInputError: the checkpoint's ``config.json`` cannot be read.
        CliError: no family with an adapter for transformers serves it.
    """
    config = read_json(checkpoint / "config.json", "the configuration")
    for family in families().values():
        if family.transformers is not None and family.model_refusal(config) is None:
            return family
    raise CliError(f"no family has an adapter for transformers that serves {checkpoint}")


def transformers_adapter(family: Family) -> Any:
    """The module `Family.transformers` of a family, or ``None`` where it has none."""
    # read by transformers when it is imported: its warnings and bars would break into ours
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    return None if family.transformers is None else importlib.import_module(family.transformers)
