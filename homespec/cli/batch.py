"""`homespec batch`: answer the rows of a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from homespec.api import Defaults
from homespec.batch.local import LocalRunner
from homespec.batch.run import BatchRun, Runner, Summary
from homespec.batch.source import survey
from homespec.batch.work import file_digest
from homespec.cli import options
from homespec.cli.app import INTERRUPTED
from homespec.cli.batch_files import open_files
from homespec.cli.batch_progress import progress, stop_in_steps
from homespec.cli.files import fetch_named
from homespec.cli.sizes import reserve_option
from homespec.cluster.runner import ClusterRunner
from homespec.console import print_note
from homespec.drafters.answer_store import SHARED_TOKENS
from homespec.errors import UsageError
from homespec.generation import MAX_DRAFT_DEPTH, WITHOUT_DRAFT_MODEL, GenerateParams
from homespec.models.pairs import local_path
from homespec.scheduling.engine import MAX_PARALLEL, ParallelEngine
from homespec.scheduling.parallel import COUNTS

_FILE = click.Path(path_type=Path)


def _parallel(_: click.Context, parameter: click.Parameter, value: str) -> int | None:
    if value == "auto":
        return None
    if value.isdigit() and 1 <= int(value) <= MAX_PARALLEL:
        return int(value)
    raise click.BadParameter(f"{value!r} is neither 1 to {MAX_PARALLEL} nor auto.", param=parameter)


parallel_option = click.option(
    "-np",
    "--parallel",
    callback=_parallel,
    default="auto",
    show_default=True,
    metavar="N|auto",
    help="Answers at once; auto for what the machine does best.",
)


@click.command("batch")
@click.argument("pair", required=False, metavar="[PAIR]")
@click.option(
    "-i", "--input-file", "source", type=_FILE, required=True, help="Rows; - for standard input."
)
@click.option(
    "-o", "--output-file", "output", type=_FILE, required=True, help="Answers; - for stdout."
)
@click.option("--jsonl-errors", "errors", type=_FILE, metavar="FILE", help="Rows that failed.")
@click.option("--retry-errors", is_flag=True, help="Do rows again that failed in an earlier run.")
@parallel_option
@click.option(
    "--cluster",
    metavar="tcp://HOST:8786",
    help="Have the workers of this Dask scheduler answer (docs/cluster.md).",
)
@click.option(
    "--drop-on-interrupt", is_flag=True, help="At Ctrl-C, give up rows on their way at once."
)
@options.model_options
@click.option(
    "-n",
    "--n-predict",
    type=click.IntRange(-1),
    default=-1,
    help="Most new tokens of a row that says nothing itself (default -1: until the model ends).",
)
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="Before every chat.")
@options.system_prompt_file_option
@click.option("-r", "--stop", "stop", multiple=True, metavar="TEXT", help="End before this text.")
@click.option("--ignore-eos", is_flag=True, help="Never let the model end by itself.")
@click.option("--raw", is_flag=True, help="Continue bare prompts as they stand: no chat template.")
@click.option(
    "--spec-type",
    type=click.Choice(["auto", *WITHOUT_DRAFT_MODEL]),
    default="auto",
    show_default=True,
    help="Draft by lookup where it pays, or not at all.",
)
@click.option(
    "--spec-draft-n-max",
    "--draft-max",
    "--draft-n",
    "--draft",
    "draft_depth",
    type=click.IntRange(0, MAX_DRAFT_DEPTH),
    help="Most tokens drafted for a row in a pass (default: 31).",
)
@options.sampling_options
@options.load_options
@reserve_option
@click.option("-q", "--quiet", is_flag=True, help="No progress, no summary.")
def command(pair: str | None, **flags: Any) -> None:
    """Answer the rows of a file with PAIR, many at once.

    A row is a line: the OpenAI batch form (custom_id, method, url, body), {"prompt": ...},
    {"messages": [...]} or plain text; the file may be gzipped. Answers are appended to the output
    as they come. After a kill or Ctrl-C the same command does what is missing.
    """
    models = options.model_references(flags)
    if pair is not None:
        if models["target"] is not None:
            raise UsageError("PAIR and -m both name the target.", hint="Give one of them.")
        models["target"] = pair
    quiet = flags.pop("quiet")
    if models.pop("draft") is not None and not quiet:
        print_note("Many rows at once draft by lookup: the draft model is not loaded.")
    load = options.load_params(flags)
    load["reserve_bytes"] = flags.pop("reserve_bytes")
    defaults = _defaults(flags)
    source, outputs = open_files(*(flags[name] for name in ("source", "output", "errors")))
    try:
        num_rows = survey(source)
        with _runner(models, load, defaults, flags, num_rows) as (runner, about):
            if not quiet:
                print_note(f"{num_rows} rows with {about}.")
            run = BatchRun(
                source,
                runner,
                defaults,
                *outputs,
                num_rows=num_rows,
                retry_errors=flags["retry_errors"],
            )
            summary = _run(run, drop=flags["drop_on_interrupt"], quiet=quiet)
    finally:
        source.close()
        for output in outputs:
            output.close()
    click.get_current_context().exit(_code(summary))


@contextmanager
def _runner(
    models: dict[str, Any],
    load: dict[str, Any],
    defaults: Defaults,
    flags: dict[str, Any],
    num_rows: int,
) -> Iterator[tuple[Runner, str]]:
    """What answers the rows, and what to call it."""
    if flags["cluster"] is not None:
        _refuse_load_flags()
        with closing(ClusterRunner(flags["cluster"], defaults)) as cluster:
            if _given("pair", "model", "hf_repo"):
                _refuse_other_model(models, cluster)
            yield cluster, f"{cluster.model_name} on the workers of {flags['cluster']}"
        return
    with load_engine(models, load, flags["parallel"], num_rows) as engine:
        yield (
            LocalRunner(engine, defaults),
            f"{engine.model.path.stem}, {engine.parallel} at once "
            f"over {engine.cache.num_cells} cells",
        )


def _given(*names: str) -> list[str]:
    """The flags of these names that stand in the command line."""
    context = click.get_current_context()
    return [
        parameter.opts[0]
        for parameter in context.command.params
        if parameter.name in names
        and context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
    ]


def _refuse_load_flags() -> None:
    given = _given(*_OF_LOADING)
    if given:
        raise UsageError(
            f"{given[0]} is for a model that is loaded here, but with --cluster none is.",
            hint="Give it to `homespec worker`, on each machine.",
        )


def _refuse_other_model(models: dict[str, Any], cluster: ClusterRunner) -> None:
    name, held = models["target"], cluster.model_name
    path = local_path(name, catalog=models["catalog"])
    if path is None:
        raise UsageError(
            f"{name} is not on this machine: nobody can tell whether the workers hold it.",
            hint=f"Leave it out: they answer with {held}.",
        )
    if file_digest(path) != cluster.model_digest:
        raise UsageError(
            f"{name} is not what the workers of the cluster hold: that is {held}.",
            hint="Leave it out, or start the workers with it.",
        )


def _code(summary: Summary) -> int:
    if summary.interrupted:
        return INTERRUPTED
    return 1 if summary.num_failed or summary.num_failed_before else 0


def _defaults(flags: dict[str, Any]) -> Defaults:
    sampling = options.sampling_params(flags)
    n_predict = flags.pop("n_predict")
    if n_predict == 0:
        raise UsageError("-n 0 asks for no tokens.", hint="Use -1 for no limit.")
    file = flags.pop("system_prompt_file")
    system = flags.pop("system") or (options.read_text(file) if file else None)
    params = GenerateParams(
        max_tokens=None if n_predict < 0 else n_predict,
        **{name: flags.pop(name) for name in _PARAMS},
    )
    return Defaults(sampling, params, system)


_PARAMS = ("stop", "ignore_eos", "raw", "spec_type", "draft_depth")
_OF_LOADING = (
    *("parallel", "ctx_size", "threads", "threads_batch", "n_gpu_layers", "device", "flash_attn"),
    *("cache_type_k", "cache_type_v", "strict_exact", "mlock", "no_mmap", "reserve_bytes"),
)


def load_engine(
    models: dict[str, Any], load: dict[str, Any], parallel: int | None, most: int = COUNTS[-1]
) -> ParallelEngine:
    """The model for many rows of one owner at once; bars while it is fetched."""
    target, _, params = fetch_named(models, load, "ngram")
    return ParallelEngine(target, params, parallel=parallel, most=most, shared_tokens=SHARED_TOKENS)


def _run(run: BatchRun, *, drop: bool, quiet: bool) -> Summary:
    with progress(quiet=quiet) as tell, stop_in_steps(run, drop=drop, quiet=quiet):
        summary = run.run(tell)
    if not quiet:
        print_note(_sentence(summary))
    return summary


def _sentence(summary: Summary) -> str:
    parts = [f"{summary.num_done} answered"]
    for count, what in (
        (summary.num_failed, "failed"),
        (summary.num_skipped - summary.num_failed_before, "done before"),
        (summary.num_failed_before, "failed before (--retry-errors tries them again)"),
        (summary.num_dropped, "given up"),
        (summary.num_left, "left"),
    ):
        if count:
            parts.append(f"{count} {what}")
    rate = f"{summary.num_tokens} tokens in {summary.seconds:.1f} s"
    if summary.num_tokens:
        rate += f", {summary.tokens_per_second:.1f} tok/s"
    sentence = f"{summary.num_rows} rows: {', '.join(parts)}. {rate}."
    if summary.interrupted:
        sentence = f"Interrupted. {sentence} The same command does the rest."
    return sentence
