"""The bench: what is asked, how arms take turns, what is counted, and what is concluded."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from homespec.bench.agreement import first_difference
from homespec.bench.arms import KEYS, parse_arm, parse_arms
from homespec.bench.compare import compare
from homespec.bench.output import as_dict
from homespec.bench.prompts import Prompt, categories, choose, read_prompts
from homespec.bench.records import PARTS, BenchResult
from homespec.bench.runner import BenchParams, run
from homespec.bench.statistics import MIN_PAIRS, paired_ratio
from homespec.bench.summary import figures_of, verdicts
from homespec.cli.generate import command as generate
from homespec.decoding.sampling import SamplingParams
from homespec.engine import Engine
from homespec.errors import UsageError

from tests.bench_models import PROMPTS, tiny_bench_engine, tiny_run


@pytest.fixture(scope="module")
def engine(tiny: Path, tiny_draft: Path) -> Iterator[Engine]:
    with tiny_bench_engine(tiny, tiny_draft) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def result(engine: Engine) -> BenchResult:
    return tiny_run(engine, "plain", "auto", "depth=fixed:4")


# -- arms -----------------------------------------------------------------------------------------


def test_keys_of_an_arm_are_the_flags_of_generate() -> None:
    flags = {name.lstrip("-") for option in generate.params for name in option.opts}
    assert KEYS.keys() - flags == {"sleep"}


def test_arms_say_how_to_draft() -> None:
    assert parse_arm("plain").is_plain
    assert parse_arm("depth=fixed:4").options == {"depth": "fixed", "draft_depth": 4}
    assert parse_arm(" spec-type=ngram , draft-max=8 ").options == {
        "spec_type": "ngram",
        "draft_depth": 8,
    }
    assert parse_arm("plain,sleep=10%").sleep == pytest.approx(0.1)


def test_one_arm_is_set_beside_two_and_several_stand_alone() -> None:
    def names(*arms: str) -> list[str]:
        return [arm.name for arm in parse_arms(arms)]

    assert names() == ["plain", "auto"]
    assert names("depth=fixed:4") == ["plain", "auto", "depth=fixed:4"]
    assert names("auto") == ["plain", "auto"]
    assert names("auto", "auto", "plain") == ["auto", "auto (2)", "plain"]


@pytest.mark.parametrize(
    "text", ["", ",", "fast", "speed=4", "depth=fixed:x", "depth=sometimes", "sleep=200%", "draft"]
)
def test_arms_that_mean_nothing(text: str) -> None:
    with pytest.raises(UsageError):
        parse_arm(text)


# -- prompts --------------------------------------------------------------------------------------


def test_the_built_in_prompts_are_of_all_kinds_and_three_languages() -> None:
    prompts = read_prompts()
    counts = Counter(prompt.category for prompt in prompts)
    assert len(counts) >= 8
    assert min(counts.values()) >= 6
    assert len({prompt.messages[0]["content"] for prompt in prompts}) == len(prompts)
    for category in counts:
        quick = [prompt for prompt in choose(prompts, 3) if prompt.category == category]
        assert {prompt.language for prompt in quick} == {"en", "de", "es"}


def test_a_run_cut_short_has_asked_all_categories_alike() -> None:
    prompts = choose(read_prompts(), None)
    seen = Counter(prompt.category for prompt in prompts[: len(prompts) // 2])
    assert len(seen) == len(categories(prompts))
    assert max(seen.values()) - min(seen.values()) <= 1


def test_files_of_others_are_read(tmp_path: Path) -> None:
    rows = [
        {"question_id": 7, "category": "writing", "turns": ["Write.", "Again."]},
        {"task_id": "T/1", "prompt": "def f():\n", "canonical_solution": "    return 1\n"},
        {
            "messages": [
                {"role": "system", "content": "Be short."},
                {"role": "user", "content": "?"},
            ]
        },
        {"prompt": "Just this."},
    ]
    file = tmp_path / "own.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    prompts = read_prompts(file)
    assert [p.category for p in prompts] == ["writing", "code", "code edit", "prompts", "prompts"]
    assert prompts[0].messages == ({"role": "user", "content": "Write."},)
    assert "return 1" in prompts[2].messages[0]["content"]
    assert len(prompts[3].messages) == 2
    assert read_prompts(tmp_path) == prompts


@pytest.mark.parametrize("line", ["[]", "{}", "{", '{"prompt": ""}', '{"turns": []}', "7"])
def test_lines_that_are_no_prompt_are_named(tmp_path: Path, line: str) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "Fine."}\n' + line)
    with pytest.raises(UsageError, match="Line 2 of"):
        read_prompts(file)


def test_no_prompts_are_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no prompts"):
        read_prompts(tmp_path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")


# -- statistics -----------------------------------------------------------------------------------


def noisy_ratios(rng: random.Random, speed: float, count: int = 24) -> list[float]:
    return [speed * math.exp(rng.gauss(0, 0.06)) for _ in range(count)]


def test_equal_arms_are_seldom_told_apart_and_others_are() -> None:
    rng = random.Random(5)

    def share(speed: float, verdict: str, tries: int = 100) -> float:
        found = [paired_ratio(noisy_ratios(rng, speed)) for _ in range(tries)]
        return sum(ratio is not None and ratio.verdict == verdict for ratio in found) / tries

    assert share(1.0, "no difference") > 0.95
    assert share(0.91, "slower") > 0.95
    assert share(1.10, "faster") > 0.95


def test_few_prompts_conclude_nothing() -> None:
    assert paired_ratio([]) is None
    few, enough = paired_ratio([2.0] * (MIN_PAIRS - 1)), paired_ratio([2.0] * MIN_PAIRS)
    assert few is not None
    assert few.verdict == "no difference"
    assert enough is not None
    assert enough.verdict == "faster"


# -- a run ----------------------------------------------------------------------------------------


def test_arms_answer_the_same_by_turns(result: BenchResult) -> None:
    assert len(result.runs) == 3 * len(PROMPTS)
    assert {run.num_tokens for run in result.runs} == {24}
    order: dict[str, list[int]] = {}
    for one in sorted(result.runs, key=lambda one: one.began):
        order.setdefault(one.prompt, []).append(one.arm)
    assert all(sorted(arms) == [0, 1, 2] for arms in order.values())
    assert {arms[0] for arms in order.values()} == {0, 1, 2}
    followers = {(a, b) for arms in order.values() for a, b in itertools.pairwise(arms)}
    assert len(followers) == 6  # each arm comes after each other one


def test_the_parts_add_up_to_the_whole(result: BenchResult) -> None:
    for one in result.runs:
        parts = sum(getattr(one, f"{part}_seconds") for part in PARTS)
        assert parts == pytest.approx(one.seconds, rel=0.02)
    for arm in range(3):
        figures = figures_of(result, arm)
        assert sum(figures.parts.values()) == pytest.approx(figures.total_seconds, rel=0.02)


def test_caches_start_empty_and_all_of_the_prompt_is_read(engine: Engine) -> None:
    found = tiny_run(engine, "plain", "plain", repeats=2)
    sizes = {one.prompt: one.num_prompt_tokens for one in found.runs}
    for one in found.runs:
        assert one.num_prompt_tokens == sizes[one.prompt] > 5
        assert one.prompt_seconds > 0
    assert len(found.runs) == 4 * len(PROMPTS)


def test_a_warm_run_reads_no_prompt(engine: Engine) -> None:
    found = tiny_run(engine, "plain", "depth=fixed:4", warm=True)
    cold = tiny_run(engine, "plain", "depth=fixed:4")
    for arm in (0, 1):
        assert figures_of(found, arm).parts["prompt"] < figures_of(cold, arm).parts["prompt"]
    assert figures_of(found, 1).num_same == 10


def test_figures_are_those_of_the_rounds(result: BenchResult) -> None:
    plain, _, fixed = (figures_of(result, arm) for arm in range(3))
    assert plain.mean_acceptance_length == 1
    assert plain.acceptance_by_position == ()
    assert fixed.mean_acceptance_length is not None
    assert 1 < fixed.mean_acceptance_length <= 5
    assert len(fixed.acceptance_by_position) == 4
    assert all(0 <= rate <= 1 for rate in fixed.acceptance_by_position)
    for one in result.runs_of(2):
        assert len(one.depths) == one.num_rounds
        assert max(one.depths) == 4
        assert sum(one.depths) == sum(one.drafted_by_position)
    assert fixed.parts["draft"] > 5 * plain.parts["draft"]
    assert fixed.rss_bytes is not None
    assert fixed.rss_bytes <= result.environment["peak_rss_bytes"]


def test_greedy_texts_are_compared(result: BenchResult) -> None:
    assert figures_of(result, 0).num_compared == 0
    for arm in (1, 2):
        assert figures_of(result, arm).num_same == figures_of(result, arm).num_compared == 10


def test_sampled_texts_are_compared_where_the_rule_keeps_them(engine: Engine) -> None:
    sampling = SamplingParams(temperature=1, seed=3)
    found = tiny_run(
        engine, "plain", "depth=fixed:4", "depth=fixed:4,spec-rule=rejection", sampling=sampling
    )
    assert figures_of(found, 1).num_same == 10
    assert figures_of(found, 2).num_compared == 0


def test_a_difference_has_its_place_and_its_gap(engine: Engine) -> None:
    prompt = engine.encode("Hello")
    said = engine.generate(
        prompt, sampling=SamplingParams(temperature=0), max_tokens=12, ignore_eos=True
    ).tokens
    engine.context.clear()
    [row] = engine.context.extend([*prompt, *said[:7]], num_rows=1)
    logits = row.logits.copy()
    other = int(logits.argsort()[-3])
    found = first_difference(engine, prompt, said, [*said[:7], other, 1, 2])
    assert found is not None
    assert found.position == 7
    assert found.gap == pytest.approx(float(logits[said[7]] - logits[other]))
    assert found.gap > 0
    assert first_difference(engine, prompt, said, said[:9]) is None


def test_an_arm_that_sleeps_is_found_slower_and_its_twin_is_not(engine: Engine) -> None:
    found = tiny_run(engine, "plain", "plain,sleep=100%", repeats=2)
    assert figures_of(found, 1).decode_ratio is not None
    assert "plain,sleep=100% is slower than plain" in verdicts(found)[0]


def test_each_arm_learns_for_itself(engine: Engine) -> None:
    before, rounds = engine.learned, dict(engine.learned.rounds)
    tiny_run(engine, "auto", "auto")
    assert engine.learned is before
    assert before.rounds == rounds


def test_long_prompts_are_left_out_with_a_word(engine: Engine) -> None:
    long = Prompt("long", "chat", ({"role": "user", "content": "word " * 600},))
    found = run(engine, parse_arms(()), [*PROMPTS[:2], long], BenchParams(max_tokens=8))
    assert len(found.runs) == 4
    assert "1 prompts were left out" in found.notes[0]
    with pytest.raises(UsageError, match="No prompt fits"):
        run(engine, parse_arms(()), [long], BenchParams(max_tokens=8))


def test_an_interrupt_keeps_what_all_arms_answered(engine: Engine) -> None:
    def stop(what: str, share: float) -> None:
        if share >= 0.5:
            raise KeyboardInterrupt

    found = run(engine, parse_arms(()), PROMPTS, BenchParams(max_tokens=8), progress=stop)
    assert found.interrupted
    assert len(found.runs) == len(PROMPTS)
    with pytest.raises(KeyboardInterrupt):
        run(
            engine,
            parse_arms(()),
            PROMPTS,
            progress=lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()),
        )


def test_a_budget_ends_the_run(engine: Engine) -> None:
    found = run(engine, parse_arms(()), PROMPTS, BenchParams(max_tokens=8, budget_seconds=1e-6))
    assert len(found.runs) < 2 * len(PROMPTS)
    assert "time was up" in found.notes[0]


# -- results --------------------------------------------------------------------------------------


def test_a_result_survives_json(result: BenchResult) -> None:
    text = json.dumps(as_dict(result))
    again = BenchResult.from_dict(json.loads(text))
    assert json.dumps(as_dict(again)) == text
    assert json.loads(text)["machine"]["files"]["target"]["sha256"]


@pytest.mark.parametrize("values", [{}, {"format": "homespec bench 0"}])
def test_other_json_is_no_result(values: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        BenchResult.from_dict(values)


def test_two_results_are_compared(result: BenchResult) -> None:
    slower = replace(
        result,
        runs=tuple(
            replace(one, seconds=one.first_token_seconds + 2 * one.decode_seconds)
            for one in result.runs
        ),
        machine={**result.machine, "cpu": "another"},
        settings={**result.settings, "max_tokens": 25},
    )
    found = compare(result, slower)
    assert [one.arm for one in found.arms] == result.arm_names
    assert all("B is slower than A, 0.500 x" in verdict for verdict in found.verdicts)
    assert found.differences == {
        "machine.cpu": (result.machine["cpu"], "another"),
        "settings.max_tokens": (24, 25),
    }
    assert any("not of the same length" in warning for warning in found.warnings)
    assert json.dumps(found.as_dict())
    same = compare(result, result)
    assert not same.differences
    assert all("no difference" in verdict for verdict in same.verdicts)
    other = replace(result, arms=({**result.arms[0], "name": "else"},))
    with pytest.raises(UsageError, match="no arm in common"):
        compare(result, other)
