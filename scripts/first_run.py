"""Set homespec up in this folder: .venv, llama.cpp built for this machine, and a first generation.

    scripts/setup          all of it; run again at any time, it does what is left to do
    scripts/setup --dev    with the tools for tests and checks, without the generation

HOMESPEC_BACKEND   cpu, cuda, rocm, vulkan or metal; unset, the machine decides
CC, CXX            the compilers; CMAKE_ARGS, CFLAGS and CXXFLAGS reach the build, too
CMAKE_BUILD_PARALLEL_LEVEL   compilers at a time; unset, what CPUs and memory bear
PYTHON             the Python to use, 3.10 or newer
XDG_CACHE_HOME     where builds are kept for other clones (homespec/ in it)
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import signal
import subprocess
import sys
from pathlib import Path

from setup_steps.backends import choose_backend
from setup_steps.diagnosis import CANNOT_RUN, FAILED, USAGE, SetupError
from setup_steps.environment import Environment
from setup_steps.process import Stopped, stop_on_signals
from setup_steps.progress import say
from setup_steps.recipe import Recipe, make_recipe
from setup_steps.toolchain import choose_amx_flags, find_toolchain, probe_amx
from setup_steps.wheel import DISTRIBUTION, cached_wheel, obtain_wheel

ROOT = Path(__file__).resolve().parent.parent
# Asks for words it has seen, which is what n-gram drafting is good at.
PROMPT = "List the days of the week in order. Then list them again, in the same order."
FIRST_GENERATION = ("--spec-type", "ngram", "--temp", "0", "-n", "64")


def pinned_version(pyproject: str) -> str:
    """The version of llama-cpp-python that pyproject.toml pins."""
    match = re.search(rf'"{DISTRIBUTION}==([^"]+)"', pyproject)
    if match is None:
        raise SetupError(f"pyproject.toml pins no {DISTRIBUTION}.", exit_code=FAILED)
    return match.group(1)


def choose_recipe() -> Recipe:
    """Look at the machine and decide what to build, saying what was found."""
    toolchain = find_toolchain()
    say(f"Compiler: {toolchain.version}")
    backend = choose_backend(os.environ.get("HOMESPEC_BACKEND", ""))
    say(f"Backend: {backend.name} ({backend.reason}). {backend.advice}".rstrip())
    amx = choose_amx_flags(lambda flags: probe_amx(toolchain.cxx, flags))
    if amx.flags:
        say(amx.note)
    version = pinned_version((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return make_recipe(version, backend, toolchain, amx)


def install_library(environment: Environment, *, dev: bool) -> None:
    """Make .venv hold homespec, and llama.cpp as it should be built on this machine."""
    recipe = choose_recipe()
    if environment.is_current(dev=dev, key=recipe.key):
        return
    cache = runpy.run_path(str(ROOT / "homespec" / "paths.py"))["cache_dir"]()
    environment.make()
    is_built = cached_wheel(cache, recipe.key) is not None
    if is_built:
        say("This takes about a minute.")
    wheel = obtain_wheel(recipe, cache, environment.python)
    dev = dev or bool(environment.note().get("dev"))
    environment.install(wheel, recipe.key, recipe.record(), dev=dev)


def generate(environment: Environment) -> None:
    """A real generation with the starter model, which is fetched the first time (98 MB)."""
    arguments = ["generate", PROMPT, *FIRST_GENERATION]
    say(f"\n$ .venv/bin/homespec {shlex.join(arguments)}")
    program = environment.folder / "bin" / "homespec"
    status = subprocess.run([program, *arguments], stdin=subprocess.DEVNULL, check=False).returncode
    if status in (-signal.SIGINT, 130):
        raise KeyboardInterrupt
    if status < 0:
        raise SetupError(
            f"llama.cpp crashed in its first generation (signal {-status}).",
            hint="`.venv/bin/homespec doctor` tells more; without special CPU features: "
            "CMAKE_ARGS=-DGGML_NATIVE=OFF scripts/setup",
        )
    if status > 0:
        raise SetupError(
            "homespec is installed, but the first generation failed, as told above.",
            hint="`.venv/bin/homespec doctor` tells more. Then run scripts/setup again.",
            exit_code=status,
        )


def run(arguments: list[str]) -> None:
    if set(arguments) & {"-h", "--help"}:
        print(__doc__)
        return
    dev = arguments == ["--dev"]
    if arguments and not dev:
        raise SetupError(
            f"unknown argument: {shlex.join(arguments)}.",
            hint="`scripts/setup --help` names what there is.",
            exit_code=USAGE,
        )
    environment = Environment(ROOT)
    # Tests and checks come here each time: a look at the note is enough for them.
    if dev and not os.environ.get("HOMESPEC_BACKEND") and environment.is_current(dev=True):
        return
    install_library(environment, dev=dev)
    if not dev:
        generate(environment)
        say("\nhomespec is ready: .venv/bin/homespec --help")


def main() -> int:
    stop_on_signals()
    try:
        run(sys.argv[1:])
    except SetupError as error:
        print(f"setup: {error.message}", file=sys.stderr)
        if error.hint:
            print(f"  {error.hint}", file=sys.stderr)
        return error.exit_code
    except OSError as error:  # a folder that is not ours, a full disk
        print(f"setup: {error.filename or 'a file'}: {error.strerror}.", file=sys.stderr)
        return CANNOT_RUN
    except KeyboardInterrupt as stop:
        print("\nsetup: stopped. Run it again, and it goes on where it was.", file=sys.stderr)
        return 128 + stop.signum if isinstance(stop, Stopped) else 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
