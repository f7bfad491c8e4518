#!/usr/bin/env bash
# Train on several nodes: run this on every node, with the same arguments.
#
#   NNODES=4 NODE_RANK=0 MASTER_ADDR=node0 launch/torchrun_multinode.sh CONFIG [key=value ...]
#
#   NNODES          how many nodes (default 1)
#   NODE_RANK       this node's number, from 0; each node has another
#   MASTER_ADDR     the host name or address of node 0, which every node can reach
#   MASTER_PORT     a free port on node 0 (default 29500)
#   NPROC_PER_NODE  ranks on this node (default: its GPUs); on a CPU it must be given
#   SHUTDOWN_SECONDS  between a signal and the kill of ranks that have not saved and ended by then (default 120)
#
# It is `torchrun ... -m megarl train CONFIG ...`: node and rank numbers are fixed, so that a run resumed on as many
# nodes finds every rank where it was. The run folder must be on storage that all nodes share.
# MEGARL_PYTHON=/path/to/python chooses the interpreter; otherwise it is that of .venv beside launch/, else python3.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
fail() {
    printf '[torchrun_multinode] %s\n' "$*" >&2
    exit 2
}
whole() { # NAME SMALLEST
    [[ "${!1}" =~ ^[0-9]+$ && "${!1}" -ge "$2" ]] || fail "$1=${!1} is not a whole number from $2 on"
}

[[ $# -ge 1 ]] || fail "usage: torchrun_multinode.sh CONFIG [key=value ...]; the variables are described in the script"
NNODES="${NNODES:-1}"
whole NNODES 1
if [[ "$NNODES" -gt 1 ]]; then
    [[ -n "${NODE_RANK:-}" ]] || fail "NODE_RANK is not set: this node's number, 0 to $((NNODES - 1))"
    [[ -n "${MASTER_ADDR:-}" ]] || fail "MASTER_ADDR is not set: the host name or address of node 0"
fi
NODE_RANK="${NODE_RANK:-0}"
MASTER_ADDR="${MASTER_ADDR:-127.0.0.1}"
MASTER_PORT="${MASTER_PORT:-29500}"
whole NODE_RANK 0
whole MASTER_PORT 1
SHUTDOWN_SECONDS="${SHUTDOWN_SECONDS:-120}"
whole SHUTDOWN_SECONDS 0
[[ "$NODE_RANK" -lt "$NNODES" ]] || fail "NODE_RANK=$NODE_RANK, but of $NNODES nodes the last is $((NNODES - 1))"
if [[ -z "${NPROC_PER_NODE:-}" ]]; then
    NPROC_PER_NODE="$({ nvidia-smi --list-gpus 2>/dev/null || true; } | wc -l)"
    [[ "$NPROC_PER_NODE" -ge 1 ]] || fail "NPROC_PER_NODE is not set, and no GPU was found to count"
fi
whole NPROC_PER_NODE 1

python="${MEGARL_PYTHON:-"$root/.venv/bin/python"}"
if [[ ! -x "$python" ]]; then
    [[ -z "${MEGARL_PYTHON:-}" ]] || fail "MEGARL_PYTHON=$python cannot be run"
    python="$(command -v python3)" || fail "no $python and no python3: build megarl's environment first"
fi

export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
printf '[torchrun_multinode] node %s of %s, %s ranks here, meeting at %s:%s\n' \
    "$NODE_RANK" "$NNODES" "$NPROC_PER_NODE" "$MASTER_ADDR" "$MASTER_PORT"
# Ranks that are told to end save a checkpoint first; nohup's ignored SIGHUP stays ignored.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT="$SHUTDOWN_SECONDS"
signals=SIGTERM,SIGINT,SIGQUIT
[[ "$(trap -p HUP)" == "trap -- '' "* ]] || signals+=,SIGHUP
exec "$python" -m torch.distributed.run --signals-to-handle "$signals" \
    --nnodes "$NNODES" --node-rank "$NODE_RANK" --nproc-per-node "$NPROC_PER_NODE" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" --max-restarts 0 \
    -m megarl train "$@"
