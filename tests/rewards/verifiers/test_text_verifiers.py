"""Verifiers that read a response's text: each case states a rule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megarl.errors import UserError
from megarl.rewards import Response, Scorer, builtin_names, find, verifiers, verify


def value(name: str, text: str, ground_truth: dict | None = None, **options) -> float | None:
    return verify(name, text, ground_truth or {}, **options).value


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<answer>Paris</answer>", True),
        ("<answer>\n Paris </answer>", True),
        (r"So \boxed{Paris}", True),
        ("It is clear.\nAnswer: Paris", True),
        ("Paris", True),
        ("Paris, I think", False),
        ("<answer>Rome</answer> or Paris", False),
        ("<answer>Rome</answer> <answer>Paris</answer>", True),
        ("<think><answer>Paris</answer></think> no idea", False),
        ("<answer>paris</answer>", False),
        ("<answer>Paris</answer><|im_end|>", True),
        ("", False),
    ],
)
def test_exact_compares_the_answer_and_nothing_around_it(text, right):
    assert value("exact", text, {"answer": "Paris"}) == right


def test_exact_takes_any_of_several_ground_truths_and_its_options():
    assert value("exact", "Answer: 7", {"answer": ["seven", 7]}) == 1.0
    assert value("exact", "PARIS!", {"answer": "Paris"}, ignore_case=True, ignore_punctuation=True) == 1.0
    assert value("exact", "...", {"answer": "$"}, ignore_punctuation=True) == 0.0  # nothing equals nothing
    assert value("exact", "New  York", {"answer": "New York"}) == 1.0
    assert value("exact", "New  York", {"answer": "New York"}, ignore_space=False) == 0.0
    assert value("exact", "New York", {}) is None
    assert value("exact", "nan", {"answer": float("nan")}) is None


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("-5", "5"),
        ("−5", "5"),
        ("- 5", "5"),
        ("-$5", "$5"),
        ("±5", "5"),
        ("1.5", "15"),
        (".5", "5"),
        ("-.5", "-5"),
        ("0.5", "05"),
        ("1,5", "15"),
        ("1..5", "15"),
        ("(1, 2)", "12"),
        ("(1,2)", "12"),
        ("1/2", "12"),
        ("1 / 2", "1 2"),
        ("-½", "½"),
        ("3:2", "32"),
        ("12:30", "1230"),
        ("10-20", "1020"),
        ("1 -5", "1-5"),
        ("50%", "50"),
        ("1e-5", "1e5"),
        ("10^{-3}", "10^3"),
        ("2^{10}", "210"),
        ("10**2", "102"),
        ("2x-5", "2x5"),
        ("x = -5", "x = 5"),
        ("x < 5", "x > 5"),
        ("<=5", ">=5"),
        (r"-\frac{1}{2}", r"\frac{1}{2}"),
        (r"\frac{1}{23}", r"\frac{12}{3}"),
        ("∞", "-∞"),
        ("कि", "की"),
    ],
)
def test_ignoring_punctuation_never_takes_a_number_for_another(one, other):
    for answer, gold in ((one, other), (other, one)):
        assert value("exact", f"Answer: {answer}", {"answer": gold}, ignore_punctuation=True) == 0
        assert value("exact", f"Answer: {answer}", {"answer": answer}, ignore_punctuation=True) == 1


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Paris.", "“Paris”"),
        ("U.S.A.", "USA"),
        ("it’s", "its"),
        ("well-known", "wellknown"),
        ("COVID-19", "COVID19"),
        ("_rock_ & roll!", "rock  roll"),
        ("−5", "-5"),
        ("**-5**", "- 5."),
        ("$-5$", "-$5"),
        ("5!", "(5)"),
        (".5", "0.5"),
        ("1,234,567.89", "1234567.89"),
        ("1’000", "1000"),
        (r"50\%", "50 %"),
        ("10–20", "10 - 20"),
        ("x=5", "x = 5"),
        ("+", "+"),
    ],
)
def test_ignoring_punctuation_takes_a_text_for_itself_however_it_is_pointed(one, other):
    for answer, gold in ((one, other), (other, one)):
        assert value("exact", f"Answer: {answer}", {"answer": gold}, ignore_punctuation=True) == 1


def test_a_choices_decimal_point_is_no_full_stop():
    choices = {"answer": "A", "choices": ["5", ".5"]}
    assert value("multiple_choice", "Answer: 5.", choices) == 1
    assert value("multiple_choice", "Answer: .5", choices) == 0


@pytest.mark.parametrize("cut_off", ["Answer: B\nAnswer: ", "Answer: B\nAnswer:", "Answer: B\n\nAnswer:\n\n"])
@pytest.mark.parametrize("extraction", ["auto", "marker"])
@pytest.mark.parametrize("marker", ["Answer:", "Answer: "])
def test_nothing_behind_the_last_marker_is_no_answer_whatever_an_earlier_one_says(
    cut_off, extraction, marker
):
    options = {"extraction": extraction, "answer_marker": marker}
    for name, ground_truth in (
        ("exact", {"answer": "B"}),
        ("multiple_choice", {"answer": "B"}),
        ("regex", {"pattern": "B|^$"}),
        ("reasoning_gym", {"dataset": "leg_counting", "entry": {"answer": "B", "metadata": {}}}),
    ):
        score = verify(name, cut_off, ground_truth, **options)
        assert (score.value, score.reason) == (0, "no answer found"), name
        assert value(name, f"{cut_off}\nB", ground_truth, **options) == 1, name
    assert value("math", "Answer: 4\nAnswer: ", {"answer": 4}, mode="lenient") == 0
    assert value("math", "#### 4\n#### ", {"answer": 4}, mode="lenient") == 0
    assert value("math", "The answer is 4.\nThe final answer is ", {"answer": 4}, mode="lenient") == 0
    assert value("math", "#### 4\nAnswer:", {"answer": 4}, mode="lenient") == 0


CHOICES = {"answer": "B", "choices": ["red", "blue", "green", "A and B"]}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("<answer>B</answer>", True),
        ("<answer>(B)</answer>", True),
        ("<answer>b.</answer>", True),
        ("Answer: **B**", True),
        (r"\boxed{\text{(B)}}", True),
        ("<answer>B) blue</answer>", True),
        ("<answer>blue</answer>", True),
        ("<answer>Blue.</answer>", True),
        ("<answer>B) red</answer>", False),
        ("<answer>A</answer>", False),
        ("<answer>A or B</answer>", False),
        ("<answer>A, B</answer>", False),
        ("<answer>AB</answer>", False),
        ("<answer>E</answer>", False),
        ("<answer>B is wrong, so A</answer>", False),
        ("A blue sky", False),
        ("B", True),
        ("<think>B</think>", False),
        ("", False),
    ],
)
def test_multiple_choice_wants_one_choice_named_and_no_hedging(text, right):
    assert value("multiple_choice", text, CHOICES) == right


def test_multiple_choice_reads_the_ground_truth_as_letter_index_or_text():
    for answer in ("B", "b", "(B)", 1, "blue"):
        assert value("multiple_choice", "Answer: B", {**CHOICES, "answer": answer}) == 1.0
    for answer in ("Z", 7, "violet", None, True):
        assert value("multiple_choice", "Answer: B", {**CHOICES, "answer": answer}) is None
    assert value("multiple_choice", "Answer: D. A and B", {**CHOICES, "answer": "D"}) == 1.0
    assert value("multiple_choice", "Answer: (D) none", {"answer": "D"}) == 1.0
    assert value("multiple_choice", "Answer: D. Or A", {"answer": "D"}) == 0.0
    assert value("multiple_choice", "Answer: (D) or (A)", {"answer": "D"}) == 0.0


def test_regex_finds_fully_matches_and_compares_its_group():
    assert value("regex", "order 66 executed", {"pattern": r"\d+"}) == 1.0
    assert value("regex", "no digits", {"pattern": r"\d+"}) == 0.0
    assert value("regex", "order 66", {"pattern": r"\d+"}, full=True) == 0.0
    assert value("regex", "66", {"pattern": r"\d+"}, full=True) == 1.0
    assert value("regex", "x=1, x=2", {"pattern": r"x=(\d)", "answer": "2"}) == 1.0
    assert value("regex", "x=2, x=1", {"pattern": r"x=(\d)", "answer": "2"}) == 0.0
    assert value("regex", "YES", {}, pattern="yes", ignore_case=True) == 1.0
    assert value("regex", "YES", {}) is None
    assert "the pattern '(' is wrong" in verify("regex", "x", {"pattern": "("}).reason


def test_a_catastrophic_pattern_costs_its_time_bound_and_is_unscored():
    score = verify("regex", "a" * 40 + "b", {"pattern": r"^(a|a)*$"}, seconds=0.3)
    assert score.value is None
    assert "took longer than 0.3 s" in score.reason


@pytest.mark.parametrize(
    ("text", "right", "failed"),
    [
        ("<think>a</think><answer>b</answer>", True, None),
        ("  <think>a</think>\n\n<answer>b</answer>\n<|im_end|>", True, None),
        ("<think>a</think><answer>b</answer> extra", False, "nothing_beside"),
        ("Hi <think>a</think><answer>b</answer>", False, "nothing_beside"),
        ("<think>a</think> so <answer>b</answer>", False, "nothing_beside"),
        ("<answer>b</answer><think>a</think>", False, "in_order"),
        ("<think>a<answer>b</answer></think>", False, "in_order"),
        ("<think>a</think><think>a</think><answer>b</answer>", False, "once"),
        ("<think>a</think><answer>b</answer><answer>c</answer>", False, "once"),
        ("<think>a</think></think><answer>b</answer>", False, "once"),
        ("<think>a<answer>b</answer>", False, "once"),
        ("<think>a</think><answer>b", False, "once"),
        ("<think></think><answer>b</answer>", False, "filled"),
        ("<think>a</think><answer> </answer>", False, "filled"),
        ("<think>a</think><answer>\u200b\u2060\ufeff</answer>", False, "filled"),
        ("a b", False, "once"),
        ("", False, "once"),
    ],
)
def test_format_wants_each_block_once_in_order_and_filled(text, right, failed):
    score = verify("format", text, {})
    assert score.value == right
    assert failed is None or score.parts[failed] == 0.0


def test_format_counts_the_block_that_the_prompt_opened():
    assert verify("format", Response("a</think><answer>b</answer>", prompt="Q <think>\n"), {}).value == 1.0
    assert verify("format", Response("a</think><answer>b</answer>", prompt="Q"), {}).value == 0.0


def test_format_options_say_what_else_may_stand_there():
    thinking = {"blocks": ("think",), "outside": "after"}
    assert value("format", "<think>a</think> free text", **thinking) == 1.0
    assert value("format", "x <think>a</think> free text", **thinking) == 0.0
    assert value("format", r"<think>a</think> \boxed{5}", **thinking, boxed=True) == 1.0
    assert value("format", r"<think>\boxed{4}</think> 5", **thinking, boxed=True) == 0.0
    assert value("format", r"<think>a</think> \boxed{5} \boxed{6}", **thinking, boxed=True) == 0.0
    assert value("format", "x <think>a</think><answer>b</answer>", outside="anything") == 1.0
    assert value("format", "<think>a</think><answer>b</answer> x", graded=True) == pytest.approx(3 / 4)


PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ('{"name": "Ada", "age": 36}', True),
        ('```json\n{"name": "Ada", "age": 36}\n```', True),
        ('Here:\n```json\n{"name": "x"}\n```\nbetter:\n```\n{"name": "Ada", "age": 36}\n```', True),
        ('<answer>{"name": "Ada", "age": 36}</answer>', True),
        ('{"name": "Ada"}', False),
        ('{"name": "Ada", "age": -1}', False),
        ('{"name": "Ada", "age": 36, "x": 1}', False),
        ('{"name": "Ada", "age": 36', False),
        ('{"name": "Ada", "age": NaN}', False),
        ('{"name": "Ada", "name": "Eve", "age": 36}', False),
        ("[" * 100_000, False),
        ("", False),
    ],
)
def test_json_schema_wants_json_that_the_schema_accepts(text, right):
    assert value("json_schema", text, {"schema": PERSON}) == right


def test_json_schema_compares_a_value_grades_and_names_the_fault():
    ada = {"schema": PERSON, "answer": {"age": 36, "name": "Ada"}}
    assert value("json_schema", '{"name": "Ada", "age": 36.0}', ada) == 1.0
    assert value("json_schema", '{"name": "Eve", "age": 36}', ada) == 0.0
    assert value("json_schema", "true", {"schema": {}, "answer": 1}) == 0.0
    score = verify("json_schema", '{"name": "Ada", "age": "x"}', {"schema": PERSON}, graded=True)
    assert score.value == 0.5
    assert score.reason.startswith("$.age: ")
    assert value("json_schema", "1", {"schema": {"type": "no such type"}}) is None
    assert value("json_schema", "1", {}) is None


def test_json_schema_fetches_no_other_document():
    score = verify("json_schema", "1", {"schema": {"$ref": "http://127.0.0.1:9/schema.json"}})
    assert score.value is None
    assert "bad ground truth" in score.reason
    assert "Unresolvable" in score.reason or "Unretrievable" in score.reason


def test_json_too_deep_for_a_recursive_schema_is_wrong_not_unscored():
    assert value("json_schema", "[" * 900 + "]" * 900, {"schema": {"items": {"$ref": "#"}}}) == 0.0


def test_length_falls_in_a_straight_line_from_start_to_end():
    def penalty(tokens: int, **options) -> float | None:
        return verify("length", Response("", tokens=tokens), {}, start=100, end=200, **options).value

    assert [penalty(n) for n in (0, 100, 125, 150, 200, 999)] == [0, 0, -0.25, -0.5, -1, -1]
    assert penalty(5, least=10) == -1.0
    assert verify("length", "no count", {}, start=1, end=2).value is None
    assert value("length", "one two three", start=2, end=4, unit="words") == -0.5
    assert value("length", "abcd", start=2, end=4, unit="characters") == -1.0
    with pytest.raises(UserError, match="0 <= least <= start < end is needed"):
        verify("length", "", {}, start=10, end=5)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from(["a", "b", "c"]), max_size=60), st.integers(1, 5))
def test_repetition_is_the_share_of_n_grams_seen_before(words, n):
    score = verify("repetition", " ".join(words), {}, ngram=n, allowed=0.0)
    grams = [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    share = 1 - len(set(grams)) / len(grams) if grams else 0.0
    assert score.value == pytest.approx(-share)
    assert score.parts["share"] == pytest.approx(share)


@pytest.mark.timeout(60)
def test_repetition_tells_a_loop_from_prose_in_any_script_and_in_linear_time():
    prose = "The quick brown fox jumps over the lazy dog while the cat sleeps near the warm old stove."
    assert value("repetition", prose) == 0.0
    assert value("repetition", "I think so. " * 200) < -0.95
    assert value("repetition", "我想是这样的。" * 100) < -0.9
    for loop in ("a", ".,;", "no_space_", "\n", "<br>"):
        assert value("repetition", loop * 2000) < -0.9, loop
    assert value("repetition", "short") == 0.0
    assert value("repetition", "a b " * 250_000) < -0.99
    with pytest.raises(UserError, match="ngram"):
        verify("repetition", "x", {}, ngram=0)


@pytest.mark.parametrize(
    ("text", "language", "expected"),
    [
        ("The answer is seven.", "en", 1.0),
        ("答案是七。", "zh", 1.0),
        ("答案是七。", "en", 0.0),
        ("答案 is 七 okay", "zh", 3 / 5),
        ("Ответ семь", "ru", 1.0),
        ("答えは七です", "ja", 1.0),
        ("정답은 칠", "ko", 1.0),
        (r"答案是 $x^2 + \sin y$ 和 \(abc\) 与 `code`。", "zh", 1.0),
        ("<think>答案</think><answer>七</answer>", "zh", 1.0),
        ("12 + 30 = 42", "zh", 1.0),
        ("", "en", 1.0),
    ],
)
def test_language_consistency_is_the_share_of_words_in_the_script(text, language, expected):
    assert value("language_consistency", text, language=language) == pytest.approx(expected)


def test_language_consistency_can_take_the_prompts_or_the_ground_truths_language():
    assert verify("language_consistency", Response("答案", prompt="请回答问题"), {}).value == 1.0
    assert verify("language_consistency", Response("answer", prompt="请回答问题"), {}).value == 0.0
    assert verify("language_consistency", Response("漢字だ", prompt="これは何ですか"), {}).value == 1.0
    assert verify("language_consistency", Response("x", prompt="1 + 1"), {}).value is None
    assert value("language_consistency", "Ja, gut", {"language": "de"}, language="ground_truth") == 1.0
    assert value("language_consistency", "Ja, gut", {}, language="ground_truth") is None
    with pytest.raises(UserError, match="unknown language 'eng'"):
        verify("language_consistency", "x", {}, language="eng")


LONG = {
    "open tags": "<answer>" * 100_000,
    "closed tags": "</answer>" * 100_000,
    "fences": "```json\n" * 100_000,
    "dollars": "$" * 1_000_001,
    "backslashes": "\\(" * 500_000,
    "angle brackets": "<" * 1_000_000,
    "blanks": " " * 1_000_000,
    "one word": "a" * 1_000_000,
}


@pytest.mark.parametrize(
    "name", ["exact", "multiple_choice", "format", "json_schema", "language_consistency"]
)
@pytest.mark.parametrize("text", LONG)
@pytest.mark.timeout(60)
def test_a_long_response_is_read_in_linear_time(name, text):
    ground_truth = {"answer": "B", "schema": {}, "language": "en"}
    options = {"language": "en"} if name == "language_consistency" else {}
    verify(name, LONG[text], ground_truth, **options)


def test_a_new_file_in_the_folder_of_verifiers_is_found_by_its_name(tmp_path, monkeypatch):
    (tmp_path / "shouting.py").write_text(
        "from megarl.rewards.contract import verifier\n"
        "@verifier(run_in='inline')\n"
        "def shouting(response, ground_truth, *, at_least: int = 1):\n"
        "    return response.text.count('!') >= at_least\n"
    )
    monkeypatch.setattr(verifiers, "__path__", [*verifiers.__path__, str(tmp_path)])
    assert verify("shouting", "Hey!", {}).value == 1.0
    assert find("shouting").spec.run_in == "inline"
    with pytest.raises(UserError, match=r"'shoutin'\. Did you mean 'shouting'"):
        find("shoutin")


def test_the_old_name_of_the_ground_truth_is_told_the_new_one():
    with pytest.raises(UserError, match=r"unknown language 'reference'\. Did you mean 'ground_truth'"):
        find("language_consistency").options({"language": "reference"}, where="here")
    options = {"url": "http://localhost", "model": "m", "template": "Compare {response} with {reference}"}
    with pytest.raises(UserError, match=r"no word \{reference\}\. Did you mean \{ground_truth\}"):
        find("model_judge").options(options, where="here")


def test_every_built_in_verifier_is_found_and_its_options_are_its_keywords():
    for name in builtin_names():
        with pytest.raises(UserError, match="has no option 'no_such_option'"):
            find(name).options({"no_such_option": 1}, where="here")


MARKED = ("exact", "multiple_choice", "regex", "reasoning_gym")
REFUSED = [
    *((name, {"answer_marker": " "}, "option 'answer_marker': it is empty") for name in MARKED),
    *(
        (name, {"tag": tag}, "option 'tag': a tag's name")
        for name in MARKED
        for tag in ("", "<answer>", "a b")
    ),
    *((name, {"extraction": "last"}, "option 'extraction'") for name in MARKED),
    ("json_schema", {"tag": ""}, "option 'tag'"),
    ("json_schema", {"schema": {"type": "text"}}, "the schema is wrong"),
    ("regex", {"pattern": ""}, "option 'pattern': it is empty"),
    ("regex", {"pattern": "("}, "the pattern '(' is wrong"),
    ("regex", {"seconds": 0}, "option 'seconds'"),
    ("regex", {"seconds": float("inf")}, "option 'seconds'"),
    ("math", {"think": ["", ""]}, "option 'think.0': it is empty"),
    ("math", {"think": ["<t>", "<t>"]}, "option 'think': the tag that opens"),
    ("math", {"think": ["<t>"]}, "option 'think"),
    ("math", {"eos": ["</s>", ""]}, "option 'eos.1': it is empty"),
    ("math", {"forms": []}, "option 'forms'"),
    ("math", {"max_characters": 0}, "option 'max_characters'"),
    ("format", {"blocks": ["think", ""]}, "option 'blocks.1'"),
    ("format", {"blocks": ["think", "think"]}, "blocks ['think', 'think'] has a name twice"),
    ("format", {"blocks": []}, "without blocks"),
    ("format", {"blocks": [], "boxed": True}, "outside must be"),
    ("format", {"eos": [" "]}, "option 'eos.0'"),
    ("length", {"start": 5, "end": 5}, "start < end"),
    ("repetition", {"ngram": 0}, "option 'ngram'"),
    ("repetition", {"allowed": float("nan")}, "option 'allowed'"),
    ("language_consistency", {"language": ""}, "unknown language ''"),
    ("code", {"total_seconds": 0}, "option 'total_seconds'"),
    ("code", {"total_seconds": float("inf")}, "option 'total_seconds'"),
    ("code", {"float_tolerance": -1}, "option 'float_tolerance"),
    ("code", {"float_tolerance": float("nan")}, "option 'float_tolerance"),
    ("code", {"languages": {"go": {"labels": [], "run": ["go"]}}}, "languages: 'go': labels"),
    ("code", {"languages": {"Go": {"labels": ["go"], "run": ["go"]}}}, "languages: 'Go': its name"),
    ("code", {"languages": {"go": {"labels": ["go"], "file": "main.go"}}}, "languages: 'go': run is missing"),
    (
        "code",
        {"languages": {"go": {"labels": ["go"], "file": "a/b", "run": ["go"]}}},
        "languages: 'go': file 'a/b'",
    ),
    ("code", {"languages": {"go": {"labels": ["go"], "run": [""]}}}, "languages: 'go': build and run"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_an_option_that_cannot_work_is_refused_at_start_by_its_key(name, options, message):
    with pytest.raises(UserError) as refused:
        Scorer({"workers": 0, "verifiers": [{"name": name, "options": options}]})
    assert str(refused.value).startswith("rewards.verifiers.0: ")
    assert message in str(refused.value)
