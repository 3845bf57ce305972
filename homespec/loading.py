"""Loading a target: files checked, memory planned, weights read, and its prompts encoded.

What decodes with it is made on top: one sequence by `homespec.engine`, many at once by
`homespec.scheduling`.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from homespec import tuned
from homespec.closing import Closing
from homespec.drafters.adaptive import Learned, Priors
from homespec.errors import HomespecError, UsageError
from homespec.generation import MAX_DRAFT_DEPTH, Closable, GenerateParams
from homespec.llama.chat_template import ChatTemplate, Message
from homespec.llama.context import Context, ContextParams
from homespec.llama.library import (
    exact_kernels_possible,
    leave_tiled_kernels,
    use_exact_kernels,
)
from homespec.llama.model import ALL_LAYERS, Model
from homespec.llama.tokenizer import Tokenizer
from homespec.models.catalog import load_catalog
from homespec.models.gguf_header import Header
from homespec.models.memory_plan import Plan
from homespec.models.text_model import require_text_model
from homespec.models.tokenizer_check import (
    Compatibility,
    check_tokenizers,
    require_compatible,
)
from homespec.planning import local_header, plan_for, request_for, suits_own_kernels
from homespec.tuning.invariance import require_invariant
from homespec.tuning.profile import Profile

logger = logging.getLogger(__name__)

Prompt = str | Sequence[Message]
"""Text, or the messages of a chat."""
LoadProgress = Callable[[str, float], None]
"""Called with what is being loaded (`target` or `draft`) and the share done, 0 to 1."""


STRICT_EXACT: dict[str, Any] = {
    "flash_attention": "on",
    "cache_type_k": "f16",
    "cache_type_v": "bf16",
    "repack": False,
}
"""What makes llama.cpp's CPU kernels width-invariant, with `use_exact_kernels`; measured."""


@dataclass(frozen=True, slots=True)
class LoadParams:
    """Where and how the two models are loaded.

    n_ctx: context in tokens, 0 for what the target was trained for. devices: names, None for all.
    Cache types and flash attention are the target's; the draft has its own, and its own threads: 0
    for as many as the target's. repack: let the CPU keep the weights in its fastest layout.
    strict_exact: take the target settings under which its logits are the same bits at every width
    of a pass, so that greedy text, and seeded text under the match rule, is the very text of plain
    decoding. reserve_bytes: memory left to the rest of the machine, None for the larger of 1 GiB
    and a tenth. tuned: take what `homespec tune` found for this box and pair, for settings that
    are left at their defaults.
    """

    n_ctx: int = 4096
    n_batch: int = 512
    gpu_layers: int = ALL_LAYERS
    draft_gpu_layers: int = ALL_LAYERS
    devices: tuple[str, ...] | None = None
    draft_devices: tuple[str, ...] | None = None
    threads: int = 0
    threads_batch: int = 0
    draft_threads: int = 0
    draft_threads_batch: int = 0
    flash_attention: str = "auto"
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    draft_flash_attention: str = "auto"
    draft_cache_type_k: str = "f16"
    draft_cache_type_v: str = "f16"
    mmap: bool = True
    mlock: bool = False
    repack: bool = True
    strict_exact: bool = False
    reserve_bytes: int | None = None
    tuned: bool = True
    max_draft_depth: int = MAX_DRAFT_DEPTH


R = TypeVar("R", bound=Closable)


class LoadedTarget(Closing):
    """A target's weights and tokenizer; close it, or use it in a `with` block.

    profile: what was measured and is used here. untuned: why nothing is, or not all; else "".
    """

    profile: Profile | None
    untuned: str
    compatibility: Compatibility | None
    plan: Plan

    def __init__(
        self,
        target: Path,
        draft: Path | None = None,
        params: LoadParams | None = None,
        progress: LoadProgress | None = None,
    ) -> None:
        """Load the files.

        Raises UsageError, RefusedError, OutOfMemoryError, LibraryError.
        """
        asked = params or LoadParams()
        params, draft = self._choose(target, draft, asked)
        if asked.strict_exact and self.profile is not None:
            tuned.require_strict(self.profile)
        self._choose_kernels(params)
        if self.plan.draft is None and draft is not None:
            logger.warning("%s", self.plan.sentence)
            draft = None
        self.params = params = replace(params, **self.plan.load_options())
        self._open: list[Closable] = []
        self.draft_context: Context | None = None
        try:
            self.model = self._keep(
                Model(
                    target,
                    gpu_layers=params.gpu_layers,
                    devices=list(params.devices) if params.devices else None,
                    mmap=params.mmap,
                    mlock=params.mlock,
                    repack=params.repack,
                    progress=named(progress, "target"),
                )
            )
            self.tokenizer = Tokenizer(self.model)
            if asked.strict_exact and self.plan.target.devices:
                require_invariant(self.model, self._target_context(params))
            self._open_caches(draft, progress)
            self.learned = Learned(self._priors())
        except BaseException:
            self.close()
            raise

    def _choose(
        self, target: Path, draft: Path | None, asked: LoadParams
    ) -> tuple[LoadParams, Path | None]:
        """The settings and the draft's file: as measured, where that holds, else as asked for.

        Notes the profile and the plan that go with them.
        """
        known, self.untuned = tuned.candidates(target, draft) if asked.tuned else ([], "")
        for profile in known:
            params, file = self._settings(asked, profile), profile.draft_path or draft
            try:
                self.compatibility, self.plan = self._plan(target, file, params)
            except HomespecError as exc:
                self.untuned = f"what was measured cannot be had: {exc.message.rstrip('.')}"
                continue
            with_draft = profile.draft is not None
            difference = profile.placement.difference(self.plan, with_draft=with_draft)
            if not difference:
                self.profile, self._tiled = profile, profile.tiled
                return params, file
            self.untuned = difference
        self.profile, self._tiled = None, True
        if asked.tuned and asked.repack and suits_own_kernels(local_header(target)):
            asked, self._tiled = replace(asked, repack=False), False
        params = self._settings(asked, None)
        self.compatibility, self.plan = self._plan(target, draft, params)
        return params, draft

    def _settings(self, asked: LoadParams, profile: Profile | None) -> LoadParams:
        params = self._suited(_with_profile(asked, profile) if profile else asked, asked)
        return replace(params, **STRICT_EXACT) if params.strict_exact else params

    def _choose_kernels(self, params: LoadParams) -> None:
        if params.strict_exact:
            use_exact_kernels()
        elif not self._tiled:
            leave_tiled_kernels()  # or it is too late in this process: then it is the other kernels

    def _suited(self, params: LoadParams, asked: LoadParams) -> LoadParams:
        """The measured settings, as far as they suit what is to decode with them."""
        return params

    def _plan(
        self, target: Path, draft: Path | None, params: LoadParams
    ) -> tuple[Compatibility | None, Plan]:
        """What fits of the pair, and whether it is one."""
        return check_files(target, draft, params)

    @abstractmethod
    def _open_caches(self, draft: Path | None, progress: LoadProgress | None) -> None:
        """Make what decodes; called once, with the draft that the plan has room for."""

    def _priors(self) -> Priors:
        known = Priors()
        if self.profile is not None:
            known = tuned.priors(self.profile, strict=self.params.strict_exact)
        if self.draft_context is None:
            return known
        ratio = self.draft_context.model.size_bytes / self.model.size_bytes
        return replace(known, size_ratio=ratio)

    def _keep(self, resource: R) -> R:
        self._open.append(resource)
        return resource

    def _target_context(self, params: LoadParams) -> ContextParams:
        return ContextParams(
            n_ctx=params.n_ctx or self.model.n_ctx_train,
            n_batch=params.n_batch,
            max_rows=params.max_draft_depth + 1,
            threads=params.threads,
            threads_batch=params.threads_batch,
            flash_attention=params.flash_attention,
            cache_type_k=params.cache_type_k,
            cache_type_v=params.cache_type_v,
            snapshots=params.max_draft_depth + 1 if self.model.recurrent else 0,
        )

    def _load_draft(self, draft: Path, n_ctx: int, progress: LoadProgress | None) -> Context:
        """The draft, with a context as long as the target's of one sequence."""
        params = self.params
        model = self._keep(
            Model(
                draft,
                gpu_layers=params.draft_gpu_layers,
                devices=list(params.draft_devices) if params.draft_devices else None,
                mmap=params.mmap,
                mlock=params.mlock,
                progress=named(progress, "draft"),
            )
        )
        settings = replace(
            self._target_context(params),
            n_ctx=n_ctx,  # a shorter one would stop drafting in mid-conversation
            max_rows=1,
            threads=params.draft_threads or params.threads,
            threads_batch=params.draft_threads_batch or params.threads_batch,
            flash_attention=params.draft_flash_attention,
            cache_type_k=params.draft_cache_type_k,
            cache_type_v=params.draft_cache_type_v,
            snapshots=params.max_draft_depth + 1 if model.recurrent else 0,
        )
        return self._keep(Context(model, settings))

    def _tokens(
        self, prompt: Prompt | list[int], system: str | None, params: GenerateParams
    ) -> list[int]:
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return [int(token) for token in prompt]
        return self.encode(cast("Prompt", prompt), system=system, raw=params.raw)

    def encode(self, prompt: Prompt, *, system: str | None = None, raw: bool = False) -> list[int]:
        """A prompt's tokens: text or messages through the chat template; `raw` text as it stands.

        Raises UsageError for an empty prompt, ModelError for a model without a chat template.
        """
        if isinstance(prompt, str):
            if not prompt.strip():
                raise UsageError("The prompt is empty.", hint="Give some text to answer.")
            if raw:
                return self.tokenizer.encode(prompt)
            prompt = [{"role": "user", "content": prompt}]
        if system:
            prompt = [{"role": "system", "content": system}, *prompt]
        return ChatTemplate(self.model, self.tokenizer).encode(prompt)

    def close(self) -> None:
        """Free caches and weights; once is enough, twice does no harm."""
        while self._open:
            self._open.pop().close()


def check_files(
    target: Path, draft: Path | None, params: LoadParams
) -> tuple[Compatibility | None, Plan]:
    """Read the headers: a bad file, a wrong pair or short memory is told before any weights."""
    header = _readable(target)
    compatibility, drafts = None, []
    if draft is not None:
        drafts = [_readable(draft)]
        compatibility = check_tokenizers(header, drafts[0])
        require_compatible(draft.name, target.name, compatibility)
    request = request_for(params, reserve_bytes=params.reserve_bytes)
    return compatibility, plan_for(header, drafts, request, catalog=load_catalog())


def _readable(path: Path) -> Header:
    """The header of a model, split or not, that llama.cpp can write text with."""
    header = local_header(path)
    require_text_model(header)
    return header


def _with_profile(params: LoadParams, profile: Profile) -> LoadParams:
    """The measured settings in the place of defaults; what was asked for stays."""
    default = LoadParams()
    free = {
        name
        for name in LoadParams.__dataclass_fields__
        if getattr(params, name) == getattr(default, name)
    }
    for own, common in (("draft_threads", "threads"), ("draft_threads_batch", "threads_batch")):
        if common not in free:
            free.discard(own)  # asked for both models
    measured = {name: v for name, v in tuned.load_options(profile).items() if name in free}
    if profile.strict_by_default and STRICT_EXACT.keys() <= free and exact_kernels_possible():
        measured["strict_exact"] = True
    return replace(params, **measured)


def named(progress: LoadProgress | None, name: str) -> Callable[[float], None] | None:
    return None if progress is None else lambda share: progress(name, share)
