"""Conversations in rows: every field of a message reaches the chat template, or the row is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from megarl.data.json_text import load_json
from megarl.data.tokenizer import REASONING
from megarl.data.values import RowError, kind_of, text
from megarl.data.wording import Message

ROLES = {  # what data sets call the speakers
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "function_call": "assistant",  # whose text is JSON: the calls
    "tool": "tool",
    "observation": "tool",
}
# Other data sets' ways to say which turns are learned; here it is `weight`.
OTHER_WEIGHTS = ("loss", "loss_weight", "loss_mask", "mask", "masked", "train", "trainable", "learn")
VARIABLES = {"enable_thinking": bool, "reasoning_effort": str}  # columns that templates know by these names
LISTS = ("tools", "documents")
SYSTEM = ("system", "system_prompt")  # columns that may hold the system message
# Arguments of transformers' `apply_chat_template` that are not the row's to set.
NOT_THE_ROWS = (
    *("conversation", "messages", "chat_template", "add_generation_prompt", "continue_final_message"),
    *("tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs"),
    *("return_tensors", "return_dict", "return_assistant_tokens_mask"),
)


def messages(value: Any, what: str) -> list[dict[str, Any]]:
    """Return a conversation: a list of {"role", "content"} (or {"from", "value"}) with the messages' other fields,
    also as JSON text. Contents are text; a list of text parts is joined."""
    value = _from_json(value, what)
    if not isinstance(value, list | tuple) or not value:
        raise RowError(f"{what} is {kind_of(value)}, not a list of messages")
    return [_message(m, f"{what}, message {i}") for i, m in enumerate(value, start=1)]


def question(value: Any, what: str) -> list[dict[str, Any]]:
    """Return what a text or a conversation asks; its last message must be the user's (a tool's, in a dialogue)."""
    if isinstance(value, str):
        return [{"role": "user", "content": text(value, what)}]
    if not isinstance(value, list | tuple):
        raise RowError(f"{what} is {kind_of(value)}, not text or messages")
    asked = messages(value, what)
    if asked[-1]["role"] not in ("user", "tool"):
        raise RowError(f"{what} ends with a message of the {asked[-1]['role']}, not of the user")
    return asked


def before_answer(conversation: Sequence[Message]) -> list[Message]:
    """Return a conversation without the assistant's last turn, if it ends with one."""
    asked = list(conversation)
    while asked and asked[-1]["role"] == "assistant":
        asked.pop()
    if not asked or all(m["role"] == "system" for m in asked):
        raise RowError("nobody asks anything before the assistant's answer")
    return asked


def all_text(asked: Sequence[Message]) -> str:
    """Return the words of a question, for its identity: contents and tool calls in order, without the roles."""
    words = []
    for message in asked:
        calls = message.get("tool_calls")
        words += [str(message.get("content") or ""), *([json.dumps(calls, sort_keys=True)] if calls else [])]
    return "\n".join(words)


def answer_turn(row: Mapping[str, Any], response: str, what: str) -> dict[str, Any]:
    """Return the assistant's turn of a row with a response column, with the reasoning and tool calls beside it."""
    beside = {key: row[key] for key in ("reasoning_content", "tool_calls", "weight") if key in row}
    return _message({"role": "assistant", "content": response, **beside}, what)


def with_system(row: Mapping[str, Any], chat: list[Message]) -> list[Message]:
    """Return the conversation with the row's system message in front (ShareGPT and Alpaca have a column for it)."""
    column = next((name for name in SYSTEM if not _is_blank(row.get(name))), None)
    if column is None:
        return chat
    if any(m["role"] == "system" for m in chat):
        raise RowError(f"there is a system message in the column {column!r} and one among the messages")
    return [{"role": "system", "content": text(row[column], repr(column))}, *chat]


def history(row: Mapping[str, Any]) -> list[Message]:
    """Return the turns before a question: Alpaca's `history` column, a list of [question, answer]."""
    given = _from_json(row.get("history"), "'history'")
    turns: list[Message] = []
    for i, pair in enumerate(given if isinstance(given, list | tuple) else (), start=1):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise RowError(f"'history', pair {i} is {kind_of(pair)}, not a question and an answer")
        for role, said in zip(("user", "assistant"), pair, strict=True):
            turns.append({"role": role, "content": text(said, f"'history', pair {i}, of the {role}")})
    return turns


def template_variables(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a row gives to its chat template beside the messages: tools, documents and variables.

    The columns `tools` and `documents` are lists of objects, also as JSON text; `chat_template_kwargs` is an object;
    `enable_thinking` and `reasoning_effort` stand for themselves. An empty one is as good as none.
    """
    found: dict[str, Any] = {}
    given = _from_json(row.get("chat_template_kwargs"), "'chat_template_kwargs'")
    if not _is_blank(given):
        if not isinstance(given, Mapping):
            raise RowError(f"'chat_template_kwargs' is {kind_of(given)}, not an object")
        found.update({key: value for key, value in given.items() if value is not None})
    for key, kind in VARIABLES.items():
        if not _is_blank(value := row.get(key)):
            if not isinstance(value, kind):
                raise RowError(
                    f"{key!r} is {kind_of(value)}, not {'text' if kind is str else 'true or false'}"
                )
            found[key] = value
    for key in LISTS:
        value = _from_json(row.get(key), repr(key))
        if _is_blank(value):
            continue
        if not _are_objects(value):
            raise RowError(f"{key!r} is {kind_of(value)}, not a list of objects")
        if key in found:
            raise RowError(f"{key!r} is a column and in 'chat_template_kwargs'")
        found[key] = list(value)
    if (legacy := row.get("functions")) and _are_objects(legacy):
        found["functions"] = list(legacy)  # which hardly a template knows
    if wrong := [key for key in NOT_THE_ROWS if key in found]:
        raise RowError(f"'chat_template_kwargs' holds {wrong[0]!r}, which is not the row's to set")
    return found


def _message(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise RowError(f"{what} is {kind_of(value)}, not an object")
    speaker, says = "role" if "role" in value else "from", "content" if "content" in value else "value"
    spoken, content = value.get(speaker), value.get(says)
    if not isinstance(spoken, str) or spoken not in ROLES:
        raise RowError(f"{what} has the role {spoken!r}; known: {', '.join(ROLES)}")
    role = ROLES[spoken]
    # A table fills the fields that a message lacks with null.
    beside = {k: v for k, v in value.items() if k not in (speaker, says) and v is not None}
    _check_weight(beside, role, what)
    if spoken == "function_call":
        content, beside["tool_calls"] = "", _called(content, what)
    if isinstance(content, list | tuple):
        content = "".join(_part(part, what) for part in content)
    calls = _from_json(beside.pop("tool_calls", None), f"{what}: tool_calls")
    if not _is_blank(calls):
        if not _are_objects(calls):
            raise RowError(f"{what}: tool_calls is {kind_of(calls)}, not a list of objects")
        beside["tool_calls"] = calls
    says_otherwise = role == "assistant" and any(
        beside.get(key) for key in ("tool_calls", "function_call", *REASONING)
    )
    if isinstance(content, str) and _is_blank(content) and (says_otherwise or role in ("system", "tool")):
        return {"role": role, "content": content, **beside}
    if content is None and says_otherwise:
        return {"role": role, **({"content": None} if says in value else {}), **beside}
    return {"role": role, "content": text(content, what), **beside}


def _is_blank(value: Any) -> bool:
    """Whether a column holds nothing: null, NaN, empty, or spaces alone."""
    return (
        value is None or value != value or value in ([], ()) or (isinstance(value, str) and not value.strip())
    )


def _are_objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(v, Mapping) for v in value)


def _part(part: Any, what: str) -> str:
    if isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
    raise RowError(f"{what} has parts that are not text: {kind!r}")


def _check_weight(beside: Mapping[str, Any], role: str, what: str) -> None:
    """Refuse a weight that is neither 0 nor 1, and other words for it: every turn would be learned all the same."""
    for key in OTHER_WEIGHTS:
        if key in beside:
            raise RowError(f"{what} has the field {key!r}, which is not known: `weight: 0` leaves a turn out")
    weight = beside.get("weight", 0)
    if weight not in (0, 1):
        raise RowError(f"{what} has the weight {weight!r}: a turn is learned (1) or not (0)")
    if weight and role != "assistant":
        raise RowError(f"{what} has weight 1 and is the {role}'s: only the assistant's turns can be learned")


def _called(content: Any, what: str) -> list[dict[str, Any]]:
    """Return the tool calls of a ShareGPT `function_call` turn: {"name", "arguments"}, or a list of them, as JSON."""
    try:
        calls = load_json(content) if isinstance(content, str) else content
    except ValueError as error:
        raise RowError(f"{what}: a function call that is not JSON: {error}") from error
    calls = calls if isinstance(calls, list) else [calls]
    if not all(isinstance(call, Mapping) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(f"{what}: a function call without a name")
    return [{"type": "function", "function": dict(call)} for call in calls]


def _from_json(value: Any, what: str) -> Any:
    """Return a list or an object, or null, that was written as JSON text; anything else as it is."""
    if isinstance(value, str) and value.strip() == "null":
        return None
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return load_json(value)
    except (ValueError, RecursionError) as error:
        raise RowError(f"{what} looks like JSON and isn't: {error}") from error
