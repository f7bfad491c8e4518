"""From settings to prompts: open the sources, hold questions out, encode, filter by length, and count it all."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from megarl.data.files import FileQuestions, Tally
from megarl.data.procedural import VERIFIER, ReasoningGymQuestions
from megarl.data.questions import Question, content_key, digest_of, is_held_out
from megarl.data.settings import DataSettings, FileSettings, ReasoningGymSettings, Source, source_name
from megarl.data.stream import Pool, PromptStream
from megarl.data.tokenizer import ChatTokenizer
from megarl.errors import UserError
from megarl.records import Prompt

BATCH = 1024  # prompts encoded at once
ATTEMPTS = 400  # candidates tried for one slot of an endless source
FATES = ("rows", "malformed", "duplicate", "leaked", "held_out", "overlong", "overlong_held_out", "train")
PROBLEMS_SHOWN = 3
FRUITLESS = 200  # held-out candidates in a row that bring no new prompt before a task counts as exhausted


@dataclass(frozen=True, eq=False)
class PromptData:
    """Prompts to train on, in pools, and to evaluate on.

    heldout: prompts by name: each source's split (under the source's name, if it has any) and each evaluation.
    counts: by source: rows, and how many of them were malformed, duplicate, leaked, held_out, overlong, train.
    """

    pools: tuple[Pool, ...]
    heldout: Mapping[str, tuple[Prompt, ...]]
    counts: Mapping[str, Mapping[str, int]]
    problems: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    notices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    seed: int = 0
    shuffle: bool = True

    @property
    def verifiers(self) -> frozenset[str]:
        """Every verifier that a prompt may name, so that a run can refuse an unknown one at its start."""
        evaluated = (p.verifier for prompts in self.heldout.values() for p in prompts)
        return frozenset(evaluated).union(*(pool.verifiers for pool in self.pools))

    def summary(self) -> list[str]:
        """For people, a line for each source: what became of its rows, and the first of the bad ones."""
        lines = []
        for name, counts in self.counts.items():
            endless = any(pool.name == name and pool.size is None for pool in self.pools)
            shown = ", ".join(f"{counts[what]} {what}" for what in FATES if counts.get(what))
            lines.append(f"{name}: {'endless; ' if endless else ''}{shown or 'nothing held out'}")
            lines += [f"  {problem}" for problem in self.problems.get(name, ())[:PROBLEMS_SHOWN]]
            lines += [f"  {notice}" for notice in self.notices.get(name, ())]
        return lines

    def stream(self, replica: int = 0, replicas: int = 1) -> PromptStream:
        """Return the training prompts of one data-parallel replica."""
        return PromptStream(
            self.pools, seed=self.seed, shuffle=self.shuffle, replica=replica, replicas=replicas
        )


@dataclass(frozen=True)
class _Rules:
    """What decides a question's fate, shared by all sources."""

    settings: DataSettings
    tokenizer: ChatTokenizer
    evaluation_keys: Mapping[bytes, str]  # content key -> evaluation that holds it

    def held_out(self, key: bytes) -> bool:
        return is_held_out(key, self.settings.heldout.fraction, self.settings.heldout.salt)

    def leaked(self, question: Question, key: bytes) -> bool:
        if key not in self.evaluation_keys:
            return False
        if self.settings.leaks == "error":
            raise UserError(
                f"question {question.question_id!r} is also in evaluation {self.evaluation_keys[key]!r}. "
                "Remove it there or here, or set leaks to 'drop'."
            )
        return True

    def encode(self, questions: Sequence[Question]) -> list[Prompt | None]:
        """Return their prompts; None for one that is longer than allowed, where such prompts are skipped."""
        texts = [self._render(question) for question in questions]
        prompts: list[Prompt | None] = []
        for question, text, ids in zip(questions, texts, self.tokenizer.encode_texts(texts), strict=True):
            most = self.settings.max_prompt_tokens
            fits = most is None or len(ids) <= most
            if not fits and self.settings.overlong == "error":
                raise UserError(
                    f"prompt {question.question_id!r} has {len(ids)} tokens, max_prompt_tokens is {most}. "
                    "Raise it, or set overlong to 'skip'."
                )
            made = Prompt(question.question_id, ids, text, question.verifier, question.ground_truth)
            prompts.append(made if fits else None)
        return prompts

    def _render(self, question: Question) -> str:
        try:
            return self.tokenizer.render_prompt(question.messages, question.variables)
        except UserError as error:
            raise UserError(f"question {question.question_id!r}: {error}") from error


class _Endless:
    """Prompts of an endless source: slot `s` is the first usable candidate for its question `start + s`."""

    def __init__(self, questions: ReasoningGymQuestions, rules: _Rules) -> None:
        self.name = questions.name
        self._questions, self._rules = questions, rules

    def pool(self, weight: float) -> Pool:
        rules = self._rules
        what = (
            self._questions.settings.model_dump_json()
            + rules.settings.heldout.model_dump_json()
            + rules.tokenizer.identity
        )
        identity = f"endless {hashlib.blake2b(what.encode(), digest_size=16).hexdigest()}"
        return Pool(self.name, None, weight, identity, frozenset({VERIFIER}), self.prompt)

    def prompt(self, slot: int) -> Prompt:
        reasons: Counter[str] = Counter()
        for attempt in range(ATTEMPTS):
            question = self._questions.candidate(self._questions.settings.start + slot, attempt)
            key = content_key(question.content)
            if self._rules.leaked(question, key):
                reasons["in an evaluation"] += 1
            elif self._rules.held_out(key):
                reasons["held out"] += 1
            elif (prompt := self._rules.encode([question])[0]) is None:
                reasons["longer than max_prompt_tokens"] += 1
            else:
                return prompt
        why = ", ".join(f"{n} {reason}" for reason, n in reasons.most_common())
        raise UserError(f"source {self.name!r}: none of {ATTEMPTS} questions can be trained on ({why}).")

    def held_out(self, count: int) -> list[Prompt]:
        """Return the first `count` distinct held-out prompts. Raises UserError if the task hasn't as many."""
        found: dict[bytes, Prompt] = {}
        slot, since, overlong = 0, 0, 0
        while len(found) < count and since < FRUITLESS / self._rules.settings.heldout.fraction:
            question = self._questions.candidate(slot, 0)
            slot, since = slot + 1, since + 1
            key = content_key(question.content)
            if key in found or key in self._rules.evaluation_keys or not self._rules.held_out(key):
                continue
            if (prompt := self._rules.encode([question])[0]) is not None:
                found[key] = prompt
                since = 0
            else:
                overlong += 1
        if len(found) < count:
            raise UserError(
                f"source {self.name!r}: only {len(found)} distinct held-out questions in {slot} draws, "
                f"{count} are wanted. "
                + (
                    f"{overlong} were longer than max_prompt_tokens={self._rules.settings.max_prompt_tokens}: raise it "
                    "(unless set, it is what sampling.max_new_tokens leaves of the model's context)."
                    if overlong
                    else "Widen the task's params, raise heldout.fraction or lower heldout.count."
                )
            )
        return list(found.values())


def open_prompts(settings: DataSettings, tokenizer: ChatTokenizer) -> PromptData:
    """Open all sources. Finite ones are read, split, encoded and filtered here, once; endless ones as drawn.

    Raises UserError for anything the user can mend; in particular, if a source has nothing left to train on.
    """
    tallies: dict[str, Tally] = {}
    held_out: dict[str, tuple[Prompt, ...]] = {}
    evaluation_keys: dict[bytes, str] = {}
    plain = _Rules(settings, tokenizer, {})
    for name, evaluation in settings.evaluations.items():
        tallies[name] = Tally()
        source = evaluation.model_copy(update={"name": name})
        held_out[name] = _open_evaluation(source, plain, evaluation_keys, tallies[name])
    rules = _Rules(settings, tokenizer, evaluation_keys)
    pools: list[Pool] = []
    seen: set[bytes] = set()
    for source in settings.sources:
        name = source_name(source)
        tallies[name] = Tally()
        if isinstance(source, ReasoningGymSettings) and source.size is None:
            endless = _Endless(ReasoningGymQuestions(source), rules)
            pools.append(endless.pool(source.weight))
            split = endless.held_out(settings.heldout.count) if settings.heldout.fraction else []
            tallies[name].counts["held_out"] = len(split)
        else:
            finite, split = _open_finite(source, rules, seen, tallies[name])
            pools.append(finite)
        if split:
            held_out[name] = tuple(split)
    return PromptData(
        pools=tuple(pools),
        heldout=held_out,
        counts={name: tally.counts for name, tally in tallies.items()},
        problems={name: tuple(tally.problems) for name, tally in tallies.items()},
        notices={name: tuple(tally.notices()) for name, tally in tallies.items()},
        seed=settings.seed,
        shuffle=settings.shuffle,
    )


def _open_evaluation(
    source: Source, rules: _Rules, keys: dict[bytes, str], tally: Tally
) -> tuple[Prompt, ...]:
    name = source_name(source)
    if isinstance(source, ReasoningGymSettings) and source.size is None:
        raise UserError(f"evaluation {name!r} is endless: set its size.")
    questions = list(_questions(source, tally))
    keys.update({content_key(question.content): name for question in questions})
    prompts = _fitting(questions, rules, tally, "overlong")
    tally.counts["held_out"] = len(prompts)
    if not prompts:
        raise UserError(f"evaluation {name!r} has no prompt ({tally.summary()}).")
    return tuple(prompts)


def _open_finite(source: Source, rules: _Rules, seen: set[bytes], tally: Tally) -> tuple[Pool, list[Prompt]]:
    """Return the training pool of a finite source and its held-out prompts; `seen` collects the keys of all sources."""
    kept: list[Question] = []
    kept_keys: set[bytes] = set()
    split: dict[bytes, Question] = {}
    for question in _questions(source, tally):
        key = content_key(question.content)
        if key in seen and rules.settings.duplicates == "drop":
            tally.counts["duplicate"] += 1
        elif rules.leaked(question, key):
            tally.counts["leaked"] += 1
        elif rules.held_out(key):
            tally.counts["held_out"] += 1
            split.setdefault(key, question)
        else:
            kept.append(question)
            kept_keys.add(key)
        seen.add(key)
    name = source_name(source)
    if kept_keys & (split.keys() | rules.evaluation_keys.keys()):  # the proof that is always on
        raise RuntimeError(f"source {name!r}: a held-out question would be trained on; a defect of megarl")
    train = _fitting(kept, rules, tally, "overlong")
    tally.counts["train"] = len(train)
    if not train:
        raise UserError(f"source {name!r} has no prompt to train on ({tally.summary()}).")
    # Keys are hashes, so the least ones are a fair sample, and the same one each time.
    chosen = [split[key] for key in sorted(split)][: rules.settings.heldout.count]
    identity = _identity(kept, train, rules.tokenizer)
    return Pool.of(name, train, source.weight, identity), _fitting(chosen, rules, tally, "overlong_held_out")


def _identity(questions: Sequence[Question], prompts: Sequence[Prompt], tokenizer: ChatTokenizer) -> str:
    """Of the questions that became prompts, and of what renders them: not of the rendered text, which may hold a
    date."""
    kept, digest = {prompt.prompt_id for prompt in prompts}, hashlib.blake2b(digest_size=16)
    for q in questions:
        if q.question_id in kept:
            digest.update(digest_of(q.question_id, q.messages, q.variables))
    return f"{digest.hexdigest()}, chat template and tokenizer {tokenizer.identity}"


def _fitting(questions: Sequence[Question], rules: _Rules, tally: Tally, overlong: str) -> list[Prompt]:
    """Return the prompts of these questions that are not too long; the others are counted as `overlong`."""
    encoded = [p for i in range(0, len(questions), BATCH) for p in rules.encode(questions[i : i + BATCH])]
    fitting = [prompt for prompt in encoded if prompt is not None]
    tally.counts[overlong] += len(encoded) - len(fitting)
    for question in questions:
        tally.unread.update(rules.tokenizer.unread_fields(question.messages, question.variables))
    return fitting


def _questions(source: Source, tally: Tally) -> Iterator[Question]:
    """Yield the questions of a finite source, counted, bad rows too."""
    if isinstance(source, FileSettings):
        yield from FileQuestions(source, tally)
        return
    for question in ReasoningGymQuestions(source):
        tally.counts["rows"] += 1
        yield question
