"""The program's commands, one file each; this one lists them."""

from __future__ import annotations

import importlib.util
import io
import os
import sys
from typing import Annotated

import typer

from backend_cli.bench import bench
from backend_cli.check.command import check
from backend_cli.errors import CliError, CommandGroup
from backend_cli.eval.compare import compare
from backend_cli.eval.gsm8k import gsm8k
from backend_cli.eval.recall import recall
from backend_cli.info import info
from backend_cli.seams import seams
from backend_cli.serve import serve
from backend_cli.tune.command import tune
from backend_core import __version__

app = typer.Typer(
    name="kda-dsv4",
    cls=CommandGroup,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Faster attention layers for vLLM, sglang and transformers: Kimi Delta Attention, "
    "DeepSeek-V4's KV compressor, MLA and block-sparse attention.",
)
app.command()(info)
app.command()(seams)
app.command()(check)
app.command()(tune)
for passes_on in (serve, bench):
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(
        passes_on
    )

evaluation = typer.Typer(help="Measure a model's accuracy, and compare two measurements.")
evaluation.command()(gsm8k)
evaluation.command()(recall)
evaluation.command()(compare)
app.add_typer(evaluation, name="eval")


@app.callback(invoke_without_command=True)
def _root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        print(__version__)
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def demo(
    num_questions: Annotated[
        int | None, typer.Option(min=1, help="Number of questions; 32 by default.")
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Let a small model answer questions over real text, with this package and without it."""
    missing = [p for p in ("torch", "transformers") if importlib.util.find_spec(p) is None]
    if missing:
        raise CliError(f"the demo needs {' and '.join(missing)}: pip install '.[cpu]' in the clone")
    # read when torch is loaded; threads that wait for one another stretch it on a busy machine
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    from backend_cli.demo import run

    raise typer.Exit(run(num_questions, json_output))


def main() -> None:
    """Entry point of the ``kda-dsv4`` script."""
    # a stream that is closed from the start (>&-) is none
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115 (for the whole process)
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # an answer may have what a terminal has not
            stream.reconfigure(errors="replace")
    if os.environ.get("COLUMNS") == "0":  # an unknown width, in which rich prints nothing
        del os.environ["COLUMNS"]
    app(prog_name="kda-dsv4")


if __name__ == "__main__":
    main()
