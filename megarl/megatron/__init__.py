"""The trainer on megatron-core."""

import importlib.util
import logging
import sys
import types
import warnings

from megarl.megatron import versions

# megarl chooses the parts itself (`platform.py`); what megatron-core misses at import, and what a later torch or
# megatron-core will rename one day, is no news to the user.
for _message in (
    ".*(Apex|Transformer Engine) (is|are|and) .*",
    r".*torch\.distributed\.\w+.* is deprecated.*",
    r"full scope is deprecated.*",
    r"The \.grad attribute of a Tensor that is not a leaf.*",
    ".*is experimental and still under active development.*",
):
    warnings.filterwarnings("ignore", message=_message)


class _Without(logging.Filter):
    """Lets only messages through that do not contain `words`."""

    def __init__(self, words: str) -> None:
        super().__init__()
        self.words = words

    def filter(self, record: logging.LogRecord) -> bool:
        return self.words not in record.getMessage()


for _module, _words in (
    ("models.gpt.gpt_model", "GPTModel IS DEPRECATED"),
    ("dist_checkpointing.strategies.common", "load_common is deprecated"),
    ("distributed.distributed_data_parallel", "full_param_layout not provided"),
):
    logging.getLogger(f"megatron.core.{_module}").addFilter(_Without(_words))


def _without_compiler() -> types.ModuleType:
    """Stands in for megatron.core.jit where nothing is compiled.

    That module hands small functions to torch.compile while it is imported, which loads a compiler that a CPU run
    never uses: four seconds in every process.
    """
    jit = types.ModuleType("megatron.core.jit")
    jit.__dict__.update(
        jit_fuser=lambda function: function,
        noop_decorator=lambda function: function,
        enable_jit_fuser=lambda: None,
        disable_jit_fuser=lambda: None,
    )
    return jit


if importlib.util.find_spec("transformer_engine") is None:
    sys.modules.setdefault("megatron.core.jit", _without_compiler())
versions.require_triton()
