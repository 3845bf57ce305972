"""Text to tokens and back, whole or piece by piece."""

from __future__ import annotations

import codecs
import ctypes
from collections.abc import Iterable

import numpy as np

from homespec.errors import UsageError
from homespec.llama.library import library
from homespec.llama.model import Model


class Tokenizer:
    """A model's own tokenizer."""

    def __init__(self, model: Model) -> None:
        self._library = library()
        self._vocab = model.vocab
        self.n_vocab = model.n_vocab
        self._pieces: dict[tuple[int, bool], bytes] = {}
        special = self._library
        self.bos = int(special.llama_vocab_bos(self._vocab))
        self.eos = int(special.llama_vocab_eos(self._vocab))
        self.add_bos = bool(special.llama_vocab_get_add_bos(self._vocab))
        is_end = special.llama_vocab_is_eog
        self.end_tokens = frozenset(t for t in range(self.n_vocab) if is_end(self._vocab, t))
        """Tokens that end a generation: end of sequence, of turn, of message."""

    def encode(
        self, text: str, *, add_special: bool = True, parse_special: bool = False
    ) -> list[int]:
        """Token ids of a text.

        add_special: add BOS (and EOS) where the model asks for it. parse_special: read markers
        such as `<|im_end|>` as the tokens they name, as in a rendered chat template. Raises
        UsageError for a text that is none.
        """
        try:
            data = text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError as exc:
            raise UsageError(
                "The text holds half of a character (a surrogate without its other half).",
                hint="It was cut in the middle of an emoji, perhaps.",
            ) from exc
        room = len(data) + 2
        buffer = np.empty(room, np.int32)
        pointer = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_int32))
        count = self._library.llama_tokenize(
            self._vocab, data, len(data), pointer, room, add_special, parse_special
        )
        if count < 0:
            raise UsageError(f"The text of {len(data)} bytes cannot be tokenized.")
        tokens: list[int] = buffer[:count].tolist()
        return tokens

    def piece(self, token: int, *, special: bool = False) -> bytes:
        """The bytes of a token; control tokens give none unless `special`.

        A piece may end inside a UTF-8 character: decode a sequence with TextDecoder.
        """
        key = (token, special)
        if key not in self._pieces:
            self._pieces[key] = self._read_piece(token, special)
        return self._pieces[key]

    def _read_piece(self, token: int, special: bool) -> bytes:
        room = 64
        while True:
            buffer = ctypes.create_string_buffer(room)
            count = self._library.llama_token_to_piece(self._vocab, token, buffer, room, 0, special)
            if count >= 0:
                return buffer.raw[:count]
            room = -count

    def decode(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens; a broken character at either end becomes U+FFFD."""
        return b"".join(self.piece(token, special=special) for token in tokens).decode(
            "utf-8", "replace"
        )

    def token_text(self, token: int) -> str:
        """A token as text, control tokens by their name; "" for a token the model lacks."""
        return self.decode([token], special=True) if 0 <= token < self.n_vocab else ""


class TextDecoder:
    """Bytes of tokens to text, holding back a character until all its bytes are there."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, piece: bytes) -> str:
        """The text that is complete with this piece."""
        return self._decoder.decode(piece)

    def flush(self) -> str:
        """What is left at the end: U+FFFD for a character that never came whole."""
        return self._decoder.decode(b"", final=True)
