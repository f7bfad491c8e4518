#!/usr/bin/env bash
# Five ways to train one MoE policy off-policy, three seeds each; curves in one CSV.
#
#   configs/experiments/moe_stability/run.sh [SEED ...]
#
# Finished runs are not repeated. Results: runs/moe_stability/.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."
here=configs/experiments/moe_stability
out=runs/moe_stability
python="${PYTHON:-.venv/bin/python}"
seeds=("$@")
[[ ${#seeds[@]} -gt 0 ]] || seeds=(0 1 2)
mkdir -p "$out"

for seed in "${seeds[@]}"; do
    cold="$out/cold_s$seed"
    if [[ ! -d "$cold/hf" ]]; then
        start="$out/start_s$seed"
        words=(seed="$seed" data.seed="$seed" model.path="$start/model"
            sft.demonstrations.path="$start/demonstrations.jsonl")
        "$python" examples/quickstart/make.py "$here/cold.yaml" "${words[@]}" --folder "$start"
        "$python" -m megarl train "$here/cold.yaml" folder="$cold" "${words[@]}"
    fi
    for variant in grpo grpo_r2 grpo_r3 gspo_recompute gspo_engine; do
        run="$out/${variant}_s$seed"
        [[ -f "$run/done" ]] && continue
        "$python" -m megarl train "$here/$variant.yaml" name="$variant" folder="$run" model.path="$cold/hf" \
            seed="$seed" data.seed="$seed"
        touch "$run/done"
    done
done
finished=("$out"/{grpo,grpo_r2,grpo_r3,gspo_recompute,gspo_engine}_s[0-9]*)
"$python" benchmarks/curves.py "${finished[@]}" >"$out/curves.csv"
"$python" benchmarks/stability.py "${finished[@]}"
echo "curves: $out/curves.csv"
