"""llama.cpp's own sampler chain, read as a distribution instead of a choice."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from homespec.decoding.sampling import SamplingParams
from homespec.decoding.types import Distribution
from homespec.errors import UsageError
from homespec.llama.context import LogitsRow
from homespec.llama.library import clear_errors, last_error, library
from homespec.llama.model import Model

_TOKEN_DATA = np.dtype([("id", np.int32), ("logit", np.float32), ("p", np.float32)])
_DRY_BREAKERS = (b"\n", b":", b'"', b"*")


class SamplerChain:
    """The filters of SamplingParams over a model's rows; keeps the Sampler protocol.

    The order is llama.cpp's: logit bias, grammar, penalties, DRY, top-k, typical, top-p, min-p,
    XTC, temperature. Filters apply to the whole row, so the grammar cuts before top-k does.
    """

    def __init__(self, model: Model, params: SamplingParams) -> None:
        """Raises UsageError for a grammar that does not parse."""
        self._library = library()
        self._model = model
        self.params = params
        self._chain = self._library.llama_sampler_chain_init(
            self._library.llama_sampler_chain_default_params()
        )
        self._look_back: list[Any] = []  # filters that want to know the prompt
        try:
            for sampler in self._filters():
                self._library.llama_sampler_chain_add(self._chain, sampler)
        except BaseException:
            self.close()
            raise
        self._capture = _Capture(self._library, self._chain)

    def _filters(self) -> list[Any]:
        p, lib, vocab = self.params, self._library, self._model.vocab
        n_vocab = self._model.n_vocab
        chosen: list[Any] = []
        if p.logit_bias:
            biases = (lib.llama_logit_bias * len(p.logit_bias))(*p.logit_bias)
            chosen.append(lib.llama_sampler_init_logit_bias(n_vocab, len(biases), biases))
        if p.grammar is not None:
            chosen.append(self._grammar(p.grammar))
        if (p.repeat_penalty, p.presence_penalty, p.frequency_penalty) != (1, 0, 0):
            self._look_back.append(
                lib.llama_sampler_init_penalties(
                    n_vocab,
                    p.repeat_last_n,
                    p.repeat_penalty,
                    p.presence_penalty,
                    p.frequency_penalty,
                )
            )
        if p.dry_multiplier > 0:
            breakers = (ctypes.c_char_p * len(_DRY_BREAKERS))(*_DRY_BREAKERS)
            self._look_back.append(
                lib.llama_sampler_init_dry(
                    vocab,
                    self._model.n_ctx_train,
                    p.dry_multiplier,
                    p.dry_base,
                    p.dry_allowed_length,
                    p.dry_penalty_last_n,
                    breakers,
                    len(breakers),
                )
            )
        chosen += self._look_back
        if p.greedy:
            return chosen
        if p.top_k > 0:
            chosen.append(lib.llama_sampler_init_top_k(p.top_k))
        if p.typical_p < 1:
            chosen.append(lib.llama_sampler_init_typical(p.typical_p, 1))
        if p.top_p < 1:
            chosen.append(lib.llama_sampler_init_top_p(p.top_p, 1))
        if p.min_p > 0:
            chosen.append(lib.llama_sampler_init_min_p(p.min_p, 1))
        if p.xtc_probability > 0:
            seed = 0 if p.seed is None else p.seed
            chosen.append(
                lib.llama_sampler_init_xtc(p.xtc_probability, p.xtc_threshold, 1, seed)
            )
        if p.temperature != 1:
            chosen.append(lib.llama_sampler_init_temp(p.temperature))
        return chosen

    def _grammar(self, text: str) -> Any:
        clear_errors()
        sampler = self._library.llama_sampler_init_grammar(
            self._model.vocab, text.encode(), b"root"
        )
        if not sampler:
            raise UsageError(
                f"The grammar does not parse: {last_error() or 'is there a rule named root?'}.",
                hint="GBNF needs a rule `root ::= ...`, and no rule may start with itself.",
            )
        return sampler

    def distribution(self, row: LogitsRow) -> Distribution:
        """The filtered distribution of the next token."""
        ids, logits = self._capture.run(row)
        if self.params.greedy:
            return Distribution.point(_best(ids, logits))
        return Distribution.from_logits(ids, logits)

    def best(self, row: LogitsRow) -> int:
        """The most likely token; the lowest id on a tie."""
        if not self.params.reshapes:
            return int(np.argmax(row.logits))
        return _best(*self._capture.run(row))

    def prime(self, prompt: Sequence[int]) -> None:
        """Note the prompt in the penalties; a grammar begins with the answer."""
        for sampler in self._look_back:
            for token in prompt:
                self._library.llama_sampler_accept(sampler, token)

    def accept(self, token: int) -> None:
        """Note a committed token."""
        self._library.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        """Free the chain and its filters; once is enough, twice does no harm."""
        if self._chain:
            self._library.llama_sampler_free(self._chain)
            self._chain = None

    def __enter__(self) -> SamplerChain:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


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


class _Capture:
    """Runs a chain inside llama_sampler_sample and keeps what it left over.

    llama_sampler_sample reads the logits in place, applies a sampler and *accepts* its choice.
    Wrapping the chain in a sampler of our own that has no `accept` leaves the chain's state alone.
    """

    def __init__(self, lib: Any, chain: Any) -> None:
        self._library, self._chain = lib, chain
        self._ids: NDArray[np.int32] = np.empty(0, np.int32)
        self._logits: NDArray[np.float32] = np.empty(0, np.float32)
        array = ctypes.POINTER(lib.llama_token_data_array)
        self._apply = ctypes.CFUNCTYPE(None, ctypes.c_void_p, array)(self._run_chain)
        self._interface = _SamplerInterface(apply=ctypes.cast(self._apply, ctypes.c_void_p).value)
        self._sampler = lib.llama_sampler(
            ctypes.cast(ctypes.pointer(self._interface), ctypes.POINTER(lib.llama_sampler_i)), None
        )

    def run(self, row: LogitsRow) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """(ids, logits) of the tokens the chain keeps."""
        self._library.llama_sampler_sample(
            ctypes.pointer(self._sampler), row.context.pointer, row.index
        )
        return self._ids, self._logits

    def _run_chain(self, _: Any, candidates: Any) -> None:
        self._library.llama_sampler_apply(self._chain, candidates)
        array = candidates.contents
        array.selected = 0
        address = ctypes.cast(array.data, ctypes.c_void_p).value
        kept = np.frombuffer(
            (ctypes.c_char * (array.size * _TOKEN_DATA.itemsize)).from_address(address), _TOKEN_DATA
        )
        self._ids, self._logits = kept["id"].copy(), kept["logit"].copy()


def _best(ids: NDArray[np.int32], logits: NDArray[np.float32]) -> int:
    return int(ids[logits == logits.max()].min())


def json_schema_grammar(schema: str | dict[str, Any]) -> str:
    """GBNF text for a JSON schema. Raises UsageError where it is none."""
    library()
    from llama_cpp.llama_grammar import json_schema_to_gbnf  # noqa: PLC0415

    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, dict):
            raise TypeError("a schema is a JSON object")  # noqa: TRY301
        return str(json_schema_to_gbnf(json.dumps(parsed)))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as exc:
        raise UsageError(
            f"The JSON schema cannot be turned into a grammar: {exc}.",
            hint="It must be a JSON object in the JSON Schema language.",
        ) from exc
