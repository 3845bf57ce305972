"""The chat on a real engine: what is read anew, and caches on disk."""

from __future__ import annotations

from pathlib import Path

import pytest
from homespec.chat.conversation import Conversation
from homespec.chat.kept_tokens import keep_written
from homespec.chat.local_engine import LocalEngine
from homespec.chat.settings import Settings
from homespec.chat.types import Figures
from homespec.decoding.sampling import SamplingParams
from homespec.engine import Engine, LoadParams
from homespec.errors import DiskError, RefusedError
from homespec.generation import GenerateParams
from homespec.llama.cache_file import load_cache, save_cache
from homespec.llama.context import Context, ContextParams
from homespec.llama.model import Model

LETTERS = Settings(
    SamplingParams(seed=5, grammar="root ::= [a-z ]+"),
    GenerateParams(max_tokens=24, ignore_eos=True, depth="fixed", draft_depth=3),
)


def ask(conversation: Conversation, text: str) -> Figures:
    turn = conversation.ask(text)
    assert list(turn)
    return turn.end()[0].figures


def test_a_turn_pays_for_its_new_tokens_alone(tiny_engine: Engine) -> None:
    tiny_engine.context.clear()
    conversation = Conversation(LocalEngine(tiny_engine), LETTERS, system="be brief")
    first = ask(conversation, "hello")
    assert first.num_cached_tokens == 0
    answer = conversation.messages[-1]["content"]
    spelt = tiny_engine.tokenizer.encode(answer, add_special=False)
    assert len(spelt) < first.num_tokens  # the tokenizer would spell the answer otherwise
    held = list(tiny_engine.context.tokens)

    second = ask(conversation, "and now?")
    assert second.num_cached_tokens == len(held) == first.num_prompt_tokens + 24 - 1
    assert tiny_engine.context.tokens[: len(held)] == held
    assert tiny_engine.draft_context is not None

    conversation.undo()
    other = ask(conversation, "another question")
    assert other.num_cached_tokens >= len(held)
    conversation.messages[0]["content"] = "changed"
    assert ask(conversation, "and?").num_cached_tokens < first.num_prompt_tokens


def test_the_context_fills_up_and_the_chat_goes_on(tiny_engine: Engine) -> None:
    conversation = Conversation(LocalEngine(tiny_engine), LETTERS, system="be brief")
    for i in range(9):
        figures = ask(conversation, f"question {i} with some more words in it")
        assert figures.num_tokens == 24
        assert figures.num_prompt_tokens + 24 <= tiny_engine.context.n_ctx
    assert conversation.start > 0
    assert len(conversation.messages) == 18


@pytest.mark.parametrize(
    ("written", "fresh", "kept"),
    [
        ([9, 1, 2, 9], [9, 3, 9, 4], [9, 1, 2, 9, 4]),  # "a" + "b" and "ab" say the same
        ([9, 1, 2], [9, 3, 9, 4], [9, 1, 2, 9, 4]),
        ([9, 1, 2, 9], [9, 4, 9, 3], [9, 4, 9, 3]),
        ([9, 1, 2, 1], [9, 3, 9], [9, 3, 9]),
        ([9, 1, 8, 2], [9, 1, 9, 2], [9, 1, 9, 2]),
        ([], [9, 3], [9, 3]),
    ],
)
def test_tokens_as_written_stay_where_the_text_agrees(
    written: list[int], fresh: list[int], kept: list[int]
) -> None:
    pieces = {1: b"a", 2: b"b", 3: b"ab", 4: b"c", 8: b"", 9: b""}
    assert keep_written(written, fresh, pieces.__getitem__) == kept


def context(path: Path, **params: object) -> Context:
    return Context(Model(path), ContextParams(**{"n_ctx": 128, "threads": 1, **params}))


def test_a_cache_comes_back_from_disk_and_a_wrong_one_is_refused(
    tiny: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    path = tmp_path / "a.cache"
    tokens = list(range(60))
    with context(tiny) as saved:
        saved.extend(tokens, 0)
        save_cache(saved, path)
        [row] = saved.extend([7], 1)
        expected = row.logits.copy()
    assert list(tmp_path.iterdir()) == [path]
    with context(tiny) as loaded:
        load_cache(loaded, path)
        assert loaded.tokens == tokens
        [row] = loaded.extend([7], 1)
        assert (row.logits == expected).all()

    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) // 2] ^= 1
    for what, content, opened, words in (
        ("another model", whole, context(tiny_draft), "another model"),
        ("a byte", bytes(damaged), context(tiny), "no whole"),
        ("its end", whole[:-100], context(tiny), "no whole"),
        ("all", b"", context(tiny), "no whole"),
        ("the context", whole, context(tiny, n_ctx=32), "60 tokens"),
        ("the types", whole, context(tiny, cache_type_k="f32"), "does not fit"),
    ):
        path.write_bytes(content)
        with opened as other:
            other.extend([1, 2], 0)
            with pytest.raises(RefusedError, match=words):
                load_cache(other, path)
            assert other.tokens == [], what
            other.extend([1, 2], 0)
    with context(tiny) as saved, pytest.raises(DiskError):
        save_cache(saved, tmp_path / "missing" / "a.cache")


def test_a_conversation_opens_again_without_being_read(
    tiny: Path, tiny_draft: Path, tmp_path: Path
) -> None:
    params = LoadParams(n_ctx=256, threads=1)
    with Engine(tiny, tiny_draft, params) as engine:
        local = LocalEngine(engine)
        conversation = Conversation(local, LETTERS)
        ask(conversation, "hello")
        held, drafted = len(engine.context.tokens), len(engine.draft_context.tokens)
        local.save(tmp_path)
    with Engine(tiny, tiny_draft, params) as engine:
        local = LocalEngine(engine)
        assert local.load(tmp_path) == ""
        assert len(engine.draft_context.tokens) == drafted > 0
        again = Conversation(local, LETTERS)
        again.messages = conversation.messages
        assert ask(again, "and now?").num_cached_tokens == held
    with Engine(tiny_draft, None, params) as engine:
        assert "another model" in LocalEngine(engine).load(tmp_path)
