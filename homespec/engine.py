"""Joins the parts: finds the files, loads them, and decodes with them.

`load` gives an `Engine`; `Engine.stream` starts a `Generation`, which yields pieces of text and
ends with a `Result`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from homespec.decoding.sampling import MAX_SEED, SamplingParams
from homespec.decoding.speculative import SpeculativeDecoder
from homespec.decoding.text import TextStream
from homespec.decoding.types import Round
from homespec.errors import UsageError
from homespec.fetching import fetch_planned, params_for
from homespec.generation import Answer, GenerateParams, Generation, Result
from homespec.llama.context import Context
from homespec.llama.sampler import SamplerChain
from homespec.loading import STRICT_EXACT, LoadedTarget, LoadParams, LoadProgress, Prompt
from homespec.models.pairs import find_pair
from homespec.models.references import Progress
from homespec.speculation import Pairing, build

__all__ = ["STRICT_EXACT", "Engine", "LoadParams", "Prompt", "load"]


class Engine(LoadedTarget):
    """A target, perhaps a draft, and their caches of one sequence."""

    context: Context

    def _open_caches(self, draft: Path | None, progress: LoadProgress | None) -> None:
        self.context = self._keep(Context(self.model, self._target_context(self.params)))
        self.draft_context = (
            self._load_draft(draft, self.context.n_ctx, progress) if draft else None
        )

    def stream(
        self,
        prompt: Prompt | list[int],
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        observe: Callable[[Round], None] | None = None,
        **options: Any,
    ) -> Generation:
        """Start a generation; nothing is decoded until it is iterated.

        prompt: text, messages, or token ids. observe: called after every round. options: the
        fields of GenerateParams. A seed makes `match` the default rule, so that the text repeats
        however much was drafted.
        """
        params = _generate_params(options)
        tokens = self._tokens(prompt, system, params)
        sampling = sampling or SamplingParams()
        if sampling.seed is None:
            seed = random.SystemRandom().randint(0, MAX_SEED)
        else:
            seed = sampling.seed
            # Depths follow clocks; under this rule alone the text does not follow the depths.
            params = replace(params, rule=params.rule or "match")
        sampling = replace(sampling, seed=seed)
        end_tokens = self.tokenizer.end_tokens
        if params.ignore_eos:
            banned = tuple((token, float("-inf")) for token in end_tokens)
            sampling = replace(sampling, logit_bias=(*sampling.logit_bias, *banned))
            end_tokens = frozenset()
        pairing = Pairing(
            self.context, self.draft_context, self.compatibility, self.tokenizer.end_tokens
        )
        how = build(pairing, params, sampling, self.learned)
        chain = SamplerChain(self.model, sampling.within(self.context.n_ctx))
        decoder = SpeculativeDecoder(
            target=self.context,
            drafter=how.drafter,
            sampler=chain,
            rule=how.rule,
            policy=how.policy,
            uniform=random.Random(seed).random,
            end_tokens=end_tokens,
            min_draft=params.min_draft,
        )
        self.context.resume()
        answer = Answer(
            decoder,
            tokens,
            text=TextStream(self.tokenizer.piece, params.stop),
            seed=seed,
            explain=how.explain,
            resources=[chain, *how.resources],
        )
        return Generation(answer, tokens, params.max_tokens, observe)

    def generate(
        self,
        prompt: Prompt | list[int],
        *,
        system: str | None = None,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Result:
        """Generate to the end; arguments as for `stream`."""
        return self.stream(prompt, system=system, sampling=sampling, **options).result


def load(
    target: str | os.PathLike[str] | None = None,
    draft: str | os.PathLike[str] | None = None,
    *,
    catalog: str | os.PathLike[str] | None = None,
    offline: bool = False,
    progress: LoadProgress | None = None,
    download_progress: Progress | None = None,
    **options: Any,
) -> Engine:
    """Load a target and, if given, a draft.

    target: a GGUF file, a name of the catalogue, a source such as `hf:user/repo@rev/file`, or
    `user/repo[:QUANT]`; None for the pair that was set up, else the starter model. A catalogue
    name brings the pair's own draft along. catalog: a file of more pairs. offline: use what is
    here. options: the fields of LoadParams. Raises HomespecError subclasses, each with a hint.
    """
    unknown = options.keys() - LoadParams.__dataclass_fields__.keys()
    if unknown:
        raise UsageError(f"load() has no option {sorted(unknown)[0]!r}.")
    pair = find_pair(target, draft, catalog=catalog, offline=offline)
    params = params_for(pair, options)
    files = fetch_planned(
        pair,
        params,
        needs_draft=draft is not None,
        progress=download_progress,
        offline=offline,
    )
    return Engine(*files, params, progress)


def _generate_params(options: dict[str, Any]) -> GenerateParams:
    unknown = options.keys() - GenerateParams.__dataclass_fields__.keys()
    if unknown:
        raise UsageError(f"generate() has no option {sorted(unknown)[0]!r}.")
    return GenerateParams(**options)
