"""`homespec chat`: talk with a model in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

from homespec.chat.conversation import Conversation
from homespec.chat.local_engine import LocalEngine
from homespec.chat.remote_engine import RemoteEngine
from homespec.chat.session import Session
from homespec.chat.settings import Settings
from homespec.chat.types import ChatEngine
from homespec.cli import options
from homespec.cli.app import INTERRUPTED
from homespec.cli.chat_input import LineEditor, PlainLines, piped_message
from homespec.cli.chat_loop import Loop
from homespec.cli.chat_view import PipeView, TerminalView, View, is_plain_terminal
from homespec.cli.files import fetch_named
from homespec.cli.sizes import reserve_option
from homespec.decoding.types import FinishReason
from homespec.engine import Engine
from homespec.errors import UsageError
from homespec.generation import GenerateParams


@click.command("chat")
@click.argument("pair", required=False)
@options.model_options
@click.option("--url", metavar="URL", help="Talk with the model of a server, e.g. of `serve`.")
@click.option("--api-key", metavar="KEY", envvar="HOMESPEC_API_KEY", help="For that server.")
@click.option("-sys", "--system-prompt", "system", metavar="TEXT", help="System prompt.")
@options.system_prompt_file_option
@click.option("-p", "--prompt", metavar="TEXT", help="The first message.")
@click.option("-st", "--single-turn", is_flag=True, help="Answer once and leave.")
@click.option("--session", "session_name", metavar="NAME", help="Go on with it, and keep it.")
@click.option(
    "-n",
    "--n-predict",
    type=click.IntRange(-1),
    default=-1,
    help="Most new tokens of an answer (default -1: until the model ends).",
)
@options.speculation_options
@options.sampling_options
@options.load_options
@reserve_option
@click.option("-r", "--stop", "stop", multiple=True, metavar="TEXT", help="End before this text.")
@click.option("--think/--no-think", default=None, help="Ask the template for reasoning, or none.")
@click.option("--fold", is_flag=True, help="Show of the reasoning only that there is some.")
@click.option("--show-accepted", is_flag=True, help="Tint the tokens that were drafted.")
@click.option("--no-markdown", is_flag=True, help="Show answers as they were written.")
@click.option("--no-stats", is_flag=True, help="No line of figures after an answer.")
def command(pair: str | None, **flags: Any) -> None:
    """Talk with a model. /help lists the commands.

    Into a pipe, or out of one, standard input is one message, and its answer alone is printed.
    """
    if pair is not None:
        if flags["model"] or flags["hf_repo"]:
            raise UsageError("PAIR and -m or -hf both name a model.", hint="Give one of them.")
        flags["model"] = pair
    models = options.model_references(flags)
    load = options.load_params(flags) | {"reserve_bytes": flags.pop("reserve_bytes")}
    loading = (models, load, flags["spec_type"])
    system_file = flags.pop("system_prompt_file")
    system = flags.pop("system") or (options.read_text(system_file) if system_file else None)
    url, key = flags.pop("url"), flags.pop("api_key")
    if url and (models["target"] or models["draft"]):
        raise UsageError("--url and a model exclude each other: the server has its own.")
    once = flags.pop("single_turn")
    first, session_name = flags.pop("prompt"), flags.pop("session_name")
    view = _view(flags)
    settings = _settings(flags)
    if not sys.stdin.isatty():
        first, once = piped_message() if first is None else first, True
    for number in (signal.SIGTERM, signal.SIGHUP):  # what Ctrl-C does to a line is another matter
        signal.signal(number, lambda *_: sys.exit(INTERRUPTED))
    session = Session(session_name) if session_name else None
    try:
        with _engine(url, key, loading) as engine:
            conversation = Conversation(engine, settings, system)
            try:
                notes = session.attach(conversation) if session else []
                code = _talk(conversation, view, first, once, notes)
            finally:
                if session:
                    session.close()
    finally:
        if session:
            session.release()
    click.get_current_context().exit(code)


@contextmanager
def _engine(
    url: str | None, key: str | None, loading: tuple[dict[str, Any], dict[str, Any], str]
) -> Iterator[ChatEngine]:
    """A server's model, or one that is loaded here: `loading` as `fetch_named` takes it."""
    if url:
        with RemoteEngine(url, key) as remote:
            yield remote
        return
    target, draft, params = fetch_named(*loading)
    with Engine(target, draft, params) as engine:
        yield LocalEngine(engine)


def _view(flags: dict[str, Any]) -> View:
    show_accepted, no_markdown = flags.pop("show_accepted"), flags.pop("no_markdown")
    if is_plain_terminal():
        return PipeView()
    return TerminalView(show_accepted=show_accepted, markdown=not no_markdown)


def _settings(flags: dict[str, Any]) -> Settings:
    n_predict = flags.pop("n_predict")
    if n_predict == 0:
        raise UsageError("-n 0 asks for no tokens.", hint="Use -1 for no limit.")
    think, fold, stats = flags.pop("think"), flags.pop("fold"), not flags.pop("no_stats")
    sampling = options.sampling_params(flags)
    generate = GenerateParams(max_tokens=None if n_predict < 0 else n_predict, **flags)
    return Settings(sampling, generate, think, fold, stats)


def make_loop(conversation: Conversation, view: View) -> Loop:
    """The loop, with the editor that goes with the view."""
    return Loop(conversation, PlainLines() if isinstance(view, PipeView) else LineEditor(), view)


def _talk(
    conversation: Conversation, view: View, first: str | None, once: bool, notes: list[str]
) -> int:
    """The conversation itself; the exit code."""
    loop = make_loop(conversation, view)
    if not once:
        view.say(f"{conversation.engine.name}. /help lists the commands, Ctrl-D leaves.")
    view.say(*notes)
    if once and first is None:
        raise UsageError("-st needs a message.", hint="Give one with -p.")
    with suppress(KeyboardInterrupt):
        if first is not None:
            reason = loop.show(conversation.ask(first))
            if once:
                return INTERRUPTED if reason is FinishReason.CANCELLED else 0
        loop.run()
        return 0
    return INTERRUPTED
