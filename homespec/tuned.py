"""What a profile of this box changes: load settings, the draft to load, and first beliefs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from homespec.drafters.adaptive import MATCH_PRIORS, MODEL_PRIOR, Priors
from homespec.errors import RefusedError
from homespec.tuning.profile import Profile, Switches, load_profile, load_target_profile

_CONTEXT = 512  # tokens in the cache at which a drafted token is priced
_MANY = 32  # tokens read at once when the draft catches up
_ENOUGH = 20  # look-ups seen before a measured rate replaces the guess


def candidates(target: Path, draft: Path | None) -> tuple[list[Profile], str]:
    """What is known of a pair here, the fullest first, and why something is not.

    What was measured of the target holds without its draft, too.
    """
    profile, reason = load_profile(target, draft)
    if profile is None:
        profile = load_target_profile(target)
        reason = reason if draft or profile is None else ""
    if profile is None:
        return [], reason
    if profile.lacks_copy and profile.fitted is not None:
        reason = f"the draft's {profile.fitted.quantization} copy is gone"
        profile = profile.as_shipped()
    return [profile, profile.of_target_alone()] if profile.draft else [profile], reason


def load_options(profile: Profile) -> dict[str, Any]:
    """Fields of LoadParams that were measured to be best here."""
    options = {name: getattr(profile.target_switches, name) for name in Switches.__slots__}
    if profile.draft_switches is not None:
        draft = profile.draft_switches
        options["draft_threads"] = draft.threads
        options["draft_threads_batch"] = draft.threads_batch
        options["draft_flash_attention"] = draft.flash_attention
        options["draft_cache_type_k"] = draft.cache_type_k
        options["draft_cache_type_v"] = draft.cache_type_v
    return options


def require_strict(profile: Profile) -> None:
    """Raise RefusedError where strictly exact settings were found not to be exact."""
    promise = profile.strict_promise
    if promise is not None and not promise.invariant:
        raise RefusedError(
            f"{profile.target.name} cannot be decoded strictly exactly here: homespec tune saw its "
            f"logits differ by {promise.largest:.2g} between passes over one token and several.",
            hint="Go without --strict-exact: the distribution is the target's either way.",
        )


def priors(profile: Profile, *, strict: bool = False) -> Priors:
    """What the adaptive drafter believes before its first round.

    strict: with the settings of strictly exact decoding.
    """
    measured = {m.length: m.rate for m in profile.acceptance.ngram if m.count >= _ENOUGH}
    token = reading = None
    if profile.draft_cost is not None:
        token = profile.draft_cost.seconds(1, _CONTEXT)
        reading = profile.draft_cost.seconds(_MANY, _CONTEXT) / _MANY
    accepted = profile.acceptance
    return Priors(
        cost=(profile.strict_cost if strict else None) or profile.target_cost,
        draft_token_seconds=token,
        read_token_seconds=reading,
        model_rate=MODEL_PRIOR if accepted.greedy is None else accepted.greedy,
        sampled_rate=MODEL_PRIOR if accepted.sampled is None else accepted.sampled,
        match_rates={**MATCH_PRIORS, **measured},
    )
