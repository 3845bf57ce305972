"""Cost curves, the choice of a draft, profiles that know when they end, and a whole run."""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from homespec.decoding.types import Distribution
from homespec.engine import STRICT_EXACT
from homespec.errors import CannotRunError, DiskError, IncompatiblePairError, ModelError, UsageError
from homespec.llama import library, quantizer
from homespec.llama.cache_filler import fill
from homespec.llama.context import Context, ContextParams
from homespec.llama.library import build_features
from homespec.llama.model import Model
from homespec.llama.tokenizer import Tokenizer
from homespec.tune import tune_pair
from homespec.tuning import fit
from homespec.tuning.agreement import (
    Agreement,
    Place,
    Reading,
    agreement,
    overlap,
    read_places,
    read_samples,
)
from homespec.tuning.box import Box, this_box
from homespec.tuning.child_arm import ChildArm
from homespec.tuning.cost import WIDTHS, CostCurve, isotonic
from homespec.tuning.drafts import DraftTuner, matrix_types
from homespec.tuning.fitted import (
    copy_bytes,
    digest_of,
    drop_copies_of,
    drop_unused,
    fitted_draft,
)
from homespec.tuning.measure import (
    MAX_ROUNDS,
    cheapest,
    choose_threads,
    contest,
    disturbance,
    interleave,
    medians,
    opened,
    settled,
    thread_counts,
    together,
)
from homespec.tuning.ngram_rates import longest_match, match_rates
from homespec.tuning.notebook import Notebook
from homespec.tuning.placement import Placement
from homespec.tuning.plot import check_plot, draw
from homespec.tuning.profile import (
    SHIPPED,
    Acceptance,
    FittedDraft,
    MatchRate,
    Profile,
    Switches,
    VariantResult,
    WidthPromise,
    identify,
    load_profile,
    profile_path,
    save_profile,
)
from homespec.tuning.target import TargetTuner
from homespec.tuning.tune import TuneParams
from hypothesis import given
from hypothesis import strategies as st

from tests.conftest import PairFiles
from tests.tiny_gguf import write_tiny_gguf

SWITCHES = Switches("off", "f16", "f16", 1, 1)
BOX = Box("A processor", ("avx2", "fma"), 4, (), "0.3.36")


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """State and cache of this test's own."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


@pytest.fixture(scope="module", autouse=True)
def one_core() -> Iterator[None]:
    """A single processor, so that passes of microseconds do not wait for a second thread."""
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    yield
    os.sched_setaffinity(0, allowed)


# The cost curve


def curve(slope: float, base: float = 1.0, per_context: float = 0.0) -> CostCurve:
    """base + slope (n - 1) seconds at a context of 0, and per_context more for each token there."""
    points = {
        (length, n): base + slope * (n - 1) + per_context * length
        for length in (0, 1000)
        for n in WIDTHS
    }
    return CostCurve.from_points(points)


def test_a_straight_cost_stays_straight_between_and_past_its_points() -> None:
    cost = curve(0.25, per_context=0.001)
    for n, length in itertools.product((1, 2, 7, 13, 32, 40, 64), (0, 1, 500, 1000, 3000)):
        assert cost.seconds(n, length) == pytest.approx(1 + 0.25 * (n - 1) + 0.001 * length)


def test_a_step_stays_where_it_was_measured() -> None:
    cost = CostCurve.from_points({(64, n): 1.0 if n <= 4 else 3.0 for n in WIDTHS})
    assert [cost.seconds(n, 64) for n in (1, 4, 5, 32, 100)] == [1, 1, 3, 3, 3]
    assert cost.seconds(1, 0) == cost.seconds(1, 9999) == 1.0  # one length tells of no slope


positive = st.floats(1e-4, 10, allow_nan=False)


@given(st.lists(positive, min_size=1, max_size=8))
def test_isotonic_regression_is_the_min_max_formula(values: list[float]) -> None:
    def mean(low: int, high: int) -> float:
        return sum(values[low : high + 1]) / (high + 1 - low)

    # Robertson, Wright and Dykstra 1988, theorem 1.4.4
    last = len(values)
    expected = [
        max(min(mean(j, k) for k in range(i, last)) for j in range(i + 1)) for i in range(last)
    ]
    assert isotonic(values) == pytest.approx(expected)


@given(st.lists(positive, min_size=12, max_size=12), st.integers(1, 50), st.integers(0, 5000))
def test_more_tokens_or_context_never_cost_less(values: list[float], n: int, length: int) -> None:
    places = itertools.product((64, 600, 2000), (1, 2, 8, 32))
    cost = CostCurve.from_points(dict(zip(places, values, strict=True)))
    here = cost.seconds(n, length)
    assert cost.seconds(n + 1, length) >= here * (1 - 1e-12)
    assert cost.seconds(n, length + 100) >= here * (1 - 1e-12)
    assert here >= min(values) * (1 - 1e-3)  # four digits are kept


def test_a_context_length_that_was_not_finished_is_left_out() -> None:
    points = {(64, 1): 1.0, (64, 2): 2.0, (600, 1): 1.5}
    assert CostCurve.from_points(points).context_lengths == (64,)


@pytest.mark.parametrize(
    "damage",
    [
        {"widths": [2, 1]},
        {"widths": [1, 2, 3]},
        {"context_lengths": []},
        {"seconds": [[1.0, math.inf]]},
        {"seconds": [[0.0, 1.0]]},
        {"seconds": [[1.0, 1.0], [1.0, 1.0]]},
    ],
)
def test_a_damaged_curve_is_no_curve(damage: dict[str, object]) -> None:
    good = {"context_lengths": [64], "widths": [1, 2], "seconds": [[1.0, 2.0]]}
    assert CostCurve.from_dict(good).as_dict() == good
    with pytest.raises(ValueError):  # noqa: PT011 - any sentence
        CostCurve.from_dict(good | damage)


# The choice


def test_expected_tokens_are_what_rounds_commit() -> None:
    rng = random.Random(1)
    for acceptance, depth in ((0.0, 3), (0.6, 4), (0.9, 8), (1.0, 5)):
        committed = 0
        for _ in range(20_000):
            accepted = 0
            while accepted < depth and rng.random() < acceptance:
                accepted += 1
            committed += accepted + 1
        assert fit.expected_tokens(acceptance, depth) == pytest.approx(committed / 20_000, rel=0.02)


def test_where_wide_passes_are_free_the_deepest_draft_is_best_and_where_they_cost_none_is() -> None:
    free, linear = curve(0.0), curve(1.0)
    assert fit.best(0.8, free, None).depth == fit.MAX_DEPTH
    assert fit.best(0.8, free, None).speedup == pytest.approx(
        fit.expected_tokens(0.8, fit.MAX_DEPTH)
    )
    assert fit.best(0.8, linear, None).speedup < 1
    assert fit.predict(0.8, linear, None)[0].speedup == 1


def test_a_draft_is_worth_its_agreement_against_its_cost() -> None:
    target = curve(0.1)
    slow, fast = curve(0.0, 0.4), curve(0.0, 0.1)
    # A cheaper draft may agree less, down to a point.
    assert fit.best(0.72, target, fast).speedup > fit.best(0.76, target, slow).speedup
    assert fit.best(0.30, target, fast).speedup < fit.best(0.76, target, slow).speedup
    assert fit.best(0.76, target, fast).depth > fit.best(0.76, target, slow).depth


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0.01, 1))
def test_more_agreement_is_never_slower(one: float, other: float, draft_cost: float) -> None:
    low, high = sorted((one, other))
    target, draft = curve(0.2), curve(0.0, draft_cost)
    assert fit.best(high, target, draft).speedup >= fit.best(low, target, draft).speedup - 1e-12


def test_a_draft_reads_one_more_token_after_it_was_accepted_whole() -> None:
    target = curve(0.1)
    draft = CostCurve((0,), (1, 2), ((0.1, 0.15),))
    always, never = (fit.round_seconds(a, 3, target, draft, 0) for a in (1.0, 0.0))
    assert never == pytest.approx(1.3 + 3 * 0.1)
    assert always - never == pytest.approx(0.05)


def test_a_gain_within_the_noise_is_none() -> None:
    assert fit.beats(1.1, 1.0)
    assert not fit.beats(1.01, 1.0)


# Measuring


def test_rounds_go_on_where_they_were_and_stop_in_time() -> None:
    rounds = [{"a": 1.0, "b": 3.0}]
    noted: list[int] = []

    def arm() -> dict[str, float]:
        time.sleep(0.02)
        return {"a": 2.0 + len(rounds), "b": 4.0}

    found = interleave(arm, rounds, 0.05, lambda: noted.append(len(rounds)))
    assert 1 < len(rounds) < MAX_ROUNDS
    assert noted == list(range(2, len(rounds) + 1))
    assert found == medians(rounds)
    assert interleave(arm, full := [{"a": 1.0}] * MAX_ROUNDS, 99) == {"a": 1.0}
    assert len(full) == MAX_ROUNDS


def test_a_few_rounds_that_agree_are_enough() -> None:
    rounds: list[dict[str, float]] = []
    times = iter([1.0, 3.0, 1.01, 1.5, 1.05, 1.0, 1.0])
    assert interleave(lambda: {"a": next(times)}, rounds, 99) == {"a": pytest.approx(1.03)}
    assert len(rounds) == 5


def test_the_first_round_is_always_finished() -> None:
    assert interleave(lambda: {"a": 1.0}, [], 0.0) == {"a": 1.0}


def test_rounds_beside_other_work_do_not_count() -> None:
    rounds = [
        {"a": 1.0, "b": 2.0},
        {"a": 1.2, "b": 2.0},
        {"a": 9.0, "b": 9.0},
        {"a": 8.0, "b": 9.0},
    ]
    assert medians(rounds) == {"a": pytest.approx(1.1), "b": 2.0}
    assert disturbance(rounds) > 1.5
    assert disturbance(rounds[:2]) < 1.1


def test_a_contest_drops_what_falls_behind_and_leaves_out_what_cannot_be() -> None:
    costs = {"f16": 1.0, "bf16": 1.01, "f32": 2.0, "q8_0": None}
    timed = dict.fromkeys(costs, 0)

    def ready(one: Switches, _: object):  # type: ignore[no-untyped-def]
        cost = costs[one.cache_type_k]
        if cost is None:
            raise UsageError("not this one")

        def arm() -> dict[str, float]:
            timed[one.cache_type_k] += 1
            return {"x": cost, "y": 2 * cost}

        return arm

    tried = [replace(SWITCHES, cache_type_k=kind) for kind in ("f32", "bf16", "f16", "q8_0")]
    ranked = contest(tried, ready, 5.0)
    assert [one.switches.cache_type_k for one in ranked] == ["f16", "bf16", "f32"]
    assert timed["f16"] == timed["bf16"] == MAX_ROUNDS > timed["f32"]
    # As good as equal: the one that stands first is taken.
    assert cheapest(ranked, tried).switches.cache_type_k == "bf16"


def test_a_device_gets_a_pass_recorded_before_it_is_timed(tiny: Path) -> None:
    with Model(tiny) as model, Context(model, ContextParams(n_ctx=64)) as context:
        widths: list[int] = []

        def timed(_: Context, width: int) -> float:
            widths.append(width)
            return float(len(widths))

        for on_devices, passes in ((False, 1), (True, 3)):
            widths.clear()
            model.on_devices = on_devices
            assert settled(context, 5, timed) == passes
            assert widths == [5] * passes


def test_thread_counts_reach_from_all_cores_down() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(4) == [4, 3, 2, 1]
    assert thread_counts(16) == [16, 15, 12, 8, 4]


def test_threads_are_chosen_among_those_there_are(tiny: Path) -> None:
    switches = replace(SWITCHES, threads=2, threads_batch=2)
    with Model(tiny) as model, opened(model, switches, 128) as context:
        fill(context, 64)
        chosen = choose_threads(context, switches, 8, 0.1)
    assert {chosen.threads, chosen.threads_batch} <= {1, 2}
    assert replace(chosen, threads=2, threads_batch=2) == switches


# Deep caches without a prompt pass


@pytest.mark.parametrize("flash", ["on", "off"])
@pytest.mark.parametrize("types", ["f16 f16", "f16 bf16", "f32 f32", "q8_0 f16"])
def test_a_cache_is_filled_by_copying(tiny: Path, flash: str, types: str) -> None:
    k, v = types.split()
    params = ContextParams(
        n_ctx=256, threads=1, flash_attention=flash, cache_type_k=k, cache_type_v=v
    )
    with Model(tiny) as model, Context(model, params) as context:
        assert fill(context, 201)
        assert len(context.tokens) == 201
        [row] = context.extend([5], 1)
        deep = row.logits.copy()
        assert np.isfinite(deep).all()
        context.truncate(201)
        [row] = context.extend([5], 1)
        assert (row.logits == deep).all()
        # The copies are looked at: a cache without them answers otherwise.
        context.truncate(16)
        [row] = context.extend([5], 1)
        assert (row.logits != deep).any()


# Agreement


def test_overlap_is_the_chance_that_rejection_sampling_accepts() -> None:
    p = Distribution(np.array([1, 2, 3], np.int32), np.array([0.5, 0.3, 0.2]))
    q = Distribution(np.array([2, 3, 4], np.int32), np.array([0.2, 0.6, 0.2]))
    accepted = sum(
        q.probability(x) * min(1.0, p.probability(x) / q.probability(x)) for x in (2, 3, 4)
    )
    assert overlap(p, q) == pytest.approx(accepted)
    assert overlap(p, p) == pytest.approx(1.0)


def test_a_model_agrees_with_itself_and_less_with_another(tiny: Path, tiny_draft: Path) -> None:
    with Model(tiny) as model, opened(model, SWITCHES, 512, max_rows=64) as context:
        readings = read_samples(context, Tokenizer(model), 24)
        again = Agreement.pooled([agreement(context, one) for one in readings])
    assert all(len(one.tokens) - one.start == len(one.places) for one in readings)
    with Model(tiny_draft) as model, opened(model, SWITCHES, 512, max_rows=64) as context:
        other = Agreement.pooled([agreement(context, one) for one in readings])
    assert again.count == other.count == sum(len(one.places) for one in readings)
    # Single tokens and blocks of them are summed in another order: near-ties may fall otherwise.
    assert again.greedy > 0.97
    assert again.sampled > 0.999
    assert 0.1 < other.greedy < again.greedy
    assert 0.1 < other.sampled < again.sampled
    for one in readings:
        kept = Reading.from_dict(json.loads(json.dumps(one.as_dict())))
        assert (kept.tokens, kept.start, kept.kind) == (one.tokens, one.start, one.kind)
        assert [p.best for p in kept.places] == [p.best for p in one.places]


def test_a_place_judges_the_token_that_stands_there(tiny: Path) -> None:
    tokens = list(range(40, 60))
    with Model(tiny) as model, opened(model, SWITCHES, 64, max_rows=64) as context:
        places = read_places(context, tokens, 12)
        assert len(places) == 8
        context.clear()
        [row] = context.extend(tokens[:12], 1)
        first = Place.of(row.logits)
    assert places[0].best == first.best
    assert places[0].q.probabilities == pytest.approx(first.q.probabilities, rel=1e-3)


def test_a_text_the_draft_cannot_read_counts_as_far_as_it_can(tmp_path: Path, tiny: Path) -> None:
    larger = write_tiny_gguf(tmp_path / "larger.gguf", vocab_size=310)
    with Model(larger) as model, opened(model, SWITCHES, 64, max_rows=64) as context:
        tokens = (*range(20), 305, 1, 2)
        reading = Reading("chat", tokens, 10, tuple(read_places(context, tokens, 10)))
    with Model(tiny) as model, opened(model, SWITCHES, 64, max_rows=64) as context:
        assert agreement(context, reading).count == 10
        assert agreement(context, replace(reading, start=21)).count == 0


# Lookup


def test_the_longest_match_wins_and_among_equals_the_latest() -> None:
    assert longest_match([1, 2, 3, 9, 2, 3, 8, 1, 2, 3]) == (3, 9)
    assert longest_match([2, 3, 9, 2, 3, 8, 2, 3]) == (2, 8)
    assert longest_match([1, 2, 3]) == (0, -1)
    assert longest_match([7] * 60) == (22, 7)


def test_match_rates_count_hits_by_length() -> None:
    period = [*range(30)] * 3
    rates = {rate.length: rate for rate in match_rates([(period, 30)])}
    assert rates[22].rate > 0.9
    assert sum(rate.count for rate in rates.values()) == 59  # nothing stood before the first
    noise = random.Random(3).choices(range(8), k=400)
    found = {rate.length: rate for rate in match_rates([(noise, 0)])}
    assert found[2].count > 30
    assert found[2].rate < 0.3


# Fitted drafts


def test_the_quantizer_makes_a_copy_in_one_type_and_keeps_it(starter: Path) -> None:
    digest = digest_of(starter)
    shares: list[float] = []
    made = fitted_draft(starter, digest, "Q8_0", progress=shares.append)
    path = Path(made.path)
    assert matrix_types(path) == {"Q8_0"}
    assert shares == sorted(shares)
    assert shares[-1] == 1
    assert path.stat().st_size <= copy_bytes(starter, "Q8_0")
    note = json.loads(path.with_suffix(".json").read_text())
    assert note["parent_sha256"] == digest
    assert note["sha256"] == digest_of(path)
    before = path.stat().st_mtime_ns
    assert fitted_draft(starter, digest, "Q8_0") == made
    assert path.stat().st_mtime_ns == before
    # A note that tells of something else is not believed.
    path.with_suffix(".json").write_text(json.dumps(note | {"size_bytes": 1}))
    assert fitted_draft(starter, digest, "Q8_0") == made
    assert path.stat().st_mtime_ns > before
    other = fitted_draft(starter, digest, "Q4_0")
    drop_unused(digest, other)
    assert not path.exists()
    assert Path(other.path).exists()
    drop_copies_of("other.gguf")
    assert Path(other.path).exists()
    drop_copies_of(starter.name)
    assert list(path.parent.iterdir()) == []


def test_rows_that_no_block_fits_fall_back_by_themselves(starter: Path) -> None:
    made = fitted_draft(starter, digest_of(starter), "Q4_K")  # 576 is no multiple of 256
    assert matrix_types(Path(made.path)) == {"Q4_K", "Q5_0"}
    with Model(made.path) as model, Context(model, ContextParams(n_ctx=32)) as context:
        [row] = context.extend([1, 2, 3], 1)
        assert np.isfinite(row.logits).all()


def test_a_quantizer_that_is_stopped_leaves_nothing(starter: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy.gguf"

    def stop(share: float) -> None:
        if share > 0.1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        quantizer.quantize(starter, copy, "Q8_0", progress=stop)
    assert [file.name for file in tmp_path.iterdir() if file.is_file()] == []


def test_what_is_no_model_cannot_be_requantized(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(ModelError, match=r"cannot requantize broken\.gguf"):
        quantizer.quantize(broken, tmp_path / "copy.gguf", "Q4_0")
    assert not (tmp_path / "copy.gguf").exists()


def test_a_full_disk_is_told_before_the_work(
    starter: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("usage", (), {"free": 1 << 20})
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    with pytest.raises(DiskError, match="Q4_0 copy of the draft"):
        fitted_draft(starter, "0" * 64, "Q4_0")


# The profile


def a_profile(target: Path, draft: Path, box: Box = BOX) -> Profile:
    return Profile(
        box=box,
        target=identify(target, sha256=digest_of(target)),
        draft=identify(draft),
        placement=Placement(29, ("CUDA0",), 0),
        created="2030-01-01T00:00:00+00:00",
        seconds={"target cost": 12.5},
        target_switches=SWITCHES,
        target_cost=curve(0.5),
        default_promise=WidthPromise(False, 0.25),
        strict_promise=WidthPromise(True, 0.0, 1.2),
        draft_switches=replace(SWITCHES, flash_attention="on"),
        draft_cost=curve(0.1, 0.2),
        fitted=FittedDraft("/nowhere/copy.gguf", "Q4_0", "a" * 64, "b" * 64),
        draft_pays=True,
        acceptance=Acceptance(0.75, 0.78, (MatchRate(2, 0.4, 30),)),
        variants=(VariantResult("Q4_0", 1, SWITCHES, curve(0.1), None, None, 4, 1.3),),
        notes=("a note",),
    )


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    paths = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * 100)
    return paths


def test_a_profile_comes_back_as_it_was(files: tuple[Path, Path]) -> None:
    profile = a_profile(*files)
    path = save_profile(profile, *files)
    assert load_profile(*files, BOX) == (profile, "")
    assert "target cost" in path.read_text()  # readable
    assert profile.draft_path is None  # the copy is gone
    assert load_profile(files[0], None, BOX) == (None, "it was never tuned here")


def test_a_changed_file_ends_a_profile_but_a_copied_one_does_not(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    target, draft = files
    save_profile(a_profile(*files), *files)
    os.utime(target, ns=(0, 0))
    assert load_profile(*files, BOX)[0] is not None  # the digest is that of the profile
    target.write_bytes(b"x" * 100)
    assert load_profile(*files, BOX) == (None, "the target's file has changed")
    save_profile(a_profile(*files), *files)
    os.utime(draft, ns=(0, 0))  # its digest is not known
    assert load_profile(*files, BOX) == (None, "the draft's file has changed")


def test_another_library_or_machine_ends_a_profile(files: tuple[Path, Path]) -> None:
    save_profile(a_profile(*files), *files)
    found, reason = load_profile(*files, replace(BOX, library="0.4.0"))
    assert (found, reason) == (None, "it was tuned with llama-cpp-python 0.3.36, not 0.4.0")
    found, reason = load_profile(*files, replace(BOX, build="another"))
    assert (found, reason) == (None, "llama.cpp was built anew since it was tuned")
    for other in (
        replace(BOX, cores=8),
        replace(BOX, cpu_features=("avx2",)),
        replace(BOX, devices=("a graphics card",)),
    ):
        assert load_profile(*files, other) == (None, "it was tuned on another machine")


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text[: len(text) // 2],
        lambda _: "[]",
        lambda _: "\x00",
        lambda text: text.replace('"version": 4', '"version": 0'),
        lambda text: text.replace('"draft_pays": true', '"draft_pays": "yes"'),
        lambda text: text.replace('"notes"', '"remarks"'),
        lambda text: text.replace('"widths": [', '"widths": ['.replace("[", "[9, ")),
    ],
    ids=["cut", "list", "binary", "version", "type", "unknown key", "curve"],
)
def test_a_damaged_profile_is_none(files: tuple[Path, Path], damage) -> None:  # type: ignore[no-untyped-def]
    path = save_profile(a_profile(*files), *files)
    text = path.read_text()
    assert damage(text) != text
    path.write_text(damage(text))
    found, reason = load_profile(*files, BOX)
    assert found is None
    assert "another version or damaged" in reason


def test_a_profile_that_cannot_be_written_is_a_plain_sentence(
    files: tuple[Path, Path], folders: Path
) -> None:
    (folders / "state").write_text("a file where the folder should be")
    with pytest.raises(DiskError, match="cannot be written"):
        save_profile(a_profile(*files), *files)


def test_a_build_is_known_by_its_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len(this_box().build) == 16
    for name in ("libllama.so", "libggml-cpu.so"):
        (tmp_path / name).write_bytes(b"kernels")
    fake = SimpleNamespace(_lib=SimpleNamespace(_name=str(tmp_path / "libllama.so")))
    monkeypatch.setattr(library, "library", lambda: fake)
    features = {"CPU": ["AVX2"]}
    monkeypatch.setattr(library, "build_features", lambda: features)
    seen = [library.build_id.__wrapped__()]
    os.utime(tmp_path / "libllama.so", ns=(0, 0))  # installed again
    assert library.build_id.__wrapped__() == seen[0]
    (tmp_path / "libggml-cpu.so").write_bytes(b"KERNELS")
    seen.append(library.build_id.__wrapped__())
    features["CPU"].append("AMX_INT8")
    seen.append(library.build_id.__wrapped__())
    assert len(set(seen)) == 3


def test_kernels_are_left_after_two_looks_only(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Arm(contextlib.nullcontext):  # type: ignore[type-arg]
        def __init__(self, *_: object, tiled: bool) -> None:
            super().__init__(self)
            self.tiled = tiled
            looks.append(tiled)

        def table(self, *_: object) -> dict[str, float]:
            return {"64,8": cost if self.tiled else 1.0}

    monkeypatch.setattr("homespec.tuning.target.ChildArm", Arm)
    for seconds, tiled, children in ((1.02, True, 2), (1.2, False, 4)):
        looks: list[bool] = []
        cost = seconds
        tuner = TargetTuner(tiny, Placement(0), a_notebook(tmp_path), 1)
        assert tuner.kernels() == {"tiled": tiled}
        assert len(looks) == children


def a_notebook(folder: Path) -> Notebook:
    return Notebook(folder / "x.partial", {}, {"all": 1.0})


# Copies of a draft


def test_a_copy_stays_while_a_profile_names_it(
    tiny_draft: Path, tmp_path: Path, files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """That of another target, too; one whose trial failed goes, and so does one that lost."""
    digest = digest_of(tiny_draft)
    used = fitted_draft(tiny_draft, digest, "Q4_0")
    save_profile(replace(a_profile(*files), fitted=used), *files)

    def trial(tuner: DraftTuner, name: str, path: Path, bound: float | None) -> dict[str, object]:
        assert path.exists()
        if name == "Q8_0":
            raise CannotRunError("it does not run.")
        speedup = {"Q4_K": 1.5, "Q5_0": 2.0}.get(name, 1.0)
        return {"quantization": name, "greedy": 0.7, "speedup": speedup}

    monkeypatch.setattr(DraftTuner, "_try", trial)
    book = a_notebook(tmp_path)
    tuner = DraftTuner(
        tiny_draft, Placement(0), book, 1, target=curve(0.5), readings=[], thorough=False
    )
    tuner.run()
    assert [one["quantization"] for one in tuner.tried] == [SHIPPED, "Q4_0", "Q4_K", "Q5_0"]
    assert "Q8_0 was left out: it does not run." in tuner.notes
    assert tuner.best_fitted is not None
    folder = Path(used.path).parent
    assert set(folder.glob("*.gguf")) == {Path(used.path), Path(tuner.best_fitted.path)}
    drop_unused(digest)
    assert list(folder.glob("*.gguf")) == [Path(used.path)]
    profile_path(*files, BOX).unlink()
    drop_unused(digest)
    assert list(folder.iterdir()) == []


def test_a_draft_that_cannot_be_tuned_is_a_note(
    tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Profile | None] = []

    def none_opens(*_: object) -> list[object]:
        kept.append(load_profile(tiny)[0])
        return []

    monkeypatch.setattr("homespec.tuning.drafts.contest", none_opens)
    profile = tune_pair(tiny, tiny_draft, TuneParams(budget_seconds=1))
    assert profile.draft is None
    assert "The draft was left out: llama.cpp accepts none" in profile.notes[-1]
    assert kept[0] is not None  # what was found of the target was safe before
    assert load_profile(tiny) == (profile, "")
    assert load_profile(tiny, tiny_draft)[0] is None
    assert profile.target_cost.widths == WIDTHS


# Strictly exact settings, in a process of their own


def test_strict_settings_are_probed_and_timed_in_a_child(tiny: Path) -> None:
    with ChildArm(tiny, replace(SWITCHES, **STRICT_EXACT), 128, Placement()) as arm:
        promise = arm.probe()
        timings = arm.table((64,), (1, 8))
    assert promise.largest < 1e-4
    assert timings.keys() == {"64,1", "64,8"}
    assert min(timings.values()) > 0


def test_the_kernels_of_a_child_are_its_own(pair: PairFiles) -> None:
    """The draft has K-quants, whose tiled kernel sums in another order, where there is one."""
    if "AVX2" not in build_features().get("CPU", ()):
        pytest.skip("llama.cpp has tiled kernels for x86 with AVX only")
    largest = {}
    for tiled in (True, False):
        with ChildArm(pair.draft, SWITCHES, 128, Placement(), tiled=tiled) as arm:
            largest[tiled] = arm.probe().largest
    assert largest[True] != largest[False]


def test_a_child_that_fails_says_why(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    with (
        ChildArm(broken, SWITCHES, 128, Placement()) as arm,
        pytest.raises(CannotRunError, match=r"broken\.gguf"),
    ):
        arm.probe()


# The whole


@pytest.fixture(scope="module")
def tuned(
    tiny: Path, tiny_draft: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Profile, Path]]:
    """A profile of the tiny pair, and the state folder where it lies."""
    home = tmp_path_factory.mktemp("tuned")
    names = ("XDG_STATE_HOME", "XDG_CACHE_HOME")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= dict.fromkeys(names, str(home))
    try:
        yield tune_pair(tiny, tiny_draft, TuneParams(budget_seconds=2)), home
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def test_a_run_measures_everything_and_keeps_it(
    tuned: tuple[Profile, Path], tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, home = tuned
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    assert load_profile(tiny, tiny_draft) == (profile, "")
    assert load_profile(tiny) == (profile.of_target_alone(), "")
    assert profile.box == this_box()
    assert "target's kernels" in profile.seconds
    assert profile.target_cost.widths == WIDTHS
    assert len(profile.target_cost.context_lengths) == 3
    assert profile.acceptance.greedy is not None
    assert 0.2 < profile.acceptance.greedy < 1
    tried = [variant.quantization for variant in profile.variants]
    assert tried == ["as shipped", "Q4_0", "Q4_K", "Q8_0", "Q5_0"]
    assert any("IQ4_NL was left out" in note for note in profile.notes)
    # What is not used is not kept, and nothing half done is left.
    kept = {Path(profile.fitted.path).name} if profile.fitted else set()
    assert {file.name for file in home.rglob("*.gguf")} == kept
    assert list(home.rglob("*.part*")) == []
    assert profile.default_promise.invariant or profile.strict_promise is not None


def test_an_interrupted_run_goes_on_where_it_was(
    tiny: Path, tiny_draft: Path, folders: Path
) -> None:
    def stop(what: str, _: float) -> None:
        if what.startswith("texts"):
            raise KeyboardInterrupt

    params = TuneParams(budget_seconds=2)
    with pytest.raises(KeyboardInterrupt, match="What is measured stays"):
        tune_pair(tiny, tiny_draft, params, stop)
    assert load_profile(tiny, tiny_draft)[0] is None
    [partial] = folders.rglob("*.partial")
    measured = json.loads(partial.read_text())["seconds"]
    shares: list[float] = []
    profile = tune_pair(tiny, tiny_draft, params, lambda _, share: shares.append(share))
    for stage, seconds in measured.items():
        if stage != "texts":
            assert profile.seconds[stage] == round(seconds, 2)
    assert shares[-1] == pytest.approx(1.0)
    assert not partial.exists()


def test_a_draft_of_another_family_is_refused(tiny: Path, starter: Path) -> None:
    with pytest.raises(IncompatiblePairError, match="cannot draft for"):
        tune_pair(tiny, starter)


# The command line


def homespec(*args: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "homespec", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_show_prints_the_profile_as_tables_or_json(
    tuned: tuple[Profile, Path], tiny: Path, tiny_draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, home = tuned
    monkeypatch.setenv("XDG_STATE_HOME", str(home))
    shown = homespec("tune", "--show", "-m", tiny, "-md", tiny_draft)
    assert shown.returncode == 0
    for part in ("A pass of the target", "as shipped", "Lookup", "Passes of any width"):
        assert part in shown.stdout
    as_json = homespec("tune", "--show", "--json", "-m", tiny, "-md", tiny_draft)
    assert Profile.from_dict(json.loads(as_json.stdout)) == profile


def test_show_without_a_profile_says_what_to_do(tiny: Path) -> None:
    shown = homespec("tune", tiny, "--show")
    assert shown.returncode == 1
    assert "it was never tuned here" in shown.stderr
    assert "hint: Measure it: homespec tune" in shown.stderr


def test_a_drawing_is_checked_for_before_minutes_are_spent(tiny: Path, tmp_path: Path) -> None:
    for file, code in (("x.txt", 2), ("nowhere/x.svg", 2)):
        began = time.monotonic()
        done = homespec("tune", tiny, "--plot", tmp_path / file)
        assert done.returncode == code
        assert "hint:" in done.stderr or "folder" in done.stderr
        assert time.monotonic() - began < 10


def test_the_profile_is_drawn(files: tuple[Path, Path], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    profile = replace(a_profile(*files), strict_cost=curve(0.6))
    check_plot(tmp_path / "drawing.svg")
    draw(profile, tmp_path / "drawing.svg")
    text = (tmp_path / "drawing.svg").read_text()
    assert text.startswith("<?xml")
    assert [file.name for file in tmp_path.glob("drawing*")] == ["drawing.svg"]


def test_without_matplotlib_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(CannotRunError, match="matplotlib"):
        check_plot(tmp_path / "x.svg")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_in_a_sentence(
    number: signal.Signals, starter: Path, folders: Path
) -> None:
    command = [sys.executable, "-m", "homespec", "tune", str(starter)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        while not list(folders.rglob("*.partial")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "What is measured stays" in stderr
    assert "Traceback" not in stderr
    assert len(list(folders.rglob("*.partial"))) == 1
    assert list(folders.rglob("*.part")) == []
    assert not profile_path(starter, None, this_box()).exists()


def test_passes_timed_at_two_speeds_of_the_machine_come_to_one_scale() -> None:
    narrow = {"64,1": 1.0, "64,8": 4.0, "600,1": 1.5, "600,8": 6.0}
    wide = {"64,1": 2.0, "64,8": 8.0, "64,16": 16.0, "600,8": 99.0, "600,16": 20.0}
    assert together(narrow, wide) == {**narrow, "64,16": 8.0, "600,16": 10.0}
