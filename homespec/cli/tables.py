"""The tables of `homespec check` and of a dry run."""

from __future__ import annotations

from dataclasses import fields
from typing import Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

from homespec.checking import DraftReport, Facts, Report
from homespec.console import human_bytes, plain_console, printable
from homespec.models.memory_estimate import MemoryParts
from homespec.models.memory_plan import ModelPlan, Plan
from homespec.models.plan_words import would_fit

_OUTCOMES = {
    "pass": Text("pass", "green"),
    "note": Text("note", "cyan"),
    "difference": Text("differs", "yellow"),
    "fail": Text("FAIL", "bold red"),
}
_VERDICTS = {
    "same": "the same tokenizer",
    "usable": "usable: verification makes the differences safe",
    "incompatible": "incompatible: cannot draft for this target",
}
_NUMBERS = {"free", "reserve", "needed", "left", "size", "parameters", "context"}
_FILE_PAGES = "file pages: read once and copied; the system takes them back when it needs room"
_DRAFTING = {"draft_model": "a draft model", "ngram": "n-grams of the text", "none": "nothing"}


def print_report(report: Report) -> None:
    """The findings of `homespec check` on stdout."""
    console = plain_console()
    facts = _table("", "model", "architecture", "weights", "parameters", "size", "context")
    _add_facts(facts, "target", report.target)
    for draft in report.drafts:
        _add_facts(facts, "draft", draft.facts)
        if draft.fitted:
            _add_facts(facts, "as fitted", draft.fitted)
    console.print(facts)
    for draft in report.drafts:
        console.print()
        _print_compatibility(console, draft)
    console.print()
    print_plan(report.plan, console)
    if not report.usable and report.plan.verdict != "refused":
        why = report.drafts[0].compatibility.reason
        _print_verdict(console, "refused", f"The draft cannot draft for this target: {why}.")
        _print_hint(console, "Choose a draft of the same model family, or go without.")


def print_plan(plan: Plan, console: Console | None = None) -> None:
    """A memory plan: what each model takes where, what there is, and the verdict."""
    console = console or plain_console()
    models = [plan.target, plan.draft] if plan.draft else [plan.target]
    taken = [
        (f"{role} in {place}", part)
        for role, model in zip(("target", "draft"), models, strict=False)
        for place, part in model.parts.items()
    ]
    parts = _table("Memory", *(title for title, _ in taken))
    for field in fields(MemoryParts):
        sizes = (_size(getattr(part, field.name)) for _, part in taken)
        parts.add_row(field.name.replace("_", " "), *sizes)
    parts.add_row("total", *(_size(part.total) for _, part in taken), style="bold")
    if plan.drafter_bytes:
        parts.add_row("n-gram index", _size(plan.drafter_bytes))
    console.print(parts)
    if any(part.file_pages for _, part in taken):
        console.print(_FILE_PAGES, style="dim", soft_wrap=True)
    console.print()
    uses = _table("Limit", "free", "reserve", "needed", "left")
    for use in plan.uses:
        left = Text(_size(-use.missing_bytes), "" if use.missing_bytes <= 0 else "bold red")
        uses.add_row(
            use.place, *map(_size, (use.free_bytes, use.reserve_bytes, use.needed_bytes)), left
        )
    console.print(uses)
    console.print()
    if plan.verdict != "refused":
        console.print(_settings(plan.target, plan), soft_wrap=True)
    _print_verdict(console, plan.verdict, plan.sentence)
    if plan.verdict == "refused":
        _print_hint(console, would_fit(plan.alternatives))


def _print_verdict(console: Console, verdict: str, sentence: str) -> None:
    style = {"fits": "green", "reduced": "yellow", "refused": "bold red"}[verdict]
    console.print(Text(f"{verdict}: ", style) + Text(printable(sentence)), soft_wrap=True)


def _print_hint(console: Console, hint: str) -> None:
    console.print(Text("hint: ", "cyan") + Text(printable(hint)), soft_wrap=True)


def _settings(target: ModelPlan, plan: Plan) -> str:
    where = f", {target.gpu_layers} of {target.layer_count} layers on {', '.join(target.devices)}"
    drafting = _DRAFTING[plan.drafting]
    if plan.draft:
        place = ", ".join(plan.draft.devices) or "RAM"
        drafting = f"{printable(plan.draft.name)} in {place}"
    return (
        f"Context {target.n_ctx}, cache K {target.cache_type_k} V {target.cache_type_v}"
        f"{where if target.devices else ''}; drafts from {drafting}."
    )


def _print_compatibility(console: Console, draft: DraftReport) -> None:
    found = draft.compatibility
    tests = _table("Tokenizers", "result", "reason")
    for test in found.tests:
        tests.add_row(test.name, _OUTCOMES[test.outcome], printable(test.reason))
    console.print(tests)
    verdict = f"{draft.facts.name}: {_VERDICTS[found.verdict]}."
    console.print(printable(verdict), soft_wrap=True)


def _add_facts(table: Table, role: str, facts: Facts) -> None:
    table.add_row(
        role,
        printable(facts.name),
        printable(facts.architecture),
        printable(facts.quantization),
        f"{facts.parameters / 1e9:.2f} G",
        human_bytes(facts.size_bytes),
        f"{facts.context_length:,}",
    )


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        number = column in _NUMBERS or " in " in column
        justify: Literal["left", "right"] = "right" if number else "left"
        table.add_column(printable(column), justify=justify, overflow="fold", no_wrap=number)
    return table


def _size(num_bytes: int) -> str:
    return f"-{human_bytes(-num_bytes)}" if num_bytes < 0 else human_bytes(num_bytes)
