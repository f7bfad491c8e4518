#!/usr/bin/env bash
# Engine against trainer in float32 and bfloat16, on two policies, with the engine's routes replayed and without.
#
#   configs/experiments/engine_mismatch/run.sh [QUICKSTART_HF_FOLDER]
#
# The folder: a finished quickstart's `hf`. Finished runs are not repeated. Results: runs/engine_mismatch/.
set -euo pipefail
quickstart="$(realpath "${1:-runs/quickstart/hf}")"
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
here=configs/experiments/engine_mismatch
out=runs/engine_mismatch
python="${PYTHON:-.venv/bin/python}"
mkdir -p "$out"

if [[ ! -d "$out/larger/hf" ]]; then
    "$python" examples/quickstart/make.py "$here/larger.yaml" --folder "$out/start" --model \
        "{hidden_size: 192, intermediate_size: 384, num_hidden_layers: 8, num_experts: 32, num_experts_per_tok: 4}"
    "$python" -m megarl train "$here/larger.yaml" folder="$out/larger"
fi

measure() { # name, model, further settings
    [[ -f "$out/$1/done" ]] && return
    "$python" -m megarl train "$here/base.yaml" name="$1" folder="$out/$1" model.path="$2" "${@:3}"
    touch "$out/$1/done"
}
for model in quickstart larger; do
    path="$quickstart"
    [[ "$model" == quickstart ]] || path="$out/larger/hf"
    measure "${model}_float32" "$path"
    measure "${model}_bfloat16_engine" "$path" engine.dtype=bfloat16
    measure "${model}_bfloat16" "$path" engine.dtype=bfloat16 model.dtype=bfloat16
done
"$python" benchmarks/mismatch.py "$out"/{quickstart,larger}_*
