"""From settings to prompts on real reasoning-gym tasks: the split holds, nothing leaks, all is counted."""

from __future__ import annotations

import json

import numpy as np
import pytest
import reasoning_gym
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from megarl.data.procedural import ReasoningGymQuestions
from megarl.data.prompts import open_prompts
from megarl.data.questions import content_key, frame, is_held_out
from megarl.data.settings import DataSettings, FileSettings, Framing, ReasoningGymSettings
from megarl.errors import UserError

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def chain_sum(**settings) -> dict:
    return {"kind": "reasoning_gym", "task": "chain_sum", "params": EASY, **settings}


def data(**settings) -> DataSettings:
    return DataSettings(**{"sources": [chain_sum()], **settings})


def pooled(made) -> list:
    """The prompts of the first, finite pool."""
    return [made.pools[0].prompt(slot) for slot in range(made.pools[0].size)]


def question_of(prompt) -> str:
    return prompt.ground_truth["entry"]["question"]


def find_leaks(training: list[str], held_out: list[str]) -> list[str]:
    """Training texts that, whitespace aside, are also held out."""
    keys = set(map(content_key, held_out))
    return [text for text in training if content_key(text) in keys]


@pytest.mark.parametrize("size", [None, 3000])
def test_no_held_out_question_is_ever_trained_on(tokenizer, size):
    made = open_prompts(data(sources=[chain_sum(size=size)], heldout={"count": 100}), tokenizer)
    held_out = [question_of(p) for p in made.heldout["chain_sum"]]
    trained = [question_of(p) for p in made.stream().next(4000)]
    assert len(set(held_out)) == 100
    assert find_leaks(trained, [f"  {q.replace(' ', '   ')}\n" for q in held_out]) == []


def test_a_neighbouring_seed_would_leak_which_is_why_the_split_is_by_text():
    """The trap itself: reasoning-gym's datasets of seed 0 and seed 1 share all questions but one."""
    first, second = (
        {e["question"] for e in reasoning_gym.create_dataset("chain_sum", seed=seed, size=200)}
        for seed in (0, 1)
    )
    assert len(first & second) >= 199


def test_endless_sources_of_neighbouring_seeds_ask_other_questions():
    first, second = (
        [
            ReasoningGymQuestions(ReasoningGymSettings(task="chain_sum", seed=s)).candidate(i, 0).content
            for i in range(300)
        ]
        for s in (0, 1)
    )
    assert len(set(first) & set(second)) < 10


def test_a_finite_source_is_exactly_the_dataset_of_that_seed_and_size(tokenizer):
    settings = data(
        sources=[chain_sum(size=40, seed=7)], heldout={"fraction": 0}, shuffle=False, duplicates="keep"
    )
    made = open_prompts(settings, tokenizer)
    expected = reasoning_gym.create_dataset("chain_sum", **EASY, seed=7, size=40)
    assert [p.ground_truth["entry"] for p in made.stream().next(40)] == list(expected)
    assert made.heldout == {}


@pytest.mark.parametrize(
    "task", ["chain_sum", "knights_knaves", "graph_color", "list_functions", "pool_matrix"]
)
def test_the_ground_truth_lets_the_task_score_an_answer_even_after_json(tokenizer, task):
    source = {"kind": "reasoning_gym", "task": task}
    made = open_prompts(data(sources=[source], heldout={"fraction": 0}), tokenizer)
    for prompt in made.stream().next(3):
        ground_truth = json.loads(json.dumps(prompt.ground_truth))
        assert prompt.verifier == "reasoning_gym"
        score = reasoning_gym.get_score_answer_fn(ground_truth["dataset"])
        if ground_truth["entry"]["answer"] is not None:
            assert score(ground_truth["entry"]["answer"], ground_truth["entry"]) == 1
        assert score("no such answer", ground_truth["entry"]) < 0.1


def test_a_composite_names_the_task_that_scores(tokenizer):
    parts = [{"name": "chain_sum", "weight": 1, "config": EASY}, {"name": "gcd", "weight": 1}]
    source = {"kind": "reasoning_gym", "task": "composite", "params": {"datasets": parts}}
    made = open_prompts(data(sources=[source], heldout={"count": 5}), tokenizer)
    tasks = {p.ground_truth["dataset"] for p in made.stream().next(40)}
    assert tasks == {"chain_sum", "gcd"}


def test_drawing_prompts_leaves_numpys_global_generator_alone(tokenizer):
    made = open_prompts(
        data(sources=[{"kind": "reasoning_gym", "task": "pool_matrix"}], heldout={"fraction": 0}), tokenizer
    )
    np.random.seed(5)
    expected = np.random.RandomState(5).random(3)
    made.stream().next(2)
    assert np.random.random(3).tolist() == expected.tolist()


def test_endless_streams_are_the_same_in_each_run_and_share_out_to_replicas(tokenizer):
    made = open_prompts(data(heldout={"count": 10}), tokenizer)
    again = open_prompts(data(heldout={"count": 10}), tokenizer)
    alone = [p.prompt_id for p in made.stream().next(30)]
    shared = [p.prompt_id for r in range(3) for p in again.stream(r, 3).next(10)]
    assert alone == shared
    assert len(set(alone)) == 30
    assert [p.text for p in made.heldout["chain_sum"]] == [p.text for p in again.heldout["chain_sum"]]


def test_an_endless_source_may_begin_later_with_the_same_questions_held_out(tokenizer):
    whole, later = (
        open_prompts(data(sources=[chain_sum(start=start)], heldout={"count": 10}), tokenizer)
        for start in (0, 7)
    )
    assert [p.prompt_id for p in later.stream().next(5)] == [p.prompt_id for p in whole.stream().next(12)[7:]]
    assert [p.text for p in later.heldout["chain_sum"]] == [p.text for p in whole.heldout["chain_sum"]]
    with pytest.raises(UserError, match="the data are not those of the checkpoint"):
        later.stream().load_state_dict(whole.stream().state_dict())
    with pytest.raises(ValueError, match="start=7 is for an endless task"):
        data(sources=[chain_sum(start=7, size=100)])


def test_evaluations_are_kept_out_of_training(tokenizer):
    evaluation = chain_sum(size=300, seed=0)
    settings = data(sources=[chain_sum(size=300, seed=100)], evaluations={"probe": evaluation})
    made = open_prompts(settings, tokenizer)
    assert made.counts["chain_sum"]["leaked"] > 100
    trained = [question_of(p) for p in made.stream().next(made.counts["chain_sum"]["train"])]
    assert find_leaks(trained, [question_of(p) for p in made.heldout["probe"]]) == []
    with pytest.raises(UserError, match=r"'chain_sum/\d+' is also in evaluation 'probe'"):
        open_prompts(settings.model_copy(update={"leaks": "error"}), tokenizer)


def test_evaluations_are_kept_out_of_endless_training_too(tokenizer):
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}  # 200 questions in all
    settings = data(
        sources=[chain_sum(params=tiny)],
        evaluations={"probe": chain_sum(params=tiny, size=150)},
        heldout={"fraction": 0},
    )
    made = open_prompts(settings, tokenizer)
    trained = [question_of(p) for p in made.stream().next(500)]
    assert find_leaks(trained, [question_of(p) for p in made.heldout["probe"]]) == []


def test_every_row_is_counted_exactly_once(tokenizer):
    longest = {len(p.token_ids) for p in pooled(open_prompts(data(sources=[chain_sum(size=50)]), tokenizer))}
    settings = data(
        sources=[chain_sum(size=2000)],
        evaluations={"probe": chain_sum(size=300)},
        max_prompt_tokens=max(longest) - 1,
    )
    count = open_prompts(settings, tokenizer).counts["chain_sum"]
    fates = ("duplicate", "leaked", "held_out", "overlong", "train")
    assert count["rows"] == 2000 == sum(count[fate] for fate in fates)
    assert all(count[fate] > 0 for fate in fates)


def test_prompts_longer_than_the_bound_are_left_out_and_counted_or_an_error(tokenizer):
    lengths = [len(p.token_ids) for p in pooled(open_prompts(data(sources=[chain_sum(size=200)]), tokenizer))]
    bound = max(lengths) - 1
    settings = data(sources=[chain_sum(size=200)], max_prompt_tokens=bound)
    made = open_prompts(settings, tokenizer)
    assert made.counts["chain_sum"]["train"] == sum(n <= bound for n in lengths)
    assert all(len(p.token_ids) <= bound for prompts in made.heldout.values() for p in prompts)
    with pytest.raises(UserError, match=rf"has \d+ tokens, max_prompt_tokens is {bound}"):
        open_prompts(settings.model_copy(update={"overlong": "error"}), tokenizer)


def test_a_prompt_exactly_as_long_as_the_bound_is_kept_and_one_token_more_is_not(tokenizer):
    everything = pooled(open_prompts(data(sources=[chain_sum(size=200)]), tokenizer))
    longest = max(len(p.token_ids) for p in everything)
    at_it = open_prompts(data(sources=[chain_sum(size=200)], max_prompt_tokens=longest), tokenizer)
    assert at_it.counts["chain_sum"].get("overlong", 0) == 0
    assert longest in {len(p.token_ids) for p in pooled(at_it)}
    below = open_prompts(data(sources=[chain_sum(size=200)], max_prompt_tokens=longest - 1), tokenizer)
    assert below.counts["chain_sum"]["overlong"] >= 1
    assert longest not in {len(p.token_ids) for p in pooled(below)}


def test_an_endless_source_of_which_nothing_fits_says_so(tokenizer):
    made = open_prompts(data(max_prompt_tokens=5, heldout={"fraction": 0}), tokenizer)
    with pytest.raises(UserError, match="400 longer than max_prompt_tokens"):
        made.stream().next(1)


def test_a_finite_source_of_which_nothing_is_left_says_why(tokenizer):
    with pytest.raises(UserError, match=r"no prompt to train on .*overlong"):
        open_prompts(data(sources=[chain_sum(size=50)], max_prompt_tokens=5), tokenizer)


def test_a_task_too_small_for_the_held_out_count_says_what_to_change(tokenizer):
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    with pytest.raises(UserError, match=r"only \d+ distinct held-out questions .* 200 are wanted"):
        open_prompts(
            data(sources=[chain_sum(params=tiny)], heldout={"count": 200, "fraction": 0.5}), tokenizer
        )


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (chain_sum(task="chain_sun"), "no task 'chain_sun'. Did you mean 'chain_sum'"),
        (chain_sum(params={"max_term": 3}), "no parameter 'max_term'. Did you mean 'max_terms'"),
        (chain_sum(params={"seed": 3}), "set `seed` beside `params`"),
        (chain_sum(params={"min_terms": 5, "max_terms": 3}), "max_terms must be >= min_terms"),
        (chain_sum(task="composite", params={}), "needs `datasets`"),
    ],
)
def test_wrong_task_settings_are_refused_before_the_first_draw(tokenizer, source, says):
    with pytest.raises(UserError, match=says):
        open_prompts(data(sources=[source]), tokenizer)


def test_duplicates_are_kept_in_their_place_if_asked(tokenizer):
    tiny = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
    source = chain_sum(params=tiny, size=400)
    kept = open_prompts(data(sources=[source], duplicates="keep", heldout={"fraction": 0}), tokenizer)
    assert [p.prompt_id for p in pooled(kept)] == [f"chain_sum/{i}" for i in range(400)]
    dropped = open_prompts(data(sources=[source], heldout={"fraction": 0}), tokenizer)
    texts = [p.text for p in pooled(dropped)]
    assert len(texts) == len(set(texts)) == len({p.text for p in pooled(kept)}) < 250


def test_two_sources_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="two sources or evaluations are named 'chain_sum'"):
        data(sources=[chain_sum(), chain_sum()])
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        data(sources=[chain_sum(weigth=2)])


def test_every_setting_describes_itself():
    for model in (DataSettings, ReasoningGymSettings, Framing):
        for name, field in model.model_fields.items():
            assert field.description, f"{model.__name__}.{name}"


def test_framing_goes_around_the_question_but_not_into_its_identity(tokenizer):
    framing = {"system": "Be brief.", "prefix": "Q: ", "suffix": " Answer in <answer>."}
    plain = open_prompts(data(sources=[chain_sum(size=30)]), tokenizer)
    framed = open_prompts(data(sources=[chain_sum(size=30, **framing)]), tokenizer)
    assert [p.prompt_id for p in pooled(plain)] == [p.prompt_id for p in pooled(framed)]
    prompt = pooled(framed)[0]
    assert prompt.text == (
        f"<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nQ: {question_of(prompt)} "
        "Answer in <answer>.<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_rows_own_system_message_stays():
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    framed = frame(messages, Framing(system="other", suffix="!"))
    assert [m["content"] for m in framed] == ["own", "hi!"]


@given(st.text(max_size=30), st.sampled_from([" ", "\n", "\t ", "\u00a0"]))
def test_whitespace_makes_no_new_question(text, space):
    spaced = space + text.replace(" ", space * 2) + space
    assert content_key(spaced) == content_key(text)


@given(st.binary(min_size=16, max_size=16), st.floats(0, 0.98), st.floats(0, 0.01))
def test_a_larger_fraction_only_adds_to_the_held_out_side(key, fraction, more):
    assert is_held_out(key, fraction + more) or not is_held_out(key, fraction)


def test_the_split_has_the_size_it_is_asked_for_and_the_salt_changes_it():
    keys = [content_key(f"question {i}") for i in range(5000)]
    chosen = {k for k in keys if is_held_out(k, 0.1)}
    assert 400 < len(chosen) < 600
    assert 20 < len(chosen & {k for k in keys if is_held_out(k, 0.1, "other")}) < 90


@pytest.mark.parametrize("key", ["system", "prefix", "suffix"])
def test_half_a_character_around_the_questions_is_refused_by_its_key(key):
    with pytest.raises(ValidationError, match=rf"{key}\n.*half a character at 1"):
        FileSettings(path="a.jsonl", preset="gsm8k", **{key: "a\ud800"})
