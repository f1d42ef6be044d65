"""The TPU VM and XPK launchers against recorded answers."""

import pytest

from tests.launch.launching import OPTIONS, PREFLIGHT, UPLOAD, status

VM = "gcloud compute tpus tpu-vm"
MISSING = {"expect": f"{VM} describe titans-1", "code": 1, "stderr": "ERROR: NOT_FOUND: no titans-1\n"}
TRAIN = ["--", "mac_170m", "--training.steps", "10"]
START = "host.sh start mac_170m --training.steps 10 --training.run_dir /mnt/titans/runs/titans-1"


def on_hosts(worker):
    where = f"--worker {worker} "
    return [
        {"expect": f"{VM} ssh titans-1", "contains": [where, "host.sh setup my-bucket /mnt/titans"]},
        {"expect": f"{VM} ssh titans-1", "contains": [where, START]},
    ]


def follow(code):
    return {"expect": f"{VM} ssh titans-1", "contains": ["--worker 0 ", "host.sh follow"], "code": code}


def launch(launcher, kind, scenario, *options):
    end = launcher("tpu_vm.py", [*OPTIONS, "--type", kind, *options, *TRAIN], scenario)
    assert "fake:" not in end.err and len(end.asked) == len(scenario), end
    return end


@pytest.mark.parametrize("kind, runtime, worker", [("v5litepod-8", "v5-lite", "0"), ("v5p-128", "v5", "all")])
def test_one_host_and_a_pod(launcher, kind, runtime, worker):
    create = {
        "expect": f"{VM} create titans-1 --project my-project --zone us-east5-b --accelerator-type {kind} --version "
        f"v2-alpha-tpu{runtime}"
    }
    end = launch(launcher, kind, [*PREFLIGHT, *UPLOAD, MISSING, create, *on_hosts(worker), follow(0)])
    assert end.code == 0 and end.err == ""
    assert f"{VM} delete titans-1 --project my-project --zone us-east5-b --quiet" in end.out
    assert "host.sh stop" in end.out


def test_flags_of_ones_own_and_another_runtime(launcher):
    create = {"expect": f"{VM} create", "contains": ["--version v2-alpha-tpuv6e-x --network=mine --internal-ips"]}
    options = ["--runtime-version", "v2-alpha-tpuv6e-x", "--gcloud=--network=mine", "--gcloud=--internal-ips"]
    launch(launcher, "v6e-8", [*PREFLIGHT, *UPLOAD, MISSING, create, *on_hosts("0"), follow(0)], *options)


def test_a_vm_that_is_there_is_used(launcher):
    there = {"expect": f"{VM} describe", "stdout": "v6e-8\n"}
    assert launch(launcher, "v6e-8", [*PREFLIGHT, *UPLOAD, there, *on_hosts("0"), follow(0)]).code == 0
    end = launch(launcher, "v6e-16", [*PREFLIGHT, *UPLOAD, there])
    assert end.code == 2 and "--type is v6e-16, but titans-1 is a v6e-8; use v6e-8, or another --name" in end.err


def test_a_vm_that_was_preempted_is_not_waited_for(launcher):
    gone = {"expect": f"{VM} describe", "stdout": "v6e-8\tPREEMPTED\n"}
    end = launch(launcher, "v6e-8", [*PREFLIGHT, *UPLOAD, gone])
    assert end.code == 2 and "titans-1 is PREEMPTED; delete it, with gcloud compute tpus tpu-vm delete" in end.err
    ready = {**gone, "stdout": "v6e-8\tREADY\n"}
    assert launch(launcher, "v6e-8", [*PREFLIGHT, *UPLOAD, ready, *on_hosts("0"), follow(0)]).code == 0


@pytest.mark.parametrize("code, ends", [(42, 0), (1, 1), (2, 1)])
def test_the_end_of_training(launcher, code, ends):
    """Stopped and saved is no failure; anything else is."""
    there = {"expect": f"{VM} describe", "stdout": "v6e-8\n"}
    asked = {"expect": f"{VM} ssh", "contains": ["host.sh status"], "stdout": status(("exited", code, 7))}
    end = launch(launcher, "v6e-8", [*PREFLIGHT, *UPLOAD, there, *on_hosts("0"), follow(code), asked])
    assert end.code == ends and f"{VM} delete titans-1" in end.out


def test_several_slices_are_sent_to_queued_resources(launcher):
    end = launch(launcher, "v6e-8", [], "--slices", "2")
    assert end.code == 2 and "--slices is 2; several slices need launch/queued_resources.py" in end.err


IMAGE = "us-east5-docker.pkg.dev/my-project/titans/titans-jax:1"
GKE = [*OPTIONS, "--type", "v6e-256", "--slices", "2", "--cluster", "pods", "--image", IMAGE]


def test_xpk(launcher):
    scenario = [
        *PREFLIGHT,
        {"expect": "docker build --file", "contains": [f"launch/Dockerfile --tag {IMAGE} "]},
        {"expect": f"docker push {IMAGE}"},
        {
            "expect": "xpk workload create --workload titans-1 --cluster pods --project my-project --zone us-east5-b "
            f"--tpu-type v6e-256 --num-slices 2 --docker-image {IMAGE} --storage titans --max-restarts 50",
            "contains": [
                "--command exec python launch/supervise.py titans train mac_170m --training.steps 10 "
                "--mesh.slice 2 --training.run_dir /mnt/titans/runs/titans-1"
            ],
        },
    ]
    end = launcher("xpk.py", [*GKE, *TRAIN], scenario)
    assert end.code == 0 and end.err == "" and len(end.asked) == len(scenario)
    assert "xpk workload delete --workload titans-1 --cluster pods" in end.out


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([*GKE[:-4], "--image", IMAGE, *TRAIN], "--cluster is missing; for example --cluster my-cluster"),
        ([*GKE[:-2], *TRAIN], "--image is missing; for example --image us-east5-docker"),
        ([*GKE, "--image", "titans", *TRAIN], "--image is 'titans'; use a registry path"),
        ([*GKE, "--", "launch/common.py"], "launch/common.py is not in the image; put the file into configs/"),
    ],
)
def test_mistakes_with_xpk(launcher, arguments, message):
    end = launcher("xpk.py", arguments)
    assert end.code == 2 and message in end.err and end.err.count("\n") == 1 and end.asked == []


@pytest.mark.parametrize("script, options", [("tpu_vm.py", [*OPTIONS, "--type", "v5p-128"]), ("xpk.py", GKE)])
def test_dry_runs_run_nothing(launcher, script, options):
    end = launcher(script, [*options, "--dry-run", *TRAIN])
    assert end.code == 0 and end.err == "" and end.asked == []
    assert end.out.splitlines()[1].startswith("+ titans compile mac_170m --topology v")
    assert "--training.run_dir /mnt/titans/runs/titans-1" in end.out
