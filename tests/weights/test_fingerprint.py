import pytest
import torch

from megarl.weights.fingerprint import digest


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_a_copy_has_the_same_digest_and_one_changed_element_another(dtype: torch.dtype) -> None:
    tensor = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
    changed = tensor.clone()
    changed[3, 5] = 0 if tensor[3, 5] else 1
    assert digest(tensor) == digest(tensor.clone())
    assert digest(tensor) != digest(changed)


def test_memory_layout_does_not_matter() -> None:
    tensor = torch.randn(5, 7)
    assert digest(tensor.T.contiguous().T) == digest(tensor)
    assert digest(torch.cat([tensor, tensor])[5:]) == digest(tensor)


def test_shape_and_dtype_do_matter() -> None:
    zeros = torch.zeros(4, 2)
    others = (zeros.reshape(2, 4), zeros.reshape(-1), zeros.int(), zeros.half(), torch.zeros(4, 1))
    assert len({digest(x) for x in (zeros, *others)}) == 6


def test_scalars_and_empty_tensors_have_digests() -> None:
    assert digest(torch.tensor(1.0)) != digest(torch.tensor(2.0))
    assert digest(torch.empty(0)) != digest(torch.empty(0, 3))
