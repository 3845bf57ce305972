"""Flags that several commands share; their names are llama.cpp's."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from homespec.cli.catalog_options import catalog_options
from homespec.decoding.sampling import SamplingParams
from homespec.errors import UsageError
from homespec.generation import DEPTHS, DRAFT_SAMPLING, MAX_DRAFT_DEPTH, SPEC_TYPES
from homespec.llama.context import CACHE_TYPES
from homespec.llama.sampler import json_schema_grammar

F = TypeVar("F", bound=Callable[..., Any])
Decorator = Callable[[F], F]

ALL = -1


def _layers(_: click.Context, parameter: click.Parameter, value: str) -> int:
    if value in ("all", "auto"):
        return ALL
    if value.isdigit():
        return int(value)
    raise click.BadParameter(f"{value!r} is neither a number nor all.", param=parameter)


def _together(*options: Decorator[F]) -> Decorator[F]:
    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _numbers(*rows: tuple[tuple[str, ...], type, Any, str]) -> list[Decorator[Any]]:
    return [
        click.option(*names, type=kind, default=default, show_default=True, help=text)
        for names, kind, default, text in rows
    ]


_CACHE = click.Choice(list(CACHE_TYPES))
_FLASH = click.Choice(["on", "off", "auto"])
_DEFAULTS = SamplingParams()

model_options = _together(
    click.option(
        "-m",
        "--model",
        metavar="MODEL",
        envvar=["HOMESPEC_MODEL", "LLAMA_ARG_MODEL"],
        help="Target: a GGUF file, a pair of the catalogue, a source or user/repo[:QUANT] "
        "(default: the pair that was set up, else the starter model).",
    ),
    click.option(
        "-md",
        "--model-draft",
        metavar="MODEL",
        envvar=["HOMESPEC_MODEL_DRAFT", "LLAMA_ARG_MODEL_DRAFT"],
        help="Draft: a smaller model of the same family, named likewise.",
    ),
    click.option("-hf", "--hf-repo", metavar="REPO[:QUANT]", help="Target from the hub."),
    click.option("-hfd", "--hf-repo-draft", metavar="REPO[:QUANT]", help="Draft from the hub."),
    catalog_options,
)

cache_options = _together(
    click.option(
        "-fa",
        "--flash-attn",
        type=_FLASH,
        default="auto",
        show_default=True,
        help="Flash attention; auto for what tune measured, else llama.cpp's choice.",
    ),
    click.option(
        "-ctk",
        "--cache-type-k",
        type=_CACHE,
        default="f16",
        show_default=True,
        help="Type of the cache of keys; q8_0 halves it, and loses a little.",
    ),
    click.option(
        "-ctv",
        "--cache-type-v",
        type=_CACHE,
        default="f16",
        show_default=True,
        help="Type of the cache of values; below f16 it needs flash attention.",
    ),
)

load_options = _together(
    click.option(
        "-c",
        "--ctx-size",
        type=click.IntRange(0),
        envvar=["HOMESPEC_CTX_SIZE", "LLAMA_ARG_CTX_SIZE"],
        help="Context in tokens; 0 for what the model was trained for (default: what the default "
        "pair was set up with, 4096 for others).",
    ),
    click.option(
        "-t",
        "--threads",
        type=click.IntRange(0),
        default=0,
        envvar=["HOMESPEC_THREADS", "LLAMA_ARG_THREADS"],
        help="Threads for one token (default: the physical cores).",
    ),
    click.option(
        "-tb", "--threads-batch", type=click.IntRange(0), default=0, help="Threads for many tokens."
    ),
    click.option(
        "-ngl",
        "--n-gpu-layers",
        callback=_layers,
        metavar="N|all|auto",
        default="all",
        envvar=["HOMESPEC_N_GPU_LAYERS", "LLAMA_ARG_N_GPU_LAYERS"],
        help="Layers of the target on devices (default: all).",
    ),
    click.option(
        "-ngld",
        "--n-gpu-layers-draft",
        callback=_layers,
        metavar="N|all|auto",
        default="all",
        help="Layers of the draft there.",
    ),
    click.option("-dev", "--device", metavar="A,B", help="Devices for the target, by name."),
    click.option("-devd", "--device-draft", metavar="A,B", help="Devices for the draft."),
    cache_options,
    click.option("-ctkd", "--cache-type-k-draft", type=_CACHE, default="f16", show_default=True),
    click.option("-ctvd", "--cache-type-v-draft", type=_CACHE, default="f16", show_default=True),
    click.option(
        "--strict-exact",
        is_flag=True,
        help="Greedy and seeded text with the bits of plain decoding (docs/exactness.md).",
    ),
    click.option("--mlock", is_flag=True, help="Keep the model from being swapped out."),
    click.option("--no-mmap", is_flag=True, help="Read the model into memory at once."),
)

speculation_options = _together(
    click.option(
        "--spec-type",
        type=click.Choice(SPEC_TYPES),
        default="auto",
        show_default=True,
        help="How to draft; auto lets lookup and draft model compete.",
    ),
    click.option(
        "--spec-draft-n-max",
        "--draft-max",
        "--draft-n",
        "--draft",
        "draft_depth",
        type=click.IntRange(0, MAX_DRAFT_DEPTH),
        help="Most tokens drafted a round (default: 31, or 3 at a fixed depth).",
    ),
    click.option(
        "--depth",
        type=click.Choice(DEPTHS),
        default="adaptive",
        show_default=True,
        help="Draft what pays here, or always as many.",
    ),
    click.option(
        "--spec-draft-n-min",
        "--draft-min",
        "min_draft",
        type=click.IntRange(0),
        default=0,
        help="Leave shorter drafts out (sampled ones are always verified).",
    ),
    click.option(
        "--spec-draft-p-min",
        "--draft-p-min",
        "p_min",
        type=click.FloatRange(0, 1),
        default=0.0,
        help="Stop drafting where the draft is less sure than this.",
    ),
    click.option(
        "--spec-draft-sampling",
        "draft_sampling",
        type=click.Choice(DRAFT_SAMPLING),
        default="auto",
        show_default=True,
        help="How the draft model chooses its tokens.",
    ),
    click.option(
        "--spec-rule",
        "rule",
        type=click.Choice(["match", "rejection"]),
        help="How sampled text is verified (default: match with a seed, else as the draft allows).",
    ),
)

system_prompt_file_option = click.option(
    "-sysf",
    "--system-prompt-file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The system prompt, out of a file.",
)

sampling_options = _together(
    *_numbers(
        (("--temp", "--temperature", "temperature"), float, _DEFAULTS.temperature, "0 is greedy."),
        (("--top-k",), int, _DEFAULTS.top_k, "0 is off."),
        (("--top-p",), float, _DEFAULTS.top_p, "1 is off."),
        (("--min-p",), float, _DEFAULTS.min_p, "0 is off."),
        (("--typical", "typical_p"), float, _DEFAULTS.typical_p, "1 is off."),
        (("--repeat-penalty",), float, _DEFAULTS.repeat_penalty, "1 is off."),
        (("--repeat-last-n",), int, _DEFAULTS.repeat_last_n, "Tokens looked back on."),
        (("--presence-penalty",), float, _DEFAULTS.presence_penalty, "0 is off."),
        (("--frequency-penalty",), float, _DEFAULTS.frequency_penalty, "0 is off."),
        (("--dry-multiplier",), float, _DEFAULTS.dry_multiplier, "0 is off."),
        (("--dry-base",), float, _DEFAULTS.dry_base, "Growth of the penalty by length."),
        (("--dry-allowed-length",), int, _DEFAULTS.dry_allowed_length, "Repeats that are free."),
        (("--dry-penalty-last-n",), int, _DEFAULTS.dry_penalty_last_n, "Tokens looked back on."),
        (("--xtc-probability",), float, _DEFAULTS.xtc_probability, "0 is off."),
        (("--xtc-threshold",), float, _DEFAULTS.xtc_threshold, "Least probability."),
    ),
    click.option("-s", "--seed", type=int, help="Makes sampling repeatable; -1 draws one."),
    click.option(
        "-l",
        "--logit-bias",
        multiple=True,
        metavar="TOKEN(+/-)BIAS",
        help="Raise or lower a token id, e.g. 15043-1.",
    ),
    click.option("--grammar", metavar="GBNF", help="Constrain the answer by a grammar."),
    click.option("--grammar-file", type=click.Path(path_type=Path), metavar="FILE"),
    click.option("-j", "--json-schema", metavar="SCHEMA", help="Constrain it to a JSON schema."),
    click.option("-jf", "--json-schema-file", type=click.Path(path_type=Path), metavar="FILE"),
)


def model_references(flags: dict[str, Any]) -> dict[str, Any]:
    """What -m/-hf, -md/-hfd, --catalog and --offline say, as arguments of `load`.

    target and draft are None where neither of their flags is given.
    """
    chosen: dict[str, Any] = {name: flags.pop(name) for name in ("catalog", "offline")}
    for role, plain, hub, names in (
        ("target", "model", "hf_repo", "-m and -hf"),
        ("draft", "model_draft", "hf_repo_draft", "-md and -hfd"),
    ):
        path, repo = flags.pop(plain), flags.pop(hub)
        if path and repo:
            raise UsageError(f"{names} both name a model.", hint="Give one of them.")
        chosen[role] = f"hf:{repo}" if repo else path
    return chosen


def load_params(flags: dict[str, Any]) -> dict[str, Any]:
    """The fields of LoadParams, taken out of the flags; n_ctx only where -c is given."""

    def names(key: str) -> tuple[str, ...] | None:
        text = flags.pop(key)
        return tuple(part.strip() for part in text.split(",")) if text else None

    n_ctx = flags.pop("ctx_size")
    return ({} if n_ctx is None else {"n_ctx": n_ctx}) | {
        "threads": flags.pop("threads"),
        "threads_batch": flags.pop("threads_batch"),
        "gpu_layers": flags.pop("n_gpu_layers"),
        "draft_gpu_layers": flags.pop("n_gpu_layers_draft"),
        "devices": names("device"),
        "draft_devices": names("device_draft"),
        "flash_attention": flags.pop("flash_attn"),
        "cache_type_k": flags.pop("cache_type_k"),
        "cache_type_v": flags.pop("cache_type_v"),
        "draft_cache_type_k": flags.pop("cache_type_k_draft"),
        "draft_cache_type_v": flags.pop("cache_type_v_draft"),
        "strict_exact": flags.pop("strict_exact"),
        "mlock": flags.pop("mlock"),
        "mmap": not flags.pop("no_mmap"),
    }


def sampling_params(flags: dict[str, Any]) -> SamplingParams:
    """SamplingParams, taken out of the flags."""
    grammar = _grammar(flags)
    seed = flags.pop("seed")
    bias = tuple(_bias(text) for text in flags.pop("logit_bias"))
    settings = {name: flags.pop(name) for name in _SAMPLING_NAMES}
    return SamplingParams(
        **settings, grammar=grammar, logit_bias=bias, seed=None if seed in (None, -1) else seed
    )


_SAMPLING_NAMES = [
    name
    for name in SamplingParams.__dataclass_fields__
    if name not in ("grammar", "logit_bias", "seed")
]


def _grammar(flags: dict[str, Any]) -> str | None:
    keys = ("grammar", "grammar_file", "json_schema", "json_schema_file")
    given = {key: value for key in keys if (value := flags.pop(key)) is not None}
    if len(given) > 1:
        raise UsageError("One grammar or schema is enough.", hint="Leave the others out.")
    for key, value in given.items():
        text = read_text(value) if key.endswith("_file") else value
        return json_schema_grammar(text) if key.startswith("json") else text
    return None


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, amount = text.partition(sign)
        if found and token.isdigit():
            try:
                return int(token), float(sign + amount)
            except ValueError:
                break
    raise UsageError(f"{text!r} is no logit bias.", hint="Write it as TOKEN+BIAS or TOKEN-BIAS.")


def read_text(path: Path) -> str:
    """A text file, or UsageError."""
    try:
        return path.read_text("utf-8")
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}.") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(f"{path} is not UTF-8 text.", hint="Convert it with iconv.") from exc


def print_json(value: Any) -> None:
    """One JSON object on a line of stdout."""
    click.echo(json.dumps(value, ensure_ascii=False))
