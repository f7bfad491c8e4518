"""The command line. Every command is a few lines over the room that does the work."""

from __future__ import annotations

import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from megarl.errors import EXIT_USER_ERROR, UserError
from megarl.monitor.tell import tell

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
bench_app = typer.Typer(help="Measure ratios side by side on this machine.", no_args_is_help=True)
app.add_typer(bench_app, name="bench")

ConfigFile = Annotated[Path, typer.Argument(help="YAML file of the run.", show_default=False)]
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

    try:
        settings = load_config(config, overrides or ())
    except UserError as error:
        error.silent = not launcher.is_first_rank()
        raise
    if not launcher.under_torchrun():
        ranks = launcher.ranks_on_this_machine(settings)
        if ranks > 1:
            raise typer.Exit(launcher.launch(settings, ["train", str(config), *(overrides or ())]))
    else:
        launcher.die_with_parent()
    from megarl.training.train import train as run

    run(settings)


@app.command()
def check(config: ConfigFile, overrides: Overrides = None) -> None:
    """Check a run without starting it: keys, rules, algorithm, layout, model, engine, tokenizer, data, verifiers.

    Refuses what the run's start would refuse, as far as one process can see it. For a run on several nodes say how
    many ranks there are in all: launch.ranks=32.
    """
    from megarl.config.load import load_config
    from megarl.launcher import ranks_on_this_machine
    from megarl.training.check import check_run

    settings = load_config(config, overrides or ())
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
def report(folder: Annotated[Path, typer.Argument(help="Run folder.")]) -> None:
    """Sum up a run from its metrics: first, last and best values, time per phase, curves."""
    from megarl.monitor.report import report_run

    report_run(folder)


@app.command()
def verify(
    file: Annotated[Path, typer.Argument(help="Responses: JSON lines, JSON, CSV or parquet.")],
    verifier: Annotated[str, typer.Option(help="Name or import path of a verifier.")] = "math",
    option: Annotated[
        list[str] | None, typer.Option("--option", "-o", help="key=value of the verifier.")
    ] = None,
    response: Annotated[str, typer.Option(help="Column of the response.")] = "response",
    reference: Annotated[str, typer.Option(help="Column of the reference.")] = "reference",
    answer: Annotated[str | None, typer.Option(help="Column to use as the reference's answer.")] = None,
    label: Annotated[str, typer.Option(help="Column of a known verdict, compared if it is there.")] = "label",
    skip_bad_rows: Annotated[bool, typer.Option(help="Count rows that can't be read, and go on.")] = False,
    workers: Annotated[int, typer.Option(help="Scoring processes.")] = 2,
    write: Annotated[Path | None, typer.Option(help="JSON-lines file for the verdicts.")] = None,
) -> None:
    """Score a file of responses without training, and compare the verdicts with a column of labels."""
    from megarl.rewards.verify_file import Columns, parse_options, verify_file

    columns = Columns(response=response, reference=reference, answer=answer, label=label)
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


@bench_app.command("logprobs")
def bench_logprobs(
    tokens: Annotated[int, typer.Option(help="Tokens of the micro-batch.", min=1)] = 2048,
    hidden_size: Annotated[int, typer.Option(help="Width of the hidden states.", min=1)] = 512,
    vocabulary: Annotated[int, typer.Option(help="Rows of the LM head.", min=2)] = 32768,
    chunk: Annotated[int, typer.Option(help="Tokens whose logits exist at one time.", min=1)] = 512,
    dtype: Annotated[str, typer.Option(help="float32 or bfloat16.")] = "float32",
    turns: Annotated[int, typer.Option(help="Times that each variant is measured.", min=2)] = 5,
) -> None:
    """The LM head's log-probabilities and entropies in chunks beside the plain computation: time and memory."""
    from megarl.bench.logprobs import bench_logprobs as measure
    from megarl.training.run import DTYPES

    if dtype not in DTYPES:
        raise UserError(f"--dtype is {dtype!r}, it must be one of {', '.join(DTYPES)}")
    print(
        measure(
            tokens=tokens,
            hidden_size=hidden_size,
            vocabulary=vocabulary,
            chunk=chunk,
            dtype=DTYPES[dtype],
            turns=turns,
        )
    )


SIZES = {
    "small": {},
    "deep": {"layers": 12, "experts": 16, "top_k": 4},
    "wide": {"hidden_size": 384, "expert_size": 256, "experts": 16, "top_k": 4, "vocabulary": 4096},
}
Size = Annotated[str, typer.Option(help=f"A tiny policy: {', '.join(SIZES)}, or all of them.")]
Turns = Annotated[int, typer.Option(help="Times that each variant is measured.", min=2)]

MemorySteps = Annotated[int, typer.Option(help="Steps over which memory is watched.", min=10)]


@bench_app.command("replay")
def bench_replay(size: Size = "all", turns: Turns = 7, memory_steps: MemorySteps = 200) -> None:
    """A training step with and without routing replay (R2 recorded, R3 the engine's), on the same samples, and the
    memory of routes over many steps."""
    from megarl.bench.step import REPLAY, memory_over_steps

    _bench_steps(size, turns, REPLAY)
    resident = memory_over_steps(memory_steps)
    early, last = max(resident[: memory_steps // 10]), max(resident[-memory_steps // 10 :])
    print(
        f"resident memory with 12 MiB of routes a step: {early / 2**20:.0f} MiB in the first tenth of {memory_steps} "
        f"steps, {last / 2**20:.0f} MiB in the last"
    )


@bench_app.command("logprob-source")
def bench_logprob_source(size: Size = "all", turns: Turns = 7) -> None:
    """A training step with recomputed old log-probabilities and with the engine's, on the same samples."""
    from megarl.bench.step import LOGPROB_SOURCES

    _bench_steps(size, turns, LOGPROB_SOURCES)


def _bench_steps(size: str, turns: int, variants: Mapping[str, tuple[str, str]]) -> None:
    from megarl.bench.step import StepSize, bench_step

    if size != "all" and size not in SIZES:
        raise UserError(f"--size is {size!r}, it must be one of {', '.join(SIZES)} or all")
    for name, fields in SIZES.items():
        if size in ("all", name):
            print(f"{name}: {bench_step(StepSize(**fields), variants, turns=turns).table()}\n")  # type: ignore[arg-type]


@bench_app.command("checkpoint")
def bench_checkpoint(
    layers: Annotated[
        int, typer.Option(help="Layers of the policy, 28 MB of training state each.", min=1)
    ] = 2,
    turns: Turns = 7,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the disk to measure, instead of that of temporary files.")
    ] = None,
) -> None:
    """Saving and loading a training checkpoint beside torch.save of as many bytes, and what of it training waits for
    when it is written behind."""
    from megarl.bench.checkpoint import bench_checkpoint as measure
    from megarl.bench.step import StepSize

    if folder is not None and not folder.is_dir():
        raise UserError(f"--folder {folder}: no such folder")
    size = StepSize(layers=layers, hidden_size=256, expert_size=256)
    print(measure(size, turns=turns, below=folder))


@app.command()
def convert(
    source: Annotated[
        Path, typer.Argument(help="Hugging Face folder, or Megatron checkpoint.", show_default=False)
    ],
    target: Annotated[Path, typer.Argument(help="Folder to write, a new one.", show_default=False)],
    config: Annotated[
        Path | None,
        typer.Option(help="Hugging Face folder with config.json and tokenizer, if SOURCE has none."),
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
    from megarl.megatron.layout import Layout
    from megarl.weights import convert as conversion

    layout = Layout(tensor=tensor, pipeline=pipeline, expert=expert)
    if not launcher.under_torchrun():
        conversion.check(source, target, config, layout)
        if (ranks := launcher.fewest_ranks(layout)) > 1:
            words = ["convert", str(source), str(target), "--dtype", dtype]
            words += ["--config", str(config)] if config else []
            for name, size in (("tensor", tensor), ("pipeline", pipeline), ("expert", expert)):
                words += [f"--{name}", str(size)]
            raise typer.Exit(launcher.start_ranks(ranks, threads, words))
    else:
        launcher.die_with_parent()
    done = conversion.convert(source, target, layout=layout, config_folder=config, dtype=dtype)
    if launcher.is_first_rank():
        print(done)


@data_app.command("inspect")
def data_inspect(
    file: Annotated[Path, typer.Argument(help="A file or folder of rows.")],
    preset: Annotated[str | None, typer.Option(help="Column layout of a known data set.")] = None,
    column: Annotated[
        list[str] | None, typer.Option("--column", "-c", help="role=name, in place of the preset's.")
    ] = None,
    split: Annotated[str | None, typer.Option(help="Split of a folder that holds several.")] = None,
    format: Annotated[str | None, typer.Option(help="Format, in place of the name's ending.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Tokenizer folder: adds lengths in tokens.")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="Jinja file, in place of its own.")] = None,
    samples: Annotated[int, typer.Option(help="Prompts to show.")] = 3,
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show counts, length percentiles, duplicates, a few rendered prompts, and problems by row number."""
    import json

    from megarl.data.inspection import inspect_file, render_report
    from megarl.data.tokenizer import load_tokenizer
    from megarl.rewards.verify_file import parse_options

    given = {"preset": preset, "split": split, "format": format, "columns": parse_options(column or [])}
    settings: dict[str, Any] = {key: value for key, value in given.items() if value}
    if chat_template and not tokenizer:
        raise UserError("--chat-template needs --tokenizer, the folder of the tokenizer that it is for")
    tokens = load_tokenizer(tokenizer, chat_template) if tokenizer else None
    found = inspect_file(file, tokenizer=tokens, samples=samples, **settings)
    print(json.dumps(found.as_dict(), indent=2, default=str) if json_output else render_report(found))


@config_app.command("show")
def config_show(config: ConfigFile, overrides: Overrides = None) -> None:
    """Print the resolved configuration: every key, defaults included."""
    from megarl.config.load import load_config, to_yaml

    print(to_yaml(load_config(config, overrides or ())), end="")


@config_app.command("explain")
def config_explain(key: Annotated[str, typer.Argument(help="A key, for example rl.group_size.")]) -> None:
    """Say what a key means, its unit and its default."""
    from megarl.config.load import describe_key

    print(describe_key(key))


def main(arguments: list[str] | None = None) -> Any:
    """The entry point: a user's mistake is one message on standard error and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # what a file holds may be more than a terminal can show
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app(args=arguments, standalone_mode=True)
    except UserError as error:
        if not error.silent:
            tell(f"megarl: error: {error}")
        sys.stderr.flush()
        sys.exit(EXIT_USER_ERROR)
    except KeyboardInterrupt:
        sys.exit(130)
