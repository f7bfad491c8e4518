"""Stand-in for torchvision, which only image inputs need and whose PyPI wheels want a CUDA build of torch."""

from sglang_cpu.stand_in import attribute as __getattr__  # noqa: F401
from sglang_cpu.stand_in import make_submodules

__version__ = "0.0.0"

make_submodules(__name__)
