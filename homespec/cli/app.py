"""The `homespec` command, and the one place where errors become words and exit codes."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
from typing import NoReturn

import click

from homespec import __version__
from homespec.console import print_error, print_note
from homespec.errors import HomespecError

INTERRUPTED = 130  # as a shell reports a death by Ctrl-C

COMMANDS = {
    "generate": "Answer a prompt.",
    "chat": "Talk with a model in the terminal.",
    "serve": "Answer whatever speaks the OpenAI API, many at once.",
    "batch": "Answer the rows of a file, many at once; a rerun does what is missing.",
    "worker": "Lend this machine to a cluster that answers the rows of a batch.",
    "check": "Compare two models' tokenizers and plan their memory, from headers alone.",
    "setup": "Choose the best pair for this machine, download it, try it, make it the default.",
    "tune": "Measure what a pair does best on this machine, and keep it.",
    "bench": "Is speculation worth it on this machine? Arms by turns on the same prompts.",
    "models": "List the pairs of the catalogue: what fits this machine, what is downloaded.",
    "pull": "Download a pair, or a single model.",
    "remove": "Delete a downloaded pair.",
    "path": "Print where a downloaded model lies.",
    "doctor": "Look at this machine, its build and its devices, and try a decode.",
}
"""Name -> help; each lives in `homespec.cli.<name>`, loaded when it is called."""


class LazyGroup(click.Group):
    """Loads a command's module only when that command is called: `--help` answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """All commands, in the order they are met."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command by that name."""
        if cmd_name not in COMMANDS:
            return None
        module = importlib.import_module(f"homespec.cli.{cmd_name.replace('-', '_')}")
        command: click.Command = module.command
        _read_environment(command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list in `--help`, without loading the commands."""
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


def _read_environment(command: click.Command) -> None:
    """Options with a value are read from HOMESPEC_ and their long name, for all commands alike.

    Those that name other variables keep them. A flag is only what somebody typed, or has set for
    one command (HOMESPEC_REMOVE_YES): a `--yes` is not meant for all.
    """
    for option in command.params:
        if isinstance(option, click.Option) and not option.is_flag and option.envvar is None:
            name = next(name for name in option.opts if name.startswith("--"))
            option.envvar = f"HOMESPEC_{name[2:].replace('-', '_').upper()}"


@click.group(
    cls=LazyGroup,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "HOMESPEC",
        "max_content_width": 100,
    },
)
@click.version_option(__version__, prog_name="homespec")
def cli() -> None:
    """Exact speculative decoding over llama.cpp for home servers."""


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 failed, 2 usage, 3 refused, 4 cannot run, 130."""
    signal.signal(signal.SIGTERM, lambda *_: _terminate())
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    try:
        code = cli.main(standalone_mode=False)
    except click.ClickException as exc:
        exc.show()
        code = exc.exit_code
    except HomespecError as exc:
        print_error(exc.message, exc.hint)
        code = exc.exit_code
    except (KeyboardInterrupt, click.Abort, EOFError) as exc:
        cause = exc.__cause__ or exc  # click makes an Abort of it
        if isinstance(cause, KeyboardInterrupt) and cause.args:  # what becomes of work half done
            print_note(str(cause))
        code = INTERRUPTED
    except BrokenPipeError:
        # The reader left (`| head`): nothing is left to say, not even at interpreter exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.exit(code if isinstance(code, int) else 0)


def _terminate() -> NoReturn:
    raise KeyboardInterrupt  # SIGTERM ends a command as Ctrl-C does
