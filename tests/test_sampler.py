"""llama.cpp's chain, read as a distribution, against the reference filters."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from homespec.decoding.sampling import SamplingParams, reference_distribution
from homespec.errors import UsageError
from homespec.llama.context import Context, ContextParams
from homespec.llama.model import Model
from homespec.llama.sampler import SamplerChain, json_schema_grammar
from homespec.llama.tokenizer import Tokenizer

OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def model(tiny: Path):
    with Model(tiny) as model:
        yield model


@pytest.fixture(scope="module")
def row(model: Model):
    with Context(model, ContextParams(n_ctx=32)) as context:
        yield context.extend([3, 14, 15, 92, 65], 1)[0]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        OFF,
        {**OFF, "temperature": 0.3},
        {**OFF, "temperature": 1.0, "top_k": 7},
        {**OFF, "top_p": 0.7},
        {**OFF, "min_p": 0.4},
        {"temperature": 0},
    ],
    ids=str,
)
def test_the_chain_filters_as_the_reference_does(model: Model, row, settings: dict) -> None:
    params = SamplingParams(**settings)
    expected = reference_distribution(row.logits, params)
    with SamplerChain(model, params) as chain:
        for _ in range(2):  # reading a row changes nothing
            got = chain.distribution(row)
            assert sorted(got.ids) == sorted(expected.ids)
            for token in expected.ids:
                assert got.probability(token) == pytest.approx(
                    expected.probability(token), rel=1e-5
                )


def test_the_row_stays_as_it_was(model: Model, row) -> None:
    before = row.logits.copy()
    with SamplerChain(model, SamplingParams(repeat_penalty=2, temperature=0.1)) as chain:
        chain.accept(5)
        chain.distribution(row)
    np.testing.assert_array_equal(row.logits, before)


def test_penalties_advance_with_committed_tokens_only(model: Model, row) -> None:
    best = int(np.argmax(row.logits))
    with SamplerChain(model, SamplingParams(temperature=0, presence_penalty=1e3)) as chain:
        assert [chain.best(row) for _ in range(3)] == [best] * 3
        chain.accept(best)
        assert chain.best(row) != best
    with SamplerChain(model, SamplingParams(temperature=0, presence_penalty=1e3)) as chain:
        chain.prime([best])
        assert chain.best(row) != best


def test_banned_and_biased_tokens(model: Model, row) -> None:
    order = np.argsort(-row.logits)
    banned = tuple((int(token), -np.inf) for token in order[:2])
    with SamplerChain(model, SamplingParams(temperature=0, logit_bias=banned)) as chain:
        assert chain.best(row) == order[2]
    with SamplerChain(model, SamplingParams(**OFF, logit_bias=banned)) as chain:
        assert not set(order[:2]) & set(chain.distribution(row).ids)
    with SamplerChain(model, SamplingParams(temperature=0, logit_bias=((7, 99.0),))) as chain:
        assert chain.best(row) == 7


def test_a_grammar_cuts_before_top_k(model: Model, row) -> None:
    tokenizer = Tokenizer(model)
    params = SamplingParams(temperature=1, top_k=1, grammar='root ::= "q" "z"')
    with SamplerChain(model, params) as chain:
        chain.prime([1, 2, 3])  # a prompt is no part of the answer
        for letter in "qz":
            [token] = tokenizer.encode(letter, add_special=False)
            assert chain.distribution(row).ids.tolist() == [token]
            chain.accept(token)
        assert set(chain.distribution(row).ids) <= set(tokenizer.end_tokens)


def twice(depth: int, rule: str = "a{0} | a{0}") -> str:
    """Rules that begin with the next one in two ways."""
    rules = [f"a{i} ::= {rule.format(i + 1)}\nb{i} ::= a{i}" for i in range(depth)]
    return "\n".join(["root ::= a0", *rules, f'a{depth} ::= "x"', f"b{depth} ::= a{depth}"])


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("foo", "expecting"),
        ('root ::= bar "a"', "Undefined rule identifier 'bar'"),
        ('top ::= "a"', "root"),
        ('root ::= root "a"', "parse"),
        ("", "root"),
        ("root ::= " + "(" * 100_000, "parentheses"),
        ("root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "parentheses"),
        ("root ::= # \r" + "(" * 100_000, "parentheses"),
        (twice(40), "begin with one another"),
        (twice(40, "a{0} | (b{0})?"), "begin with one another"),
        (twice(40, "(a{0} | a{0}){{1,2}}"), "begin with one another"),
        (twice(40, '"" a{0} | [] a{0}+'), "begin with one another"),
    ],
)
def test_a_grammar_that_does_not_parse_is_explained(
    model: Model, grammar: str, words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError, match=words):
        SamplerChain(model, SamplingParams(grammar=grammar))
    assert capfd.readouterr().err == ""


def test_parentheses_as_a_schema_may_need_them(model: Model) -> None:
    grammar = json_schema_grammar({"type": "string", "maxLength": 1000})
    assert "(" * 2 in grammar.replace("char ", "")
    SamplerChain(model, SamplingParams(grammar=grammar)).close()
    SamplerChain(model, SamplingParams(grammar=twice(8))).close()
    SamplerChain(model, SamplingParams(grammar=twice(900, 'a{0} | "y"'))).close()
    optional = {"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(400)}}
    SamplerChain(model, SamplingParams(grammar=json_schema_grammar(optional))).close()
    spelt = "root ::= " + '"(" [(] ' * 3000 + "# " + "(" * 3000
    SamplerChain(model, SamplingParams(grammar=spelt)).close()


def test_dry_and_xtc_are_built(model: Model, row) -> None:
    settings = {"dry_multiplier": 0.8, "xtc_probability": 0.5, "typical_p": 0.9}
    with SamplerChain(model, SamplingParams(**settings, seed=1)) as chain:
        chain.prime([1, 2, 3, 1, 2])
        assert chain.distribution(row).probabilities.sum() == pytest.approx(1)


def test_a_schema_becomes_a_grammar(model: Model) -> None:
    grammar = json_schema_grammar('{"type": "object", "properties": {"a": {"type": "integer"}}}')
    SamplerChain(model, SamplingParams(grammar=grammar)).close()
    for bad in ("[1]", "{", '{"type": 7}', '{"$ref": "#/nowhere"}'):
        with pytest.raises(UsageError, match="schema"):
            json_schema_grammar(bad)
