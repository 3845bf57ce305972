"""`homespec bench`: is speculation worth it on this machine?"""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from homespec.bench.arms import parse_arms
from homespec.bench.compare import compare, read_result
from homespec.bench.output import as_dict
from homespec.bench.peer import Peer
from homespec.bench.prompts import BUILT_IN, choose, read_prompts
from homespec.bench.records import BenchResult
from homespec.bench.report import check_report, write_report
from homespec.bench.runner import BenchParams, run
from homespec.cli import options
from homespec.cli.app import INTERRUPTED
from homespec.cli.bench_tables import print_comparison, print_notes, print_result
from homespec.cli.files import fetch_named
from homespec.cli.measuring import measuring
from homespec.console import print_note
from homespec.decoding.sampling import SamplingParams
from homespec.engine import Engine
from homespec.errors import UsageError

QUICK_PROMPTS, QUICK_TOKENS = 3, 40  # of each category, of each answer
TOKENS = 128


@click.command("bench")
@click.argument("pair", required=False, metavar="[PAIR]")
@options.model_options
@click.option(
    "--arm",
    "arms",
    multiple=True,
    metavar="ARM",
    help='plain, auto, or settings: "depth=fixed:4", "spec-type=ngram,draft-max=8". One is set '
    "beside plain and auto; several stand alone, judged by the first.",
)
@click.option("--quick", is_flag=True, help="Fewer prompts and shorter answers.")
@click.option(
    "--prompts",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="JSONL of your own, Spec-Bench's format included, or a folder of it.",
)
@click.option(
    "--per-category", type=click.IntRange(1), metavar="N", help="Prompts of each category."
)
@click.option(
    "-n",
    "--n-predict",
    type=click.IntRange(2),
    metavar="N",
    help=f"Tokens of each answer (default: {TOKENS}, {QUICK_TOKENS} with --quick).",
)
@click.option(
    "--repeats", type=click.IntRange(1), default=1, show_default=True, help="Of every prompt."
)
@click.option(
    "--budget", type=click.FloatRange(1), metavar="SECONDS", help="Begin no prompt after so long."
)
@click.option(
    "--warm", is_flag=True, help="Let the target read each prompt before: decoding alone counts."
)
@click.option("--against", metavar="URL", help="An OpenAI-compatible server to put beside.")
@click.option("--against-model", metavar="NAME", help="The server's model (default: its first).")
@click.option(
    "--against-key",
    metavar="KEY",
    help="Its API key (or HOMESPEC_BENCH_AGAINST_KEY).",
)
@click.option(
    "--report",
    type=click.Path(path_type=Path),
    metavar="FILE.html",
    help="Write a page; plots need the extra `plot`.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option(
    "--compare",
    "compared",
    nargs=2,
    type=click.Path(path_type=Path),
    metavar="A.json B.json",
    help="Compare two results, of two boxes for example; measure nothing.",
)
@options.sampling_options
@options.load_options
def command(pair: str | None, **flags: Any) -> None:
    """Measure plain and speculative decoding of PAIR on the same prompts, by turns.

    Answers are greedy unless --temp is given, and all of one length. Arms share the loaded target;
    each starts every prompt with empty caches.
    """
    as_json, report, compared = (flags.pop(key) for key in ("as_json", "report", "compared"))
    if compared:
        _compare(compared, as_json)
        return
    if report is not None:
        check_report(report)
    result = _measure(pair, flags)
    if as_json:
        options.print_json(as_dict(result))
    else:
        print_result(result)
    print_notes(result)
    if report is not None:
        write_report(result, report)
        print_note(f"The report is in {report}.")
    if result.interrupted:
        click.get_current_context().exit(INTERRUPTED)


def _measure(pair: str | None, flags: dict[str, Any]) -> BenchResult:
    models = options.model_references(flags)
    if pair is not None:
        if models["target"] is not None:
            raise UsageError("PAIR and -m both name the target.", hint="Give one of them.")
        models["target"] = pair
    url = flags.pop("against")
    arms = parse_arms(flags.pop("arms"), url)
    quick, own = flags.pop("quick"), flags.pop("prompts")
    per_category = flags.pop("per_category") or (QUICK_PROMPTS if quick else None)
    prompts = choose(read_prompts(own or BUILT_IN), per_category)
    params = BenchParams(
        max_tokens=flags.pop("n_predict") or (QUICK_TOKENS if quick else TOKENS),
        repeats=flags.pop("repeats"),
        budget_seconds=flags.pop("budget"),
        sampling=_sampling(flags),
        warm=flags.pop("warm"),
    )
    named, key = flags.pop("against_model"), flags.pop("against_key")
    peer = Peer(url, named, key) if url else None
    try:
        target, draft, load = fetch_named(models, options.load_params(flags))
        began = time.perf_counter()
        with Engine(target, draft, load) as engine:
            load_seconds = time.perf_counter() - began
            with measuring() as progress:
                return run(
                    engine,
                    arms,
                    prompts,
                    params,
                    load_seconds=load_seconds,
                    command=told_command(sys.argv[1:]),
                    progress=progress,
                    peer=peer,
                )
    finally:
        if peer is not None:
            peer.close()


def told_command(words: Sequence[str]) -> str:
    """The command line for the record: without this machine's folders, and without a key."""
    told, is_key = ["homespec"], False
    for word in words:
        shown = "KEY" if is_key else re.sub(r"(^|=)/.*/", r"\1", word)
        told.append(re.sub(r"^(--against-key)=.*", r"\1=KEY", shown))
        is_key = word == "--against-key"
    return shlex.join(told)


def _sampling(flags: dict[str, Any]) -> SamplingParams:
    """Greedy unless a temperature is given; with a seed, that all arms draw the same numbers."""
    given = options.sampling_params(flags)
    source = click.get_current_context().get_parameter_source("temperature")
    temperature = 0.0 if source is ParameterSource.DEFAULT else given.temperature
    return replace(given, temperature=temperature, seed=1 if given.seed is None else given.seed)


def _compare(files: tuple[Path, Path], as_json: bool) -> None:
    comparison = compare(*map(read_result, files))
    if as_json:
        options.print_json(comparison.as_dict())
    else:
        print_comparison(comparison)
