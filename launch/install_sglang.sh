#!/usr/bin/env bash
# Build SGLang's own virtual environment, beside the trainer's and never in it.
#
#   launch/install_sglang.sh [cpu|cuda] VENV_DIR
#
#   cpu    SGLang without its GPU libraries, and launch/sglang_cpu, which runs it without them (default; 1.6 GB)
#   cuda   SGLang with everything it asks for
#
# Run it again at any time: it does nothing while its inputs are unchanged, and goes on where it was
# interrupted. PYTHON=/path/to/python chooses the interpreter, otherwise the first of python3, python3.11,
# python3.12 and python3.13 that fits.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
say() { printf '[install_sglang] %s\n' "$*"; }
fail() {
    printf '[install_sglang] %s\n' "$*" >&2
    exit 2
}
usage="usage: install_sglang.sh [cpu|cuda] VENV_DIR"

device=cpu venv=""
for argument in "$@"; do
    case "$argument" in
        cpu | cuda) device="$argument" ;;
        -*) fail "unknown option $argument; $usage" ;;
        *) [[ -z "$venv" ]] || fail "$usage"; venv="$argument" ;;
    esac
done
[[ -n "$venv" ]] || fail "$usage"
mkdir -p "$venv" 2>/dev/null || fail "cannot make the folder $venv"
venv="$(cd "$venv" && pwd)"
if compgen -G "$venv/lib/python*/site-packages/megatron" >/dev/null; then
    fail "$venv is the trainer's environment (it holds megatron-core): SGLang needs a folder of its own"
fi

# One installer at a time in this folder.
if command -v flock >/dev/null; then
    exec 9>"$venv/.megarl-install.lock"
    flock -n 9 || { say "another installer is at work in $venv, waiting for it"; flock 9; }
fi

fits() { "$1" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' >/dev/null 2>&1; }
if [[ -n "${PYTHON:-}" ]]; then
    fits "$PYTHON" || fail "PYTHON=$PYTHON is not a Python 3.11, 3.12 or 3.13"
    python="$PYTHON"
else
    python=""
    for candidate in python3 python3.11 python3.12 python3.13; do
        if fits "$candidate"; then python="$candidate"; break; fi
    done
    [[ -n "$python" ]] || fail "no Python 3.11 to 3.13 found; install one, or name it: PYTHON=/path/to/python"
fi
if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making a virtual environment in $venv with $("$python" --version)"
    "$python" -m venv "$venv" ||
        fail "$python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
fi

# The stamp is the fingerprint of everything that goes into the environment, written when it is complete.
requirements="$root/requirements/sglang-$device.txt"
stamp="$venv/.megarl-sglang"
fingerprint="$({
    printf '%s\n' "$device" "$venv"
    "$venv/bin/python" -VV
    cat -- "${BASH_SOURCE[0]}" "$requirements"
    if [[ "$device" == cpu ]]; then
        find "$root/launch/sglang_cpu" \( -name '*.py' -o -name '*.toml' \) -print0 | LC_ALL=C sort -z | xargs -0 cat --
    fi
} | "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')"
if [[ -f "$stamp" && "$(cat "$stamp")" == "$fingerprint" ]]; then
    say "SGLang ($device) is up to date in $venv"
    exit 0
fi
rm -f "$stamp"

lean() { "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-input "$@"; }

install_torch() {
    local version
    version="$(sed -n 's/^torch==//p' "$requirements")"
    [[ -n "$version" ]] || fail "$requirements does not pin torch"
    say "installing torch $version"
    # Its CPU build, where pip is set up to find one: the CUDA build works too, but is ten times larger.
    lean -c "$requirements" "torch==$version+cpu" 2>/dev/null || lean -c "$requirements" "torch==$version"
}

if [[ "$device" == cuda ]]; then
    say "installing SGLang for CUDA (many GB)"
    lean -r "$requirements"
    "$venv/bin/python" -W ignore -c 'import sglang, torch; assert torch.version.cuda, "torch is no CUDA build"'
else
    install_torch
    say "installing SGLang and the pinned packages of requirements/sglang-cpu.txt (about 100)"
    lean --no-deps -r "$requirements"
    say "installing launch/sglang_cpu"
    build="$(mktemp -d)" # a copy, for a build leaves files beside its sources
    trap 'rm -rf "$build"' EXIT
    cp -R "$root/launch/sglang_cpu" "$build/"
    lean --no-deps --no-build-isolation --force-reinstall "$build/sglang_cpu"
    "$venv/bin/python" -W ignore - <<'PYTHON'
import os, sys
from importlib.metadata import entry_points

from sglang_cpu.__main__ import ENVIRONMENT, STAND_INS

os.environ.update(ENVIRONMENT)
sys.path.insert(0, str(STAND_INS))
import sglang, torch

assert entry_points(group="sglang.srt.plugins", name="megarl_cpu"), "SGLang would not find the plugin"
PYTHON
fi
printf '%s\n' "$fingerprint" >"$stamp"
say "SGLang ($device) is installed in $venv"
