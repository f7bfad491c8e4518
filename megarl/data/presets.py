"""The shapes that data sets have: which columns hold the question and the answer, and how they are read.

A preset is a row of one table. The `columns`, `ground_truth` and `verifier` of a source's settings override
it, so a data set without a preset needs none.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from megarl.data import messages, values
from megarl.data.values import RowError
from megarl.data.wording import Message
from megarl.errors import UserError, did_you_mean


@dataclass(frozen=True)
class Preset:
    """How one shape of rows is read.

    columns: by role (question, messages, answer, response, chosen, rejected) the columns that may hold it; the
        first that a row has wins, and a dotted name looks inside an object.
    uses: what such rows are for: methods of `RowReader`.
    read: by column, what makes its value the answer; a column that is not listed holds the answer itself.
    ground_truth: columns that the verifier needs as they are; a row must have at least one of them.
    verifier: who scores; None = the settings must say.
    optional: roles that a row may lack.
    compose: makes the question's text of the row and its question column.
    bare: takes away the frame that the data set itself puts around a question, for the question's identity.
    """

    name: str
    about: str
    columns: Mapping[str, tuple[str, ...]]
    uses: tuple[str, ...] = ("prompt",)
    verifier: str | None = None
    read: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    ground_truth: tuple[str, ...] = ()
    optional: frozenset[str] = frozenset()
    compose: Callable[[Mapping[str, Any], str], str] = lambda row, question: question
    bare: Callable[[str], str] = str


_DAPO_FRAME = re.compile(
    r"\ASolve the following math problem step by step\. The last line[^\n]*\n\n(?P<question>.*?)"
    r'(?:\n\nRemember to put your answer on its own line after "Answer:"\.?)?\s*\Z',
    re.DOTALL,
)


def _without_dapo_frame(text: str) -> str:
    found = _DAPO_FRAME.match(text)
    return found["question"] if found else text


def _with_input(row: Mapping[str, Any], question: str) -> str:
    given = row.get("input")
    return f"{question}\n\n{given}" if isinstance(given, str) and given.strip() else question


def _with_starter_code(row: Mapping[str, Any], question: str) -> str:
    starter = row.get("starter_code")
    if not isinstance(starter, str) or not starter.strip():
        return question
    return f"{question}\n\nBegin with this code:\n```python\n{starter.rstrip()}\n```"


PRESETS: Mapping[str, Preset] = {
    preset.name: preset
    for preset in (
        Preset(
            "livecodebench",
            "LiveCodeBench code generation: unit tests as JSON, the private ones compressed",
            {"question": ("question_content",)},
            verifier="code",
            ground_truth=("public_test_cases", "private_test_cases", "metadata"),
            compose=_with_starter_code,
        ),
        Preset(
            "preference",
            "pairs: prompt, chosen, rejected, as texts or as messages (which may hold the prompt)",
            {"question": ("prompt", "question"), "chosen": ("chosen",), "rejected": ("rejected",)},
            uses=("preference",),
            optional=frozenset({"question"}),
        ),
        Preset(
            "dapo",
            "DAPO-Math-17k and other rows in verl's layout: prompt messages, reward_model.ground_truth",
            {"question": ("prompt",), "answer": ("reward_model.ground_truth", "label", "solution")},
            verifier="math",
            bare=_without_dapo_frame,
        ),
        Preset(
            "gsm8k",
            "GSM8K: question, and an answer that ends with '#### number'",
            {"question": ("question",), "answer": ("answer",)},
            verifier="math",
            read={"answer": values.after_hashes},
        ),
        Preset(
            "math",
            "MATH and MATH-500: problem, and an answer or a solution with a boxed one",
            {"question": ("problem",), "answer": ("answer", "solution")},
            verifier="math",
            read={"solution": values.last_boxed},
        ),
        Preset(
            "deepscaler",
            "DeepScaleR: problem, answer, solution",
            {"question": ("problem",), "answer": ("answer",)},
            verifier="math",
        ),
        Preset(
            "aime",
            "AIME in its usual forms: problem (Problem, question), answer (Answer)",
            {"question": ("problem", "Problem", "question"), "answer": ("answer", "Answer")},
            verifier="math",
        ),
        Preset(
            "messages",
            "chat rows: messages (role, content) or conversations (from, value), perhaps with an answer",
            {"messages": ("messages", "conversations"), "answer": ("answer", "label", "ground_truth")},
            uses=("chat", "prompt"),
            optional=frozenset({"answer"}),
        ),
        Preset(
            "prompt_response",
            "a prompt (or instruction with input, or question) and a response (completion, output) to learn",
            {
                "question": ("prompt", "instruction", "question"),
                "response": ("response", "completion", "output"),
            },
            uses=("chat",),
            compose=_with_input,
        ),
    )
}


@dataclass(frozen=True)
class PromptRow:
    """asked: the conversation so far; bare: the words that identify it; verifier and ground_truth as in `Prompt`;
    variables: what else the row gives to the chat template."""

    asked: list[Message]
    bare: str
    verifier: str
    ground_truth: Mapping[str, Any]
    variables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PreferenceRow:
    """Two answers to the same prompt, of which the first is preferred."""

    prompt: list[Message]
    chosen: str
    rejected: str


class RowReader:
    """Reads rows of one shape; every method raises RowError with what is wrong with the row.

    preset: a name in PRESETS, or None. columns: roles to columns, in place of the preset's. ground_truth: keys
    of the verifier's ground truth to columns, beside the preset's. verifier: in place of the preset's.
    """

    def __init__(
        self,
        preset: str | None = None,
        columns: Mapping[str, str] | None = None,
        ground_truth: Mapping[str, str] | None = None,
        verifier: str | None = None,
    ) -> None:
        if preset is not None and preset not in PRESETS:
            raise UserError(
                f"no preset {preset!r}.{did_you_mean(preset, PRESETS)} There are {', '.join(PRESETS)}."
            )
        self.preset = PRESETS[preset] if preset else Preset("none", "columns as set", {})
        self.columns = {**self.preset.columns, **{role: (c,) for role, c in (columns or {}).items()}}
        self.extra = dict(ground_truth or {})
        self.verifier = verifier or self.preset.verifier
        self._required = set(columns or {}) | (set(self.preset.columns) - self.preset.optional)

    def fitting_use(self, row: Mapping[str, Any]) -> str | None:
        """Return the first of the preset's uses that reads this row, or None."""
        for use in self.preset.uses:
            with suppress(RowError, UserError):
                getattr(self, use)(row)
                return use
        return None

    def prompt(self, row: Mapping[str, Any]) -> PromptRow:
        asked = self._asked(row)
        verifier = self.verifier
        if "verifier" in self.columns:
            verifier = values.text(self._value(row, "verifier")[1], "the verifier")
        if verifier is None:
            raise UserError(f"rows of preset {self.preset.name!r} don't say who scores them. Set verifier.")
        ground_truth, variables = self._ground_truth(row), messages.template_variables(row)
        values.check_unicode(messages=asked, ground_truth=ground_truth, **variables)
        bare = self.preset.bare(messages.all_text(asked))
        return PromptRow(messages.with_system(row, asked), bare, verifier, ground_truth, variables)

    def chat(self, row: Mapping[str, Any]) -> list[Message]:
        """Return a conversation to learn from; it ends with the assistant."""
        if "messages" in self.columns:
            column, value = self._value(row, "messages")
            chat = messages.with_system(row, list(messages.messages(value, repr(column))))
        else:
            asked = self._asked(row)
            column, value = self._value(row, "response")
            chat = [*messages.with_system(row, asked), messages.answer_turn(row, value, repr(column))]
        if chat[-1]["role"] != "assistant":
            raise RowError(f"{column!r} ends with a message of the {chat[-1]['role']}, not of the assistant")
        values.check_unicode(messages=chat)
        return chat

    def variables(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a row gives to the chat template beside its messages."""
        variables = messages.template_variables(row)
        values.check_unicode(**variables)
        return variables

    def preference(self, row: Mapping[str, Any]) -> PreferenceRow:
        chosen, rejected = (self._value(row, role)[1] for role in ("chosen", "rejected"))
        shared: list[Message] = []
        if not isinstance(chosen, str) or not isinstance(rejected, str):
            one, other = messages.messages(chosen, "'chosen'"), messages.messages(rejected, "'rejected'")
            if one[:-1] != other[:-1]:
                raise RowError("'chosen' and 'rejected' differ before their last message")
            if {one[-1]["role"], other[-1]["role"]} != {"assistant"}:
                raise RowError("'chosen' and 'rejected' must end with the assistant's message")
            if beside := sorted((one[-1].keys() | other[-1].keys()) - {"role", "content"}):
                raise RowError(
                    f"'chosen' and 'rejected' end in messages with {beside[0]!r}: a pair is of texts"
                )
            shared, chosen, rejected = list(one[:-1]), one[-1]["content"], other[-1]["content"]
        prompt = messages.with_system(row, shared or self._asked(row))
        values.check_unicode(messages=prompt)
        chosen, rejected = values.text(chosen, "'chosen'"), values.text(rejected, "'rejected'")
        if chosen == rejected:
            raise RowError("'chosen' and 'rejected' are the same")
        return PreferenceRow(prompt, chosen, rejected)

    def _asked(self, row: Mapping[str, Any]) -> list[Message]:
        if "question" not in self.columns and "messages" in self.columns:
            column, value = self._value(row, "messages")
            return messages.before_answer(messages.messages(value, repr(column)))
        column, value = self._value(row, "question")
        asked: list[Message] = list(messages.question(value, repr(column)))
        if isinstance(value, str):
            return [*messages.history(row), {"role": "user", "content": self.preset.compose(row, value)}]
        return asked

    def _ground_truth(self, row: Mapping[str, Any]) -> dict[str, Any]:
        ground_truth: dict[str, Any] = {}
        if "answer" in self.columns:
            try:
                column, value = self._value(row, "answer")
            except RowError:
                if "answer" in self._required:
                    raise
            else:
                reader = self.preset.read.get(column, lambda raw: raw)
                ground_truth["answer"] = values.answer(reader(values.answer(value)))
        ground_truth.update({c: row[c] for c in self.preset.ground_truth if row.get(c) not in (None, "")})
        if self.preset.ground_truth and not ground_truth.keys() & set(self.preset.ground_truth):
            raise RowError(
                f"none of the columns {', '.join(map(repr, self.preset.ground_truth))} holds anything"
            )
        for key, column in self.extra.items():
            try:
                ground_truth[key] = values.lookup(row, column)
            except KeyError:
                raise RowError(f"no column {column!r} for the ground truth's {key!r}") from None
        return ground_truth

    def _value(self, row: Mapping[str, Any], role: str) -> tuple[str, Any]:
        if role not in self.columns:
            raise UserError(f"rows of preset {self.preset.name!r} have no {role} column. Set columns.{role}.")
        return values.pick(row, role, self.columns[role])


def detect_preset(row: Mapping[str, Any]) -> str | None:
    """Return the first preset of the table that reads this row, or None."""
    return next((name for name in PRESETS if RowReader(name, verifier="any").fitting_use(row)), None)
