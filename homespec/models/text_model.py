"""Whether a GGUF file is a language model that homespec can run, told from its header.

llama.cpp refuses most unfit files itself; some values end the whole process instead (a failed
GGML_ASSERT), so those are looked for here.
"""

from __future__ import annotations

from homespec.errors import ModelError
from homespec.models import architectures
from homespec.models.gguf_header import Header

_MAX_EXPERTS = 1024  # llama.cpp's own limit
_BUFFER_ALIGNMENT = 32  # a mapped file's tensors have to start at a multiple of it
_ROPE_SCALINGS = (None, "none", "linear", "yarn", "longrope")
# Tokenizer model -> the BOS and EOS ids llama.cpp takes where the file states none.
_DEFAULT_ENDS = {"llama": (1, 2), "gpt2": (11, 11), "t5": (None, 1), "plamo2": (1, 2)}
_OTHER_TYPES = {
    "adapter": "an adapter (LoRA), which works only on top of the model it was made for",
    "imatrix": "an importance matrix for quantizing, not a model",
    "mmproj": "the part of a multimodal model that reads pictures or sound",
}


def require_text_model(header: Header) -> None:
    """Raise ModelError, with the reason, where the file cannot write text token by token.

    For a split model: the header of its first file, or of all joined.
    """
    if header.split_number:
        raise ModelError(
            f"{header.source} is only part {header.split_number + 1} of "
            f"{header.split_count} of a model.",
            hint="Name the first part; the others are found beside it.",
        )
    what = _OTHER_TYPES.get(header.text("general.type") or "")
    what = what or architectures.why_not_text(header.architecture)
    if what is None and not header.has_decoder:
        what = "an embedding model, which looks at the whole text at once and writes none"
    if what:
        raise ModelError(
            f"{header.source} is {what}.",
            hint="Take a model made for text generation, like an Instruct model.",
        )
    if not header.tensors and not header.is_split:
        raise ModelError(
            f"{header.source} holds a vocabulary but no weights.",
            hint="Take the model's full GGUF file.",
        )
    problem = _network_problem(header) or _vocabulary_problem(header)
    if problem:
        raise ModelError(
            f"{header.source} cannot be run: {problem}.",
            hint="The file was made by a faulty tool; take another one of this model.",
        )


def _network_problem(header: Header) -> str | None:
    def number(key: str) -> int:
        return header.integer(header.of_architecture(key)) or 0

    def epsilon(key: str) -> float:
        value = header.metadata.get(header.of_architecture(f"attention.layer_norm_{key}"), 0.0)
        return value if isinstance(value, float) else 0.0

    experts, groups = number("expert_count"), number("expert_group_count")
    used = max(header.per_layer(header.of_architecture("expert_used_count")) or (0,))
    scaling = header.text(header.of_architecture("rope.scaling.type"))
    headless = {
        f"blk.{i}.attn_k.weight" for i, heads in enumerate(header.head_count_kv) if not heads
    }
    checks = (
        (header.context_length < 1, "it has no context"),
        (header.embedding_length < 1, "its hidden state has no width"),
        (
            number("nextn_predict_layers") > header.block_count,
            "it has more prediction layers than layers",
        ),
        (
            experts > _MAX_EXPERTS or used > experts or (experts > 0 and not used),
            f"it uses {used} of {experts} experts",
        ),
        (
            groups > 0 and (groups >= experts or experts % groups > 0),
            f"it has {experts} experts in {groups} groups",
        ),
        (scaling not in _ROPE_SCALINGS, f"its position scaling {scaling!r:.60} is unknown"),
        (
            not (epsilon("rms_epsilon") >= 0 and epsilon("epsilon") >= 0),  # NaN is not >= 0
            "the small number in its normalization is negative or none",
        ),
        (
            any(tensor.name in headless for tensor in header.tensors),
            "a layer with attention weights has no heads",
        ),
        (
            header.data_offset % _BUFFER_ALIGNMENT > 0 and header.tensors,
            f"its tensors start at byte {header.data_offset:,}, no multiple of 32",
        ),
    )
    return next((problem for failed, problem in checks if failed), None)


def _vocabulary_problem(header: Header) -> str | None:
    pieces = list(header.tokens)
    model = header.text("tokenizer.ggml.model")
    if model in (None, "none", "no_vocab") or not pieces:
        return "it has no tokenizer"
    known = set(pieces)
    if len(known) != len(pieces):
        return "its vocabulary holds the same piece twice"
    if model == "llama":
        for byte in range(256):
            if b"<0x%02X>" % byte not in known and bytes([byte]) not in known:
                return f"its vocabulary has no piece for the byte {byte}"
    for end, default in zip(("bos", "eos"), _DEFAULT_ENDS.get(model, (None, None)), strict=True):
        stated = header.integer(f"tokenizer.ggml.{end}_token_id", high=2**32 - 1)
        token = stated if stated is not None and stated < len(pieces) else default
        unusable = token is None or token >= len(pieces)
        if unusable and header.flag(f"tokenizer.ggml.add_{end}_token"):
            return f"it asks for the {end.upper()} token, but has none"
    return None
