"""`homespec generate`: answer one prompt."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from homespec.checking import check_pair
from homespec.cli import options
from homespec.cli.app import INTERRUPTED
from homespec.cli.files import fetch_named, named_pair
from homespec.cli.signals import stop_on_signal
from homespec.cli.sizes import reserve_option
from homespec.cli.tables import print_report
from homespec.console import AnswerWriter, figures, load_bars, stderr
from homespec.decoding.types import FinishReason
from homespec.engine import Engine
from homespec.errors import RefusedError, UsageError
from homespec.fetching import params_for, plan_request
from homespec.generation import WITHOUT_DRAFT_MODEL, Generation
from homespec.llama.context import Context
from homespec.models.catalog import load_catalog


@click.command("generate")
@click.argument("prompt", required=False)
@click.option("-p", "--prompt", "prompt_flag", metavar="TEXT", help="The prompt, as a flag.")
@click.option("-f", "--file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="System prompt.")
@options.system_prompt_file_option
@options.model_options
@click.option(
    "-n",
    "--n-predict",
    type=click.IntRange(-1),
    default=-1,
    help="Most new tokens (default -1: until the model ends).",
)
@options.speculation_options
@options.sampling_options
@options.load_options
@click.option("-r", "--stop", "stop", multiple=True, metavar="TEXT", help="End before this text.")
@click.option("--ignore-eos", is_flag=True, help="Never let the model end by itself.")
@click.option("--raw", is_flag=True, help="Continue the prompt as it stands: no chat template.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--show-accepted", is_flag=True, help="Tint the tokens that were drafted.")
@click.option("--dry-run", is_flag=True, help="Show the memory plan, and load nothing.")
@reserve_option
@click.option("--explain", is_flag=True, help="Say why it drafted as it did.")
@click.option("-q", "--quiet", is_flag=True, help="Print the answer alone.")
def command(prompt: str | None, **flags: Any) -> None:
    """Answer PROMPT, from the argument, -f FILE or standard input.

    The answer goes to stdout, everything else to stderr.
    """
    models = options.model_references(flags)
    sampling = options.sampling_params(flags)
    load_settings = options.load_params(flags)
    load_settings["reserve_bytes"] = flags.pop("reserve_bytes")
    if flags.pop("dry_run"):
        click.get_current_context().exit(_dry_run(models, load_settings, flags["spec_type"]))
    text = _prompt(prompt, flags)
    system_file = flags.pop("system_prompt_file")
    system = flags.pop("system") or (options.read_text(system_file) if system_file else None)
    shown = {key: flags.pop(key) for key in ("as_json", "show_accepted", "quiet", "explain")}
    n_predict = flags.pop("n_predict")
    if n_predict == 0:
        raise UsageError("-n 0 asks for no tokens.", hint="Use -1 for no limit.")
    target, draft, params = fetch_named(models, load_settings, flags["spec_type"])
    with Engine(target, draft, params) as engine:
        generation = engine.stream(
            text,
            system=system,
            sampling=sampling,
            max_tokens=None if n_predict < 0 else n_predict,
            **flags,
        )
        interrupted = _run(generation, engine.context, shown)
        if shown["explain"] and engine.untuned and not shown["as_json"]:
            stderr().print(f"Not all settings are measured ones: {engine.untuned}.")
    if interrupted:
        click.get_current_context().exit(INTERRUPTED)


def _prompt(argument: str | None, flags: dict[str, Any]) -> str:
    flag, file = flags.pop("prompt_flag"), flags.pop("file")
    given = [text for text in (argument, flag) if text is not None]
    if file is not None:
        given.append(options.read_text(file))
    if len(given) > 1:
        raise UsageError("More than one prompt is given.", hint="Use the argument, -p or -f.")
    if given:
        return given[0]
    if sys.stdin.isatty():
        raise UsageError(
            "There is no prompt.", hint='Try: homespec generate "Why is the sky blue?"'
        )
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as exc:
        raise UsageError("Standard input is not UTF-8 text.") from exc


def _dry_run(models: dict[str, Any], settings: dict[str, Any], spec_type: str) -> int:
    """Print what would be loaded where; 0 where it fits."""
    pair = named_pair(models, spec_type)
    request = plan_request(params_for(pair, settings))
    if spec_type in WITHOUT_DRAFT_MODEL:
        request = replace(request, drafting=spec_type)
    known, offline = load_catalog(models["catalog"]), models["offline"]
    with load_bars() as bars:
        report = check_pair(pair, request, known, offline=offline, progress=bars.download)
    print_report(report)
    return 0 if report.usable else RefusedError.exit_code


def _run(generation: Generation, context: Context, shown: dict[str, bool]) -> bool:
    """Write the answer; whether it was interrupted."""
    as_json = shown["as_json"]
    writer = AnswerWriter(show_accepted=shown["show_accepted"])
    with stop_on_signal(context) as stopped, suppress(KeyboardInterrupt):
        for chunk in generation:
            if not as_json:
                writer.write(chunk.text, accepted=chunk.accepted)
            if stopped:
                break
    generation.cancel()
    result = generation.result
    if as_json:
        options.print_json(result.as_dict())
    else:
        writer.end()
    if not shown["quiet"] and not as_json:
        stderr().print(figures(result.stats), style="dim")
    if shown["explain"] and not as_json:
        for line in result.explanation:
            stderr().print(line)
    return result.finish_reason is FinishReason.CANCELLED
