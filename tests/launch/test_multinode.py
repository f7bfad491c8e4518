"""The multi-node launchers, with real torchrun agents that meet on loopback.

What runs on the ranks is a stand-in for training: it joins a gloo group, adds something up with all the
others, and writes down who it was.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPT = LAUNCH / "torchrun_multinode.sh"
RANK_PROGRAM = """
import json, os, sys
from pathlib import Path
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
who = {"node": int(os.environ["GROUP_RANK"]), "local": int(os.environ["LOCAL_RANK"]), "sum": int(total)}
who |= {"arguments": sys.argv[1:], "threads": os.environ["OMP_NUM_THREADS"]}
Path(os.environ["SEEN"], os.environ["RANK"]).write_text(json.dumps(who))
dist.destroy_process_group()
"""


@pytest.fixture
def ranks(tmp_path: Path) -> tuple[dict[str, str], Path]:
    """The environment in which `-m megarl` is the program above, and the folder where its ranks report."""
    (tmp_path / "path" / "megarl").mkdir(parents=True)
    (tmp_path / "path" / "megarl" / "__main__.py").write_text(RANK_PROGRAM)
    seen = tmp_path / "seen by ranks"
    seen.mkdir()
    kept = {
        k: v
        for k, v in os.environ.items()
        if k not in ("NNODES", "NODE_RANK", "MASTER_ADDR", "OMP_NUM_THREADS")
    }
    changed = {"PYTHONPATH": str(tmp_path / "path"), "SEEN": str(seen), "MEGARL_PYTHON": sys.executable}
    return kept | changed | {"MASTER_PORT": str(free_port()), "GLOO_SOCKET_IFNAME": "lo"}, seen


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Away from the project's folder, where `-m megarl` would be megarl itself."""
    return subprocess.run(
        command, env=environment, cwd=environment["SEEN"], capture_output=True, text=True, timeout=300
    )


def check_two_nodes(seen: Path, arguments: list[str], *, ranks_a_node: int) -> None:
    reports = {int(file.name): json.loads(file.read_text()) for file in seen.iterdir()}
    assert sorted(reports) == list(range(2 * ranks_a_node))
    for rank, report in reports.items():
        assert (report["node"], report["local"]) == divmod(rank, ranks_a_node), (
            "a rank's number follows from its node's"
        )
        assert report["sum"] == 2 * ranks_a_node, "all ranks are in one group"
        assert report["arguments"] == ["train", *arguments]
        assert report["threads"] == "1"


@pytest.mark.distributed
def test_two_nodes_make_one_group_with_fixed_ranks_and_the_same_arguments(
    ranks: tuple[dict[str, str], Path], tmp_path: Path
) -> None:
    environment, seen = ranks
    environment |= {"NNODES": "2", "NPROC_PER_NODE": "2", "MASTER_ADDR": "127.0.0.1"}
    arguments = ["my run.yaml", "name=two words"]
    nodes = [
        subprocess.Popen([str(SCRIPT), *arguments], env=environment | {"NODE_RANK": str(node)}, cwd=tmp_path)
        for node in (1, 0)
    ]
    try:
        assert [node.wait(timeout=300) for node in nodes] == [0, 0]
    finally:
        for node in nodes:
            node.kill()
    check_two_nodes(seen, arguments, ranks_a_node=2)


@pytest.mark.distributed
def test_slurm_tasks_become_nodes(ranks: tuple[dict[str, str], Path], tmp_path: Path) -> None:
    """`srun` and `scontrol` are played by two lines each: a task a node, and the host names of the job."""
    environment, seen = ranks
    tools = {
        "scontrol": '[[ "$*" == "show hostnames node[0-1]" ]] && printf "127.0.0.1\\nnode1\\n"',
        "srun": 'while [[ "$1" == --* ]]; do shift; done\n'
        'SLURM_NODEID=1 "$@" & SLURM_NODEID=0 "$@" && wait -n',
    }
    for name, body in tools.items():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment |= {"PATH": f"{tmp_path}:{environment['PATH']}", "NPROC_PER_NODE": "1"}
    environment |= {"SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[0-1]", "SLURM_JOB_ID": "7"}
    environment |= {"SLURM_SUBMIT_DIR": str(LAUNCH.parent)}
    done = run([str(LAUNCH / "slurm.sbatch"), "my run.yaml"], environment)
    assert done.returncode == 0, done.stderr
    check_two_nodes(seen, ["my run.yaml"], ranks_a_node=1)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (
            {"NNODES": "2", "MASTER_ADDR": "a", "NPROC_PER_NODE": "1"},
            "NODE_RANK is not set: this node's number, 0 to 1",
        ),
        ({"NNODES": "2", "NODE_RANK": "0", "NPROC_PER_NODE": "1"}, "MASTER_ADDR is not set"),
        ({"NNODES": "two"}, "NNODES=two is not a whole number from 1 on"),
        ({"NNODES": "2", "NODE_RANK": "2", "MASTER_ADDR": "a"}, "NODE_RANK=2, but of 2 nodes the last is 1"),
        ({"NPROC_PER_NODE": "0"}, "NPROC_PER_NODE=0 is not a whole number from 1 on"),
        pytest.param(
            {"NPROC_PER_NODE": ""},
            "NPROC_PER_NODE is not set, and no GPU was found",
            marks=pytest.mark.skipif(
                shutil.which("nvidia-smi") is not None, reason="there are GPUs to count"
            ),
        ),
    ],
)
def test_a_wrong_variable_is_named_before_anything_starts(
    ranks: tuple[dict[str, str], Path], variables: dict[str, str], message: str
) -> None:
    environment, seen = ranks
    done = run([str(SCRIPT), "run.yaml"], environment | variables)
    assert done.returncode == 2
    assert message in done.stderr
    assert list(seen.iterdir()) == []


def test_the_kubernetes_job_counts_its_nodes_once_and_names_its_first_pod() -> None:
    service, job = yaml.safe_load_all((LAUNCH / "kubernetes.yaml").read_text())
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    policy = pod["containers"][0]
    environment = {variable["name"]: variable for variable in policy["env"]}
    assert spec["completionMode"] == "Indexed"
    assert spec["completions"] == spec["parallelism"] == int(environment["NNODES"]["value"])
    assert "job-completion-index" in environment["NODE_RANK"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    assert pod["subdomain"] == service["metadata"]["name"]
    assert environment["MASTER_ADDR"]["value"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert int(environment["NPROC_PER_NODE"]["value"]) == policy["resources"]["limits"]["nvidia.com/gpu"]
    assert {mount["name"] for mount in policy["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
