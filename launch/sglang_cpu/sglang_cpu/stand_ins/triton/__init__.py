"""Stand-in for triton, whose kernels only run on a GPU. The two functions are the ones SGLang calls on a
CPU.
"""

from sglang_cpu.stand_in import attribute as __getattr__  # noqa: F401
from sglang_cpu.stand_in import make_submodules

__version__ = "3.7.0"

make_submodules(__name__)


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 0 else 1
