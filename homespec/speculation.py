"""Puts a generation's speculation together: drafter, acceptance rule and depth policy."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from homespec.decoding.depth import FixedDepth
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.types import DepthPolicy, Drafter
from homespec.decoding.verify import RULES, AcceptanceRule
from homespec.drafters.adaptive import AdaptiveDrafter, Learned
from homespec.drafters.draft_model import DraftModelDrafter
from homespec.drafters.ngram import NgramDrafter
from homespec.drafters.none import NoDrafter
from homespec.errors import UsageError
from homespec.generation import ADAPTIVE_CEILING, Closable, GenerateParams
from homespec.llama.context import Context
from homespec.llama.sampler import SamplerChain
from homespec.models.tokenizer_check import Compatibility

FIXED_DEPTH = 3  # as llama.cpp


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a generation drafts and verifies; `resources` are to be closed after it."""

    drafter: Drafter
    rule: AcceptanceRule
    policy: DepthPolicy
    explain: Callable[[], list[str]]
    resources: list[Closable] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Pairing:
    """A loaded target and, perhaps, its draft."""

    target: Context
    draft: Context | None
    compatibility: Compatibility | None
    end_tokens: frozenset[int]


def build(
    pairing: Pairing, params: GenerateParams, sampling: SamplingParams, learned: Learned
) -> Speculation:
    """The speculation that `params` ask for. Raises UsageError for a draft that is not there."""
    kind = params.spec_type or "auto"
    if kind == "draft_model" and pairing.draft is None:
        raise UsageError(
            "Drafting with a model needs a draft model.", hint="Name one with -md FILE."
        )
    if kind == "none" or not pairing.target.can_truncate:
        return Speculation(
            NoDrafter(), _rule(params, sampling, False), FixedDepth(0), lambda: [_why_off(pairing)]
        )
    sampled = pairing.draft is not None and samples_draft(params, sampling)
    resources: list[Closable] = []
    model = None
    if pairing.draft is not None and kind in ("auto", "draft_model"):
        chain = _draft_chain(pairing.draft, sampling, sampled)
        resources.append(chain)
        model = _draft_model(pairing, pairing.draft, chain, params, sampling)
    ngram = NgramDrafter() if kind in ("auto", "ngram") else None
    rule = _rule(params, sampling, sampled and model is not None)
    if params.depth == "fixed":
        depth = FIXED_DEPTH if params.draft_depth is None else params.draft_depth
        drafter: Drafter = model or ngram or NoDrafter()
        line = f"{drafter.name} drafted {depth} tokens a round, as asked."
        return Speculation(drafter, rule, FixedDepth(depth), lambda: [line], resources)
    ceiling = ADAPTIVE_CEILING if params.draft_depth is None else params.draft_depth
    learned.draft_is(sampled=sampled)
    adaptive = AdaptiveDrafter(ngram, model, learned)
    return Speculation(adaptive, rule, FixedDepth(ceiling), adaptive.explain, resources)


def samples_draft(params: GenerateParams, sampling: SamplingParams) -> bool:
    """Whether the draft is sampled from its own distribution, and not greedy."""
    if sampling.greedy or params.draft_sampling == "greedy":
        return False
    # The match rule asks for one token only: the likeliest is the best guess.
    return params.draft_sampling == "probabilistic" or params.rule != "match"


def _rule(params: GenerateParams, sampling: SamplingParams, sampled: bool) -> AcceptanceRule:
    if sampling.greedy:
        return RULES["greedy"]
    return RULES[params.rule or ("rejection" if sampled else "match")]


def _draft_chain(draft: Context, sampling: SamplingParams, sampled: bool) -> SamplerChain:
    if sampled:
        return SamplerChain(draft.model, replace(sampling.within(draft.n_ctx), grammar=None))
    # A greedy draft needs probabilities for its confidence alone; llama.cpp asks the top 10 too.
    return SamplerChain(draft.model, SamplingParams(temperature=1, top_k=10, top_p=1, min_p=0))


def _draft_model(
    pairing: Pairing,
    draft: Context,
    chain: SamplerChain,
    params: GenerateParams,
    sampling: SamplingParams,
) -> DraftModelDrafter:
    check = pairing.compatibility
    same_size = draft.model.n_vocab == pairing.target.model.n_vocab
    sampled = samples_draft(params, sampling)
    return DraftModelDrafter(
        draft,
        chain,
        uniform=random.Random(f"{sampling.seed}/draft").random if sampled else None,
        p_min=params.p_min,
        end_tokens=pairing.end_tokens,
        shared_vocabulary=check.shared_vocabulary if check and not same_size else None,
        forbidden=check.forbidden_ids if check else (),
    )


def _why_off(pairing: Pairing) -> str:
    if not pairing.target.can_truncate:
        return "Plain decoding: this model's cache cannot drop the tokens of a rejected draft."
    return "Plain decoding, as asked."
