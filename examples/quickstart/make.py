"""Make what the quickstart starts from: a tiny Mixture-of-Experts policy with random weights, its tokenizer, and
demonstrations of how to add numbers up.

    python examples/quickstart/make.py [CONFIG] [key=value ...] [--model FIELDS] [--folder FOLDER]

CONFIG and the words are those that `megarl train` is given; `model.path` and `sft.demonstrations.path` say what is
made, where they lie in FOLDER. Files that are up to date are kept. The same words give the same files, byte for byte.

- Questions: those that the run would train on from the first one on, so none that it holds out. The run itself draws
  later ones (`data.sources.0.start`).
- Demonstrations: most show their work, a running total after every term, and begin in one of three ways; the others
  answer at once. The likeliest of four beginnings is to answer at once; RL can discover that working it out pays.
- Tokenizer: every byte is a token, so any text can be written; every digit is one of its own, so that numbers of all
  lengths are spelled the same way; the phrases of the questions are learned whole, so that prompts are short.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import version
from itertools import count
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from megarl.config.load import load_config
from megarl.config.schema import Config
from megarl.data.procedural import ReasoningGymQuestions
from megarl.data.questions import Question, content_key, is_held_out
from megarl.data.settings import ReasoningGymSettings
from megarl.data.tokenizer import ChatTokenizer, load_tokenizer
from megarl.errors import EXIT_USER_ERROR, UserError, did_you_mean
from megarl.monitor.files import write_atomic, writing
from megarl.monitor.progress import progress
from megarl.settings import user_path

HERE = Path(__file__).resolve().parent
FILES = HERE / "files"
QUICKSTART = HERE.parents[1] / "configs" / "quickstart.yaml"

MODEL: Mapping[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "initializer_range": 0.05,
    "tie_word_embeddings": False,
}

WORKED_SHARE = 0.62
OPENINGS = ("", "Work: ", "Sum: ")
ANSWER = "Answer:"

PAD, TURN_START, TURN_END = "<pad>", "<|im_start|>", "<|im_end|>"
LEAST_VOCAB = 3 + 256
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{ '<|im_start|>' + message.role + '\\n' + message.content }}<|im_end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}"
)


def make_files(config: Config, fields: Mapping[str, Any] | None = None, folder: Path = FILES) -> list[str]:
    """Make the model and the demonstrations that the configuration names, if they lie in `folder`.

    fields: Hugging Face config fields, laid over those of `MODEL`. Returns a line about each file. Raises UserError
    for a configuration or fields that can't be met.
    """
    model, rows, demonstrations = Path(str(config.model.path)), 0, None
    if config.sft.steps and config.sft.demonstrations is not None:
        rows = config.sft.steps * config.sft.batch_size
        demonstrations = Path(config.sft.demonstrations.path)
    paths = [path for path in (model, demonstrations) if path is not None]
    ours = [path for path in paths if path.resolve().is_relative_to(folder.resolve())]
    said = [f"{path}: left as it is, it does not lie in {folder}" for path in paths if path not in ours]
    if not ours:
        return said
    shape = {**MODEL, **(fields or {})}
    inputs = json.dumps(
        {
            "model": shape,
            "seed": config.seed,
            "data": config.data.model_dump(mode="json"),
            "rows": rows,
            "made by": hashlib.blake2b(Path(__file__).read_bytes(), digest_size=16).hexdigest(),
            "with": {
                name: version(name) for name in ("torch", "transformers", "tokenizers", "reasoning-gym")
            },
        }
    )
    stamp = folder / "made.json"
    if stamp.is_file() and stamp.read_text() == inputs and all(path.exists() for path in ours):
        return [*said, *(f"{path}: up to date" for path in ours)]
    stamp.unlink(missing_ok=True)
    hf_config(shape)
    questions = open_questions(config)
    if model in ours:
        with progress("Making the tokenizer and the model", announce=True):
            tokenizer = build_tokenizer(model, training_texts(questions))
            parameters = make_model(model, tokenizer, shape, seed=config.seed)
        said.append(f"{model}: made, {parameters / 1e6:.2f} M random parameters of seed {config.seed}")
    if demonstrations in ours:
        write_demonstrations(demonstrations, config, questions, rows)
        said.append(f"{demonstrations}: made, {rows} demonstrations")
    write_atomic(stamp, inputs)
    return said


def open_questions(config: Config) -> ReasoningGymQuestions:
    """The endless sums that the run trains on. Raises UserError where it trains on something else."""
    source, *others = config.data.sources
    if (
        others
        or not isinstance(source, ReasoningGymSettings)
        or (source.task, source.size) != ("chain_sum", None)
    ):
        raise UserError(
            "data.sources: there are demonstrations for one endless reasoning_gym source, the task chain_sum: name "
            "model.path and sft.demonstrations.path of your own for other data"
        )
    return ReasoningGymQuestions(source)


def training_questions(config: Config, questions: ReasoningGymQuestions) -> Iterator[Question]:
    """The questions that a run would train on, from the first one on: those that it holds out are passed over."""
    split = config.data.heldout
    for slot in count():
        candidates = (questions.candidate(slot, attempt) for attempt in count())
        yield next(
            q for q in candidates if not is_held_out(content_key(q.content), split.fraction, split.salt)
        )


def worked_sum(expression: str) -> str:
    """A sum worked out from the left, with the running total after every term.

    >>> worked_sum("4 - 1 - 7 + 12")
    '4-1=3-7=-4+12=8'
    """
    total, *rest = re.findall(r"[+-]?\d+", expression.replace(" ", ""))
    value, text = int(total), total
    for term in rest:
        value += int(term)
        text += f"{term}={value}"
    return text


def demonstrate(question: Question, seed: int) -> str:
    """The response to a sum; a hash of the question's name and the seed chooses whether it is worked out, and how that
    begins."""
    entry = question.ground_truth["entry"]
    answer = f"{ANSWER} {entry['answer']}"
    digest = hashlib.blake2b(f"{seed}/{question.question_id}".encode(), digest_size=8).digest()
    draw = int.from_bytes(digest, "big")
    if draw >= WORKED_SHARE * 2**64:
        return answer
    return f"{OPENINGS[draw % len(OPENINGS)]}{worked_sum(entry['metadata']['expression'])}\n{answer}"


def write_demonstrations(path: Path, config: Config, questions: ReasoningGymQuestions, rows: int) -> None:
    """Write JSON lines of the preset `messages`, in the order in which the run would draw the questions."""
    with progress("Making demonstrations", rows, unit="rows", announce=True) as bar, writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8") as file:
            for _, question in zip(range(rows), training_questions(config, questions), strict=False):
                answer = {"role": "assistant", "content": demonstrate(question, config.seed)}
                file.write(json.dumps({"messages": [*question.messages, answer]}, ensure_ascii=False) + "\n")
                bar.advance()


def training_texts(questions: ReasoningGymQuestions) -> list[str]:
    """What the tokenizer is trained on: questions, and how answers begin."""
    asked = [str(m["content"]) for slot in range(2000) for m in questions.candidate(slot, 0).messages]
    return [*asked, *[f"{ANSWER} "] * len(asked)]


def build_tokenizer(folder: str | Path, texts: Iterable[str], vocab_size: int = 384) -> ChatTokenizer:
    """Train a byte-level BPE on the texts, save it to the folder and load it from there.

    vocab_size: the most entries (3 special tokens, 256 bytes, the rest merges; fewer if the texts hold fewer words).
    Special tokens: <pad> 0, <|im_start|> 1, <|im_end|> 2 (EOS). Raises UserError for a vocabulary under 259.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < LEAST_VOCAB:
        raise UserError(
            f"vocab_size is {vocab_size}: 3 special tokens and 256 bytes need at least {LEAST_VOCAB}."
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, TURN_START, TURN_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator([part for text in texts for part in ("user\n", text, "assistant\n")], trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=PAD,
        eos_token=TURN_END,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
        model_max_length=1_000_000,
    )
    fast.chat_template = CHAT_TEMPLATE
    with writing(Path(folder)):
        Path(folder).mkdir(parents=True, exist_ok=True)
        fast.save_pretrained(str(folder))
    return load_tokenizer(folder)


def hf_config(fields: Mapping[str, Any], **vocabulary: Any) -> Any:
    """The transformers config of these fields, `model_type` among them. Raises UserError for an unknown field and for
    a shape that transformers refuses."""
    from transformers import AutoConfig

    own = dict(fields)
    model_type = own.pop("model_type")
    try:
        known = AutoConfig.for_model(model_type)
        for name in own:
            if not hasattr(known, name) and name != "head_dim":
                raise UserError(
                    f"--model: {model_type} has no field {name!r}.{did_you_mean(name, vars(known))}"
                )
        return AutoConfig.for_model(model_type, **{**vocabulary, **own})
    except (ValueError, TypeError, RuntimeError) as error:
        raise UserError(f"--model: transformers refuses this model: {error}") from error


def make_model(folder: Path, tokenizer: ChatTokenizer, fields: Mapping[str, Any], *, seed: int) -> int:
    """Write config.json and weights drawn from `seed` into the folder; returns the number of parameters.

    fields: Hugging Face config fields; the vocabulary is the tokenizer's unless they say otherwise. Raises UserError
    as `hf_config` does.
    """
    import torch
    from transformers import AutoModelForCausalLM

    config = hf_config(
        fields,
        vocab_size=tokenizer.hf.backend_tokenizer.get_vocab_size(),
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.hf.pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        except (ValueError, TypeError, RuntimeError) as error:
            raise UserError(f"--model: transformers refuses this model: {error}") from error
    with writing(folder):
        model.save_pretrained(folder)
    return int(model.num_parameters())


def main(
    config: Annotated[Path, typer.Argument(help="YAML file of the run.")] = QUICKSTART,
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key.sub=value words, laid over the file.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="YAML mapping of Hugging Face config fields to change.")] = "{}",
    folder: Annotated[Path, typer.Option(help="Where files are made; others are left as they are.")] = FILES,
) -> None:
    """Make the policy and the demonstrations that a run of the quickstart's kind starts from."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        fields = yaml.safe_load(model)
        if not isinstance(fields, dict):
            raise UserError(f"--model {model}: write a mapping, for example {{hidden_size: 192}}")
        for line in make_files(load_config(config, overrides or ()), fields, user_path(folder)):
            print(line)
    except UserError as error:
        print(f"make.py: error: {error}", file=sys.stderr)
        raise typer.Exit(EXIT_USER_ERROR) from None


if __name__ == "__main__":
    typer.run(main)
