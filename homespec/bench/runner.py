"""Runs the arms: one loaded engine, the same prompts, by turns, in an order that rotates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from homespec.bench.agreement import first_difference
from homespec.bench.arms import Arm
from homespec.bench.engine_arm import Answer, EngineArm, device_bytes
from homespec.bench.machine import describe
from homespec.bench.peer import Peer, PeerAnswer
from homespec.bench.prompts import WARM_UP, Prompt
from homespec.bench.records import BenchResult, Run
from homespec.bench.statistics import spread
from homespec.bench.watch import Watch, thinned
from homespec.decoding.sampling import SamplingParams
from homespec.decoding.stats import clock
from homespec.engine import Engine
from homespec.errors import HomespecError, ModelError, UsageError
from homespec.llama.memory import peak_memory_bytes

Progress = Callable[[str, float], None]
"""Called with what is being done and the share that is done, 0 to 1."""

WARM_UP_TOKENS = 32
GREEDY = SamplingParams(temperature=0, seed=1)


@dataclass(frozen=True, slots=True)
class BenchParams:
    """What a run asks. max_tokens: of each answer, no less. budget_seconds: begin no prompt later.

    sampling needs a seed, so that all arms draw from the same numbers. warm: the target has read
    the prompt before any arm answers, so that decoding alone is measured.
    """

    max_tokens: int = 128
    repeats: int = 1
    budget_seconds: float | None = None
    sampling: SamplingParams = GREEDY
    warm: bool = False


@dataclass(frozen=True, slots=True)
class _Asked:
    """A prompt with its tokens."""

    prompt: Prompt
    tokens: list[int]


def run(
    engine: Engine,
    arms: Sequence[Arm],
    prompts: Sequence[Prompt],
    params: BenchParams | None = None,
    *,
    load_seconds: float | None = None,
    command: str = "",
    progress: Progress | None = None,
    peer: Peer | None = None,
) -> BenchResult:
    """Measure. Ctrl-C ends it with what all arms have answered by then.

    load_seconds: what loading took, for the cold start. command: what was asked for, to be told
    with the result. Raises KeyboardInterrupt before the first
    prompt is answered by all, NetworkError where the server does not answer.
    """
    bench = _Bench(engine, arms, params or BenchParams(), peer, progress or _silent)
    learned = engine.learned
    try:
        result = bench.measure(prompts, load_seconds)
    finally:
        engine.learned = learned
    return replace(result, settings={"command": command, **result.settings})


class _Bench:
    def __init__(
        self,
        engine: Engine,
        arms: Sequence[Arm],
        params: BenchParams,
        peer: Peer | None,
        progress: Progress,
    ) -> None:
        if any(arm.url for arm in arms) and peer is None:
            raise UsageError("An arm is a server's, but no server is given.")
        self._engine, self._arms, self._params = engine, arms, params
        self._peer, self._progress = peer, progress
        self._own = {i: EngineArm(engine, arm) for i, arm in enumerate(arms) if arm.url is None}
        self._runs: list[Run] = []
        self._notes: list[str] = []

    def measure(self, prompts: Sequence[Prompt], load_seconds: float | None) -> BenchResult:
        asked, interrupted = self._fitting(prompts), False
        with Watch() as watch:
            cold = self._cold_start(load_seconds)
            self._warm_up()
            try:
                self._ask_all(asked, watch)
            except KeyboardInterrupt:
                if not self._runs:
                    raise
                interrupted = True
                self._notes.append("The run was interrupted: only what all arms answered counts.")
            environment = watch.environment(self._plain_spread())
        return BenchResult(
            arms=tuple(arm.as_dict() for arm in self._arms),
            runs=tuple(self._runs),
            cold_start=cold,
            machine=describe(self._engine),
            settings=self._settings(prompts),
            environment={**environment, "peak_rss_bytes": peak_memory_bytes()},
            samples=thinned(watch.samples),
            notes=tuple(self._notes),
            interrupted=interrupted,
        )

    def _fitting(self, prompts: Sequence[Prompt]) -> list[_Asked]:
        """Those that fit the context with their answers."""
        asked = [_Asked(prompt, _tokens(self._engine, prompt)) for prompt in prompts]
        room = self._engine.context.n_ctx + 1 - self._params.max_tokens
        fitting = [one for one in asked if len(one.tokens) <= room]
        if not fitting:
            raise UsageError(
                f"No prompt fits a context of {self._engine.context.n_ctx} tokens with an answer "
                f"of {self._params.max_tokens}.",
                hint="Ask for a larger context with -c, or shorter answers with -n.",
            )
        if len(fitting) < len(asked):
            left = len(asked) - len(fitting)
            self._notes.append(f"{left} prompts were left out: they do not fit the context.")
        return fitting

    def _cold_start(self, load_seconds: float | None) -> dict[str, float]:
        """The very first token, before anything is warm; told apart from the figures."""
        tokens = _tokens(self._engine, _warm_up_prompt())
        own = next(iter(self._own.values()), None)
        found = {} if load_seconds is None else {"load_seconds": load_seconds}
        if own is not None:
            first = own.answer(tokens, self._params.sampling, 1)
            found["first_token_seconds"] = first.stats.time_to_first_token_seconds
        return found

    def _warm_up(self) -> None:
        """One answer of each arm, thrown away."""
        self._progress("warming up", 0.0)
        asked = _Asked(_warm_up_prompt(), _tokens(self._engine, _warm_up_prompt()))
        for arm in range(len(self._arms)):
            self._answer(arm, asked, min(WARM_UP_TOKENS, self._params.max_tokens))

    def _ask_all(self, asked: Sequence[_Asked], watch: Watch) -> None:
        began, total = clock(), len(asked) * self._params.repeats
        budget = self._params.budget_seconds
        for number in range(total):
            repeat, index = divmod(number, len(asked))
            share = number / total
            if budget is not None:
                share = max(share, (clock() - began) / budget)
                if clock() - began > budget:
                    self._notes.append(f"{total - number} prompts were left out: time was up.")
                    return
            one = asked[index]
            self._progress(f"{one.prompt.category} ({number + 1} of {total})", min(share, 1.0))
            self._runs += self._ask(one, number, repeat, watch)

    def _ask(self, asked: _Asked, number: int, repeat: int, watch: Watch) -> list[Run]:
        """All arms on one prompt, each prompt begun by another one."""
        count = len(self._arms)
        order = [(number + i) % count for i in range(count)]
        if (number // count) % 2:  # or with three arms the third would always follow the second
            order.reverse()
        runs: dict[int, Run] = {}
        answers: dict[int, Answer] = {}
        if self._params.warm:
            next(iter(self._own.values())).answer(asked.tokens, self._params.sampling, 1)
        for arm in order:
            mark = watch.mark()
            answer = self._answer(arm, asked, self._params.max_tokens, warm=self._params.warm)
            run = Run(
                arm=arm,
                prompt=asked.prompt.name,
                category=asked.prompt.category,
                repeat=repeat,
                began=mark.at - watch.began,
                **answer.figures(),
            )
            if isinstance(answer, Answer):
                answers[arm] = answer
                rss, others = watch.since(mark)
                run = replace(run, rss_bytes=rss, others_cpu=others, device_bytes=device_bytes())
            runs[arm] = run
        for arm in sorted(answers):
            runs[arm] = self._compared(runs[arm], asked, answers)
        return [runs[arm] for arm in range(count)]

    def _answer(
        self, arm: int, asked: _Asked, max_tokens: int, *, warm: bool = False
    ) -> Answer | PeerAnswer:
        own = self._own.get(arm)
        if own is not None:
            return own.answer(asked.tokens, self._params.sampling, max_tokens, warm=warm)
        assert self._peer is not None
        return self._peer.answer(asked.prompt.messages, self._params.sampling, max_tokens)

    def _compared(self, run: Run, asked: _Asked, answers: dict[int, Answer]) -> Run:
        """With whether its text is that of the first arm, where that is to be expected."""
        sampling = self._params.sampling
        first = answers.get(0)
        rules = {self._arms[i].options.get("rule") for i in (0, run.arm)}
        if run.arm == 0 or first is None or (not sampling.greedy and "rejection" in rules):
            return run
        difference = first_difference(
            self._engine, asked.tokens, first.tokens, answers[run.arm].tokens
        )
        return replace(run, same=difference is None, difference=difference)

    def _plain_spread(self) -> float | None:
        """The spread of the first plain arm's speed; None without one."""
        plain = next((i for i, arm in enumerate(self._arms) if arm.is_plain), None)
        rates = [run.decode_tokens_per_second for run in self._runs if run.arm == plain]
        return spread([rate for rate in rates if rate is not None])

    def _settings(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        params, load = self._params, self._engine.params
        sampling = {
            name: getattr(params.sampling, name) for name in params.sampling.__dataclass_fields__
        }
        return {
            "max_tokens": params.max_tokens,
            "repeats": params.repeats,
            "budget_seconds": params.budget_seconds,
            "warm": params.warm,
            "num_prompts": len(prompts),
            "sampling": sampling,
            "load": {name: getattr(load, name) for name in load.__dataclass_fields__},
            "tuned": self._engine.profile is not None,
        }


def _warm_up_prompt() -> Prompt:
    return Prompt("warm-up", "warm-up", ({"role": "user", "content": WARM_UP},))


def _tokens(engine: Engine, prompt: Prompt) -> list[int]:
    try:
        return engine.encode(list(prompt.messages))
    except ModelError:  # no chat template
        text = "\n\n".join(message["content"] for message in prompt.messages)
        return engine.encode(text, raw=True)
    except HomespecError as exc:
        raise UsageError(f"Prompt {prompt.name} cannot be asked: {exc.message}") from exc


def _silent(what: str, share: float) -> None:
    """No progress is wanted."""
