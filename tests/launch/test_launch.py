"""The scripts of launch/: what they would run and refuse, and local.sh for real."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).parents[2] / "launch"
SCRIPTS = sorted(path.relative_to(LAUNCH).as_posix() for path in LAUNCH.rglob("*.sh"))
TRAIN = ("train", "my file.py", "--run-dir", 'say "a" & b')


def bash(script, *words, **environ):
    return subprocess.run(
        ["bash", str(LAUNCH / script), *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env={"PATH": "/usr/bin:/bin", **environ},
    )


def dry_run(script, *words, **environ):
    """What --dry-run prints; nothing of its commands is on this PATH's machine."""
    done = bash(script, "--dry-run", *words, **environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_scripts_are_here():
    assert SCRIPTS == [
        "gke/jobset.sh",
        "gke/xpk.sh",
        "local.sh",
        "slurm.sh",
        "tpu_vm.sh",
    ]


@pytest.mark.parametrize("script", SCRIPTS)
def test_shellcheck_has_nothing_to_say(script):
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = str(beside) if beside.exists() else shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install -e '.[dev]'")
    done = subprocess.run(
        [shellcheck, str(LAUNCH / script)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("script", SCRIPTS)
def test_wrong_usage_prints_the_head_of_the_script(script):
    done = bash(script)
    assert done.returncode == 2 and done.stdout == ""
    assert f"launch/{script} [--dry-run]" in done.stderr
    assert "set -euo" not in done.stderr


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("local.sh", ("0", "train", "x.py")),
        ("local.sh", ("--gpus", "2", "--cpu-devices", "2", "2", "train", "x.py")),
        ("local.sh", ("--gpus", "many", "2", "train", "x.py")),
        ("slurm.sh", ("2", "--partition=gpu", "train", "x.py")),
        ("slurm.sh", ("two", "--", "train", "x.py")),
        ("tpu_vm.sh", ("my-tpu", "--zone=a", "train")),
        ("gke/jobset.sh", ("Name", "2", "8", "image", "runs", "train")),
        ("gke/jobset.sh", ("name", "2", "no", "image", "runs", "train")),
        ("gke/xpk.sh", ("name", "cluster", "v6e-256", "two", "image", "train")),
    ],
)
def test_bad_words_are_refused(script, words):
    assert bash(script, "--dry-run", *words).returncode == 2


def test_local_gives_every_process_its_number_and_devices():
    lines = dry_run("local.sh", "--gpus", 4, 2, *TRAIN, PORT="1234").splitlines()
    for i, line in enumerate(lines):
        words = shlex.split(line)
        gpus = ["0,1,2,3", "4,5,6,7"][i]
        assert words[:3] == ["env", f"CUDA_VISIBLE_DEVICES={gpus}", "memjax"]
        joins = ["--coordinator", "127.0.0.1:1234"]
        joins += ["--num-processes", "2", "--process-id", str(i)]
        assert words[3:] == [*TRAIN, *joins]
    assert len(lines) == 2
    simulated = dry_run("local.sh", "--cpu-devices", 3, 1, *TRAIN, XLA_FLAGS="--a=1")
    words = shlex.split(simulated)
    flags = "XLA_FLAGS=--a=1 --xla_force_host_platform_device_count=3"
    assert words[:4] == ["env", "JAX_PLATFORMS=cpu", flags, "memjax"]


def test_slurm_submits_one_process_a_node():
    text = dry_run("slurm.sh", 4, "--partition=gpu", "--time=1-00:00:00", "--", *TRAIN)
    first, script = text.split("<<\n", 1)
    words = shlex.split(first)
    assert words[0] == "sbatch"
    assert {"--nodes=4", "--ntasks-per-node=1", "--partition=gpu"} < set(words)
    assert {"--signal=TERM@120", "--requeue", "--open-mode=append"} < set(words)
    head, command, *rest = script.splitlines()
    assert head == "#!/usr/bin/env bash" and rest == []
    assert shlex.split(command) == ["srun", "--kill-on-bad-exit=1", "memjax", *TRAIN]


def test_tpu_vm_runs_on_all_hosts():
    words = shlex.split(dry_run("tpu_vm.sh", "my-tpu", "us-a", *TRAIN, FOLDER="a b"))
    ssh = ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "my-tpu", "--zone=us-a"]
    assert words[:8] == [*ssh, "--worker=all"]
    (command,) = words[8:]
    remote = shlex.split(command.removeprefix("--command="))
    assert remote[:3] == ["cd", "a b", "&&"]
    assert remote[3:] == [".venv/bin/memjax", *TRAIN, "--cluster", "tpu"]


def test_jobset_is_a_manifest_of_joined_pods():
    yaml = pytest.importorskip("yaml")
    text = dry_run("gke/jobset.sh", "pod1", 4, 8, "host/image:1", "runs", *TRAIN)
    assert not re.search(r"@[A-Z]+@", text)
    manifest = yaml.safe_load(text)
    assert manifest["apiVersion"] == "jobset.x-k8s.io/v1alpha2"
    assert manifest["kind"] == "JobSet" and manifest["metadata"]["name"] == "pod1"
    spec = manifest["spec"]
    assert spec["failurePolicy"]["maxRestarts"] > 0
    (workers,) = spec["replicatedJobs"]
    job = workers["template"]["spec"]
    assert (job["completionMode"], job["completions"]) == ("Indexed", 4)
    assert (job["parallelism"], job["backoffLimit"]) == (4, 0)
    pod = job["template"]["spec"]
    (container,) = pod["containers"]
    assert container["image"] == "host/image:1"
    assert container["command"] == ["memjax", *TRAIN, "--stopped-code", "75"]
    assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}
    environ = {one["name"]: one for one in container["env"]}
    assert environ["MEMJAX_NUM_PROCESSES"]["value"] == "4"
    # JobSet's names: JOBSET-REPLICATEDJOB-JOB-POD.JOBSET
    assert environ["MEMJAX_COORDINATOR"]["value"] == "pod1-workers-0-0.pod1:8476"
    field = environ["MEMJAX_PROCESS_ID"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert field == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    plain = dry_run("gke/jobset.sh", "pod1", 2, 1, "image", "runs", "eval", "/runs/a")
    assert '["memjax", "eval", "/runs/a"]' in plain, "only train can be stopped"


def test_xpk_submits_the_slices():
    words = shlex.split(
        dry_run(
            *("gke/xpk.sh", "pod1", "my-cluster", "v6e-256", 2, "host/image:1", *TRAIN),
            OPTIONS="--project=p --zone=z",
        )
    )
    assert words[:3] == ["xpk", "workload", "create"]
    assert {"--workload=pod1", "--cluster=my-cluster", "--tpu-type=v6e-256"} < set(
        words
    )
    assert {"--max-restarts=20", "--restart-on-user-code-failure"} < set(words)
    assert {"--num-slices=2", "--docker-image=host/image:1", "--zone=z"} < set(words)
    command = shlex.split(words[-1].removeprefix("--command="))
    assert command == ["memjax", *TRAIN, "--stopped-code", "75"]


FAKE = """#!/usr/bin/env bash
# Stands for memjax: says what it was given, and ends as it is told.
echo "$JAX_PLATFORMS $*" >"$FOLDER/${!#}"
[[ ${!#} != "$FAILS" ]] || exit 3
[[ ${!#} != "$HANGS" ]] || exec sleep 100
"""


@pytest.mark.parametrize(("fails", "code"), [("none", 0), ("1", 3)])
def test_local_starts_all_and_ends_with_the_status_of_the_first_that_fails(
    tmp_path, fails, code
):
    fake = tmp_path / "memjax"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    settings = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FOLDER": str(tmp_path)}
    settings |= {"FAILS": fails, "HANGS": "none", "PORT": "1234"}
    done = bash("local.sh", "--cpu-devices", 1, 3, "train", "x.py", **settings)
    assert done.returncode == code, done.stderr
    said = [(tmp_path / str(i)).read_text() for i in range(3)]
    assert [text.split()[-1] for text in said] == ["0", "1", "2"]
    assert all(text.startswith("cpu train x.py --coordinator ") for text in said)


@pytest.mark.slow
def test_local_ends_a_process_that_hangs_after_another_failed(tmp_path):
    fake = tmp_path / "memjax"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    settings = {"PATH": f"{tmp_path}:/usr/bin:/bin", "FOLDER": str(tmp_path)}
    settings |= {"FAILS": "1", "HANGS": "0"}
    done = bash("local.sh", 2, "train", "x.py", **settings)
    assert done.returncode == 3


def test_local_runs_two_real_processes():
    """`memjax doctor`, joined: the cheapest command that needs the other process."""
    done = subprocess.run(
        ["bash", str(LAUNCH / "local.sh"), "--cpu-devices", "2", "2", "doctor"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    assert "process 0 of 2, joined by options" in done.stdout
    assert "2 devices here, 4 in all" in done.stdout
    assert done.stdout.count("versions") == 1, "one process speaks"
