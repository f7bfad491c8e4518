"""What a row says reaches the model: its messages' fields, tools and variables, as transformers itself renders them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megarl.data.files import open_conversations
from megarl.data.packing import make_micro_batches
from megarl.data.presets import RowReader
from megarl.data.prompts import open_prompts
from megarl.data.settings import DataSettings, DemonstrationSettings
from megarl.data.tokenizer import ChatTokenizer, load_tokenizer
from megarl.errors import UserError
from tests.data.templates import GLM, LLAMA, PLAIN, QWEN

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]


def call(arguments: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "weather", "arguments": arguments}}


DIALOGUE: list[dict[str, Any]] = [
    {"role": "system", "content": ""},
    {"role": "user", "content": "And in Paris?"},
    {
        "role": "assistant",
        "content": None,
        "reasoning_content": "I must look.",
        "tool_calls": [call({"city": "Paris", "unit": None})],
    },
    {"role": "tool", "content": "", "tool_call_id": "1", "name": "weather"},
    {"role": "assistant", "content": "Sunny.", "reasoning_content": "Nothing came."},
]
LOOKS = "<think>\nI must look.\n</think>\n\n<tool_call>weather {}</tool_call><|im_end|>".format(
    '{"city": "Paris", "unit": null}'
)
SAYS = "<think>\nNothing came.\n</think>\n\nSunny.<|im_end|>"


@pytest.fixture
def with_template(tokenizer: ChatTokenizer, tmp_path: Path) -> Callable[[str], ChatTokenizer]:
    def load(template: str) -> ChatTokenizer:
        path = tmp_path / "template.jinja"
        path.write_text(template)
        return load_tokenizer(tokenizer.folder, path)

    return load


@pytest.fixture
def qwen(with_template: Callable[[str], ChatTokenizer]) -> ChatTokenizer:
    return with_template(QWEN)


def learn(
    rows: list[dict[str, Any]], tokenizer: ChatTokenizer, folder: Path, **settings: Any
) -> tuple[list[str], list[str], Any]:
    """What each row becomes, what of it is learned, and the tally."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = DemonstrationSettings(**{"path": str(path), "preset": "messages", **settings})
    sequences, tally = open_conversations(made, tokenizer)
    decode = tokenizer.hf.decode
    return (
        [decode(s.token_ids) for s in sequences],
        [decode(s.token_ids[s.loss_mask]) for s in sequences],
        tally,
    )


def rendered(tokenizer: ChatTokenizer, messages: list[dict[str, Any]], **given: Any) -> str:
    """transformers' own text, which ends behind the last stop token in what is learned."""
    return str(tokenizer.hf.apply_chat_template(messages, tokenize=False, **given)).rstrip("\n")


@pytest.mark.parametrize("as_json", [False, True])
def test_every_field_of_a_demonstration_reaches_the_template(qwen, tmp_path, as_json):
    row = {"messages": DIALOGUE, "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": True}}
    if as_json:
        row = {key: json.dumps(value) for key, value in row.items()}
    (whole,), (learned,), _ = learn([row], qwen, tmp_path)
    assert whole == rendered(qwen, DIALOGUE, tools=TOOLS, enable_thinking=True)
    assert learned == LOOKS + SAYS


def test_every_field_of_a_prompt_reaches_the_template(qwen, tmp_path):
    path = tmp_path / "asked.jsonl"
    path.write_text(json.dumps({"messages": DIALOGUE, "tools": TOOLS, "enable_thinking": False}) + "\n")
    source = {"kind": "file", "path": str(path), "preset": "messages", "verifier": "exact"}
    data = open_prompts(DataSettings(sources=(source,), heldout={"fraction": 0}), qwen)
    (prompt,) = data.stream().next(1)
    expected = qwen.hf.apply_chat_template(
        DIALOGUE[:-1], tools=TOOLS, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    assert prompt.token_ids.tolist() == expected
    assert "does not read the messages' 'tool_call_id'" in data.summary()[1]


def test_a_turn_of_weight_0_is_read_and_not_learned(qwen, tmp_path):
    silent = [{**m, "weight": 0} if m.get("tool_calls") else m for m in DIALOGUE]
    (whole,), (learned,), _ = learn([{"messages": silent}], qwen, tmp_path)
    assert whole == rendered(qwen, DIALOGUE)
    assert learned == SAYS
    with pytest.raises(UserError, match=r"row 1: .* at least one assistant message of weight 1"):
        learn([{"messages": [{**m, "weight": 0} for m in DIALOGUE]}], qwen, tmp_path)


def test_reasoning_beside_a_response_column_is_learned_with_it(qwen, tmp_path):
    row = {"prompt": "1 + 1?", "response": "2", "reasoning_content": "One more than one."}
    _, (learned,), _ = learn([row], qwen, tmp_path, preset="prompt_response")
    assert learned == "<think>\nOne more than one.\n</think>\n\n2<|im_end|>"


def test_sharegpt_keeps_its_system_message_and_its_calls(qwen, tmp_path):
    turns = [
        {"from": "human", "value": "Paris?"},
        {"from": "function_call", "value": '{"name": "weather", "arguments": {"city": "Paris"}}'},
        {"from": "observation", "value": "sun"},
        {"from": "gpt", "value": "Sunny."},
    ]
    row = {"conversations": turns, "system": "Be brief.", "tools": json.dumps(TOOLS)}
    same = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Paris?"},
        {"role": "assistant", "content": "", "tool_calls": [call({"city": "Paris"})]},
        {"role": "tool", "content": "sun"},
        {"role": "assistant", "content": "Sunny."},
    ]
    (whole,), _, _ = learn([row], qwen, tmp_path)
    assert whole == rendered(qwen, same, tools=TOOLS)


@pytest.mark.parametrize(
    ("template", "written"),
    [(QWEN, 'weather {"city":"Paris"}'), (LLAMA, 'weather {"city": "Paris"}'), (GLM, "weather city=Paris")],
    ids=["as it is", "as JSON", "item by item"],
)
def test_arguments_that_are_json_text_are_written_as_the_template_can(
    with_template, tmp_path, template, written
):
    chat = [DIALOGUE[1], {"role": "assistant", "tool_calls": [call('{"city":"Paris"}')]}]
    _, (learned,), _ = learn([{"messages": chat}], with_template(template), tmp_path)
    assert learned == f"<tool_call>{written}</tool_call><|im_end|>"


@pytest.mark.parametrize(
    ("row", "lost"),
    [
        ({"messages": DIALOGUE}, "'reasoning_content', 'tool_calls'"),
        ({"messages": [DIALOGUE[1], DIALOGUE[4]]}, "'reasoning_content'"),
        ({"messages": [DIALOGUE[1], {"role": "assistant", "content": "a"}], "tools": TOOLS}, "'tools'"),
        (
            {"messages": [DIALOGUE[1], {"role": "assistant", "content": "a"}], "documents": [{"a": 1}]},
            "'docu",
        ),
        (
            {"messages": [DIALOGUE[1], {"role": "assistant", "content": "", "function_call": {"name": "f"}}]},
            "'function_call'",
        ),
        (
            {"messages": [DIALOGUE[1], {"role": "assistant", "content": "a"}], "functions": [{"name": "f"}]},
            "'fun",
        ),
    ],
)
def test_what_a_template_does_not_know_is_refused_by_its_name(with_template, tmp_path, row, lost):
    with pytest.raises(UserError, match=rf"rows\.jsonl, row 1: .* does not know {lost}"):
        learn([row], with_template(PLAIN), tmp_path)


USER = {"role": "user", "content": "a"}
SAID = {"role": "assistant", "content": "b"}


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"messages": [USER, {**SAID, "weight": 0.5}]}, "message 2 has the weight 0.5"),
        ({"messages": [{**USER, "weight": 1}, SAID]}, "message 1 has weight 1 and is the user's"),
        ({"messages": [USER, {**SAID, "loss": False}]}, "the field 'loss', which is not known: `weight: 0`"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, SAID]}, "not text: 'image_url'"),
        ({"messages": [USER, {**SAID, "tool_calls": "x"}]}, "tool_calls is text, not a list"),
        ({"messages": [USER, {"role": "assistant", "content": ""}]}, "message 2 is empty"),
        (
            {"messages": [{"role": "system", "content": "x"}, USER, SAID], "system": "y"},
            "in the column 'system'",
        ),
        ({"messages": [{"role": ["user"], "content": "a"}, SAID]}, "message 1 has the role ['user']; known"),
        ({"messages": [USER, SAID], "system": ["y"]}, "'system' is a list, not text"),
        ({"messages": [USER, SAID], "tools": "weather"}, "'tools' is text, not a list of objects"),
        ({"messages": [USER, SAID], "chat_template_kwargs": [1]}, "is a list, not an object"),
        (
            {"messages": [USER, SAID], "chat_template_kwargs": {"add_generation_prompt": True}},
            "'add_generation_prompt', which is not the row's to set",
        ),
        ({"messages": [USER, SAID], "enable_thinking": "no"}, "'enable_thinking' is text"),
        ({"messages": [USER, {**SAID, "content": "a\ud800"}]}, "half a character at 1"),
        (
            {"messages": [{"role": "system", "content": ""}, {**USER, "name": "\ud800"}, SAID]},
            "[1].name is not",
        ),
        (
            {"messages": [USER, {**SAID, "tool_calls": [call({"\ud800": 1})]}]},
            "a key of 'messages'[1].tool_calls",
        ),
        ({"messages": [USER, SAID], "tools": [{"name": "a\udc00"}]}, "'tools'[0].name is not valid Unicode"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_its_name(qwen, tmp_path, row, problem):
    with pytest.raises(UserError) as error:
        learn([row], qwen, tmp_path)
    assert "rows.jsonl, row 1: " in str(error.value)
    assert problem in str(error.value)


@pytest.mark.parametrize("takes", ["m.content | string", "m.content + ''"], ids=["writes None", "fails"])
def test_null_content_beside_a_call_is_empty_where_a_template_cannot_take_it(with_template, tmp_path, takes):
    careless = with_template(QWEN.replace("m.content if m.content is string else ''", takes))
    (whole,), (learned,), _ = learn([{"messages": DIALOGUE, "tools": TOOLS}], careless, tmp_path)
    assert learned == LOOKS + SAYS
    assert whole == rendered(careless, [{**m, "content": m["content"] or ""} for m in DIALOGUE], tools=TOOLS)


def test_arguments_that_are_objects_are_written_by_a_template_that_takes_only_text(with_template, tmp_path):
    deepseek = with_template(
        QWEN.replace("f.arguments if f.arguments is string else f.arguments | tojson", "'' + f.arguments")
    )
    chat = [USER, {**SAID, "tool_calls": [call({"city": "Orléans"}), call('{"city": 1}')]}]
    _, (learned,), _ = learn([{"messages": chat}], deepseek, tmp_path)
    assert 'weather {"city": "Orléans"}<' in learned
    assert 'weather {"city": 1}<' in learned


@pytest.mark.parametrize("weight", [0, 1])
def test_a_turn_that_ends_in_another_token_than_the_last_one_never_learns_the_users_words(
    with_template, tmp_path, weight
):
    """gpt-oss ends earlier turns with a token that does not stop a response."""
    oss = with_template(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|im_end|>' if m.role == 'assistant' and loop.last else '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    assert learn([{"messages": [USER, SAID]}], oss, tmp_path)[1] == ["b<|im_end|>"]
    with pytest.raises(UserError, match=r"row 1: .* rewrites message 4 or what comes before"):
        learn([{"messages": [USER, SAID, USER, {**SAID, "weight": weight}]}], oss, tmp_path)


def test_thoughts_written_in_the_content_are_learned_where_the_prompt_opens_them(with_template, tmp_path):
    thinking = with_template(
        PLAIN.replace("{% if add_gen", "{%- if add_gen").replace(
            "assistant\n{% endif", "assistant\n<think>\n{% endif"
        )
    )
    chat = [USER, {**SAID, "content": "<think>\nhm\n</think>\n\nb"}]
    (whole,), (learned,), _ = learn([{"messages": chat}], thinking, tmp_path)
    assert (whole, learned) == (rendered(thinking, chat), "hm\n</think>\n\nb<|im_end|>")
    with pytest.raises(UserError, match="rewrites message 2"):
        learn([{"messages": [USER, SAID]}], thinking, tmp_path)


@pytest.mark.parametrize("blank", ["", "\n\n", " "])
def test_content_of_spaces_is_as_good_as_empty_content(qwen, tmp_path, blank):
    chat = [{**m, "content": blank if not m["content"] else m["content"]} for m in DIALOGUE]
    (whole,), _, _ = learn([{"messages": chat, "tools": TOOLS}], qwen, tmp_path)
    assert whole == rendered(qwen, chat, tools=TOOLS)


@pytest.mark.parametrize("nothing", [None, "", " ", "null", "[]", [], float("nan")])
def test_a_column_that_holds_nothing_is_as_good_as_none(with_template, tmp_path, nothing):
    chat = [USER, {**SAID, "tool_calls": None if nothing != nothing else nothing}]
    row = {"messages": chat, "tools": nothing, "system": nothing if nothing not in ("null", "[]") else ""}
    row |= {"chat_template_kwargs": nothing if nothing != "[]" else {}, "enable_thinking": row["system"]}
    plain = with_template(PLAIN)
    assert learn([row], plain, tmp_path)[0] == [rendered(plain, [USER, SAID])]


def test_alpaca_keeps_its_system_message_and_its_history(qwen, tmp_path):
    row = {"instruction": "Add.", "input": "1 + 1", "output": "2", "history": [["a", "b"], ["c", "d"]]}
    asked = [
        *({"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}),
        *({"role": "user", "content": "c"}, {"role": "assistant", "content": "d"}),
        *({"role": "user", "content": "Add.\n\n1 + 1"}, {"role": "assistant", "content": "2"}),
    ]
    system = {"role": "system", "content": "Be brief."}
    rows = [
        row,
        {**row, "system": "Be brief."},
        {**row, "system_prompt": "Be brief.", "history": json.dumps([])},
    ]
    wholes, _, _ = learn(rows, qwen, tmp_path, preset="prompt_response")
    assert wholes == [rendered(qwen, chat) for chat in (asked, [system, *asked], [system, *asked[-2:]])]
    with pytest.raises(UserError, match="'history', pair 1 is text, not a question and an answer"):
        learn([{**row, "history": ["a"]}], qwen, tmp_path, preset="prompt_response")


def test_a_questions_system_column_is_asked_and_does_not_change_what_is_held_out(qwen):
    row = {"question": "1 + 1?", "answer": "#### 2"}
    plain, framed = (RowReader("gsm8k").prompt(r) for r in (row, {**row, "system": "Be brief."}))
    assert framed.asked == [{"role": "system", "content": "Be brief."}, *plain.asked]
    assert framed.bare == plain.bare


def test_a_turn_that_the_template_leaves_open_does_not_learn_the_next_ones_text(with_template, tmp_path):
    opened = with_template(
        "{% for m in messages %}{% if m.role == 'user' %}Q: {{ m.content }}<|im_end|>{% else %}"
        "A: {{ m.content }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}A: {% endif %}"
    )
    _, (learned,), _ = learn([{"messages": [USER, SAID, USER, SAID]}], opened, tmp_path)
    assert learned == "b\n<|im_end|>b\n<|im_end|>"


@pytest.mark.parametrize("ending", ["<|im_end|>", "<|im_end|>\n", "<|im_end|><|im_end|>", " <|im_end|> "])
def test_a_response_that_ends_in_its_stop_token_stops_once(qwen, tmp_path, ending):
    ended = [USER, {"role": "assistant", "content": f"b{ending}"}]
    (whole,), (learned,), _ = learn([{"messages": [*ended, *ended]}], qwen, tmp_path)
    assert whole.replace(" ", "") == rendered(qwen, [USER, SAID, USER, SAID])
    assert learned.replace(" ", "") == "b<|im_end|>b<|im_end|>"
    row = {"prompt": "a", "response": f"b{ending}"}
    _, (learned,), _ = learn([row], qwen, tmp_path, preset="prompt_response")
    assert learned.replace(" ", "") == "b<|im_end|>"
    history = qwen.render_prompt([*ended, USER])
    assert history.replace(" ", "") == qwen.render_prompt([USER, SAID, USER])


def test_the_last_stop_token_is_learned_though_it_pads_too(tokenizer, tmp_path):
    hf = load_tokenizer(tokenizer.folder).hf
    hf.pad_token = None
    padless = ChatTokenizer(hf, tokenizer.folder)
    assert padless.pad_token_id == padless.eos_token_id
    sequence = padless.encode_chat([USER, SAID])
    (batch,) = make_micro_batches([sequence], 64)
    learned = batch.labels[batch.mask].tolist()
    assert learned == [*padless.encode("b"), padless.eos_token_id]


def test_a_table_that_fills_missing_fields_with_null_adds_nothing_to_a_call(qwen, tmp_path):
    pyarrow = pytest.importorskip("pyarrow.parquet")
    calls = [call({"city": "Paris"}), call({"unit": "C"})]
    chats = [[USER, {"role": "assistant", "content": None, "tool_calls": [one]}] for one in calls]
    import pyarrow as arrow

    pyarrow.write_table(arrow.Table.from_pylist([{"messages": c} for c in chats]), tmp_path / "rows.parquet")
    source = DemonstrationSettings(path=str(tmp_path / "rows.parquet"), preset="messages")
    sequences, _ = open_conversations(source, qwen)
    assert [qwen.hf.decode(s.token_ids) for s in sequences] == [rendered(qwen, chat) for chat in chats]


def test_a_template_that_wants_a_result_behind_every_call_is_no_hindrance(with_template, tmp_path):
    strict = with_template(
        "{% if messages[-1].tool_calls %}{{ raise_exception('a call without a result') }}{% endif %}" + QWEN
    )
    _, (learned,), _ = learn([{"messages": DIALOGUE, "tools": TOOLS}], strict, tmp_path)
    assert learned == LOOKS + SAYS


def test_of_several_templates_the_one_for_tools_is_used_where_there_are_tools(tokenizer, tmp_path):
    several = load_tokenizer(tokenizer.folder)
    several.hf.chat_template = {"default": PLAIN, "tool_use": QWEN}
    rows = [{"messages": DIALOGUE, "tools": TOOLS}, {"messages": [USER, SAID]}]
    (first, second), _, _ = learn(rows, several, tmp_path)
    assert first == rendered(several, DIALOGUE, tools=TOOLS)
    assert second == rendered(several, [USER, SAID])
    several.hf.chat_template = {"tool_use": QWEN}
    assert learn(rows[:1], several, tmp_path)[0] == [first]
    with pytest.raises(UserError, match=r"row 2: .* no chat template"):
        learn(rows, several, tmp_path)
