"""What is asked: the prompts that come with homespec, or a JSONL file of your own.

A line of such a file is one of

    {"category": "chat", "prompt": "..."}             or "messages", as the OpenAI API has them
    {"question_id": 1, "category": "...", "turns": ["...", ...]}      Spec-Bench: the first turn
    {"task_id": "...", "prompt": "def ...", "canonical_solution": "..."}              HumanEval
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

from homespec.errors import UsageError

BUILT_IN = Path(__file__).with_name("prompts.jsonl")
WARM_UP = "Write three sentences about the weather in autumn, then write the same again."

_HINT = 'A line is a JSON object, for example {"category": "chat", "prompt": "Hello"}.'


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: chat messages, of a category; language as a code such as `en`."""

    name: str
    category: str
    messages: tuple[dict[str, str], ...]
    language: str = ""


def read_prompts(path: Path = BUILT_IN) -> list[Prompt]:
    """The prompts of a JSONL file, or of all those in a folder. Raises UsageError."""
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    prompts = list(chain.from_iterable(map(_read_file, files)))
    if not prompts:
        raise UsageError(f"There are no prompts in {path}.", hint=_HINT)
    return prompts


def choose(prompts: Iterable[Prompt], per_category: int | None) -> list[Prompt]:
    """The first `per_category` prompts of each category (None: all), the categories by turns.

    A run that is cut short has then asked all categories alike.
    """
    groups: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in prompts:
        groups[prompt.category].append(prompt)
    rows = zip_longest(*(group[:per_category] for group in groups.values()))
    return [prompt for row in rows for prompt in row if prompt is not None]


def _read_file(path: Path) -> Iterator[Prompt]:
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}.") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path} is not UTF-8 text.", hint=_HINT) from exc
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield from _read_row(json.loads(line), f"{path.stem}:{number}")
        except (ValueError, TypeError, KeyError, IndexError, AttributeError) as exc:
            raise UsageError(f"Line {number} of {path} is no prompt.", hint=_HINT) from exc


def _read_row(row: dict[str, Any], place: str) -> Iterator[Prompt]:
    if "canonical_solution" in row:
        yield from _human_eval(row)
        return
    name = str(row.get("name", row.get("question_id", place)))
    category, language = str(row.get("category", "prompts")), str(row.get("language", ""))
    if "messages" in row:
        messages = [{"role": m["role"], "content": _text(m["content"])} for m in row["messages"]]
    else:
        messages = _user(row["turns"][0] if "turns" in row else row["prompt"])
    if not messages:
        raise ValueError("no messages")
    yield Prompt(name, category, tuple(messages), language)


def _human_eval(row: dict[str, Any]) -> Iterator[Prompt]:
    """A function to complete, and, whole, to edit."""
    name, head = str(row.get("task_id", "task")), _text(row["prompt"])
    complete = f"Complete this function.\n```python\n{head}```"
    edit = (
        "Add type hints and a comment above each loop, and give the whole function again.\n"
        f"```python\n{head}{_text(row['canonical_solution'])}```"
    )
    yield Prompt(name, "code", tuple(_user(complete)), "en")
    yield Prompt(f"{name} edit", "code edit", tuple(_user(edit)), "en")


def _user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": _text(text)}]


def _text(value: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError("no text")
    return value


def categories(prompts: Sequence[Prompt]) -> list[str]:
    """Their categories, in the order they are met."""
    return list(dict.fromkeys(prompt.category for prompt in prompts))
