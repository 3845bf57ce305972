"""The door to llama.cpp: positions, truncation, rows, tokenizer, template, devices."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from homespec.errors import ModelError, UsageError
from homespec.llama.chat_template import ChatTemplate
from homespec.llama.context import Context, ContextParams
from homespec.llama.devices import devices, num_threads, offload_devices
from homespec.llama.library import build_features, library
from homespec.llama.model import Model
from homespec.llama.tokenizer import TextDecoder, Tokenizer

from tests.tiny_gguf import write_tiny_gguf


@pytest.fixture(scope="module")
def model(tiny: Path):
    with Model(tiny) as model:
        yield model


@pytest.fixture
def context(model: Model):
    with Context(model, ContextParams(n_ctx=96, n_batch=32, max_rows=17)) as context:
        yield context


TEXT = [(11 * i) % 290 for i in range(96)]


def rows(context: Context, tokens: list[int], num_rows: int) -> np.ndarray:
    return np.stack([row.logits.copy() for row in context.extend(tokens, num_rows)])


@pytest.mark.parametrize("split", [1, 3, 16, 17, 31, 32, 33, 63, 64, 70])
def test_rows_are_those_of_one_token_at_a_time(model: Model, context: Context, split: int) -> None:
    """Whatever passes the tokens came in; the last ones with a row each."""
    with Context(model, ContextParams(n_ctx=96)) as single:
        expected = np.concatenate([rows(single, [token], 1) for token in TEXT[:80]])
    context.extend(TEXT[:split], 0)
    num_rows = min(80 - split, 17)
    got = rows(context, TEXT[split:80], num_rows)
    np.testing.assert_allclose(got, expected[80 - num_rows :], atol=2e-3)
    assert context.tokens == TEXT[:80]


def test_truncation_is_absolute_and_forgets(context: Context) -> None:
    first = rows(context, TEXT[:20], 1)
    context.extend([1, 2, 3], 0)
    context.truncate(19)
    assert context.tokens == TEXT[:19]
    np.testing.assert_allclose(rows(context, TEXT[19:20], 1), first, atol=2e-3)
    context.truncate(0)
    np.testing.assert_allclose(rows(context, TEXT[:20], 1), first, atol=2e-3)


def test_a_context_is_filled_to_its_last_cell(context: Context) -> None:
    context.extend(TEXT[:95], 0)
    assert len(context.extend(TEXT[95:], 1)) == 1
    with pytest.raises(AssertionError, match="exceed n_ctx 96"):
        context.extend([1], 1)
    assert len(context.tokens) == 96


def test_ids_out_of_range_never_reach_llama(context: Context) -> None:
    for bad in ([-1], [5, 300]):
        with pytest.raises(UsageError, match="between 0 and 299"):
            context.extend(bad, 1)
    assert context.tokens == []


def test_logits_are_read_in_place(context: Context) -> None:
    [row] = context.extend([1], 1)
    assert row.logits.ctypes.data == row.logits.ctypes.data == context.logits_address(0)
    assert not row.logits.flags.owndata


@pytest.mark.parametrize(
    "settings",
    [
        {"flash_attention": "maybe"},
        {"cache_type_k": "q3_k"},
        {"n_ctx": 0},
    ],
)
def test_settings_that_cannot_be_meant(settings: dict) -> None:
    with pytest.raises(UsageError):
        ContextParams(**settings)


def test_a_quantized_v_cache_without_flash_attention_is_explained(model: Model) -> None:
    with pytest.raises(UsageError, match="flash"):
        Context(model, ContextParams(n_ctx=64, flash_attention="off", cache_type_v="q8_0"))


def test_closing_twice_does_no_harm(tiny: Path) -> None:
    model = Model(tiny)
    context = Context(model, ContextParams(n_ctx=32))
    for _ in range(2):
        context.close()
        model.close()


def test_load_progress_is_told_and_can_stop(tiny: Path) -> None:
    seen: list[float] = []
    Model(tiny, progress=seen.append).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1
    with pytest.raises(ModelError):
        Model(tiny, progress=lambda share: False)


def test_an_interrupt_during_the_load_is_not_lost(tiny: Path) -> None:
    """Python runs signal handlers in callbacks too, where ctypes swallows what they raise."""

    def interrupted(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Model(tiny, progress=interrupted)


@pytest.mark.parametrize("delay", [0.0, 0.002, 0.01, 0.03])
def test_a_signal_in_a_callback_of_llama_cpp_is_not_lost(
    delay: float, starter: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is delivered at the first instruction of a callback, where no `try` holds yet."""
    library()  # imported before, not in between
    sender = threading.Timer(delay, os.kill, [os.getpid(), signal.SIGINT])

    def load() -> None:
        sender.start()
        with Model(starter):
            time.sleep(5)

    with pytest.raises(KeyboardInterrupt):
        load()
    assert "ignored" not in capfd.readouterr().err


def test_text_survives_the_tokenizer(model: Model) -> None:
    tokenizer = Tokenizer(model)
    for text in ("Grüße, 世界 🙂\n\ttabs", "x", " "):
        tokens = tokenizer.encode(text, add_special=False)
        assert tokenizer.decode(tokens) == text
        decoder = TextDecoder()
        shown = [decoder.push(tokenizer.piece(token)) for token in tokens]
        assert "".join(shown) + decoder.flush() == text
        assert "\ufffd" not in "".join(shown)


def test_markers_are_tokens_only_where_asked(model: Model) -> None:
    tokenizer = Tokenizer(model)
    [marker] = tokenizer.encode("<|im_end|>", add_special=False, parse_special=True)
    assert marker in tokenizer.end_tokens
    assert len(tokenizer.encode("<|im_end|>", add_special=False)) > 1
    assert tokenizer.decode([marker]) == ""
    assert tokenizer.token_text(marker) == "<|im_end|>"


def test_bos_stands_once_whoever_adds_it(tmp_path: Path) -> None:
    for template in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        path = write_tiny_gguf(
            tmp_path / "bos.gguf",
            chat_template=template,
            metadata={"tokenizer.ggml.add_bos_token": True},
        )
        with Model(path) as model:
            tokenizer = Tokenizer(model)
            tokens = ChatTemplate(model, tokenizer).encode([{"role": "user", "content": "hi"}])
        assert tokens.count(tokenizer.bos) == 1
        assert tokens[0] == tokenizer.bos


def test_a_model_without_a_template_or_with_a_broken_one(tmp_path: Path) -> None:
    for template, words in ((None, "no chat template"), ("{% if %}", "does not parse")):
        path = write_tiny_gguf(tmp_path / "template.gguf", chat_template=template)
        with Model(path) as model, pytest.raises(ModelError, match=words):
            ChatTemplate(model, Tokenizer(model))


def test_the_cpu_is_a_device_and_no_place_for_layers() -> None:
    cpus = [device for device in devices() if device.kind == "cpu"]
    assert len(cpus) == 1
    assert 0 < cpus[0].free_bytes <= cpus[0].total_bytes
    assert all(device.offloads for device in offload_devices())
    with pytest.raises(UsageError, match="NoSuch9"):
        offload_devices(["NoSuch9"])


def test_threads_are_within_reason() -> None:
    import os

    assert 1 <= num_threads() <= (os.cpu_count() or 1)


def test_build_features_name_the_cpu() -> None:
    assert "CPU" in build_features()


def test_the_log_goes_to_logging(tiny: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="homespec.llama"):
        Model(tiny).close()
    assert any("llama" in record.message for record in caplog.records)


def test_no_layer_on_devices_means_no_device_at_all(tiny: Path) -> None:
    with Model(tiny, gpu_layers=0) as model, Context(model, ContextParams(n_ctx=32)) as context:
        assert len(context.extend([1, 2, 3], 1)) == 1


def test_a_pass_can_be_aborted_and_leaves_the_cache_as_it_was(context: Context) -> None:
    context.extend(TEXT[:10], 0)
    context.abort()
    with pytest.raises(KeyboardInterrupt):
        context.extend(TEXT[10:60], 1)
    assert context.tokens == TEXT[:10]
    context.resume()
    assert len(context.extend(TEXT[10:60], 1)) == 1


def test_devices_are_asked_of_the_library_that_llama_uses() -> None:
    """Not of a second copy of ggml, whose registry would be another one."""
    import ctypes

    from homespec.llama.devices import device_handle
    from homespec.llama.library import library

    count = library()._lib.ggml_backend_dev_count
    get = library()._lib.ggml_backend_dev_get
    count.restype, get.restype, get.argtypes = ctypes.c_size_t, ctypes.c_void_p, [ctypes.c_size_t]
    found = devices()
    assert len(found) == count()
    assert [device_handle(device) for device in found] == [get(d.index) for d in found]
