"""Every model family: transformers' log-probabilities in every layout, the same bits out as in, each tensor once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.megatron.jobs import make_samples
from tests.ranks import RankPool
from tests.weights.families import FAMILIES, VOCABULARY, make, reference_logprobs
from tests.weights.jobs import families_job

pytestmark = pytest.mark.distributed

LOGPROBS = 2e-5  # absolute, float32
GRADIENTS = 1e-4  # relative in norm, for each tensor

ALL = tuple(FAMILIES)
MOE = tuple(name for name, tiny in FAMILIES.items() if tiny.moe)
FEW_KEYS = (
    "qwen3",
    "qwen2.5-one-kv-head",
    "qwen2-moe",
    "olmoe",
    "glm-4.5",
)  # fewer key heads than four ranks
LATENT = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "moonlight", "glm-4.7-flash")

# name: ranks, layout, families
LAYOUTS: dict[str, tuple[int, dict[str, Any], tuple[str, ...]]] = {
    "one": (1, {}, ALL),
    "TP2": (2, {"tensor": 2}, ALL),
    "PP2": (2, {"pipeline": 2}, ALL),
    "EP2": (2, {"expert": 2}, MOE),
    "CP2": (2, {"context": 2}, LATENT),  # the others' attention is that of tests/megatron/test_layouts.py
    "TP2xCP2": (4, {"tensor": 2, "context": 2}, ("deepseek-v2", "deepseek-v3", "qwen2.5-one-kv-head")),
    "TP4": (4, {"tensor": 4}, FEW_KEYS),
}
CASES = [(name, layout) for layout, (_, _, families) in LAYOUTS.items() for name in families]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("families")
    return {name: make(name, folder / name, shard="20KB") for name in FAMILIES}


@pytest.fixture(scope="module")
def references(checkpoints: dict[str, Path]) -> dict[str, dict[str, torch.Tensor]]:
    samples = make_samples(5, VOCABULARY)
    return {name: reference_logprobs(folder, samples) for name, folder in checkpoints.items()}


class Results:
    """One job a layout, all families in it, run when first asked for."""

    def __init__(self, ranks: RankPool, checkpoints: dict[str, Path], written: Path) -> None:
        self.ranks, self.checkpoints, self.written = ranks, checkpoints, written
        self.found: dict[str, dict[str, dict[str, Any]]] = {}
        self.failed: dict[str, Exception] = {}

    def of(self, layout: str) -> dict[str, dict[str, Any]]:
        if layout in self.failed:
            pytest.fail(f"the job of {layout} failed: {self.failed[layout]}")
        if layout not in self.found:
            size, degrees, families = LAYOUTS[layout]
            folders = {name: self.checkpoints[name] for name in families}
            arguments = {"folders": folders, "written": self.written / layout, "layout": degrees}
            try:
                self.found[layout] = self.ranks.run(size, families_job, timeout=240, **arguments)[0]
            except Exception as error:
                self.failed[layout] = error
                raise
        return self.found[layout]


@pytest.fixture(scope="module")
def results(
    ranks: RankPool, checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    return Results(ranks, checkpoints, tmp_path_factory.mktemp("written"))


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_log_probabilities_are_those_of_transformers(
    family: str, layout: str, results: Results, references: dict[str, dict[str, torch.Tensor]]
) -> None:
    got = results.of(layout)[family]["logprobs"]
    largest = 0.0
    compared = 0
    for sample in make_samples(5, VOCABULARY):
        start = len(sample.prompt.token_ids)
        mask = torch.from_numpy(sample.loss_mask)
        expected = references[family][sample.sample_id][start - 1 :][mask]
        value = got[sample.sample_id][start - 1 : -1][mask]
        compared += len(expected)
        if len(expected):
            largest = max(largest, float((value - expected).abs().max()))
    assert compared > 50
    print(f"largest difference {family} {layout}: {largest:.2e}")
    assert largest < LOGPROBS


@pytest.mark.parametrize(("family", "layout"), [case for case in CASES if case[1] != "one"])
def test_gradients_do_not_depend_on_the_layout(family: str, layout: str, results: Results) -> None:
    expected, got = results.of("one")[family], results.of(layout)[family]
    assert got["norm"] == pytest.approx(expected["norm"], rel=1e-4)
    for name, gradient in got["gradients"].items():
        reference = expected["gradients"][name]
        assert float((gradient - reference).norm()) <= GRADIENTS * float(reference.norm()), name


@pytest.mark.parametrize(("family", "layout"), CASES)
def test_a_checkpoint_comes_back_bit_for_bit(
    family: str, layout: str, results: Results, checkpoints: dict[str, Path]
) -> None:
    results.of(layout)
    before, after = _tensors(checkpoints[family]), _tensors(results.written / layout / family)
    if FAMILIES[family].fields.get("tie_word_embeddings"):
        before.pop("lm_head.weight", None)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype, name
        assert torch.equal(after[name], tensor), name


@pytest.mark.parametrize("family", ["deepseek-v3", "moonlight", "glm-4.5"])
def test_training_leaves_the_selection_bias_as_it_was(
    family: str, results: Results, checkpoints: dict[str, Path]
) -> None:
    stored = _tensors(checkpoints[family])
    biases = results.of("one")[family]["biases"]
    assert len(biases) == 2
    for name, bias in biases.items():
        layer = name.split(".")[2]
        assert torch.equal(bias, stored[f"model.layers.{layer}.mlp.gate.e_score_correction_bias"])


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
