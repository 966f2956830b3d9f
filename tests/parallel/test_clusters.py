"""Who is joined, by options and by the variables of a cluster; nothing is started."""

import importlib.util

import pytest

from memjax.errors import ConfigError
from memjax.parallel.clusters import Wanted, wanted

SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_NODELIST": "node[001-003]",
    "SLURM_NTASKS": "6",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}
PAIR = {"coordinator": "host:12345", "num_processes": 2, "process_id": 1}


def test_a_plain_machine_is_alone():
    assert wanted({}) is None
    assert wanted({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}) is None, "any pod"
    assert wanted({"TPU_WORKER_HOSTNAMES": "localhost"}) is None, "a slice of one host"
    assert wanted({}, coordinator="host:1", num_processes=1, process_id=0) is None
    batch_script = {k: v for k, v in SLURM.items() if k != "SLURM_STEP_NODELIST"}
    assert wanted(batch_script) is None, "sbatch without srun"
    assert wanted(SLURM | {"SLURM_STEP_NUM_TASKS": "1"}) is None, "srun -n 1"


def test_options_win_over_variables_and_both_over_a_cluster():
    told = Wanted(
        found_by="options", coordinator="host:12345", num_processes=2, process_id=1
    )
    assert wanted(SLURM, **PAIR) == told
    variables = {
        "MEMJAX_COORDINATOR": "host:12345",
        "MEMJAX_NUM_PROCESSES": "2",
        "MEMJAX_PROCESS_ID": "1",
    }
    assert wanted(SLURM | variables) == told
    assert wanted(variables, cluster="none") is None, "given by name"
    assert wanted(variables | {"MEMJAX_PROCESS_ID": "7"}, process_id=1) == told
    v6 = wanted({}, coordinator="[::1]:80", num_processes=2, process_id=0)
    assert v6 is not None and v6.coordinator == "[::1]:80"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"coordinator": "h:1"}, "given together with num-processes, process-id"),
        ({"process_id": 0}, "process-id = 0 .*together with coordinator, num-proc"),
        ({**PAIR, "coordinator": "host"}, "coordinator = 'host' .*HOST:PORT"),
        ({**PAIR, "coordinator": "host:"}, "HOST:PORT"),
        ({**PAIR, "coordinator": ":12345"}, "HOST:PORT"),
        ({**PAIR, "coordinator": "host:0"}, "port 1..65535"),
        ({**PAIR, "coordinator": "host:65536"}, "port 1..65535"),
        ({**PAIR, "coordinator": "host:-1"}, "port 1..65535"),
        ({**PAIR, "num_processes": 0}, "num-processes = 0 .*at least 1"),
        ({**PAIR, "process_id": 2}, "process-id = 2 .*0..1, as --num-processes is 2"),
        ({**PAIR, "process_id": -1}, "process-id = -1"),
        ({**PAIR, "cluster": "slurm"}, "cluster = 'slurm' .*auto beside a coord"),
        ({"cluster": "mpi"}, "cluster = 'mpi' .*one of auto, none, slurm"),
        ({"cluster": "slurm"}, "inside `srun`; SLURM_JOB_ID, .* is not set"),
        ({"cluster": "kubernetes"}, "KUBERNETES_SERVICE_HOST is not set"),
    ],
)
def test_half_an_address_and_bad_numbers_are_refused(given, said):
    with pytest.raises(ConfigError, match=said):
        wanted({}, **given)


def test_numbers_in_variables_are_integers():
    with pytest.raises(ConfigError, match="num-processes = 'two' .*an integer"):
        wanted({"MEMJAX_NUM_PROCESSES": "two"}, coordinator="h:1", process_id=0)
    with pytest.raises(ConfigError, match="SLURM_PROCID = 'x'"):
        wanted(SLURM | {"SLURM_PROCID": "x"})


def test_slurm_is_recognised_and_can_be_declined():
    found = wanted(SLURM)
    assert found is not None and found.found_by == "slurm"
    assert (found.num_processes, found.process_id) == (6, 3)
    assert found.coordinator is None, "jax knows the first node"
    assert wanted(SLURM, cluster="slurm") == found
    assert wanted(SLURM, cluster="none") is None
    assert wanted(SLURM | {"MEMJAX_CLUSTER": "none"}) is None


@pytest.mark.parametrize(
    ("more", "ids"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3"}, (2, 3)),
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "5"}, ()),
        ({}, (1,)),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPUS_PER_TASK": "2"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_GPU_BIND": "single:2"}, ()),
        ({"CUDA_VISIBLE_DEVICES": "0,1,2,3", "SLURM_GPU_BIND": "none"}, (2, 3)),
        # The third node has one task: it takes all.
        ({"CUDA_VISIBLE_DEVICES": "0,1", "SLURM_NODEID": "2"}, ()),
        ({"SLURM_STEP_TASKS_PER_NODE": "", "CUDA_VISIBLE_DEVICES": "0,1"}, (1,)),
    ],
)
def test_gpus_of_a_slurm_task(more, ids):
    found = wanted(SLURM | more)
    assert found is not None and found.local_device_ids == ids


@pytest.mark.parametrize(
    "variables",
    [
        {"TPU_WORKER_HOSTNAMES": "a,b"},
        {"TPU_PROCESS_ADDRESSES": "a:8476,b:8476"},
        {"TPU_WORKER_HOSTNAMES": "a", "MEGASCALE_NUM_SLICES": "2"},
    ],
)
def test_tpu_hosts_that_list_each_other_are_recognised(variables):
    assert wanted(variables) == Wanted(found_by="tpu")
    assert wanted({}, cluster="tpu") == Wanted(found_by="tpu"), "by metadata"


def test_a_pod_of_an_indexed_job_is_recognised_with_the_package(monkeypatch):
    pod = {"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "1"}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert wanted(pod) is None, "jobs of many single processes are indexed too"
    with pytest.raises(ConfigError, match="pip install kubernetes"):
        wanted(pod, cluster="kubernetes")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert wanted(pod) == Wanted(found_by="kubernetes")
    assert wanted(pod, cluster="none") is None
