"""The tokenizer: chat templates, and what is learned of a conversation."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AddedToken

from megarl.data.tokenizer import load_tokenizer
from megarl.errors import UserError
from megarl.rewards import verify

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1 + 1"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 1"},
    {"role": "assistant", "content": "3"},
]


def test_a_prompt_is_rendered_up_to_where_the_assistant_begins(tokenizer):
    text = tokenizer.render_prompt("1 + 1")
    ids = tokenizer.encode(text)
    assert text == "<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
    assert ids.dtype == np.int32
    assert tokenizer.hf.decode(ids) == text
    assert tokenizer.render_prompt([{"role": "user", "content": "1 + 1"}]) == text


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_survives_the_byte_level_tokenizer(tokenizer, text):
    if not any(mark in text for mark in tokenizer.hf.all_special_tokens):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_assistants_turns_are_learned_and_nothing_else(tokenizer):
    sequence = tokenizer.encode_chat(CHAT)
    learned = tokenizer.hf.decode(sequence.token_ids[sequence.loss_mask])
    assert learned == "2<|im_end|>3<|im_end|>"
    assert tokenizer.hf.decode(sequence.token_ids) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1 + 1<|im_end|>\n<|im_start|>assistant\n"
        "2<|im_end|>\n<|im_start|>user\n2 + 1<|im_end|>\n<|im_start|>assistant\n3<|im_end|>"
    )


def test_a_demonstration_begins_where_the_engine_would_begin_to_sample(tokenizer):
    prompt_ids = tokenizer.encode(tokenizer.render_prompt("1 + 1"))
    sequence = tokenizer.encode_chat(
        [{"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}]
    )
    assert sequence.token_ids[: len(prompt_ids)].tolist() == prompt_ids.tolist()
    assert sequence.token_ids[len(prompt_ids) :].tolist() == [*tokenizer.encode("2"), tokenizer.eos_token_id]
    assert sequence.loss_mask.tolist() == [False] * len(prompt_ids) + [True, True]


def test_many_conversations_are_encoded_like_each_alone(tokenizer):
    chats = [CHAT, CHAT[:3], CHAT[1:3], [{"role": "assistant", "content": "I begin."}], CHAT]
    for one, alone in zip(tokenizer.encode_chats(chats), map(tokenizer.encode_chat, chats), strict=True):
        assert one.token_ids.tolist() == alone.token_ids.tolist()
        assert one.loss_mask.tolist() == alone.loss_mask.tolist()


def test_a_turn_that_the_template_leaves_open_still_learns_to_stop(tokenizer, tmp_path):
    template = tmp_path / "open.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    opened = load_tokenizer(tokenizer.folder, template)
    sequence = opened.encode_chat(CHAT[1:3])
    assert int(sequence.token_ids[-1]) == opened.eos_token_id
    assert sequence.loss_mask[-1]


STRIPS_EARLIER_THINKING = """{% for m in messages %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' %}{% if loop.last %}{% if '</think>' not in m.content %}<think></think>{% endif %}
{{- m.content }}{% else %}{{ m.content.split('</think>')[-1] }}{% endif %}
{%- else %}{{ m.content }}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def strips_thinking(tokenizer, tmp_path):
    """A template of Qwen3's kind: earlier turns lose their thinking, the last one always has a thinking
    block."""
    template = tmp_path / "strips.jinja"
    template.write_text(STRIPS_EARLIER_THINKING)
    return load_tokenizer(tokenizer.folder, template)


def test_earlier_turns_are_learned_as_the_model_will_meet_them(strips_thinking):
    sequence = strips_thinking.encode_chat(CHAT)
    learned = strips_thinking.hf.decode(sequence.token_ids[sequence.loss_mask])
    assert learned == "2<|im_end|><think></think>3<|im_end|>"


def test_a_turn_that_the_template_cuts_is_refused_and_named(strips_thinking):
    thought = [*CHAT[:2], {"role": "assistant", "content": "<think>easy</think>2"}, *CHAT[3:]]
    with pytest.raises(UserError, match="rewrites message 3"):
        strips_thinking.encode_chat(thought)
    assert strips_thinking.encode_chat(thought[:3]).loss_mask.any()


def test_template_options_reach_the_template(tokenizer, tmp_path):
    template = tmp_path / "options.jinja"
    template.write_text(
        "{{ messages[0].content }}{% if thinking is defined and not thinking %} (be quick){% endif %}"
    )
    assert load_tokenizer(tokenizer.folder, template).render_prompt("hi") == "hi"
    quick = load_tokenizer(tokenizer.folder, template, {"thinking": False})
    assert quick.render_prompt("hi") == "hi (be quick)"


def test_a_conversation_without_an_answer_is_refused(tokenizer):
    with pytest.raises(UserError, match="at least one assistant message"):
        tokenizer.encode_chat(CHAT[:2])


def test_messages_that_the_template_refuses_are_the_users_mistake(tokenizer, tmp_path):
    template = tmp_path / "strict.jinja"
    template.write_text("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(UserError, match="roles must alternate"):
        load_tokenizer(tokenizer.folder, template).render_prompt("hi")


def test_a_missing_or_empty_folder_is_named(tokenizer, tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no such folder"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no tokenizer could be loaded"):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"gone\.jinja: the chat template can't be read"):
        load_tokenizer(tokenizer.folder, tmp_path / "gone.jinja")


def test_a_folder_without_a_chat_template_says_what_to_do(tokenizer, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tokenizer.folder / name).read_bytes())
    with pytest.raises(UserError, match="no chat template"):
        load_tokenizer(tmp_path).render_prompt("hi")


def test_all_stop_tokens_of_the_generation_config_end_a_response(tokenizer, tmp_path):
    for file in Path(tokenizer.folder).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    assert load_tokenizer(tmp_path).stop_token_ids == (2, 1)
    assert tokenizer.stop_token_ids == (2,)


@pytest.mark.parametrize("stops", [0, [0, 1000000]])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_what_the_models_own_files_say_ends_a_response_does_with_a_tokenizer_from_elsewhere(
    tokenizer, tmp_path, file, stops
):
    (tmp_path / file).write_text(json.dumps({"eos_token_id": stops}))
    opened = load_tokenizer(tokenizer.folder, model=tmp_path)
    assert opened.stop_token_ids == (2, *(stops if isinstance(stops, list) else [stops]))
    assert opened.describe_stops().startswith("Responses end at <|im_end|> (2), <pad> (0)")
    np.testing.assert_array_equal(opened.encode_chat(CHAT).token_ids, tokenizer.encode_chat(CHAT).token_ids)


@pytest.mark.parametrize("stops", ["two", [2, "two"], -1, True, 10**12])
def test_a_stop_that_is_no_token_id_is_named_with_its_file(tokenizer, tmp_path, stops):
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": stops}))
    with pytest.raises(UserError, match=r"config.json: eos_token_id: .* is no token id"):
        load_tokenizer(tokenizer.folder, model=tmp_path)


def test_an_embedding_smaller_than_the_tokenizer_is_refused(tokenizer):
    tokenizer.check_embedding(tokenizer.vocab_size)
    with pytest.raises(UserError, match=f"set the model's vocab_size to {tokenizer.vocab_size}"):
        tokenizer.check_embedding(tokenizer.vocab_size - 1)


def test_half_a_character_is_the_users_mistake(tokenizer):
    for encode in (
        tokenizer.encode,
        lambda text: tokenizer.encode_chat([*CHAT[:2], {**CHAT[2], "content": text}]),
    ):
        with pytest.raises(UserError, match=r"half a character, .* '.*a\\ud800b.*'"):
            encode("a\ud800b")


def test_any_ids_are_a_text_that_can_be_written_and_read_again(tokenizer):
    rng = np.random.default_rng(0)
    for _ in range(50):
        text = tokenizer.decode(rng.integers(0, tokenizer.vocab_size, 40))
        assert text.encode().decode() == text


TAGS = ("<think>", "</think>", "<answer>", "</answer>")
ANSWERED = r"<think>It could be \boxed{42}.</think> <answer>7</answer>"


@pytest.mark.parametrize("special", [True, False])
def test_tags_reach_the_verifiers_whether_or_not_they_are_special_tokens_and_what_frames_a_response_does_not(
    tokenizer, tmp_path, special
):
    tokenizer.hf.save_pretrained(tmp_path)
    hf = load_tokenizer(tmp_path).hf
    tags = [AddedToken(tag, special=special, normalized=False) for tag in TAGS]
    hf.add_tokens(tags, special_tokens=special)
    hf.add_tokens([AddedToken("<|eot|>", special=True)], special_tokens=True)
    hf.save_pretrained(tmp_path)
    stops = [hf.eos_token_id, *hf.convert_tokens_to_ids(["<|eot|>", "</answer>"])]
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    tagged = load_tokenizer(tmp_path)
    assert set(tagged.hf.convert_tokens_to_ids(TAGS)) <= set(tagged.encode(ANSWERED).tolist())
    skipping = tagged.hf.decode(tagged.encode(ANSWERED), skip_special_tokens=True)
    assert ("<think>" not in skipping) == special

    frame = [tagged.pad_token_id, stops[1], tagged.eos_token_id]
    text = tagged.decode([*tagged.encode(ANSWERED), *frame])
    assert text == ANSWERED
    assert verify("format", text, {}).value == 1
    assert verify("math", text, {"answer": 42}).value == 0, "a box in the thinking is no answer"
    assert verify("exact", text, {"answer": 7}).value == 1
    assert tagged.decode([*tagged.encode("7"), *frame]) == "7"
