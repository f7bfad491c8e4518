"""How a model is cut: layers that do not divide give the last stage, which has the LM head, fewer; what cannot be cut
is refused by its key."""

from __future__ import annotations

from typing import Any

import pytest
from megatron.core.transformer import TransformerConfig

from megarl.errors import UserError
from megarl.megatron.model import Architecture, _last_stage, check_fits, transformer_config
from megarl.megatron.platform import Platform
from megarl.megatron.settings import Layout, ModelSettings

SIZES = {
    "num_layers": 5,
    "hidden_size": 32,
    "num_attention_heads": 12,
    "num_query_groups": 4,
    "ffn_hidden_size": 48,
}
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 18, "moe_shared_expert_intermediate_size": 36}
DENSE = Architecture(SIZES, 101, 64)
MOE = Architecture({**SIZES, **EXPERTS, "moe_layer_freq": [0, 1, 1, 1, 1]}, 101, 64, moe_layers=(1, 2, 3, 4))


def configured(layout: Layout, **extra: Any) -> TransformerConfig:
    settings = ModelSettings(dtype="float32", transformer=extra)
    return transformer_config(DENSE, layout, Platform.detect("cpu"), settings)


@pytest.mark.parametrize(
    ("layers", "stages", "last"), [(60, 4, None), (61, 4, 13), (61, 16, 1), (27, 2, 13), (3, 2, 1)]
)
def test_the_last_stage_has_fewer_layers(layers: int, stages: int, last: int | None) -> None:
    assert _last_stage(layers, Layout(pipeline=stages)) == last
    if last is not None:
        assert (layers - last) % (stages - 1) == 0
        assert last < (layers - last) // (stages - 1)


def test_an_empty_stage_is_refused() -> None:
    with pytest.raises(UserError, match="4 layers leave one of 3 stages empty"):
        _last_stage(4, Layout(pipeline=3))


@pytest.mark.parametrize(
    ("model", "layout", "message"),
    [
        (DENSE, {"expert": 2}, r"parallel\.expert: the model is dense"),
        (DENSE, {"tensor": 5}, r"parallel\.tensor: 5 does not divide the model's 12 attention heads"),
        (DENSE, {"tensor": 3}, r"parallel\.tensor: 3 and the model's 4 key heads"),
        (MOE, {"expert": 3}, r"parallel\.expert: 3 does not divide the model's 8 experts"),
        (MOE, {"tensor": 4, "expert": 4, "expert_tensor": 4}, r"expert_tensor: 4 .* 18 rows of an expert"),
        (DENSE, {"pipeline": 6}, r"parallel\.pipeline: 5 layers leave one of 6 stages empty"),
        (
            DENSE,
            {"pipeline": 2, "virtual_pipeline": 2},
            r"parallel\.virtual_pipeline: 5 layers .* 2 stages x 2",
        ),
    ],
)
def test_a_layout_that_the_model_cannot_have_is_refused_by_its_key(
    model: Architecture, layout: dict[str, int], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_fits(model, Layout(**layout))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"num_layer": 4}, r"model\.transformer\.num_layer: .* Did you mean 'num_layers'"),
        ({"moe_token_dispatcher_type": "allgater"}, "'allgater' is none of allgather, alltoall, flex"),
    ],
)
def test_a_field_or_word_that_megatron_core_does_not_know_is_refused(
    extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        check_fits(MOE, Layout(), extra)


def test_what_divides_or_is_split_by_the_user_fits() -> None:
    check_fits(MOE, Layout(tensor=2, pipeline=2, expert=8))
    check_fits(DENSE, Layout(tensor=12), {"num_query_groups": 3})
    uneven = Layout(pipeline=2, virtual_pipeline=2)
    check_fits(DENSE, uneven, {"num_layers_in_first_pipeline_stage": 4})


@pytest.mark.parametrize(
    "split", [{"num_layers_in_first_pipeline_stage": 2}, {"account_for_loss_in_pipeline_split": True}]
)
def test_a_users_own_split_of_layers_that_do_not_divide_stands(split: dict[str, Any]) -> None:
    assert configured(Layout(pipeline=2), **split).num_layers_in_last_pipeline_stage is None


def test_a_transformer_setting_that_megatron_core_does_not_take_is_the_users_error() -> None:
    with pytest.raises(UserError, match=r"^model\.transformer: megatron-core does not take it: .*num_layer"):
        configured(Layout(pipeline=2), num_layers_in_first_pipeline_stage=0)
