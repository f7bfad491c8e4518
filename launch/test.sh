#!/usr/bin/env bash
# Build what the tests need (the trainer's environment, SGLang's on the CPU, a sandbox for code), then check the
# code and run the whole suite on two cores. Ends with the slowest files, the wall time and the CPU time of all
# processes.
#
#   launch/test.sh [PYTEST_ARGUMENT ...]
#
# Run it again at any time: environments are kept while their inputs are unchanged.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
"$root/launch/install_trainer.sh" cpu "$root/.venv" --dev
"$root/launch/install_sglang.sh" cpu "$root/.venv-sglang"
if ! command -v bwrap >/dev/null; then
    if [[ "$(id -u)" == 0 ]] && command -v apt-get >/dev/null; then
        echo "[test] installing bubblewrap, the sandbox of the code verifier"
        apt-get update -qq && apt-get install -y -qq bubblewrap >/dev/null
    else
        echo "[test] bubblewrap is missing (apt install bubblewrap): the code sandbox's tests are skipped" >&2
    fi
fi

cd "$root"
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false
if [[ $# -eq 0 ]]; then
    .venv/bin/ruff check .
    .venv/bin/ruff format --check .
    .venv/bin/mypy megarl
fi
[[ $# -gt 0 ]] || set -- --numprocesses 2 --no-loadscope-reorder
echo "[test] pytest $*"
exec .venv/bin/python -m tests.measured .venv/bin/python -m pytest "$@"
