"""Which file of a repository `user/repo[:QUANT]` means."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from homespec.errors import UsageError
from homespec.models.references import shard_names

DEFAULT_QUANT = "Q4_K_M"
_REFERENCE = re.compile(r"(?P<repo>\w[\w.-]*/\w[\w.-]*)(:(?P<quant>[\w.-]+))?", re.ASCII)
_NO_MODEL = re.compile(r"(mmproj|mtp-|.*imatrix)", re.IGNORECASE)
_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")
_QUANT = re.compile(
    r"[-._]((UD-)?(I?Q\d\w*|TQ\d_\d|MXFP4\w*|NVFP4\w*|BF16|F16|F32|FP16|FP32))$", re.IGNORECASE
)


def parse_reference(reference: str) -> tuple[str, str | None]:
    """`user/repo:quant` as repository and quantization."""
    match = _REFERENCE.fullmatch(reference)
    if not match:
        raise UsageError(
            f"{reference} is no repository.", hint="Write user/repo or user/repo:QUANT."
        )
    return match["repo"], match["quant"]


def is_reference(text: str) -> bool:
    """Whether it reads as `user/repo` or `user/repo:quant`."""
    return _REFERENCE.fullmatch(text) is not None


def quant_of(path: str) -> str | None:
    """The quantization a file's name ends with, in capitals."""
    match = _QUANT.search(_SHARD.sub("", PurePosixPath(path).name.removesuffix(".gguf")))
    return match[1].upper() if match else None


def choose(paths: list[str], repo: str, quant: str | None = None) -> str:
    """The model file among a repository's paths; UsageError lists the quants where none is it."""
    models = [path for path in paths if _is_model(path)]
    if not models:
        raise UsageError(
            f"{repo} holds no GGUF model.", hint="Repositories of such models often end with -GGUF."
        )
    wanted = (quant or DEFAULT_QUANT).upper()
    found = [path for path in models if quant_of(path) == wanted]
    if not found:  # unsloth's dynamic quants are also asked for by the plain name
        found = [path for path in models if quant_of(path) == f"UD-{wanted}"]
    if not found and quant is None and len(models) == 1:
        found = models
    # Some publish the same model in one file and in parts.
    whole = [path for path in found if shard_names(PurePosixPath(path).name)[1:] == []]
    found = whole or found
    if len(found) == 1:
        return found[0]
    if found:
        raise UsageError(
            f"{repo} holds several models of quantization {wanted}: {', '.join(found)}.",
            hint=f"Name one as hf:{repo}@main/FILE.",
        )
    there = sorted({quant_of(path) or PurePosixPath(path).name for path in models})
    raise UsageError(
        f"{repo} holds no {wanted} model.",
        hint=f"There are: {', '.join(there)}. Write {repo}:QUANT.",
    )


def _is_model(path: str) -> bool:
    """A GGUF model, or the first part of one."""
    name = PurePosixPath(path).name
    if not name.lower().endswith(".gguf") or _NO_MODEL.match(name):
        return False
    shard = _SHARD.search(name[:-5])
    return shard is None or int(shard[1]) == 1
