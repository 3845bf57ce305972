"""Timing passes: several things in turn, so that a disturbance hits all of them, and medians.

A round times each thing once. Rounds go on until a few agree or their share of the time is used
up; the first is always finished, so a slow machine gets fewer repetitions, never fewer things.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from homespec.decoding.stats import clock
from homespec.errors import CannotRunError, OutOfMemoryError, UsageError
from homespec.llama.cache_filler import fill
from homespec.llama.context import Context, ContextParams
from homespec.llama.model import Model
from homespec.tuning.profile import Switches

Timings = dict[str, float]
"""Seconds by the name of what was timed."""

MAX_ROUNDS = 7
CALM_ROUNDS = 3  # as many that took about the same time are enough
CALM = 1.08
DISTURBED = 1.5  # a round that took so many times the fastest one shared the machine
_RECORDING = 2  # passes until a device replays what it recorded
K = TypeVar("K")


def interleave(
    arm: Callable[[], Timings],
    rounds: list[Timings],
    seconds: float,
    noted: Callable[[], None] = lambda: None,
) -> Timings:
    """Medians of what `arm` times, called again and again for about `seconds`.

    rounds: what was measured before, continued in place; noted: called after each round.
    """
    began, longest = clock(), 0.0
    while len(rounds) < MAX_ROUNDS:
        started = clock()
        if rounds and (started - began + longest > seconds or _agree(rounds)):
            break
        rounds.append(arm())
        longest = max(longest, clock() - started)
        noted()
    return medians(rounds)


def _agree(rounds: Sequence[Timings]) -> bool:
    totals = sorted(sum(timed.values()) for timed in rounds)
    return len(totals) >= CALM_ROUNDS and totals[CALM_ROUNDS - 1] <= CALM * totals[0]


def medians(rounds: Sequence[Timings]) -> Timings:
    """The median of each timing over the rounds that nothing disturbed."""
    totals = [sum(timed.values()) for timed in rounds]
    calm = [
        timed
        for timed, total in zip(rounds, totals, strict=True)
        if total <= DISTURBED * min(totals)
    ]
    return {key: statistics.median(timed[key] for timed in calm) for key in calm[0]}


def together(first: Timings, second: Timings) -> Timings:
    """Both, the second brought to the speed that the machine had in the first.

    The median of what is in both tells how much faster or slower it was.
    """
    scale = statistics.median(first[key] / second[key] for key in first.keys() & second.keys())
    return {key: seconds * scale for key, seconds in second.items()} | first


def disturbance(rounds: Sequence[Timings]) -> float:
    """How many times its fastest a typical round took; 1 on a machine with nothing else to do."""
    totals = [sum(timed.values()) for timed in rounds]
    return statistics.median(totals) / min(totals)


def time_pass(context: Context, width: int) -> float:
    """Seconds of a pass over `width` tokens with a row for each; the cache is left as found."""
    length = len(context.tokens)
    tokens = [(17 * i) % min(context.model.n_vocab, 20_000) for i in range(length, length + width)]
    began = clock()
    rows = context.extend(tokens, width)
    _ = rows[-1].logits  # a device may still be at work when the pass returns
    seconds = clock() - began
    context.truncate(length)
    return seconds


def time_token(context: Context, width: int = 1) -> float:
    """Seconds until a draft has read `width` tokens and chosen the next one."""
    length = len(context.tokens)
    tokens = [(17 * i) % min(context.model.n_vocab, 20_000) for i in range(length, length + width)]
    began = clock()
    [row] = context.extend(tokens, 1)
    int(np.argmax(row.logits))
    seconds = clock() - began
    context.truncate(length)
    return seconds


def settled(
    context: Context, width: int, timed: Callable[[Context, int], float] = time_pass
) -> float:
    """What `timed` gives once the pass is a usual one.

    CUDA launches the kernels of a pass one by one, records them when the same pass comes again,
    and replays the recording from then on, in a half to a third of the time.
    """
    for _ in range(_RECORDING if context.model.on_devices else 0):
        timed(context, width)
    return timed(context, width)


def time_table(
    context: Context,
    lengths: Sequence[int],
    widths: Sequence[int],
    timed: Callable[[Context, int], float] = time_pass,
) -> Timings:
    """Each width at each length of context once: {"length,width": seconds}."""
    found = {}
    for length in lengths:
        fill(context, length)
        timed(context, 1)  # the first pass sets its graph up
        for width in widths:
            found[f"{length},{width}"] = settled(context, width, timed)
    return found


def points(timings: Timings) -> dict[tuple[int, int], float]:
    """The timings of `time_table` as CostCurve.from_points takes them."""
    found = {}
    for key, seconds in timings.items():
        length, _, width = key.partition(",")
        found[int(length), int(width)] = seconds
    return found


@dataclass(frozen=True, slots=True)
class Contestant:
    """Settings in a contest, with what they cost: the geometric mean of all their timings."""

    switches: Switches
    seconds: float


def contest(
    candidates: Sequence[Switches],
    arms: Callable[[Switches, ExitStack], Callable[[], Timings]],
    seconds: float,
    margin: float = 1.15,
) -> list[Contestant]:
    """Time candidates in turn, dropping those that fall behind; cheapest first.

    arms: makes a candidate ready (closing what it opens with the stack) and returns what times it.
    A candidate the model or the machine cannot have is left out. margin: how many times the
    cheapest a candidate may cost before it is dropped.
    """
    began = clock()
    with ExitStack() as all_open:
        running: dict[Switches, tuple[Callable[[], Timings], ExitStack, list[Timings]]] = {}
        dropped: list[Contestant] = []
        for candidate in candidates:
            stack = all_open.enter_context(ExitStack())
            try:
                arm = arms(candidate, stack)
            except (UsageError, OutOfMemoryError):
                stack.close()
                continue
            running[candidate] = (arm, stack, [arm()])
            dropped += _drop_slow(running, margin)
        while len(running) > 1 and clock() - began < seconds:
            for arm, _, rounds in running.values():
                rounds.append(arm())
            dropped += _drop_slow(running, margin)
            if min(len(rounds) for _, _, rounds in running.values()) >= MAX_ROUNDS:
                break
        left = [Contestant(key, score(rounds)) for key, (_, _, rounds) in running.items()]
    return sorted([*left, *dropped], key=lambda one: one.seconds)


def _drop_slow(
    running: dict[Switches, tuple[Callable[[], Timings], ExitStack, list[Timings]]], margin: float
) -> Iterator[Contestant]:
    scores = {key: score(rounds) for key, (_, _, rounds) in running.items()}
    for key, seconds in scores.items():
        if seconds > margin * min(scores.values()):
            running.pop(key)[1].close()
            yield Contestant(key, seconds)


def score(rounds: Sequence[Timings]) -> float:
    """The geometric mean of the medians."""
    return statistics.geometric_mean(medians(rounds).values())


def cheapest(contestants: Sequence[Contestant], order: Sequence[Switches]) -> Contestant:
    """The first in `order` of those that are as cheap as the cheapest, give or take 2 %.

    Raises CannotRunError where there is none.
    """
    if not contestants:
        raise CannotRunError("llama.cpp accepts none of the settings that were tried.")
    best = contestants[0].seconds
    near = {one.switches: one for one in contestants if one.seconds <= 1.02 * best}
    return next(near[switches] for switches in order if switches in near)


def thread_counts(cores: int) -> list[int]:
    """Counts to try: all up to four, then in steps of about a quarter of the cores."""
    if cores <= 4:
        return list(range(cores, 0, -1))
    return sorted({math.ceil(cores * share) for share in (1, 0.75, 0.5, 0.25)} | {cores - 1})[::-1]


def choose_threads(context: Context, switches: Switches, width: int, seconds: float) -> Switches:
    """The switches with the thread counts that are cheapest for one token and for `width`."""
    counts = thread_counts(switches.threads)
    if len(counts) == 1:
        return switches
    found = []
    for tokens in (1, width):
        candidates = [replace(switches, threads=n, threads_batch=n) for n in counts]

        def ready(candidate: Switches, _: ExitStack, tokens: int = tokens) -> Callable[[], Timings]:
            def time() -> Timings:
                context.set_threads(candidate.threads, candidate.threads_batch)
                time_pass(context, tokens)  # new threads are started in the first pass
                return {"pass": settled(context, tokens)}

            return time

        ranked = contest(candidates, ready, seconds / 2)
        found.append(cheapest(ranked, candidates).switches.threads)
    chosen = replace(switches, threads=found[0], threads_batch=found[1])
    context.set_threads(chosen.threads, chosen.threads_batch)
    return chosen


@contextmanager
def opened(
    model: Model, switches: Switches, n_ctx: int, *, max_rows: int = 33, n_batch: int = 64
) -> Iterator[Context]:
    """A context with these switches; small batches keep its buffers small."""
    params = ContextParams(
        n_ctx=n_ctx,
        n_batch=n_batch,
        max_rows=max_rows,
        threads=switches.threads,
        threads_batch=switches.threads_batch,
        flash_attention=switches.flash_attention,
        cache_type_k=switches.cache_type_k,
        cache_type_v=switches.cache_type_v,
        snapshots=max_rows if model.recurrent else 0,
    )
    with Context(model, params) as context:
        yield context
