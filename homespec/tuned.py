"""What a profile of this box changes: load settings, the draft to load, and first beliefs."""

from __future__ import annotations

from typing import Any

from homespec.drafters.adaptive import MATCH_PRIORS, MODEL_PRIOR, Priors
from homespec.tuning.profile import Profile, Switches

_CONTEXT = 512  # tokens in the cache at which a drafted token is priced
_MANY = 32  # tokens read at once when the draft catches up
_ENOUGH = 20  # look-ups seen before a measured rate replaces the guess


def load_options(profile: Profile) -> dict[str, Any]:
    """Fields of LoadParams that were measured to be best here."""
    options = {name: getattr(profile.target_switches, name) for name in Switches.__slots__}
    if profile.draft_switches is not None:
        draft = profile.draft_switches
        options["draft_flash_attention"] = draft.flash_attention
        options["draft_cache_type_k"] = draft.cache_type_k
        options["draft_cache_type_v"] = draft.cache_type_v
    return options


def priors(profile: Profile) -> Priors:
    """What the adaptive drafter believes before its first round."""
    measured = {m.length: m.rate for m in profile.acceptance.ngram if m.count >= _ENOUGH}
    token = reading = None
    if profile.draft_cost is not None:
        token = profile.draft_cost.seconds(1, _CONTEXT)
        reading = profile.draft_cost.seconds(_MANY, _CONTEXT) / _MANY
    return Priors(
        cost=profile.target_cost,
        draft_token_seconds=token,
        read_token_seconds=reading,
        model_rate=profile.acceptance.greedy or MODEL_PRIOR,
        match_rates={**MATCH_PRIORS, **measured},
    )
