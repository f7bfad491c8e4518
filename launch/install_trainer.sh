#!/usr/bin/env bash
# Build megarl's virtual environment from the pinned files in requirements/, then install megarl itself in it.
#
#   launch/install_trainer.sh [cpu|cuda] VENV_DIR [--dev]
#
#   cpu    the CPU build of torch (default)
#   cuda   torch for CUDA and Transformer Engine, which is compiled here: needs nvcc and the cuDNN headers
#   --dev  also what the tests and checks need
#
# Run it again at any time: it does nothing while its inputs are unchanged, and goes on where it was
# interrupted. PYTHON=/path/to/python chooses the interpreter, otherwise the first of python3, python3.11,
# python3.12 and python3.13 that fits.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
say() { printf '[install_trainer] %s\n' "$*"; }
fail() {
    printf '[install_trainer] %s\n' "$*" >&2
    exit 2
}
usage="usage: install_trainer.sh [cpu|cuda] VENV_DIR [--dev]"

device=cpu dev=no venv=""
for argument in "$@"; do
    case "$argument" in
        cpu | cuda) device="$argument" ;;
        --dev) dev=yes ;;
        -*) fail "unknown option $argument; $usage" ;;
        *) [[ -z "$venv" ]] || fail "$usage"; venv="$argument" ;;
    esac
done
[[ -n "$venv" ]] || fail "$usage"
mkdir -p "$venv" 2>/dev/null || fail "cannot make the folder $venv"
venv="$(cd "$venv" && pwd)"

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

# A stamp is the fingerprint of everything that went into an install; it is written when the install is complete.
fingerprint() { # WORD FILE...
    {
        printf '%s\n' "$1" "$root" "$venv"
        "$venv/bin/python" -VV
        cat -- "${BASH_SOURCE[0]}" "$root/pyproject.toml" "${@:2}"
    } | "$venv/bin/python" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}
installed() { # STAMP_NAME FINGERPRINT
    [[ -f "$venv/.megarl-$1" && "$(cat "$venv/.megarl-$1")" == "$2" ]]
}

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making a virtual environment in $venv with $("$python" --version)"
    "$python" -m venv "$venv" ||
        fail "$python cannot make virtual environments (on Debian and Ubuntu: apt install python3-venv)"
fi
pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
lean() { pip install --quiet --no-input --no-compile "$@"; }

install_torch() {
    local version
    version="$(sed -n 's/^torch==//p' "$root/requirements/cpu.txt")"
    [[ -n "$version" ]] || fail "requirements/cpu.txt does not pin torch"
    if [[ "$device" == cuda ]]; then
        say "installing torch $version for CUDA (several GB)"
        lean "torch==$version"
    elif [[ "$(uname -s)" == Linux && "$(uname -m)" == x86_64 ]]; then
        say "installing torch $version for the CPU (about 200 MB)"
        # The CPU build bears the local version +cpu. Where pip is not set up to find it, torch comes with CUDA: it
        # runs on a CPU as well, and is several GB larger.
        if pip install --dry-run --quiet --no-deps "torch==$version+cpu" >/dev/null 2>&1; then
            lean --no-deps "torch==$version+cpu"
        else
            say "pip finds no CPU build: taking the one with CUDA (several GB). To avoid that, stop, set"
            say "PIP_EXTRA_INDEX_URL to the package index of PyTorch's CPU builds, and run this again"
            lean "torch==$version"
        fi
    else
        say "installing torch $version"
        lean "torch==$version"
    fi
}

inputs=("$root/requirements/cpu.txt")
[[ "$device" == cpu ]] || inputs+=("$root/requirements/cuda.txt")
can_compile() {
    command -v cc >/dev/null && "$venv/bin/python" -c 'import os, sys, sysconfig
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))'
}
compiler_hint() {
    can_compile || printf '%s' "; pycosat, which reasoning-gym needs, is compiled here: install a C compiler and \
Python's headers (on Debian and Ubuntu: apt install build-essential python3-dev), then run this again"
}

base="$(fingerprint "$device" "${inputs[@]}")"
if installed trainer "$base"; then
    say "megarl ($device) is up to date in $venv"
else
    rm -f "$venv/.megarl-trainer"
    install_torch
    say "installing the pinned packages of requirements/cpu.txt (about 100)"
    lean -r "$root/requirements/cpu.txt" || fail "pip could not install them (its message is above)$(compiler_hint)"
    if [[ "$device" == cuda ]]; then
        say "compiling Transformer Engine against this torch (many minutes)"
        lean --no-build-isolation -c "$root/requirements/cpu.txt" -r "$root/requirements/cuda.txt"
    fi
    say "installing megarl from $root"
    lean --no-deps --no-build-isolation --editable "$root"
    # By all cores at once, where pip would take one; a few packages hold files of other Pythons, which stay as they are.
    say "compiling the packages' Python files"
    "$venv/bin/python" -m compileall -q -j 0 "$venv/lib" >/dev/null 2>&1 || true
    "$venv/bin/python" -W ignore -c 'import megarl, megatron.core, torch'
    printf '%s\n' "$base" >"$venv/.megarl-trainer"
    say "megarl ($device) is installed in $venv"
fi

if [[ "$dev" == yes ]]; then
    extra="$(fingerprint "dev $base" "$root/requirements/dev.txt")"
    if installed trainer-dev "$extra"; then
        say "what the tests need is up to date"
    else
        say "installing what the tests need (requirements/dev.txt)"
        lean -c "$root/requirements/cpu.txt" -r "$root/requirements/dev.txt"
        printf '%s\n' "$extra" >"$venv/.megarl-trainer-dev"
    fi
fi
