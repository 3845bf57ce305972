"""llama.cpp's own sampler chain, read as a distribution instead of a choice."""

from __future__ import annotations

import ctypes
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from homespec.closing import Closing
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.types import Distribution
from homespec.errors import UsageError
from homespec.llama.context import LogitsRow
from homespec.llama.grammar import check_grammar_text
from homespec.llama.library import captured_stderr, library
from homespec.llama.model import Model

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_DRY_BREAKERS = (b"\n", b":", b'"', b"*")


class _SamplerInterface(ctypes.Structure):
    """llama_sampler_i; everything but `apply` may be NULL."""

    _fields_ = [
        (name, ctypes.c_void_p)
        for name in (
            "name",
            "accept",
            "apply",
            "reset",
            "clone",
            "free",
            "backend_init",
            "backend_accept",
            "backend_apply",
            "backend_set_input",
            "backend_reset",
            "copy_state",
        )
    ]


class SamplerChain(Closing):
    """The filters of SamplingParams over a model's rows; keeps the Sampler protocol.

    The order is llama.cpp's: logit bias, grammar, penalties, DRY, top-k, typical, top-p, min-p,
    XTC, temperature. Filters apply to the whole row, so the grammar cuts before top-k does.
    """

    def __init__(self, model: Model, params: SamplingParams) -> None:
        """Raises UsageError for a grammar that does not parse."""
        self._library = lib = library()
        self._model = model
        self.params = params
        self._suppressed = frozenset(id_ for id_, bias in params.logit_bias if bias == -np.inf)
        self._grammars: list[Any] = []
        self._penalties: list[Any] = []
        self._keep: list[Any] = []  # what the chain points into
        self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        self._ids: NDArray[np.int32] = np.empty(0, np.int32)
        self._logits: NDArray[np.float32] = np.empty(0, np.float32)
        self._captured = False
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    def _build(self) -> None:
        p, lib = self.params, self._library
        if p.grammar is not None:
            self._grammars.append(self._grammar(p.grammar))
        self._penalties += self._penalty_filters()
        first: list[Any] = []
        if p.logit_bias:
            biases = (lib.llama_logit_bias * len(p.logit_bias))(*p.logit_bias)
            first.append(
                lib.llama_sampler_init_logit_bias(self._model.n_vocab, len(biases), biases)
            )
        stateful = [self._without_accept(s) for s in (*self._grammars, *self._penalties)]
        last = [self._capture(), lib.llama_sampler_init_greedy()]
        for sampler in (*first, *stateful, *self._cuts(), *last):
            lib.llama_sampler_chain_add(self._chain, sampler)

    def _penalty_filters(self) -> list[Any]:
        p, lib, model = self.params, self._library, self._model
        chosen = []
        if (p.repeat_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0):
            chosen.append(
                lib.llama_sampler_init_penalties(
                    model.n_vocab,
                    p.repeat_last_n,
                    p.repeat_penalty,
                    p.frequency_penalty,
                    p.presence_penalty,
                )
            )
        if p.dry_multiplier > 0:
            breakers = (ctypes.c_char_p * len(_DRY_BREAKERS))(*_DRY_BREAKERS)
            chosen.append(
                lib.llama_sampler_init_dry(
                    model.vocab,
                    p.dry_multiplier,
                    p.dry_base,
                    p.dry_allowed_length,
                    p.dry_penalty_last_n,
                    breakers,
                    len(breakers),
                )
            )
        return chosen

    def _cuts(self) -> list[Any]:
        """The filters without memory."""
        p, lib = self.params, self._library
        if p.greedy:
            return []
        seed = 0 if p.seed is None else p.seed
        cuts: list[tuple[bool, Callable[[], Any]]] = [
            (p.top_k > 0, lambda: lib.llama_sampler_init_top_k(p.top_k)),
            (p.typical_p < 1, lambda: lib.llama_sampler_init_typical(p.typical_p, 1)),
            (p.top_p < 1, lambda: lib.llama_sampler_init_top_p(p.top_p, 1)),
            (p.min_p > 0, lambda: lib.llama_sampler_init_min_p(p.min_p, 1)),
            (
                p.xtc_probability > 0,
                lambda: lib.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, 1, seed),
            ),
            (p.temperature != 1, lambda: lib.llama_sampler_init_temp(p.temperature)),
        ]
        return [make() for wanted, make in cuts if wanted]

    def _without_accept(self, sampler: Any) -> Any:
        """A view of a stateful sampler that filters like it, but never advances it.

        llama_sampler_sample reads the logits in place, and then accepts its own choice, which is
        not ours: what is committed is told to the samplers themselves, in `accept`.
        """
        original = ctypes.cast(sampler.contents.iface, ctypes.POINTER(_SamplerInterface)).contents
        return self._sampler(
            _SamplerInterface(name=original.name, apply=original.apply), sampler.contents.ctx
        )

    def _capture(self) -> Any:
        """A last filter that changes nothing and keeps what is left."""
        array = ctypes.POINTER(self._library.llama_token_data_array)
        prototype = cast("Any", ctypes.CFUNCTYPE(None, ctypes.c_void_p, array))
        function = prototype(self._keep_candidates)
        self._keep.append(function)
        address = ctypes.cast(function, ctypes.c_void_p).value
        return self._sampler(_SamplerInterface(apply=address), None)

    def _sampler(self, interface: _SamplerInterface, context: Any) -> Any:
        self._keep.append(interface)
        pointer = ctypes.cast(
            ctypes.pointer(interface), ctypes.POINTER(self._library.llama_sampler_i)
        )
        return self._library.llama_sampler_init(pointer, context)

    def _keep_candidates(self, _: Any, candidates: Any) -> None:
        array = candidates.contents
        address = ctypes.cast(array.data, ctypes.c_void_p).value
        size = array.size * _TOKEN_DATA.itemsize
        kept = np.frombuffer((ctypes.c_char * size).from_address(address), _TOKEN_DATA)
        self._ids, self._logits = kept["id"].copy(), kept["logit"].copy()
        self._captured = True

    def _filter(self, row: LogitsRow) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(ids, logits) of the tokens the chain keeps. Raises UsageError where it keeps none."""
        self._captured = False
        self._library.llama_sampler_sample(self._chain, row.context.pointer, row.index)
        if not self._captured:
            # Python runs signal handlers in callbacks too, where ctypes swallows what they raise.
            raise KeyboardInterrupt
        if not self._ids.size or self._logits.max() == -np.inf:
            raise UsageError("The grammar allows no token of this model here.")
        return self._ids, self._logits

    def _grammar(self, text: str) -> Any:
        if not text.strip():
            raise UsageError("The grammar is empty: it needs a rule named root.")
        try:
            data = text.encode()
        except UnicodeEncodeError as exc:
            raise UsageError("The grammar holds half of a character (a surrogate).") from exc
        check_grammar_text(text)
        with captured_stderr() as said:  # the grammar parser prints, it does not log
            sampler = self._library.llama_sampler_init_grammar(self._model.vocab, data, b"root")
        if not sampler:
            reason = re.sub(r"^[^:]*: (error[^:]*: )?", "", (said.text.splitlines() or [""])[0])
            raise UsageError(
                f"The grammar does not parse: {reason or 'it has no usable rule named root'}.",
                hint="GBNF needs a rule `root ::= ...`, and no rule may start with itself.",
            )
        return sampler

    def distribution(self, row: LogitsRow) -> Distribution:
        """The filtered distribution of the next token."""
        if self.params.greedy:
            return Distribution.point(self.best(row))
        return Distribution.from_logits(*self._filter(row))

    def best(self, row: LogitsRow) -> int:
        """The most likely token; the lowest id on a tie."""
        if not self.params.reshapes:
            token = int(np.argmax(row.logits))
            if token not in self._suppressed:
                return token
        ids, logits = self._filter(row)
        return int(ids[logits == logits.max()].min())

    def prime(self, prompt: Sequence[int]) -> None:
        """Note the prompt in the penalties; a grammar begins with the answer."""
        for sampler in self._penalties:
            for token in prompt:
                self._library.llama_sampler_accept(sampler, token)

    def accept(self, token: int) -> None:
        """Note a committed token."""
        for sampler in (*self._grammars, *self._penalties):
            self._library.llama_sampler_accept(sampler, token)

    def close(self) -> None:
        """Free the chain and its filters; once is enough, twice does no harm."""
        if self._chain:
            for sampler in (self._chain, *self._grammars, *self._penalties):
                self._library.llama_sampler_free(sampler)
            self._chain = None


def json_schema_grammar(schema: str | dict[str, Any]) -> str:
    """GBNF text for a JSON schema. Raises UsageError where it is none."""
    library()
    from llama_cpp.llama_grammar import json_schema_to_gbnf  # noqa: PLC0415

    hint = "It must be a JSON object in the JSON Schema language."
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
    except (ValueError, RecursionError) as exc:
        raise UsageError(f"The JSON schema is no JSON: {exc}.", hint=hint) from exc
    if not isinstance(parsed, dict):
        raise UsageError("The JSON schema is no JSON object.", hint=hint)
    try:
        return str(json_schema_to_gbnf(json.dumps(parsed)))
    except Exception as exc:  # the converter asserts, indexes and recurses on what it is given
        raise UsageError(
            f"The JSON schema cannot be turned into a grammar: {exc}.", hint=hint
        ) from exc
