"""How the program fails: one sentence on stderr and an exit code, converted in one place."""

from __future__ import annotations

import errno
import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from backend_cli.terminal import visible
from backend_core.strict import is_on

# typer used to raise click's exceptions and now raises those of a copy it carries.
_ClickException: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class CliError(Exception):
    """The command cannot do its work; the message is the sentence that the user reads."""

    exit_code = 1


class BadInputError(CliError):
    """An unusable argument, environment variable or file of the user."""

    exit_code = 2


class CommandGroup(TyperGroup):
    """A command group that turns every exception into a sentence and an exit code.

    1 is failure, 2 bad input and 130 an interrupt. ``KDA_DSV4_TRACEBACK=1`` keeps the traceback of
    an exception that is not a ``CliError``: such a one is a bug of ours.
    """

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run as click does, then exit."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError:
            _close_output()  # the reader of a pipe has left
            sys.exit(1)
        except (KeyboardInterrupt, typer.Abort):
            sys.exit(130)
        except CliError as error:
            _fail(str(error), error.exit_code)
        except _ClickException as error:
            _fail(error.format_message(), error.exit_code)
        except Exception as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                _close_output()
                _fail(f"cannot write the output: {error.strerror}", 1)
            if is_on("KDA_DSV4_TRACEBACK"):
                raise
            _fail(f"internal error, {type(error).__name__}: {error}", 1)
        sys.exit(code or 0)


def _close_output() -> None:
    """Nothing more can be written to stdout, at exit neither."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, code: int) -> None:
    print(f"kda-dsv4: {visible(' '.join(message.split()))}", file=sys.stderr)
    sys.exit(code)
