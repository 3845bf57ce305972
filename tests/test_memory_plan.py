"""The rules of the memory plan, on invented machines and models of real shapes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from homespec.errors import PlanError, UsageError
from homespec.models.fitting import PlanRequest
from homespec.models.gguf_header import Header, read_header
from homespec.models.machine import GIB, DeviceMemory, LimitKind, Machine, MemoryLimit
from homespec.models.memory_estimate import RAM
from homespec.models.memory_plan import AUTO, Candidate, Plan, plan, propose
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.clock import fastest
from tests.shaped_gguf import SHAPES, write_shaped_gguf

_HEADERS: dict[str, Header] = {}


@pytest.fixture(scope="module", autouse=True)
def headers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("shaped")
    for name in SHAPES:
        _HEADERS[name] = read_header(write_shaped_gguf(folder / f"{name}.gguf", name))
    yield
    _HEADERS.clear()


def machine(
    total: float, free: float, *gpus: float, kind: LimitKind = "machine", **device: Any
) -> Machine:
    """A machine with so many GiB of RAM in all and free, and devices that are nearly empty."""
    return Machine(
        (MemoryLimit(kind, int(total * GIB), int(free * GIB)),),
        tuple(
            DeviceMemory(f"GPU{i}", int(size * GIB), int(size * GIB * 0.96), **device)
            for i, size in enumerate(gpus)
        ),
        frozenset({"REPACK", "AVX2"}),
    )


def propose_for(where: Machine, target: str, *drafts: str, **wanted: Any) -> Plan:
    candidates = wanted.pop("candidates", ())
    request = PlanRequest(**wanted)
    return propose(
        _HEADERS[target], [_HEADERS[name] for name in drafts], request, where, candidates
    )


def over(proposed: Plan) -> list[str]:
    """The places that are promised more than they have."""
    return [use.place for use in proposed.uses if use.missing_bytes > 0]


# --- where things go ----------------------------------------------------------------------------


def test_with_room_for_all_everything_is_as_asked_for() -> None:
    found = propose_for(machine(32, 28), "qwen2.5-1.5b", "qwen2.5-0.5b")
    assert found.verdict == "fits"
    assert found.drafting == "draft_model"
    assert found.target.n_ctx == found.draft.n_ctx == 4096  # type: ignore[union-attr]
    assert found.target.gpu_layers == 0
    assert not over(found)
    assert "28.0 GiB of 32.0 GiB free" in found.sentence


def test_a_24_gb_gpu_takes_target_and_draft_whole() -> None:
    found = propose_for(machine(32, 28, 24), "qwen2.5-32b", "qwen2.5-0.5b")
    assert found.target.gpu_layers == found.target.layer_count
    assert found.draft is not None
    assert found.draft.devices == ("GPU0",)
    assert found.draft.gpu_layers == found.draft.layer_count
    assert not over(found)


def test_an_8_gb_gpu_full_of_target_leaves_the_draft_in_ram() -> None:
    found = propose_for(machine(32, 28, 8), "llama-3.1-8b", "llama-3.2-1b", n_ctx=16384)
    assert found.target.gpu_layers == found.target.layer_count
    assert found.draft is not None
    assert found.draft.devices == ()
    assert found.draft.gpu_layers == 0
    assert found.verdict == "fits"


def test_a_4_gb_gpu_takes_a_part_of_the_layers() -> None:
    found = propose_for(machine(16, 12, 4), "llama-3.1-8b", "llama-3.2-1b")
    assert 0 < found.target.gpu_layers < found.target.layer_count
    assert not over(found)
    more = replace(PlanRequest(), gpu_layers=found.target.gpu_layers + 1)
    refused = propose(_HEADERS["llama-3.1-8b"], [], more, machine(16, 12, 4))
    assert refused.verdict == "refused"
    assert over(refused) == ["GPU0"]
    assert [other.arguments for other in refused.alternatives if other.kind == "layers"] == [
        f"-ngl {found.target.gpu_layers}"
    ]


def test_two_gpus_share_the_target_and_one_of_them_takes_the_draft_whole() -> None:
    where = machine(32, 28, 16, 12)
    found = propose_for(where, "qwen2.5-32b", "qwen2.5-1.5b", "qwen2.5-0.5b")
    assert found.target.devices == ("GPU0", "GPU1")
    assert found.draft is not None
    assert len(found.draft.devices) == 1
    taken = {use.place: use for use in found.uses}
    alone = {use.place: use for use in propose_for(where, "qwen2.5-32b").uses}
    rooms = {name: -alone[name].missing_bytes for name in ("GPU0", "GPU1")}
    assert found.draft.devices[0] == max(rooms, key=rooms.__getitem__)
    assert all(use.missing_bytes <= 0 for use in taken.values())


def test_an_integrated_gpu_draws_on_the_ram() -> None:
    where = machine(16, 14, 12, kind="machine", unified=True)
    found = propose_for(where, "llama-3.1-8b")
    ram = next(use for use in found.uses if use.place == RAM)
    assert found.target.gpu_layers == found.target.layer_count
    assert ram.needed_bytes >= found.target.parts["GPU0"].needed + found.target.parts[RAM].needed


def test_named_devices_are_the_ones_used() -> None:
    where = machine(32, 28, 24, 24)
    found = propose_for(
        where, "llama-3.1-8b", "llama-3.2-1b", devices=("gpu1",), draft_devices=("GPU0",)
    )
    assert found.target.devices == ("GPU1",)
    assert found.draft is not None
    assert found.draft.devices == ("GPU0",)
    with pytest.raises(UsageError, match="GPU7") as error:
        propose_for(where, "llama-3.1-8b", devices=("GPU7",))
    assert "GPU0, GPU1" in str(error.value.hint)


def test_layers_asked_for_are_the_layers_planned() -> None:
    found = propose_for(machine(32, 28, 24), "llama-3.1-8b", "llama-3.2-1b", gpu_layers=0)
    assert found.target.devices == ()
    found = propose_for(
        machine(32, 28, 24), "llama-3.1-8b", "llama-3.2-1b", gpu_layers=7, draft_gpu_layers=0
    )
    assert found.target.gpu_layers == 7
    assert found.draft is not None
    assert found.draft.gpu_layers == 0


# --- the draft gives way ------------------------------------------------------------------------


def test_a_draft_that_does_not_fit_gives_way_to_the_next() -> None:
    full = propose_for(machine(8, 7.9), "llama-3.1-8b", "qwen3-0.6b", "gemma-3-270m")
    assert full.verdict == "fits"
    less = propose_for(machine(8, 6.9), "llama-3.1-8b", "qwen3-0.6b", "gemma-3-270m")
    assert less.verdict == "reduced"
    assert less.draft is not None
    assert less.draft.name.startswith("gemma")
    assert "qwen3-0.6b.gguf does not fit beside the target" in less.sentence
    assert "gemma-3-270m.gguf drafts instead" in less.sentence


def test_without_room_for_any_draft_n_grams_are_used_then_nothing() -> None:
    alone = propose_for(machine(8, 7), "llama-3.1-8b").uses[0].needed_bytes / GIB
    tight = propose_for(machine(8, alone + 1.001), "llama-3.1-8b", "llama-3.2-1b")
    assert tight.verdict == "reduced"
    assert tight.drafting == "ngram"
    assert tight.drafter_bytes > 0
    assert "Drafts come from n-grams" in tight.sentence
    index = tight.drafter_bytes / GIB
    tightest = propose_for(machine(8, alone + 1 - index / 2), "llama-3.1-8b", "llama-3.2-1b")
    assert tightest.drafting == "none"
    assert tightest.drafter_bytes == 0
    assert "Decoding is plain" in tightest.sentence
    assert not over(tightest)


def test_drafting_without_a_model_leaves_the_drafts_out() -> None:
    found = propose_for(machine(32, 28), "llama-3.1-8b", "llama-3.2-1b", drafting="ngram")
    assert (found.verdict, found.drafting, found.draft) == ("fits", "ngram", None)
    found = propose_for(machine(32, 28), "llama-3.1-8b", "llama-3.2-1b", drafting="none")
    assert (found.verdict, found.drafting, found.drafter_bytes) == ("fits", "none", 0)


def test_the_reserve_is_left_alone() -> None:
    where = machine(8, 7.9)
    assert propose_for(where, "llama-3.1-8b", "llama-3.2-1b").drafting == "draft_model"
    kept = propose_for(where, "llama-3.1-8b", "llama-3.2-1b", reserve_bytes=2 * GIB)
    assert kept.drafting == "ngram"
    assert kept.uses[0].reserve_bytes == 2 * GIB
    assert propose_for(where, "llama-3.1-8b", reserve_bytes=4 * GIB).verdict == "refused"


# --- context and cache --------------------------------------------------------------------------


def test_the_models_own_context_is_taken_as_far_as_it_fits() -> None:
    long = propose_for(machine(64, 60), "llama-3.2-1b", n_ctx=0)
    assert long.target.n_ctx == 131072
    short = propose_for(machine(8, 4), "llama-3.2-1b", n_ctx=0)
    assert 4096 < short.target.n_ctx < 131072
    again = propose_for(machine(8, 4), "llama-3.2-1b", n_ctx=2 * short.target.n_ctx)
    assert again.verdict == "refused"


def test_a_context_nobody_asked_for_pushes_no_layer_off_the_device() -> None:
    where = machine(64, 60, 8)
    usual = propose_for(where, "llama-3.1-8b", n_ctx=4096)
    own = propose_for(where, "llama-3.1-8b", n_ctx=0)
    assert own.target.gpu_layers == usual.target.gpu_layers == usual.target.layer_count
    assert own.target.n_ctx > 4096
    asked = propose_for(where, "llama-3.1-8b", n_ctx=65536)
    assert asked.target.n_ctx == 65536
    assert asked.target.gpu_layers < usual.target.gpu_layers


def test_a_cache_nobody_chose_is_quantized_only_where_that_is_needed() -> None:
    any_type = {"cache_type_k": None, "cache_type_v": None}
    roomy = propose_for(machine(16, 14), "llama-3.1-8b", n_ctx=16384, **any_type)
    assert (roomy.target.cache_type_k, roomy.target.cache_type_v) == ("f16", "f16")
    tight = propose_for(machine(8, 7.2), "llama-3.1-8b", n_ctx=16384, **any_type)
    assert (tight.target.cache_type_k, tight.target.cache_type_v) == ("q8_0", "q8_0")
    assert propose_for(machine(8, 7.2), "llama-3.1-8b", n_ctx=16384).verdict == "refused"


def test_quantizing_is_no_way_out_without_flash_attention() -> None:
    refused = propose_for(machine(8, 7.2), "llama-3.1-8b", n_ctx=16384, flash_attention="off")
    kinds = {other.kind for other in refused.alternatives}
    assert refused.verdict == "refused"
    assert "cache" not in kinds
    assert "context" in kinds


# --- refusals -----------------------------------------------------------------------------------


def test_a_refusal_has_exit_code_3_and_lists_what_fits() -> None:
    where = machine(8, 7.2)
    with pytest.raises(PlanError) as error:
        plan(_HEADERS["llama-3.1-8b"], [], PlanRequest(n_ctx=32768), where)
    assert error.value.exit_code == 3
    assert "llama-3.1-8b.gguf needs" in error.value.message
    assert "32768 tokens" in error.value.message
    refused = propose_for(where, "llama-3.1-8b", n_ctx=32768)
    found = {other.kind: other.arguments for other in refused.alternatives}
    assert found["context"] == "-c 8192"
    assert "(-c 8192)" in str(error.value.hint)
    assert propose_for(where, "llama-3.1-8b", n_ctx=8192).verdict == "fits"


def test_a_process_limit_counts_mapped_pages_and_points_to_reading() -> None:
    # 1.3 GiB are needed; with the file mapped and its matrices copied, address space is 2 GiB.
    where = machine(1.8, 1.7, kind="process")
    refused = propose_for(where, "qwen2.5-1.5b")
    assert refused.verdict == "refused"
    assert [other.arguments for other in refused.alternatives if other.kind == "mapping"] == [
        "--no-mmap"
    ]
    assert propose_for(where, "qwen2.5-1.5b", mmap=False).verdict == "fits"
    as_ram = propose_for(machine(3, 2.7), "qwen2.5-1.5b")
    assert as_ram.verdict == "fits"
    assert as_ram.uses[0].needed_bytes < as_ram.total_bytes  # file pages can be taken back


def test_locked_pages_cannot_be_taken_back() -> None:
    locked = propose_for(machine(8, 7), "qwen2.5-1.5b", mlock=True)
    assert locked.uses[0].needed_bytes == locked.total_bytes


def test_every_limit_has_to_be_kept() -> None:
    ram = MemoryLimit("machine", 32 * GIB, 28 * GIB)
    container = MemoryLimit("container", 2 * GIB, 3 * GIB // 2)
    found = propose(
        _HEADERS["qwen2.5-1.5b"],
        [_HEADERS["qwen2.5-0.5b"]],
        PlanRequest(),
        Machine((ram, container), (), frozenset()),
    )
    assert found.verdict == "reduced"
    assert {use.place for use in found.uses} == {RAM, container.label}
    assert container.label in found.sentence


def test_other_models_are_named_by_header_or_by_size() -> None:
    candidates = [
        Candidate("qwen3-8b", target_bytes=5 * GIB, draft_bytes=GIB // 2),
        Candidate("small-by-size", target_bytes=98 << 20),
        Candidate("unknown-size"),
        Candidate("small", target=_HEADERS["smollm2-135m"]),
        Candidate("pair", _HEADERS["qwen2.5-1.5b"], _HEADERS["qwen2.5-0.5b"]),
        Candidate("other-quant", _HEADERS["qwen2.5-0.5b"], same_model=True),
    ]
    where = machine(2, 1.7)
    refused = propose_for(where, "qwen2.5-1.5b", candidates=candidates)
    assert refused.verdict == "refused"
    pairs = [other.arguments for other in refused.alternatives if other.kind == "pair"]
    assert pairs == ["small-by-size", "small"]
    assert [o.arguments for o in refused.alternatives if o.kind == "quantization"] == [
        "other-quant"
    ]
    large = propose_for(machine(16, 9), "llama-3.3-70b", candidates=candidates)
    assert large.alternatives[0].arguments == "qwen3-8b"


def test_a_candidate_may_need_a_smaller_context() -> None:
    candidates = [Candidate("small", target=_HEADERS["smollm2-135m"])]
    found = propose_for(machine(2, 1.3), "qwen2.5-1.5b", n_ctx=16384, candidates=candidates)
    [pair] = [other for other in found.alternatives if other.kind == "pair"]
    name, flag, n_ctx = pair.arguments.split()
    assert (name, flag) == ("small", "-c")
    small = propose_for(machine(2, 1.3), "smollm2-135m", n_ctx=int(n_ctx))
    assert small.verdict == "fits"
    assert int(n_ctx) < 16384


def test_a_machine_that_tells_nothing_is_not_in_the_way() -> None:
    found = propose(_HEADERS["llama-3.3-70b"], [], PlanRequest(), Machine(()))
    assert found.verdict == "fits"
    assert "does not tell" in found.sentence


# --- what is handed on --------------------------------------------------------------------------


def test_the_settings_chosen_are_named_as_the_engines() -> None:
    from homespec.engine import LoadParams

    found = propose_for(machine(32, 28, 24), "llama-3.1-8b", "llama-3.2-1b", n_ctx=8192)
    params = LoadParams(**found.load_options())
    assert params.n_ctx == 8192
    assert params.gpu_layers == 33
    assert params.draft_devices == ("GPU0",)
    assert params.draft_gpu_layers == 17


def test_the_plan_is_json() -> None:
    found = propose_for(machine(2, 1.7), "qwen2.5-1.5b", "qwen2.5-0.5b")
    read = json.loads(json.dumps(found.as_dict()))
    assert read["verdict"] == "refused"
    assert read["target"]["parts"][RAM]["kv"] == found.target.parts[RAM].kv
    assert read["uses"][0]["missing_bytes"] > 0


def test_a_plan_takes_no_time() -> None:
    where = machine(64, 60, 24, 24)
    plan = partial(propose_for, where, "llama-3.3-70b", "llama-3.2-1b", n_ctx=0)
    assert fastest(plan, within=1) < 1


# --- properties ---------------------------------------------------------------------------------

PAIRS = [
    ("qwen2.5-1.5b", ("qwen2.5-0.5b",)),
    ("qwen2.5-32b", ("qwen2.5-1.5b", "qwen2.5-0.5b")),
    ("llama-3.1-8b", ("llama-3.2-1b",)),
    ("llama-3.3-70b", ("llama-3.2-1b",)),
    ("gemma-3-4b", ("gemma-3-270m",)),
    ("qwen3-30b-a3b", ("qwen3-0.6b",)),
    ("qwen3.5-0.8b", ()),
]
sizes = st.floats(0.5, 64)


@st.composite
def machines(draw: st.DrawFn) -> Machine:
    total = draw(sizes)
    kind = draw(st.sampled_from(["machine", "container", "process"]))
    gpus = draw(st.lists(st.floats(1, 48), max_size=2))
    unified = draw(st.booleans())
    return machine(total, total * draw(st.floats(0.3, 1)), *gpus, kind=kind, unified=unified)


@st.composite
def requests(draw: st.DrawFn) -> PlanRequest:
    layers = st.sampled_from([AUTO, 0, 5, 99])
    kind = draw(st.sampled_from(["f16", "q8_0", None]))
    return PlanRequest(
        n_ctx=draw(st.sampled_from([0, 512, 4096, 16384, 65536])),
        gpu_layers=draw(layers),
        draft_gpu_layers=draw(layers),
        cache_type_k=kind,
        cache_type_v=kind,
        flash_attention=draw(st.sampled_from(["auto", "off"])) if kind == "f16" else "auto",
        mmap=draw(st.booleans()),
        reserve_bytes=draw(st.sampled_from([None, 0, GIB])),
    )


@settings(max_examples=60, deadline=None)
@given(machines(), requests(), st.sampled_from(PAIRS))
def test_a_draft_never_changes_the_target(
    where: Machine, request: PlanRequest, pair: tuple[str, tuple[str, ...]]
) -> None:
    target, drafts = _HEADERS[pair[0]], [_HEADERS[name] for name in pair[1]]
    alone, together = (propose(target, some, request, where) for some in ([], drafts))
    assert together.target == alone.target
    assert (together.verdict == "refused") == (alone.verdict == "refused")
    if together.draft:
        assert together.draft.n_ctx == together.target.n_ctx


@settings(max_examples=60, deadline=None)
@given(machines(), requests(), st.sampled_from(PAIRS))
def test_what_is_promised_is_there(
    where: Machine, request: PlanRequest, pair: tuple[str, tuple[str, ...]]
) -> None:
    found = propose(_HEADERS[pair[0]], [_HEADERS[name] for name in pair[1]], request, where)
    assert bool(over(found)) == (found.verdict == "refused")
    assert found.sentence
    if request.n_ctx:
        assert found.target.n_ctx == request.n_ctx
    if request.gpu_layers != AUTO and where.offload_devices:
        assert found.target.gpu_layers == min(request.gpu_layers, found.target.layer_count)


@settings(max_examples=40, deadline=None)
@given(machines(), requests(), st.sampled_from(PAIRS))
def test_what_a_refusal_proposes_does_fit(
    where: Machine, request: PlanRequest, pair: tuple[str, tuple[str, ...]]
) -> None:
    target = _HEADERS[pair[0]]
    found = propose(target, [], request, where)
    assume(found.verdict == "refused")
    for other in found.alternatives:
        words = other.arguments.split()
        changes: dict[str, Any] = {
            "context": lambda words=words: {"n_ctx": int(words[1])},
            "cache": lambda words=words: {"cache_type_k": words[1], "cache_type_v": words[3]},
            "layers": lambda words=words: {"gpu_layers": int(words[1])},
            "mapping": lambda: {"mmap": False},
        }[other.kind]()
        again = propose(target, [], replace(request, **changes), where)
        assert again.verdict != "refused", other


@settings(max_examples=60, deadline=None)
@given(
    machines(),
    st.sampled_from(PAIRS),
    st.integers(1, 60000),
    st.integers(1, 60000),
    st.sampled_from(["auto", "off"]),
)
def test_a_longer_context_never_takes_less(
    where: Machine, pair: tuple[str, tuple[str, ...]], one: int, other: int, flash: str
) -> None:
    # Several devices share by free memory alone: more layers may fit them better than fewer.
    assume(len(where.devices) < 2)
    target = _HEADERS[pair[0]]
    short, long = (
        propose(target, [], PlanRequest(n_ctx=n_ctx, flash_attention=flash), where)
        for n_ctx in sorted((one, other))
    )
    if short.verdict == "refused":
        assert long.verdict == "refused"
    elif long.verdict != "refused":
        assert long.target.gpu_layers <= short.target.gpu_layers
        if long.target.gpu_layers == short.target.gpu_layers:
            assert long.target.total_bytes >= short.target.total_bytes
