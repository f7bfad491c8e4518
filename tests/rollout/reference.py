"""What an engine is held against: one `transformers` forward of the same weights, in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from megarl.rollout.engine import GenerateRequest, GenerateResult


def checkpoint_weights(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint by their names on disk, in order."""
    return load_file(folder / "model.safetensors")


class Reference:
    """A checkpoint's own opinion about what was sampled from it."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(self, tokens: np.ndarray) -> torch.Tensor:
        """float32 [tokens, vocabulary]."""
        with torch.no_grad():
            return self.model(torch.as_tensor(tokens, dtype=torch.int64)[None]).logits[0]

    def logprobs(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        """float32 [response_tokens], at the request's temperature (1 for greedy)."""
        tokens = whole(request, result)
        scaled = self.logits(tokens) / (request.sampling.temperature or 1.0)
        chosen = scaled.log_softmax(-1)[len(request.token_ids) - 1 : -1]
        ids = torch.as_tensor(result.response_ids, dtype=torch.int64)
        return chosen.gather(1, ids[:, None])[:, 0].numpy()

    def greedy(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        """int64 [response_tokens], the most likely token at each place."""
        return self.logits(whole(request, result))[len(request.token_ids) - 1 : -1].argmax(-1).numpy()

    def routes(self, request: GenerateRequest, result: GenerateResult) -> np.ndarray:
        """int64 [tokens - 1, moe_layers, top_k], each row's experts in ascending order."""
        chosen: list[torch.Tensor] = []
        routers = [
            layer.mlp.gate
            for layer in self.model.model.layers
            if getattr(layer.mlp, "gate", None) is not None
        ]
        hooks = [
            router.register_forward_hook(lambda module, inputs, output: chosen.append(router_logits(output)))
            for router in routers
        ]
        self.logits(whole(request, result))
        for hook in hooks:
            hook.remove()
        top = [logits.topk(self.model.config.num_experts_per_tok, -1).indices for logits in chosen]
        return torch.stack(top, dim=1)[:-1].sort(-1).values.numpy()


def router_logits(output: torch.Tensor | tuple[torch.Tensor, ...]) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output[0]


def whole(request: GenerateRequest, result: GenerateResult) -> np.ndarray:
    """Prompt and response."""
    return np.concatenate([request.token_ids, result.response_ids])
