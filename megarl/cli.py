"""The command line. Every command is a few lines over the room that does the work."""

from __future__ import annotations

import faulthandler
import io
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from megarl.errors import EXIT_USER_ERROR, UserError
from megarl.monitor.signals import Stopped
from megarl.monitor.status import print_status
from megarl.settings import expand_home

app = typer.Typer(
    name="megarl",
    help="Reinforcement learning for Mixture-of-Experts language models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="Look at configurations.", no_args_is_help=True)
data_app = typer.Typer(help="Look at data.", no_args_is_help=True)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")


def path(word: str) -> Path:
    """Read a path of the command line: no shell reads the `~` in `--option=~/file`, or without a shell."""
    try:
        return Path(expand_home(word))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error


AS_PATH: Any = {"parser": path}
ConfigFile = Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False, **AS_PATH)]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="key.sub=value words, laid over the file.", show_default=False)
]


@app.command()
def train(config: ConfigFile, overrides: Overrides = None) -> None:
    """Train: cold start, reinforcement learning, export.

    Starts its own ranks on this machine, unless it already runs under torchrun. Started again with the same run
    folder, it goes on from the newest good checkpoint.
    """
    from megarl import launcher
    from megarl.config.load import load_config
    from megarl.config.rules import check_files
    from megarl.megatron.environment import another_rank_tells, read_place
    from megarl.monitor.signals import StopSignals

    stop = StopSignals()
    stop.listen()
    faulthandler.enable(2)  # a fault in native code says where
    try:  # what can be told before torch is imported
        settings = load_config(config, overrides or ())
        check_files(settings)
    except UserError as error:
        error.silent = another_rank_tells()
        raise
    if (place := read_place()) is not None:
        launcher.check_alone(settings, place)
        launcher.die_with_parent()
        stop.supervised = True
    elif (code := launcher.launch(settings, ["train", str(config), *(overrides or ())])) is not None:
        raise typer.Exit(code)
    elif read_place() is not None:  # a fork
        stop.listen()
        stop.supervised = True
    from megarl.training.train import train as run

    run(settings, stop)


@app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a run without starting it: keys, rules, algorithm, layout, model, engine, tokenizer, data, verifiers.

    Refuses what the run's start would refuse, as far as one process can see it. For a run on several nodes say how
    many ranks there are in all: launch.ranks=32.
    """
    from megarl.config.load import load_config
    from megarl.config.rules import check_files
    from megarl.launcher import ranks_on_this_machine

    settings = load_config(config, overrides or ())
    check_files(settings)  # so far, without torch
    from megarl.training.check import check_run

    print(f"{config}: fine. {check_run(settings, ranks_on_this_machine(settings))}")


@app.command()
def algorithms(
    name: Annotated[
        str | None, typer.Argument(help="A recipe, or a part by name or import path; without it, all.")
    ] = None,
) -> None:
    """Show the objectives: formula, source and every default."""
    from megarl.algorithms import render_algorithms

    print(render_algorithms(name))


@app.command()
def report(folder: Annotated[Path, typer.Argument(help="Run folder.", **AS_PATH)]) -> None:
    """Sum up a run from its metrics: first, last and best values, time per phase, curves."""
    from megarl.monitor.report import report_run

    report_run(folder)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="Responses: JSON lines, JSON, CSV or parquet.", **AS_PATH)],
    verifier: Annotated[str, typer.Option(help="Name or import path of a verifier.")] = "math",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="key=value of the verifier.")
    ] = None,
    response: Annotated[str, typer.Option(help="Column of the response.")] = "response",
    ground_truth: Annotated[str, typer.Option(help="Column of the ground truth.")] = "ground_truth",
    answer: Annotated[str | None, typer.Option(help="Column to use as the ground truth's answer.")] = None,
    label: Annotated[str, typer.Option(help="Column of a known verdict, compared if it is there.")] = "label",
    skip_bad_rows: Annotated[bool, typer.Option(help="Count rows that can't be read, and go on.")] = False,
    workers: Annotated[int, typer.Option(help="Scoring processes.")] = 2,
    write: Annotated[Path | None, typer.Option(help="JSON-lines file for the verdicts.", **AS_PATH)] = None,
) -> None:
    """Score a file of responses without training, and compare the verdicts with a column of labels."""
    from megarl.rewards.scoring.verify_file import Columns, parse_options, verify_file

    columns = Columns(response=response, ground_truth=ground_truth, answer=answer, label=label)
    print(
        verify_file(
            file,
            verifier=verifier,
            options=parse_options(option or []),
            columns=columns,
            on_bad_row="skip" if skip_bad_rows else "error",
            workers=workers,
            write=write,
        )
    )


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(help="Hugging Face folder, or Megatron checkpoint.", show_default=False, **AS_PATH),
    ],
    target: Annotated[
        Path, typer.Argument(help="Folder to write, a new one.", show_default=False, **AS_PATH)
    ],
    config: Annotated[
        Path | None,
        typer.Option(
            help="Hugging Face folder with config.json and tokenizer, if SOURCE has none.", **AS_PATH
        ),
    ] = None,
    dtype: Annotated[str, typer.Option(help="float32 | bfloat16 | auto: what config.json says.")] = "auto",
    tensor: Annotated[int, typer.Option(min=1, help="Tensor parallelism while converting.")] = 1,
    pipeline: Annotated[int, typer.Option(min=1, help="Pipeline parallelism while converting.")] = 1,
    expert: Annotated[int, typer.Option(min=1, help="Expert parallelism while converting.")] = 1,
    threads: Annotated[int, typer.Option(min=1, help="Threads of each rank.")] = 1,
) -> None:
    """Convert weights: a Hugging Face folder to a Megatron distributed checkpoint, or back.

    The direction follows from the source. A Megatron checkpoint can be read in any layout; the one given
    here only spreads work and memory over ranks. They are started on this machine, unless the command
    already runs under torchrun. A training run's checkpoint is converted with --config.
    """
    from megarl import launcher
    from megarl.megatron.environment import forget_place, read_place
    from megarl.megatron.settings import Layout
    from megarl.weights import convert as conversion

    layout = Layout(tensor=tensor, pipeline=pipeline, expert=expert)
    if (place := read_place()) is not None:
        launcher.die_with_parent()
    else:
        conversion.check(source, target, config, layout)
        forget_place()
        if (ranks := launcher.fewest_ranks(layout)) > 1:
            words = ["convert", str(source), str(target), "--dtype", dtype]
            words += ["--config", str(config)] if config else []
            for name, size in (("tensor", tensor), ("pipeline", pipeline), ("expert", expert)):
                words += [f"--{name}", str(size)]
            if (code := launcher.start_ranks(ranks, threads, words)) is not None:
                raise typer.Exit(code)
            place = read_place()
    done = conversion.convert(source, target, layout=layout, config_folder=config, dtype=dtype)
    if place is None or place.rank == 0:
        print(done)


@data_app.command("inspect")
def data_inspect(
    file: Annotated[Path, typer.Argument(help="A file or folder of rows.", **AS_PATH)],
    preset: Annotated[str | None, typer.Option(help="Column layout of a known data set.")] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", "-c", help="role=name, in place of the preset's.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a folder that holds several.")] = None,
    format: Annotated[str | None, typer.Option(help="Format, in place of the name's ending.")] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Tokenizer folder: adds lengths in tokens.", **AS_PATH)
    ] = None,
    chat_template: Annotated[
        Path | None, typer.Option(help="Jinja file, in place of its own.", **AS_PATH)
    ] = None,
    samples: Annotated[int, typer.Option(help="Prompts to show.")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show counts, length percentiles, duplicates, a few rendered prompts, and problems by row number."""
    import json
    from datetime import datetime

    from megarl.data.inspection import inspect_file, render_report
    from megarl.data.tokenizer import load_tokenizer
    from megarl.rewards.scoring.verify_file import parse_options

    given = {"preset": preset, "split": split, "format": format, "columns": parse_options(column or [])}
    settings: dict[str, Any] = {key: value for key, value in given.items() if value}
    if chat_template and not tokenizer:
        raise UserError("--chat-template needs --tokenizer, the folder of the tokenizer that it is for")
    tokens = (
        load_tokenizer(tokenizer, chat_template, now=datetime.now()) if tokenizer else None
    )  # one for all rows
    found = inspect_file(file, tokenizer=tokens, samples=samples, **settings)
    as_json = json.dumps(vars(found), indent=2, default=str).replace("\x7f", "\\u007f")  # the rest is ASCII
    print(as_json if json_output else render_report(found))
    if found.malformed == found.rows:
        raise UserError(
            f"{file}: none of its {found.rows:,} rows can be used. The first: {found.problems[0]}"
        )


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration: every key, defaults included."""
    from megarl.config.load import load_config, to_yaml

    print(to_yaml(load_config(config, overrides or ())), end="")


@config_app.command("explain")
def config_explain(key: Annotated[str, typer.Argument(help="A key, for example rl.group_size.")]) -> None:
    """Say what a key means, its unit and its default."""
    from megarl.config.keys import describe_key

    print(describe_key(key))


def main(arguments: list[str] | None = None) -> Any:
    """The entry point: a user's mistake is one message on standard error and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a file holds may be more than a terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(args=arguments, standalone_mode=True)
    except UserError as error:
        if not error.silent:
            print_status(f"megarl: error: {error}")
        sys.stderr.flush()
        sys.exit(EXIT_USER_ERROR)
    except Stopped as stopped:
        if not stopped.silent:
            print_status(f"megarl: {stopped}")
        sys.exit(stopped.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
