"""`python -m sglang_cpu --model-path ... --port ...`: `sglang.launch_server` with what a CPU needs.

Every argument of `sglang.launch_server` is passed on and wins over the defaults set here.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",
    "TORCHDYNAMO_DISABLE": "1",  # its compiler wants triton or a C++ tool chain
    "TOKENIZERS_PARALLELISM": "false",
}
ARGUMENTS = ("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch")


def main() -> None:
    path = [str(STAND_INS), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**ENVIRONMENT, **os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-m", "sglang.launch_server", *ARGUMENTS, *sys.argv[1:]]
    os.execve(sys.executable, command, environment)


if __name__ == "__main__":
    main()
