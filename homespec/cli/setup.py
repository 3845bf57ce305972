"""`homespec setup`: the best pair for this machine, downloaded, tried and made the default."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import click
from rich.text import Text

from homespec.checking import Report
from homespec.cli import options
from homespec.cli.asking import confirmed
from homespec.cli.catalog_options import catalog_options
from homespec.cli.measuring import measuring
from homespec.cli.tables import print_plan
from homespec.console import LoadBars, load_bars, print_note, printable, stderr
from homespec.models.catalog import Pair
from homespec.models.files import human
from homespec.models.memory_plan import PlanRequest
from homespec.setup import Outcome, Settings, set_up
from homespec.tuning.notebook import Progress as Tell

DECLINED = 1


@click.command("setup")
@click.argument("pair", required=False, metavar="[PAIR]")
@click.option("-y", "--yes", is_flag=True, help="Do not ask: for scripts.")
@click.option(
    "-c",
    "--ctx-size",
    type=click.IntRange(0),
    default=4096,
    show_default=True,
    help="Context to plan for, in tokens; 0 for as much of the model's own as fits.",
)
@click.option("--no-tune", is_flag=True, help="Do not measure what the machine does best.")
@catalog_options
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    pair: str | None, yes: bool, ctx_size: int, no_tune: bool, as_json: bool, **where: Any
) -> None:
    """Choose the best pair for this machine, or take PAIR, and make it the default.

    Both files are downloaded, tested in a process of their own, tuned (see homespec tune), and
    tried on a few prompts. PAIR
    is a pair of the catalogue, a source or user/repo[:QUANT]. Without a network the starter
    model is set up.
    """
    settings = Settings(**where, request=PlanRequest(n_ctx=ctx_size), tune=not no_tune)
    with _Guide(asks=not yes, shows_plan=not as_json) as guide:
        outcome = set_up(pair, settings, guide)
    if outcome is None:
        print_note("Nothing was downloaded, and the default is as it was.")
        click.get_current_context().exit(DECLINED)
    if as_json:
        options.print_json(outcome.as_dict())
    else:
        _print(outcome)


class _Guide:
    """Tells on stderr what happens, shows the plan on stdout, and asks."""

    def __init__(self, *, asks: bool, shows_plan: bool) -> None:
        self._asks, self._shows_plan = asks, shows_plan
        self._moving = ExitStack()  # a spinner or bars: one at a time, none beside other output
        self._bars: LoadBars | None = None

    def __enter__(self) -> _Guide:
        return self

    def __exit__(self, *_: object) -> None:
        self._stand_still()

    def _stand_still(self) -> None:
        self._moving.close()
        self._bars = None

    def note(self, text: str) -> None:
        """A sentence."""
        self._stand_still()
        print_note(text)

    def working(self, text: str) -> None:
        """A spinner until the next thing happens; a line where stderr is no terminal."""
        self._stand_still()
        if stderr().is_terminal:
            self._moving.enter_context(stderr().status(Text(printable(text))))
        else:
            print_note(f"{text}.")

    def report(self, report: Report) -> None:
        """The memory plan."""
        self._stand_still()
        if self._shows_plan:
            print_plan(report.plan)

    def download(self, name: str, done: int, total: int | None) -> None:
        """Bars for all files of a download."""
        if self._bars is None:
            self._stand_still()
            self._bars = self._moving.enter_context(load_bars())
        self._bars.download(name, done, total)

    @contextmanager
    def measuring(self) -> Iterator[Tell]:
        """A bar with what is measured."""
        if stderr().is_terminal:
            self._stand_still()
        with measuring() as tell:
            yield tell

    def agrees(self, pair: Pair, download_bytes: int) -> bool:
        """Name the files and ask."""
        self._stand_still()
        about = (f"Licence: {pair.target.licence}" if pair.target.licence else "", pair.notes)
        if any(about):
            print_note(". ".join(text.rstrip(".") for text in about if text) + ".")
        do = f"Download {human(download_bytes)}, try" if download_bytes else "Try"
        draft = f" with {pair.draft.name}" if pair.draft else ""
        proposal = f"{do} {pair.name}{draft} and make it the default"
        if self._asks:
            return confirmed(f"{proposal}?", default=True)
        print_note(f"{proposal}.")
        return True


def _print(outcome: Outcome) -> None:
    trial, pair = outcome.trial, outcome.pair
    always = "Always drafting: " if trial.drafting == "draft_model" else "Of the drafts: "
    click.echo(
        f"Tried on {trial.num_prompts} prompts: {trial.tokens_per_second:.1f} tok/s speculative, "
        f"{trial.plain_tokens_per_second:.1f} plain, {trial.speed_ratio:.2f} x. "
        f"{always}{trial.acceptance_rate:.0%} accepted, acceptance length "
        f"{trial.mean_acceptance_length:.2f}."
    )
    drafts = pair.draft.name if pair.draft else "n-grams"
    click.echo(
        f"The default is {pair.name} now, drafts from {drafts}. Try: homespec generate Hello"
    )
