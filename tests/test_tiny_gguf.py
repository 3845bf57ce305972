"""The tiny model is a real one: llama.cpp loads it, and it says the same every time."""

from __future__ import annotations

from operator import eq
from pathlib import Path

import pytest
from llama_cpp import Llama

from tests.tiny_gguf import write_tiny_gguf

TEXT = "Hello the öß 😀, how are things today in the house of tests?"


def best_tokens(path: Path) -> tuple[str, list[int]]:
    """What llama.cpp makes of the text's tokens, and the best token after each of them."""
    model = Llama(str(path), n_ctx=128, verbose=False, logits_all=True)
    try:
        tokens = model.tokenize(TEXT.encode())
        assert tokens[0] == model.token_bos()
        model.eval(tokens)
        return model.detokenize(tokens).decode(), model.scores[: len(tokens)].argmax(1).tolist()
    finally:
        model.close()


def test_the_same_arguments_give_the_same_bytes(tmp_path: Path) -> None:
    one, same, other = (
        write_tiny_gguf(tmp_path / name, seed=seed).read_bytes()
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same != other


def test_llama_cpp_runs_it_and_tokenizes_any_text(tmp_path: Path) -> None:
    text, best = best_tokens(write_tiny_gguf(tmp_path / "a.gguf"))
    assert text == TEXT
    assert len(set(best)) > len(best) / 2, "a model that repeats itself tests little"


def test_noise_makes_a_draft_that_agrees_in_part(tmp_path: Path) -> None:
    shares = []
    _, target = best_tokens(write_tiny_gguf(tmp_path / "a.gguf"))
    for noise in (0.01, 0.1, 1.0):
        _, draft = best_tokens(write_tiny_gguf(tmp_path / "b.gguf", noise=noise))
        shares.append(sum(map(eq, target, draft)) / len(target))
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.8
    assert 0.3 < shares[1] < 0.9
    assert shares[2] < 0.3


@pytest.mark.parametrize("size", [259, 100_000])
def test_a_vocabulary_that_cannot_be_made_is_an_error(tmp_path: Path, size: int) -> None:
    with pytest.raises(ValueError, match="cannot be made"):
        write_tiny_gguf(tmp_path / "a.gguf", vocab_size=size)
