"""Messages in other words for the same, for chat templates that can't take them as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from megarl.errors import UserError

# {"role": "system" | "user" | "assistant" | "tool", "content": str}, and fields of the template: tool_calls, name ...
Message = Mapping[str, Any]


def function_of(call: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the name and arguments of a tool call, which may be wrapped in {"type", "function"}."""
    function = call.get("function", call)
    return function if isinstance(function, Mapping) else {}


def _arguments(messages: Sequence[Message]) -> Iterator[Any]:
    for message in messages:
        for call in message.get("tool_calls") or ():
            yield function_of(call).get("arguments")


def rendered(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> tuple[str, Sequence[Message]]:
    """Return the text of messages and the messages as they were rendered: as they are, or, where the template can't
    take them so, in other words for the same: tool calls' arguments as objects or as JSON text, null content as empty.
    """
    refusals: list[UserError] = []
    for chat in _same_calls(messages):
        try:
            text, chat = _without_null(chat, render)
        except UserError as error:
            refusals.append(error)
            continue
        as_text = [a for a in _arguments(chat) if isinstance(a, str)]
        if not any(json.dumps(a, ensure_ascii=False) in text for a in as_text):  # else quoted once more
            return text, chat
    raise refusals[0]


def _same_calls(messages: Sequence[Message]) -> Iterator[Sequence[Message]]:
    """Yield the messages as they are, with all tool calls' arguments as objects, and with all of them as JSON text."""
    yield messages
    if any(isinstance(a, str) for a in _arguments(messages)):
        yield _with_arguments(messages, _as_object)
    if any(isinstance(a, Mapping) for a in _arguments(messages)):
        yield _with_arguments(messages, _as_text)


def _without_null(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str]
) -> tuple[str, Sequence[Message]]:
    """Return the text of messages, with content that is null as empty where the template fails or writes None."""
    if all(m.get("content") is not None for m in messages):
        return render(messages), messages
    empty = [{**m, "content": m.get("content") or ""} for m in messages]
    try:
        text = render(messages)
    except UserError:
        return render(empty), empty
    if "None" in text and text.count("None") > (plain := render(empty)).count("None"):
        return plain, empty
    return text, messages


def _with_arguments(messages: Sequence[Message], change: Callable[[Any], Any]) -> list[Message]:
    """Return the messages with every tool call's arguments changed."""

    def changed(call: Mapping[str, Any]) -> Mapping[str, Any]:
        function = function_of(call)
        if "arguments" not in function:
            return call
        function = {**function, "arguments": change(function["arguments"])}
        return {**call, "function": function} if "function" in call else function

    return [
        {**m, "tool_calls": [changed(call) for call in m["tool_calls"]]} if m.get("tool_calls") else m
        for m in messages
    ]


def _as_object(arguments: Any) -> Any:
    try:
        return json.loads(arguments.strip() or "{}") if isinstance(arguments, str) else arguments
    except ValueError as error:
        raise UserError(f"a tool call's arguments are neither an object nor JSON: {error}") from error


def _as_text(arguments: Any) -> Any:
    return json.dumps(arguments, ensure_ascii=False) if isinstance(arguments, Mapping) else arguments
