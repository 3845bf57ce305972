"""Many sequences at once: each one's text is its own, whoever shares its passes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from homespec.decoding.depth import best_depths
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.types import FinishReason
from homespec.engine import Engine, LoadParams
from homespec.errors import ContextFullError, HomespecError, UsageError
from homespec.generation import GenerateParams
from homespec.scheduling import scheduler as scheduling
from homespec.scheduling.engine import ParallelEngine
from homespec.scheduling.job import Job, Request
from homespec.scheduling.parallel import best_parallel, largest_that_fits
from homespec.scheduling.scheduler import Progress, ScheduleParams, Scheduler
from homespec.scheduling.service import Service
from homespec.tuning.cost import CostCurve

LOAD = LoadParams(n_ctx=96, threads=1, strict_exact=True, tuned=False)
GREEDY = SamplingParams(temperature=0, seed=0)
CHARM = "she sells sea shells she sells sea shells she sells "


@pytest.fixture(scope="module")
def engine(tiny: Path) -> Iterator[ParallelEngine]:
    with ParallelEngine(tiny, LOAD, parallel=6) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def alone(tiny: Path) -> Iterator[Engine]:
    """The same model with the same settings, one sequence at a time, without speculation."""
    with Engine(tiny, None, LOAD) as loaded:
        yield loaded


def scheduler(engine: ParallelEngine, **options: int) -> Scheduler:
    params = ScheduleParams(parallel=6, n_ctx=96)
    return Scheduler(engine.cache, engine.tokenizer, engine.learned, replace(params, **options))


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    """Of many lengths; a repetition in every third, so that lookups have something to find."""
    drawn = random.Random(seed)
    made = []
    for i in range(count):
        tokens = [drawn.randrange(40, 280) for _ in range(drawn.randrange(2, 40))]
        made.append((tokens * 3)[:60] if i % 3 == 0 else tokens)
    return made


def run(one: Scheduler, requests: Sequence[Request]) -> list[Job]:
    jobs = [one.submit(request) for request in requests]
    while not one.idle:
        one.step()
    return jobs


def solo(alone: Engine, request: Request) -> tuple[int, ...]:
    return alone.generate(
        request.tokens,
        sampling=request.sampling,
        max_tokens=request.params.max_tokens,
        ignore_eos=request.params.ignore_eos,
        spec_type="none",
        rule="match",
    ).tokens


@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("chunk", [512, 7])
def test_each_text_is_its_solo_text(
    engine: ParallelEngine, alone: Engine, temperature: float, chunk: int
) -> None:
    requests = [
        Request(
            tokens,
            SamplingParams(temperature=temperature, seed=number),
            GenerateParams(max_tokens=5 + 3 * (number % 8), ignore_eos=True),
        )
        for number, tokens in enumerate(prompts(14))
    ]
    one = scheduler(engine, prompt_chunk=chunk)
    jobs = run(one, requests)
    assert [job.result.tokens for job in jobs] == [solo(alone, request) for request in requests]
    assert one.stats.num_displaced == 0
    one.close()
    assert engine.cache.num_free == engine.cache.num_cells


def test_lookups_are_drafted_and_change_nothing(engine: ParallelEngine, alone: Engine) -> None:
    """A cost that hardly rises with the width, and lookups believed in: drafts are proposed."""
    flat = CostCurve((0,), (1, 64), ((1.0, 1.01),))
    one = scheduler(engine)
    one._learned = type(engine.learned)(replace(engine._priors(), cost=flat))
    tokens = engine.encode(CHARM, raw=True)
    requests = [
        Request(tokens[i:], GREEDY, GenerateParams(max_tokens=40, ignore_eos=True))
        for i in range(4)
    ]
    jobs = run(one, requests)
    drafted = sum(job.result.stats.num_drafted for job in jobs)
    assert drafted > 20
    assert [job.result.tokens for job in jobs] == [solo(alone, request) for request in requests]
    plain = run(
        one,
        [replace(r, params=replace(r.params, spec_type="none")) for r in requests],
    )
    assert sum(job.result.stats.num_drafted for job in plain) == 0
    one.close()


def test_jobs_join_and_leave_at_any_step(engine: ParallelEngine, alone: Engine) -> None:
    drawn = random.Random(3)
    requests = [
        Request(tokens, GREEDY, GenerateParams(max_tokens=12, ignore_eos=True))
        for tokens in prompts(24, seed=1)
    ]
    one = scheduler(engine, parallel=4, prompt_chunk=16)
    jobs: list[Job] = []
    dropped: set[int] = set()
    while len(jobs) < len(requests) or not one.idle:
        if len(jobs) < len(requests) and drawn.random() < 0.4:
            jobs.append(one.submit(requests[len(jobs)]))
        if jobs and drawn.random() < 0.1:
            number = drawn.randrange(len(jobs))
            if not jobs[number].done:
                one.cancel(jobs[number])
                dropped.add(number)
        one.step()
    assert 0 < len(dropped) < 20
    for number, (job, request) in enumerate(zip(jobs, requests, strict=True)):
        whole = solo(alone, request)
        if number not in dropped:
            assert job.result.tokens == whole
        elif job.result is not None:
            assert job.result.finish_reason is FinishReason.CANCELLED
            assert job.result.tokens == whole[: len(job.result.tokens)]
    one.close()
    assert engine.cache.num_free == engine.cache.num_cells


def test_a_shared_beginning_is_read_once(engine: ParallelEngine, alone: Engine) -> None:
    begin = prompts(2, seed=5)[1] + list(range(100, 140))
    requests = [
        Request([*begin, *tail], GREEDY, GenerateParams(max_tokens=6, ignore_eos=True))
        for tail in ([60, 61], [62], [60, 61, 63], [64, 65, 66])
    ]
    one = scheduler(engine, prompt_chunk=20)
    jobs = run(one, requests)
    assert [job.result.tokens for job in jobs] == [solo(alone, request) for request in requests]
    generated = sum(len(job.result.tokens) for job in jobs)
    assert one.stats.num_cached_tokens >= 3 * len(begin)
    assert one.stats.num_evaluated <= len(begin) + 10 + generated + sum(
        job.result.stats.num_drafted for job in jobs
    )
    # Ended sequences are kept for those to come.
    [late] = run(one, requests[:1])
    assert late.result.stats.num_cached_tokens == len(begin) + 1
    assert late.result.tokens == jobs[0].result.tokens
    one.close()


def test_too_few_cells_displace_the_youngest_and_lose_nothing(tiny: Path, alone: Engine) -> None:
    """Two sequences of up to 90 tokens over 96 cells."""
    requests = [
        Request(tokens, GREEDY, GenerateParams(max_tokens=50, ignore_eos=True))
        for tokens in prompts(9, seed=2)
    ]
    with ParallelEngine(tiny, LOAD, parallel=1) as engine:
        one = Scheduler(
            engine.cache, engine.tokenizer, engine.learned, ScheduleParams(2, 96, keep=0)
        )
        jobs = run(one, requests)
        assert one.stats.num_displaced > 0
        assert [job.result.tokens for job in jobs] == [solo(alone, r) for r in requests]
        assert engine.cache.num_free == engine.cache.num_cells


def test_a_stop_string_ends_what_cannot_be_cut(
    engine: ParallelEngine, alone: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recurrent state without snapshots: a sequence goes whole or not at all."""
    cache, remove = engine.cache, engine.cache._remove
    monkeypatch.setattr(cache, "can_truncate", False)
    monkeypatch.setattr(
        cache, "_remove", lambda number, at: remove(number, at) if at <= 0 else False
    )
    tokens = prompts(2, seed=8)[1]
    params = GenerateParams(max_tokens=30, ignore_eos=True)
    whole = alone.generate(tokens, sampling=GREEDY, max_tokens=30, ignore_eos=True).text
    stop = whole[10:15]
    one = scheduler(engine)
    requests = [Request(tokens, GREEDY, replace(params, stop=(stop,))), Request(tokens, GREEDY)]
    stopped, _ = run(one, requests)
    assert stopped.error is None
    assert stopped.result.text == whole[: whole.find(stop)]
    assert stopped.result.finish_reason is FinishReason.STOP
    one.close()
    assert cache.num_free == cache.num_cells


@pytest.mark.parametrize("shared", [0, 4096])
def test_ended_answers_are_drafted_from_where_that_is_asked_for(
    engine: ParallelEngine, alone: Engine, shared: int
) -> None:
    flat = CostCurve((0,), (1, 64), ((1.0, 1.01),))
    one = scheduler(engine, shared_tokens=shared)
    one._learned = type(engine.learned)(replace(engine._priors(), cost=flat))
    request = Request(
        prompts(2, seed=9)[1],
        SamplingParams(temperature=1.5, seed=5),
        GenerateParams(max_tokens=40, ignore_eos=True),
    )
    [first], [second] = run(one, [request]), run(one, [request])
    assert first.result.tokens == second.result.tokens == solo(alone, request)
    gained = second.result.stats.num_accepted - first.result.stats.num_accepted
    assert gained > 20 if shared else abs(gained) < 5
    one.close()


def test_what_cannot_be_served_is_refused_and_the_others_go_on(engine: ParallelEngine) -> None:
    one = scheduler(engine)
    for tokens, error in (([1] * 97, ContextFullError), ([], UsageError), ([999], UsageError)):
        with pytest.raises(error):
            one.submit(Request(tokens, GREEDY))
    with pytest.raises(UsageError, match="grammar"):
        one.submit(Request([1], replace(GREEDY, grammar="no grammar")))
    with pytest.raises(UsageError, match="draft"):
        one.submit(Request([1], GREEDY, GenerateParams(spec_type="draft_model")))
    [job] = run(one, [Request([1, 2], GREEDY, GenerateParams(max_tokens=3))])
    assert job.result.stats.num_tokens <= 3
    one.close()


def test_an_interrupted_pass_leaves_everything_as_it_was(
    engine: ParallelEngine, alone: Engine
) -> None:
    requests = [
        Request(tokens, GREEDY, GenerateParams(max_tokens=10, ignore_eos=True))
        for tokens in prompts(3)
    ]
    one = scheduler(engine)
    jobs = [one.submit(request) for request in requests]
    for number in range(40):
        if number % 3 == 1 and not one.idle:
            engine.cache.context.abort()
            with pytest.raises(KeyboardInterrupt):
                one.step()
            engine.cache.context.resume()
        one.step()
    assert [job.result.tokens for job in jobs] == [solo(alone, request) for request in requests]
    one.close()


def test_the_width_of_a_pass_goes_to_the_likeliest_tokens() -> None:
    def steps(width: int) -> float:
        return 1.0 if width <= 4 else 2.0

    assert best_depths([[0.9, 0.9], [0.5, 0.5]], steps, 10) == [2, 0]
    assert best_depths([[0.9, 0.9], [0.5, 0.5]], steps, 1) == [1, 0]
    assert best_depths([[0.9], [0.9], [], [0.9]], steps, 10) == [0, 0, 0, 0]
    assert best_depths([[1.0] * 8], lambda width: width**0.5, 10) == [8]
    assert best_depths([], steps, 10) == []


def test_as_many_sequences_as_pay_and_fit() -> None:
    linear_from_8 = CostCurve((0,), (1, 2, 4, 8, 16, 32), ((1.0, 1.1, 1.2, 1.4, 2.8, 5.6),))
    assert best_parallel(linear_from_8, 64) == 8
    assert best_parallel(linear_from_8, 5) == 4
    assert best_parallel(CostCurve((0,), (1, 8), ((1.0, 8.0),)), 64) == 1
    assert largest_that_fits(lambda cells: cells <= 1000, 4096, 512) == 512
    assert largest_that_fits(lambda cells: cells <= 1024, 4096, 512) == 1024
    assert largest_that_fits(lambda cells: False, 4096, 512) == 512


def test_the_number_is_measured_where_it_is_not_given(tiny: Path) -> None:
    with ParallelEngine(tiny, LOAD, most=4) as engine:
        assert 1 <= engine.parallel <= 4
        assert engine.learned.cost.seconds(4, 10) > 0
        assert engine.cache.num_cells >= LOAD.n_ctx


def test_the_deepest_draft_fits_into_a_pass(tiny: Path, tiny_draft: Path, alone: Engine) -> None:
    params = GenerateParams(max_tokens=60, ignore_eos=True, depth="fixed", draft_depth=32)
    request = Request(prompts(1)[0][:20], GREEDY, params)
    with ParallelEngine(tiny, LOAD, draft=tiny_draft, parallel=2) as engine:
        [job] = run(engine.scheduler, [request])
    assert job.result.stats.num_drafted >= 32
    assert job.result.tokens == solo(alone, request)


def test_drafts_take_free_cells_only(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [
        Request(tokens, GREEDY, GenerateParams(max_tokens=50, ignore_eos=True))
        for tokens in prompts(9, seed=2)
    ]
    limits = []

    def deepest(rates: list[list[float]], _: object, limit: int) -> list[int]:
        limits.append((limit, one._cache.num_free))
        depths = []
        for chances in rates:
            depths.append(min(len(chances), limit - sum(depths)))
        return depths

    monkeypatch.setattr(scheduling, "best_depths", deepest)
    with ParallelEngine(tiny, LOAD, parallel=1) as engine:
        one = Scheduler(
            engine.cache, engine.tokenizer, engine.learned, ScheduleParams(2, 96, keep=0)
        )
        run(one, requests)
    assert all(0 <= limit <= free for limit, free in limits)
    assert any(limit < 10 for limit, _ in limits)


def test_a_draft_model_drafts_for_a_job_while_it_is_alone(
    tiny: Path, tiny_draft: Path, alone: Engine
) -> None:
    params = GenerateParams(max_tokens=60, ignore_eos=True, depth="fixed", draft_depth=3)
    requests = [Request(tokens, GREEDY, params) for tokens in prompts(3, seed=4)]
    with ParallelEngine(tiny, LOAD, draft=tiny_draft, parallel=3) as engine:
        one = engine.scheduler
        [first] = run(one, requests[:1])
        assert first.result.stats.drafted_by_source["draft_model"] > 10
        assert first.result.tokens == solo(alone, requests[0])
        jobs = [one.submit(requests[0])]
        for number in range(1, 400):
            if number in (4, 12):
                jobs.append(one.submit(requests[len(jobs)]))
            one.step()
        assert [job.result.tokens for job in jobs] == [solo(alone, r) for r in requests]


def test_a_service_takes_requests_from_any_thread(engine: ParallelEngine, alone: Engine) -> None:
    params = GenerateParams(max_tokens=15, ignore_eos=True)
    requests = [Request(tokens, GREEDY, params) for tokens in prompts(12, seed=6)]
    service = Service(scheduler(engine))
    heard: dict[int, str] = {}

    def ask(number: int) -> tuple[int, ...]:
        def listen(progress: Progress) -> None:
            text = "".join(chunk.text for chunk in progress.chunks)
            heard[number] = heard.get(number, "") + text

        return service.submit(requests[number], listen).result.result(timeout=60).tokens

    try:
        with ThreadPoolExecutor(12) as pool:
            found = list(pool.map(ask, range(12)))
        assert found == [solo(alone, request) for request in requests]
        decode = alone.tokenizer.decode
        assert heard == {number: decode(tokens) for number, tokens in enumerate(found)}
        with pytest.raises(ContextFullError):
            service.submit(Request([1] * 97, GREEDY)).result.result(timeout=60)
        endless = Request(requests[0].tokens, GREEDY, replace(params, max_tokens=None))
        tickets = [service.submit(endless) for _ in range(20)]
        for ticket in tickets[:10]:
            service.cancel(ticket)
        for ticket in tickets:
            with suppress(HomespecError):  # dropped before it began
                assert ticket.result.result(timeout=60).tokens
    finally:
        service.close()
        service.scheduler.close()
    assert engine.cache.num_free == engine.cache.num_cells


def test_closing_a_service_ends_what_is_open(engine: ParallelEngine) -> None:
    service = Service(scheduler(engine, parallel=1))
    request = Request([50, 60], GREEDY, GenerateParams(ignore_eos=True))
    tickets = [service.submit(request) for _ in range(50)]
    service.close()
    assert all(ticket.result.done() for ticket in tickets)
    with pytest.raises(HomespecError):
        tickets[-1].result.result()
    service.scheduler.close()
