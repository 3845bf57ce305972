"""The tables of `homespec tune`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from homespec.console import human_bytes, plain_console, printable
from homespec.tuning.cost import CostCurve
from homespec.tuning.fit import CONTEXT_LENGTH
from homespec.tuning.placement import place_words
from homespec.tuning.profile import Profile, Switches, VariantResult, WidthPromise

_WIDE = 200  # into a pipe: a line stays a line


def print_profile(profile: Profile) -> None:
    """What was measured, and what follows from it, on stdout."""
    console = plain_console()
    if not console.is_terminal:
        console = plain_console(width=_WIDE)
    _print_box(console, profile)
    _print_switches(console, profile)
    _print_cost(console, "A pass of the target", profile.target_cost)
    if profile.strict_cost is not None:
        _print_cost(console, "A pass of the target with --strict-exact", profile.strict_cost)
    if profile.variants:
        _print_variants(console, profile)
    _print_lookup(console, profile)
    for sentence in (*_promises(profile), *profile.notes):
        console.print(printable(sentence), soft_wrap=True)


def _print_box(console: Console, profile: Profile) -> None:
    table = Table(box=None, pad_edge=False, show_header=False)
    box = profile.box
    table.add_row("target", printable(profile.target.name))
    if profile.draft is not None:
        table.add_row("draft", printable(profile.draft.name))
    place = profile.placement
    lying = [f"target {place_words(place.gpu_layers, place.devices)}"]
    if profile.draft is not None:
        lying.append(f"draft {place_words(place.draft_gpu_layers, place.draft_devices)}")
    table.add_row("layers", printable(", ".join(lying)))
    table.add_row("machine", printable(", ".join([f"{box.cpu}, {box.cores} cores", *box.devices])))
    table.add_row("library", f"llama-cpp-python {box.library}")
    total = sum(profile.seconds.values())
    table.add_row("measured", f"{profile.created}, in {total:.0f} s")
    console.print(table)


def _print_switches(console: Console, profile: Profile) -> None:
    table = _table("Switches", "flash attention", "K", "V", "threads", "many tokens", "repack")
    rows = [("target", profile.target_switches)]
    if profile.draft_switches is not None:
        rows.append(("draft", profile.draft_switches))
    for name, switches in rows:
        table.add_row(name, *_switches(switches))
    console.print()
    console.print(table)


def _switches(switches: Switches) -> tuple[str, ...]:
    return (
        switches.flash_attention,
        switches.cache_type_k,
        switches.cache_type_v,
        str(switches.threads),
        str(switches.threads_batch),
        "on" if switches.repack else "off",
    )


def _print_cost(console: Console, title: str, curve: CostCurve) -> None:
    table = _table("context", *map(str, curve.widths), numbers=True)
    for length, row in zip(curve.context_lengths, curve.table, strict=True):
        table.add_row(str(length), *(_milliseconds(seconds) for seconds in row))
    console.print(f"\n{title}: milliseconds by tokens of the pass and tokens of context")
    console.print(table)


def _print_variants(console: Console, profile: Profile) -> None:
    table = _table(
        "Draft", "size", "ms a token", "greedy", "sampled", "best depth", "speed", numbers=True
    )
    chosen = profile.fitted.quantization if profile.fitted else profile.variants[0].quantization
    for variant in profile.variants:
        style = "bold" if variant.quantization == chosen and profile.draft_pays else ""
        table.add_row(*_variant(variant), style=style)
    console.print()
    console.print(table)
    console.print(
        "greedy, sampled: agreement with the target at temperature 0 and 0.8. speed: expected, as "
        "ratio to plain decoding; < where no agreement could have made up for the cost.",
        style="dim",
        soft_wrap=not console.is_terminal,
    )


def _variant(variant: VariantResult) -> tuple[str, ...]:
    shares = [
        "-" if share is None else f"{share:.3f}" for share in (variant.greedy, variant.sampled)
    ]
    return (
        variant.quantization,
        human_bytes(variant.size_bytes),
        _milliseconds(variant.cost.seconds(1, CONTEXT_LENGTH)),
        *shares,
        str(variant.depth),
        f"{'< ' if variant.greedy is None else ''}{variant.speedup:.2f}",
    )


def _print_lookup(console: Console, profile: Profile) -> None:
    rates = profile.acceptance.ngram
    table = _table("Lookup, match of", *(str(rate.length) for rate in rates), numbers=True)
    table.add_row("goes on", *(f"{rate.rate:.2f}" for rate in rates))
    table.add_row("tries", *(str(rate.count) for rate in rates))
    console.print()
    console.print(table)
    console.print()


def _promises(profile: Profile) -> list[str]:
    found = [f"Passes of any width give {_bits(profile.default_promise)}."]
    if profile.strict_promise is not None:
        strict = profile.strict_promise
        found.append(
            f"With --strict-exact they give {_bits(strict)}; passes cost {strict.slowdown:.2f} "
            f"times as much{', so it is the default here' if profile.strict_by_default else ''}."
        )
    if not profile.tiled:
        found.append(
            "llama.cpp's tiled kernels are left out: without them, wide passes are faster."
        )
    if profile.draft is not None:
        if not profile.draft_pays:
            found.append("The draft model is not expected to pay here on any kind of text.")
        elif profile.fitted is not None and profile.lacks_copy:
            found.append(
                f"The draft's {profile.fitted.quantization} copy is gone, so the draft is loaded "
                "as shipped: homespec tune makes it again."
            )
        elif profile.fitted is not None:
            found.append(f"The draft's {profile.fitted.quantization} copy is used.")
    return found


def _bits(promise: WidthPromise) -> str:
    if promise.invariant:
        return "the same bits: greedy text is that of plain decoding"
    return (
        f"logits that differ by up to {promise.largest:.2g}, so greedy text may part from plain "
        "decoding at a near-tie"
    )


def _milliseconds(seconds: float) -> str:
    milliseconds = 1000 * seconds
    return f"{milliseconds:.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


def _table(title: str, *columns: str, numbers: bool = False) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(title)
    for column in columns:
        table.add_column(column, justify="right" if numbers else "left")
    return table
