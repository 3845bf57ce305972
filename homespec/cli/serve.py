"""`homespec serve`: the OpenAI API over HTTP."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from homespec.api import Defaults
from homespec.cli import options
from homespec.cli.app import INTERRUPTED
from homespec.cli.batch import parallel_option
from homespec.cli.files import fetch_named
from homespec.cli.sizes import reserve_option
from homespec.console import human_bytes, print_note
from homespec.errors import LibraryError, UsageError
from homespec.generation import WITHOUT_DRAFT_MODEL, GenerateParams
from homespec.scheduling.engine import ParallelEngine
from homespec.server.settings import Limits, MiB, ServerParams

_FILE = click.Path(path_type=Path)
_MOST_PARALLEL = 16  # where the machine chooses: more answers at once are each very slow


def _keep_alive(_: click.Context, parameter: click.Parameter, value: str) -> float | None:
    """`30s`, `5m`, `2h`, seconds, or `forever`."""
    if value == "forever":
        return None
    number, unit = (value[:-1], value[-1]) if value[-1:] in "smh" else (value, "s")
    try:
        seconds = float(number) * {"s": 1, "m": 60, "h": 3600}[unit]
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise click.BadParameter(f"{value!r} is no time like 30s, 5m or forever.", param=parameter)
    return seconds


@click.command("serve")
@click.argument("pair", required=False, metavar="[PAIR]")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Address to listen on.",
    envvar=["HOMESPEC_HOST", "LLAMA_ARG_HOST"],
)
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8080,
    show_default=True,
    help="Port; 0 for any free one.",
    envvar=["HOMESPEC_PORT", "LLAMA_ARG_PORT"],
)
@click.option(
    "--api-key",
    "keys",
    multiple=True,
    metavar="KEY",
    help="Let in who has it; repeatable.",
    envvar=["HOMESPEC_API_KEY", "LLAMA_API_KEY"],
)
@click.option(
    "--api-key-file",
    "key_file",
    type=_FILE,
    metavar="FILE",
    help="SHA-256 of keys, one a line.",
)
@click.option("--no-api-key", is_flag=True, help="Listen to a network without any key.")
@click.option(
    "--allow-host",
    "hosts",
    multiple=True,
    metavar="NAME",
    help="A name by which a server without keys may be called, besides localhost and addresses.",
)
@parallel_option
@click.option(
    "--queue",
    type=click.IntRange(0),
    default=64,
    show_default=True,
    help="Answers that may wait for a place; more are refused.",
)
@click.option(
    "--keep",
    type=click.IntRange(0, 64),
    default=8,
    show_default=True,
    help="Ended conversations whose cells are kept for the next turn.",
)
@click.option(
    "--time-limit",
    type=click.FloatRange(1),
    default=600,
    show_default=True,
    metavar="SECONDS",
    help="Of a request, waiting included.",
)
@click.option(
    "--keep-alive",
    callback=_keep_alive,
    default="forever",
    show_default=True,
    metavar="TIME",
    help="Let the model go after so long without a request (30s, 5m, forever).",
)
@click.option(
    "--shutdown-time",
    "drain",
    type=click.FloatRange(0),
    default=30,
    show_default=True,
    metavar="SECONDS",
    help="For running answers to end, at SIGTERM.",
)
@click.option(
    "--max-request-mib",
    type=click.IntRange(1, 1024),
    default=8,
    show_default=True,
    help="Largest body of a request.",
)
@click.option("-a", "--alias", metavar="NAME", help="What clients call the model.")
@options.model_options
@click.option(
    "-n",
    "--n-predict",
    type=click.IntRange(-1),
    default=-1,
    help="Most new tokens where a request says nothing (default -1: until the model ends).",
)
@click.option(
    "--spec-type",
    type=click.Choice(["auto", *WITHOUT_DRAFT_MODEL]),
    default="auto",
    show_default=True,
    help="Draft where it pays, by lookup only, or not at all.",
)
@options.sampling_options
@options.load_options
@reserve_option
@click.option("--log-prompts", is_flag=True, help="Write what is asked and answered to the log.")
@click.option("-q", "--quiet", is_flag=True, help="No line for each request.")
def command(pair: str | None, **flags: Any) -> None:
    """Serve PAIR to whatever speaks the OpenAI API: chats, completions, streams, tools.

    Requests that come at the same time are answered together. SIGTERM lets running answers end
    and exits 0. Listening to more than this machine needs an API key.
    """
    try:
        from homespec.server import app, host, keys, serving  # noqa: PLC0415
    except ModuleNotFoundError as exc:
        raise LibraryError(
            f"The server needs a package that is not installed: {exc.name}.",
            hint="Run scripts/setup, or install the extra: pip install -e '.[server]'.",
        ) from exc
    own = flags["host"]
    known = keys.Keys.of(flags["keys"], flags["key_file"])
    serving.check_exposure(own, known, allowed=flags["no_api_key"])
    logging.getLogger("homespec.server").setLevel(
        logging.WARNING if flags["quiet"] else logging.INFO
    )
    defaults, params = _defaults(flags), _params(flags, bool(known))
    load, path = _loader(pair, flags)
    listener = serving.bind(own, flags["port"])
    with listener:
        port = listener.getsockname()[1]
        if not flags["quiet"]:
            print_note(f"Loading {path.name}; http://{_written(own)}:{port}/v1 answers soon.")

        def ready(server: app.Server) -> None:
            resident = server.host.resident
            if flags["quiet"] or resident is None:
                return
            engine = resident.engine
            print_note(
                f"Ready: {server.name}, {engine.parallel} at once over "
                f"{engine.cache.num_cells} cells, {human_bytes(engine.model.size_bytes)}."
            )

        def make() -> app.Server:
            created = int(path.stat().st_mtime)
            return app.Server(host.Host(load, path.stem), defaults, params, known, created)

        interrupted = serving.serve(make, listener, ready)
    click.get_current_context().exit(INTERRUPTED if interrupted else 0)


def _written(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _loader(pair: str | None, flags: dict[str, Any]) -> tuple[Callable[[], ParallelEngine], Path]:
    """What loads the model, as often as it is called, and its file, which is fetched here."""
    models = options.model_references(flags)
    if pair is not None:
        if models["target"] is not None:
            raise UsageError("PAIR and -m both name the target.", hint="Give one of them.")
        models["target"] = pair
    settings = options.load_params(flags) | {"reserve_bytes": flags["reserve_bytes"]}
    target, draft, load = fetch_named(models, settings, flags["spec_type"])

    def make() -> ParallelEngine:
        return ParallelEngine(
            target,
            load,
            draft=draft,
            parallel=flags["parallel"],
            most=_MOST_PARALLEL,
            keep=flags["keep"],
        )

    return make, target


def _defaults(flags: dict[str, Any]) -> Defaults:
    """What holds where a request says nothing."""
    n_predict = flags["n_predict"]
    if n_predict == 0:
        raise UsageError("-n 0 asks for no tokens.", hint="Use -1 for no limit.")
    params = GenerateParams(
        max_tokens=None if n_predict < 0 else n_predict, spec_type=flags["spec_type"]
    )
    return Defaults(options.sampling_params(flags), params)


def _params(flags: dict[str, Any], guarded: bool) -> ServerParams:
    names = ("localhost", flags["host"], *flags["hosts"])
    hosts = None if guarded else tuple(name.lower() for name in names)
    return ServerParams(
        queue=flags["queue"],
        name=flags["alias"],
        time_limit=flags["time_limit"],
        keep_alive=flags["keep_alive"],
        drain=flags["drain"],
        hosts=hosts,
        log_prompts=flags["log_prompts"],
        reserve_bytes=flags["reserve_bytes"],
        limits=Limits(body_bytes=flags["max_request_mib"] * MiB),
    )
