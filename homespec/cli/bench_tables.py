"""What `homespec bench` prints."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from homespec.bench.compare import Comparison
from homespec.bench.records import PARTS, BenchResult
from homespec.bench.statistics import Ratio
from homespec.bench.summary import ALL, Figures, summarize, verdicts
from homespec.console import human_bytes, plain_console, print_note, printable

_POSITIONS = 8  # fit a terminal; the report and the JSON have all


def print_result(result: BenchResult) -> None:
    """Tables on stdout, the verdict last."""
    console = plain_console()
    figures = summarize(result)
    overall = [one for one in figures if one.category == ALL]
    console.print(_speed_table(result, overall))
    _titled(console, "Where the time goes", _time_table(overall))
    if any(one.acceptance_by_position for one in overall):
        _titled(console, "Accepted, by position in the draft", _acceptance_table(overall))
    if len(result.categories) > 1:
        _titled(console, "Decoding, tokens/s", _category_table(result, figures))
    _line(console, _cold_start(result))
    for text in verdicts(result):
        console.print(printable(text), style="bold", soft_wrap=True)


def print_notes(result: BenchResult) -> None:
    """What stands against believing the figures, on stderr."""
    for text in result.notes:
        print_note(text)
    for text in result.environment["disturbances"]:
        print_note(f"Disturbed, so do not trust these figures: {text}")


def _speed_table(result: BenchResult, figures: list[Figures]) -> Table:
    first = result.arm_names[0]
    table = _table(
        "arm", "first token", "prompt", "decode", "answer", "tokens/pass", f"decode / {first}"
    )
    for one in figures:
        table.add_row(
            printable(one.arm),
            _number(one.first_token_seconds, "{:.3f} s"),
            _number(one.prompt_tokens_per_second, "{:.0f} tok/s"),
            _number(one.decode_tokens_per_second, "{:.1f} tok/s"),
            _number(one.seconds, "{:.2f} s"),
            _number(one.mean_acceptance_length, "{:.2f}"),
            _ratio(one.decode_ratio),
        )
        if one.reported:
            table.add_row(
                "  by its own clock",
                "",
                _number(one.reported.get("prompt_tokens_per_second"), "{:.0f} tok/s"),
                _number(one.reported.get("decode_tokens_per_second"), "{:.1f} tok/s"),
                "",
                "",
                "",
                style="dim",
            )
    return table


def _time_table(figures: list[Figures]) -> Table:
    table = _table("arm", *PARTS, "peak memory", "same text")
    for one in figures:
        known = sum(one.parts.values())
        shares = [f"{one.parts[part] / known:.1%}" if known else "" for part in PARTS]
        memory = human_bytes(one.rss_bytes) if one.rss_bytes else ""
        if one.device_bytes:
            memory += f" + {human_bytes(one.device_bytes)}"
        table.add_row(printable(one.arm), *shares, memory, _same(one))
    return table


def _acceptance_table(figures: list[Figures]) -> Table:
    deepest = min(max(len(one.acceptance_by_position) for one in figures), _POSITIONS)
    names = [str(i + 1) for i in range(deepest)]
    table = _table("arm", *names)
    for one in figures:
        if one.acceptance_by_position:
            shares = [f"{rate:.0%}" for rate in one.acceptance_by_position[:deepest]]
            table.add_row(printable(one.arm), *shares)
    return table


def _category_table(result: BenchResult, figures: list[Figures]) -> Table:
    names = result.arm_names
    table = _table(
        "category",
        *(printable(name) for name in names),
        *(f"/ {names[0]}" for _ in names[1:]),
    )
    for category in result.categories:
        row = [one for one in figures if one.category == category]
        table.add_row(
            printable(category),
            *(_number(one.decode_tokens_per_second, "{:.1f}") for one in row),
            *(
                _number(one.decode_ratio.median if one.decode_ratio else None, "{:.2f} x")
                for one in row[1:]
            ),
        )
    return table


def _cold_start(result: BenchResult) -> str:
    cold = result.cold_start
    parts = []
    if "load_seconds" in cold:
        parts.append(f"loading {cold['load_seconds']:.2f} s")
    if "first_token_seconds" in cold:
        parts.append(f"first token {cold['first_token_seconds']:.2f} s")
    return f"Cold start: {', '.join(parts)}." if parts else ""


def _same(one: Figures) -> str:
    if not one.num_compared:
        return ""
    text = f"{one.num_same} of {one.num_compared}"
    return text if one.largest_gap is None else f"{text}, gap {one.largest_gap:.2f}"


def _ratio(ratio: Ratio | None) -> str:
    return f"{ratio.median:.2f} x ({ratio.low:.2f}-{ratio.high:.2f})" if ratio else ""


def print_comparison(comparison: Comparison) -> None:
    """Two results beside each other on stdout."""
    console = plain_console()
    table = _table("arm", "A decode", "B decode", "A answer", "B answer", "decode B / A")
    for one in comparison.arms:
        table.add_row(
            printable(one.arm),
            *(_number(f.decode_tokens_per_second, "{:.1f} tok/s") for f in (one.a, one.b)),
            *(_number(f.seconds, "{:.2f} s") for f in (one.a, one.b)),
            _ratio(one.ratio),
        )
    console.print(table)
    if comparison.differences:
        differing = Table("what differs", "A", "B", box=None, pad_edge=False, header_style="bold")
        for name, (a, b) in comparison.differences.items():
            differing.add_row(*(printable(str(text)) for text in (name, a, b)))
        console.print(differing)
    for text in comparison.verdicts:
        console.print(printable(text), style="bold", soft_wrap=True)
    for text in comparison.warnings:
        print_note(text)


def _titled(console: Console, title: str, table: Table) -> None:
    """A title of the table's own would be broken to its width."""
    console.print(f"\n{title}", style="bold")
    console.print(table)


def _table(first: str, *columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first, overflow="fold")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _line(console: Console, text: str) -> None:
    if text:
        console.print(f"\n{text}", soft_wrap=True)


def _number(value: float | None, form: str) -> str:
    return form.format(value) if value is not None else ""
