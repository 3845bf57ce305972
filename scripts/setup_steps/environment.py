"""`.venv`: made, repaired and filled; a note in it says for which state of the project."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from setup_steps.diagnosis import SetupError, diagnose, how_to_install
from setup_steps.process import Command, run_logged
from setup_steps.progress import say
from setup_steps.recipe import ADDED_TO_BUILD
from setup_steps.wheel import build_error

NOTE = "homespec-build.json"


@dataclass(frozen=True, slots=True)
class Environment:
    """The virtual environment of a checkout."""

    root: Path

    @property
    def folder(self) -> Path:
        return self.root / ".venv"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def log(self) -> Path:
        return self.folder / "setup.log"

    def note(self) -> Mapping[str, Any]:
        """What was installed for what, {} where that is not known."""
        try:
            found = json.loads((self.folder / NOTE).read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    def is_current(self, *, dev: bool, key: str | None = None) -> bool:
        """Whether all is installed, for these sources and, where given, this wheel."""
        note = self.note()
        wanted = self._state()
        return (
            all(note.get(name) == value for name, value in wanted.items())
            and (note.get("dev", False) or not dev)
            and (key is None or note.get("key") == key)
            and self._runs("import importlib.metadata as m; m.version('llama-cpp-python')")
        )

    def make(self) -> None:
        """Make the environment where it is missing, broken or of a moved checkout; see to its pip.

        Raises SetupError where this Python lacks venv or ensurepip.
        """
        is_moved = self.note().get("root", str(self.root)) != str(self.root)
        if is_moved or not self._runs("import pip"):
            if importlib.util.find_spec("ensurepip") is None:
                raise SetupError(
                    f"This Python ({sys.executable}) cannot make virtual environments.",
                    hint=how_to_install("venv"),
                )
            say("Making .venv ...")
            is_dead = self.python.is_symlink() and not self._runs("")  # its Python was removed
            if is_moved or is_dead:  # the programs in it name another place
                shutil.rmtree(self.folder)
            self.folder.mkdir(exist_ok=True)
            self._run([sys.executable, "-m", "venv", self.folder], ".venv could not be made.")
        # Older ones, of Ubuntu 22.04 for example, know no --config-settings.
        self.pip(["install", "--quiet", "pip>=23.1"], "pip could not be brought up to date.")

    def install(self, wheel: Path, key: str, build: Mapping[str, object], *, dev: bool) -> None:
        """Install the wheel and homespec itself, editable; then note it."""
        note = self.folder / NOTE
        is_other = self.note().get("key") != key
        note.unlink(missing_ok=True)
        say("Installing homespec and what it needs ...")
        if is_other:
            # pip would keep a build of the same version with other flags
            self.pip(
                ["install", "--quiet", "--no-deps", "--force-reinstall", wheel],
                "The library could not be installed.",
            )
        project = f"{self.root}[{'dev' if dev else 'server'}]"
        self.pip(["install", "--editable", project], "homespec could not be installed.")
        text = json.dumps({**self._state(), "dev": dev, "key": key, "build": dict(build)}, indent=2)
        note.write_text(text, encoding="utf-8")

    def pip(self, arguments: Command, failure: str) -> None:
        """Run the environment's pip; its settings and the network's are the user's own."""
        self._run([self.python, "-m", "pip", *arguments], failure)

    def _state(self) -> dict[str, str]:
        project = (self.root / "pyproject.toml").read_bytes()
        added = b"".join(path.read_bytes() for path in ADDED_TO_BUILD)
        return {
            "root": str(self.root),
            "pyproject": hashlib.sha256(project).hexdigest(),
            "added": hashlib.sha256(added).hexdigest(),
        }

    def _runs(self, code: str) -> bool:
        try:
            run = subprocess.run([self.python, "-c", code], capture_output=True, check=False)
        except OSError:
            return False
        return run.returncode == 0

    def _run(self, command: Command, failure: str) -> None:
        self.log.write_bytes(b"")
        if run_logged(command, self.log) != 0:
            with self.log.open(encoding="utf-8", errors="replace") as log:
                raise build_error(failure, diagnose(log), self.log)
