"""Where homespec keeps its files: the XDG folders, each under `homespec/`."""

from __future__ import annotations

import os
from pathlib import Path


def _xdg(variable: str, default: str) -> Path:
    root = os.environ.get(variable, "")
    # The XDG specification: a relative path is invalid and to be ignored.
    base = Path(root) if os.path.isabs(root) else Path.home() / default
    return base / "homespec"


def config_dir() -> Path:
    """The user's own settings and catalogue."""
    return _xdg("XDG_CONFIG_HOME", ".config")


def cache_dir() -> Path:
    """Files that can be made or fetched again."""
    return _xdg("XDG_CACHE_HOME", ".cache")


def state_dir() -> Path:
    """Profiles, histories and choices: they outlive a cache."""
    return _xdg("XDG_STATE_HOME", ".local/state")
