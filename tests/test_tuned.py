"""A profile changes how a pair is loaded and what is believed first; never what was asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from homespec import SamplingParams
from homespec.engine import Engine, LoadParams
from homespec.scheduling.engine import ParallelEngine
from homespec.tuning.cost import CostCurve
from homespec.tuning.profile import (
    Acceptance,
    FittedDraft,
    MatchRate,
    Profile,
    Switches,
    WidthPromise,
    identify,
    save_profile,
    this_box,
)

GREEDY = SamplingParams(temperature=0)
CURVE = CostCurve((0, 1024), (1, 4, 32), ((0.01, 0.02, 0.05), (0.02, 0.03, 0.06)))
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
    copy.unlink()
    with Engine(tiny, tiny_draft, LoadParams(n_ctx=128)) as engine:
        assert engine.draft_context is not None
        assert engine.draft_context.model.path == tiny_draft
