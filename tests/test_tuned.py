"""A profile changes how a pair is loaded and what is believed first; never what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from homespec import SamplingParams, loading
from homespec.checking import check
from homespec.engine import STRICT_EXACT, Engine, LoadParams
from homespec.errors import RefusedError
from homespec.fetching import as_planned
from homespec.models.memory_plan import PlanRequest
from homespec.models.pairs import find_pair
from homespec.scheduling.engine import ParallelEngine
from homespec.tuning.cost import CostCurve
from homespec.tuning.placement import Placement
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
    save_profile,
    this_box,
)

GREEDY = SamplingParams(temperature=0)
CURVE = CostCurve((0, 1024), (1, 4, 32), ((0.01, 0.02, 0.05), (0.02, 0.03, 0.06)))
DEARER = CostCurve((0, 1024), (1, 4, 32), ((0.03, 0.05, 0.08), (0.05, 0.06, 0.09)))
SWITCHES = Switches("on", "f16", "bf16", 1, 1)


@pytest.fixture
def profile(
    tiny: Path, tiny_draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Profile:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return Profile(
        box=this_box(),
        target=identify(tiny),
        draft=identify(tiny_draft),
        placement=Placement(0, None, 0, None),
        created="2026-01-01T00:00:00Z",
        seconds={},
        target_switches=SWITCHES,
        target_cost=CURVE,
        default_promise=WidthPromise(True, 0.0),
        draft_switches=replace(SWITCHES, flash_attention="off", cache_type_v="f16"),
        draft_cost=CURVE,
        acceptance=Acceptance(0.9, 0.8, (MatchRate(3, 0.11, 400), MatchRate(4, 0.99, 1))),
    )


def test_measured_settings_take_the_place_of_defaults(
    profile: Profile, tiny: Path, tiny_draft: Path
) -> None:
    save_profile(profile, tiny, tiny_draft)
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
        assert engine.profile == profile
        assert (engine.params.flash_attention, engine.params.cache_type_v) == ("on", "bf16")
        assert engine.params.draft_flash_attention == "off"
        learned = engine.learned
        assert learned.draft_token(0) == pytest.approx(CURVE.seconds(1, 512))
        assert learned.reading(32, 0) == pytest.approx(CURVE.seconds(32, 512))
        assert learned.model_rate.value == pytest.approx(0.9)
        assert learned.matches[3].value == pytest.approx(0.11)
        assert learned.matches[4].value < 0.9  # seen once: the guess stays
        assert engine.generate("Hello", sampling=GREEDY, max_tokens=20).tokens


def test_what_a_pair_showed_of_its_target_holds_without_the_draft(
    profile: Profile, tiny: Path, tiny_draft: Path
) -> None:
    save_profile(profile, tiny, tiny_draft)
    with Engine(tiny, params=LoadParams(n_ctx=128)) as engine:
        assert engine.profile == profile.of_target_alone()
        assert not engine.untuned
        assert engine.params.flash_attention == "on"
    elsewhere = replace(profile, box=replace(profile.box, build="another"))
    save_profile(elsewhere, tiny, tiny_draft)
    with Engine(tiny, params=LoadParams(n_ctx=128)) as engine:
        assert engine.profile is None
        assert engine.untuned == "it was never tuned here"


def test_what_was_asked_for_stays(profile: Profile, tiny: Path, tiny_draft: Path) -> None:
    save_profile(profile, tiny, tiny_draft)
    with Engine(
        tiny, tiny_draft, LoadParams(n_ctx=128, flash_attention="off", threads=2)
    ) as engine:
        assert (engine.params.flash_attention, engine.params.threads) == ("off", 2)
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128, tuned=False)) as engine:
        assert engine.profile is None
        assert engine.params.flash_attention == "auto"


def test_many_sequences_do_not_take_what_suits_one(profile: Profile, tiny: Path) -> None:
    alone = replace(profile, draft=None, target_switches=replace(SWITCHES, flash_attention="off"))
    save_profile(alone, tiny)
    load = LoadParams(n_ctx=128)
    with Engine(tiny, params=load) as engine:
        assert engine.params.flash_attention == "off"
    for asked, attention, kind in (
        (load, "auto", "bf16"),
        (replace(load, flash_attention="off"), "off", "f16"),
        (replace(load, cache_type_v="q8_0"), "auto", "q8_0"),
    ):
        with ParallelEngine(tiny, asked, parallel=2) as engine:
            settings = engine.cache.context.params
            assert engine.profile == alone
            assert (settings.flash_attention, settings.cache_type_v) == (attention, kind)


def test_a_fitted_draft_is_loaded_while_it_is_there(
    profile: Profile, tiny: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    copy = tmp_path / "fitted.gguf"
    copy.write_bytes(tiny_draft.read_bytes())
    fitted = FittedDraft(str(copy), "Q4_0", "", "")
    save_profile(replace(profile, fitted=fitted), tiny, tiny_draft)
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
        assert engine.draft_context is not None
        assert engine.draft_context.model.path == copy
        assert not engine.untuned
    report = check(tiny, tiny_draft, PlanRequest(n_ctx=128))
    assert report.plan.draft is not None
    assert report.plan.draft.name == copy.name
    assert report.drafts[0].facts.source == f"file:{tiny_draft}"
    assert report.as_dict()["drafts"][0]["fitted"]["source"] == f"file:{copy}"
    pair = find_pair(tiny, tiny_draft)
    assert as_planned(pair, report, print) == pair
    copy.unlink()
    assert check(tiny, tiny_draft, PlanRequest(n_ctx=128)).drafts[0].fitted is None
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
        assert engine.draft_context is not None
        assert engine.draft_context.model.path == tiny_draft


def test_without_its_copy_the_draft_is_taken_for_what_it_is(
    profile: Profile, tiny: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    shipped = VariantResult(SHIPPED, 1, SWITCHES, DEARER, 0.5, 0.4, 4, 1.1)
    lost = FittedDraft(str(tmp_path / "gone.gguf"), "Q4_0", "", "")
    for variants in ((shipped,), ()):
        save_profile(replace(profile, fitted=lost, variants=variants), tiny, tiny_draft)
        with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
            assert engine.untuned == "the draft's Q4_0 copy is gone"
            assert engine.params.flash_attention == "on"
            if variants:
                assert engine.params.draft_flash_attention == "on"
                assert engine.learned.draft_token(0) == DEARER.seconds(1, 512)
                assert engine.learned.model_rate.value == pytest.approx(0.5)
            else:
                assert engine.params.draft_flash_attention == "auto"
                assert not engine.learned.knows_draft


def test_a_pair_that_was_not_tuned_takes_what_is_known_of_its_target(
    profile: Profile, tiny: Path, tiny_draft: Path
) -> None:
    alone = profile.of_target_alone()
    save_profile(alone, tiny)
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
        assert engine.profile == alone
        assert engine.untuned == "it was never tuned here"
        assert engine.params.flash_attention == "on"
        assert engine.draft_context is not None
        size_ratio = engine.draft_context.model.size_bytes / engine.model.size_bytes
        plain = engine.learned.cost.seconds(1, 0)
        assert engine.learned.draft_token(0) == pytest.approx(size_ratio * plain)


def planned_elsewhere(monkeypatch: pytest.MonkeyPatch, device: str, layers: int) -> None:
    """Have the plan put the target on a device; a build without one loads it all the same."""
    check_files = loading.check_files

    def elsewhere(*args: Any) -> Any:
        compatibility, plan = check_files(*args)
        target = replace(plan.target, devices=(device,), gpu_layers=layers)
        return compatibility, replace(plan, target=target)

    monkeypatch.setattr(loading, "check_files", elsewhere)


def refuse(*_: object) -> None:
    raise RefusedError("other bits")


def test_what_was_measured_elsewhere_is_not_used(
    profile: Profile, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = replace(profile.of_target_alone(), strict_by_default=True)
    load = LoadParams(n_ctx=128)
    save_profile(replace(alone, placement=Placement(3, ("CUDA0",))), tiny)
    with Engine(tiny, params=load) as engine:
        assert engine.profile is None
        assert engine.untuned == "it was tuned with the target with 3 layers on CUDA0, not in RAM"
        assert engine.params.flash_attention == "auto"
    # What nobody asked for is no reason to refuse.
    monkeypatch.setattr(loading, "require_invariant", refuse)
    planned_elsewhere(monkeypatch, "CUDA0", 3)
    with Engine(tiny, params=load) as engine:
        assert engine.profile is not None
        assert engine.params.strict_exact
    for there in (Placement(0), Placement(2, ("CUDA0",)), Placement(3, ("CUDA1",))):
        save_profile(replace(alone, placement=there), tiny)
        with Engine(tiny, params=load) as engine:
            assert engine.profile is None
            assert not engine.params.strict_exact
    with pytest.raises(RefusedError, match="other bits"):
        Engine(tiny, params=replace(load, strict_exact=True))


def test_a_draft_that_lies_elsewhere_costs_the_draft_s_settings_only(
    profile: Profile, tiny: Path, tiny_draft: Path
) -> None:
    on_device = Placement(0, None, 3, ("CUDA0",))
    save_profile(replace(profile, placement=on_device), tiny, tiny_draft)
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
        assert engine.untuned == "it was tuned with the draft with 3 layers on CUDA0, not in RAM"
        assert engine.params.flash_attention == "on"
        assert engine.params.draft_flash_attention == "auto"
        assert engine.draft_context is not None


def test_strict_by_default_leaves_what_was_asked_for(profile: Profile, tiny: Path) -> None:
    alone = replace(profile.of_target_alone(), strict_by_default=True, strict_cost=DEARER)
    save_profile(alone, tiny)
    load = LoadParams(n_ctx=128)
    with Engine(tiny, params=load) as engine:
        assert engine.params.strict_exact
        assert {name: getattr(engine.params, name) for name in STRICT_EXACT} == STRICT_EXACT
        assert engine.learned.cost.seconds(1, 0) == DEARER.seconds(1, 0)
    for asked in ({"flash_attention": "off"}, {"cache_type_k": "q8_0", "flash_attention": "on"}):
        with Engine(tiny, params=replace(load, **asked)) as engine:
            assert not engine.params.strict_exact
            assert {name: getattr(engine.params, name) for name in asked} == asked
            assert engine.learned.cost.seconds(1, 0) == CURVE.seconds(1, 0)


def test_strictly_exact_is_refused_where_it_was_seen_not_to_be(
    profile: Profile, tiny: Path
) -> None:
    alone, load = profile.of_target_alone(), LoadParams(n_ctx=128, strict_exact=True)
    save_profile(replace(alone, strict_promise=WidthPromise(False, 0.25)), tiny)
    with pytest.raises(RefusedError, match=r"logits differ by 0\.25") as caught:
        Engine(tiny, params=load)
    assert "--strict-exact" in str(caught.value.hint)
    Engine(tiny, params=replace(load, strict_exact=False)).close()
    save_profile(replace(alone, strict_promise=WidthPromise(True, 0.0)), tiny)
    Engine(tiny, params=load).close()


def test_the_draft_has_threads_of_its_own(profile: Profile, tiny: Path, tiny_draft: Path) -> None:
    measured = replace(SWITCHES, threads=2, threads_batch=3)
    save_profile(replace(profile, draft_switches=measured), tiny, tiny_draft)
    for asked, threads in ((0, (2, 3)), (4, (4, 3))):
        with Engine(tiny, tiny_draft, LoadParams(n_ctx=128, threads=asked)) as engine:
            assert engine.draft_context is not None
            settings = engine.draft_context.params
            assert (settings.threads, settings.threads_batch) == threads
            assert engine.context.params.threads == (asked or 1)


def test_a_measured_nought_is_no_guess_and_sampled_drafts_have_their_own_rate(
    profile: Profile, tiny: Path, tiny_draft: Path
) -> None:
    save_profile(replace(profile, acceptance=Acceptance(0.0, 0.4)), tiny, tiny_draft)
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
        for temperature, rate in ((0.0, 0.0), (0.8, 0.4), (0.0, 0.0)):
            sampling = SamplingParams(temperature=temperature)
            engine.stream("Hello", sampling=sampling, max_tokens=4).cancel()
            assert engine.learned.model_rate.value == pytest.approx(rate)


@pytest.mark.parametrize("suits", [True, False])
def test_what_was_not_measured_is_loaded_as_suits_homespecs_kernels(
    suits: bool, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[bool] = []
    monkeypatch.setattr(loading, "suits_own_kernels", lambda _: suits)
    monkeypatch.setattr(loading, "leave_tiled_kernels", lambda: chosen.append(True))
    for tuned in (True, False):
        with Engine(tiny, params=LoadParams(n_ctx=128, tuned=tuned)) as engine:
            assert engine.params.repack == (not (suits and tuned))
    assert chosen == [True] * suits
