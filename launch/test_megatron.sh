#!/usr/bin/env bash
# Run what depends on megatron-core on another version of it than requirements/cpu.txt pins, in an environment of its
# own: the trainer's, with that version put over it.
#
#   launch/test_megatron.sh [VERSION] [PYTEST_ARGUMENT ...]
#
#   VERSION   default: the newest that megarl is tested on (requirements/megatron-newest.txt)
#
# The environment is .venv-megatron-VERSION in the project's folder. Run it again at any time: the environment is kept
# while its inputs are unchanged. PYTHON as for install_trainer.sh.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
pins="$root/requirements/megatron-newest.txt"
say() { printf '[test_megatron] %s\n' "$*"; }
pinned() { sed -n "s/^$1==//p" "$pins"; }

version="$(pinned megatron-core)"
if [[ "${1:-}" =~ ^[0-9]+(\.[0-9]+)+$ ]]; then
    version="$1"
    shift
fi
venv="$root/.venv-megatron-$version"
"$root/launch/install_trainer.sh" cpu "$venv" --dev

wanted=("megatron-core==$version" "triton==$(pinned triton)")
installed() {
    "$venv/bin/python" - "${wanted[@]}" <<'PYTHON'
import importlib.metadata, sys
have = {d.metadata["Name"].lower(): d.version for d in importlib.metadata.distributions()}
sys.exit(any(have.get(pin.split("==")[0]) != pin.split("==")[1] for pin in sys.argv[1:]))
PYTHON
}
if installed; then
    say "${wanted[*]} are in $venv"
else
    say "installing ${wanted[*]}"
    # Newer versions ask for Python 3.12 in their metadata, and use nothing of it here.
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-input --no-deps \
        --ignore-requires-python "${wanted[@]}"
fi

cd "$root"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [[ $# -eq 0 ]]; then
    set -- --numprocesses 2 --no-loadscope-reorder tests/megatron tests/weights tests/routing \
        tests/training/test_update_layouts.py tests/training/test_golden.py tests/training/test_engines.py
fi
say "megatron-core $version: pytest $*"
exec "$venv/bin/python" -m pytest "$@"
