"""The model's own chat template: messages to the prompt it was trained on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from homespec.errors import ModelError, RefusedError
from homespec.llama.library import library
from homespec.llama.model import Model
from homespec.llama.tokenizer import Tokenizer

Message = dict[str, Any]
"""`{"role": "system" | "user" | "assistant" | "tool", "content": text, ...}`, as OpenAI has it."""


class ChatTemplate:
    """The Jinja template in a GGUF file, rendered by llama_cpp's sandboxed formatter.

    source: its text.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer) -> None:
        """Raises ModelError for a model without a template, or with one that does not parse."""
        library()
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter  # noqa: PLC0415

        if model.chat_template is None:
            raise ModelError(
                f"{model.path.name} has no chat template: it continues text, but does not chat.",
                hint="Use --raw to have the prompt continued as it stands.",
            )
        self.source = model.chat_template
        self._tokenizer = tokenizer
        self._bos = tokenizer.token_text(tokenizer.bos)
        try:
            self._formatter = Jinja2ChatFormatter(
                template=model.chat_template,
                bos_token=self._bos,
                eos_token=tokenizer.token_text(tokenizer.eos),
            )
        except Exception as exc:  # any Jinja error: the file decides what the template is
            raise ModelError(
                f"The chat template of {model.path.name} does not parse: {exc}.",
                hint="Use --raw to have the prompt continued as it stands.",
            ) from exc

    def render(self, messages: Sequence[Message], **extra: Any) -> str:
        """The prompt text, ready for the assistant's answer; `extra` goes to the template.

        Raises RefusedError with the template's own words where it rejects the messages.
        """
        try:
            return str(self._formatter(messages=list(messages), **extra).prompt)
        except Exception as exc:  # the template raises what it likes
            raise RefusedError(
                f"The model's chat template refuses these messages: {exc}.",
                hint="Some templates know no system role, or want user and assistant in turn.",
            ) from exc

    def encode(self, messages: Sequence[Message], **extra: Any) -> list[int]:
        """The prompt's tokens; BOS stands there once, whoever adds it."""
        return self.tokenize(self.render(messages, **extra))

    def tokenize(self, text: str) -> list[int]:
        """The tokens of a rendered prompt."""
        add_special = not (self._bos and text.startswith(self._bos))
        return self._tokenizer.encode(text, add_special=add_special, parse_special=True)
