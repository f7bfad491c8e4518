#!/usr/bin/env bash
# Build megarl's environment for this machine's CPU, make the job's files, then run it: a tiny Mixture-of-Experts policy
# learns sums, cold start first, then reinforcement learning.
#
#   launch/quickstart.sh [CONFIG] [key=value ...]
#
# CONFIG is configs/quickstart.yaml unless another one is named. Results lie in runs/<name>. Run it again at any
# time: the environment is kept, and a run that was interrupted goes on where it stopped.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
config="$root/configs/quickstart.yaml"
if [[ $# -gt 0 && "$1" != *=* ]]; then
    config="$(cd "$(dirname "$1")" && pwd)/$(basename "$1")"
    shift
fi

"$root/launch/install_trainer.sh" cpu "$root/.venv"
if [[ "$config" == *sglang* ]]; then
    "$root/launch/install_sglang.sh" cpu "$root/.venv-sglang"
fi
cd "$root"
echo "[quickstart] examples/quickstart/make.py $config $*"
"$root/.venv/bin/python" examples/quickstart/make.py "$config" "$@"
echo "[quickstart] megarl train $config $*"
exec "$root/.venv/bin/megarl" train "$config" "$@"
