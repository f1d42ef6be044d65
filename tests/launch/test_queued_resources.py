"""The queued-resource launcher against recorded answers of gcloud: preemption, quota, failures, stopping."""

import json
import signal
import time

import common
import pytest
import queued_resources
from queued_resources import Training, judge

from tests.launch.launching import OPTIONS, PREFLIGHT, UPLOAD, status

BEGIN = [*PREFLIGHT, *UPLOAD]
QR = "gcloud compute tpus queued-resources"
TRAIN = "host.sh start mac_170m --data.path /mnt/titans/data --training.run_dir /mnt/titans/runs/titans-1"
CREATE = {
    "expect": f"{QR} create titans-1 --project my-project --zone us-east5-b --node-id titans-1 --accelerator-type "
    "v6e-16 --runtime-version v2-alpha-tpuv6e --spot"
}
DELETE = {"expect": f"{QR} delete titans-1 --project my-project --zone us-east5-b --force --quiet"}
ABSENT = {
    "expect": f"{QR} describe titans-1",
    "code": 1,
    "stderr": "ERROR: (gcloud.compute.tpus.queued-resources.describe) NOT_FOUND: Resource 'titans-1' was not found\n",
}
SETUP = {"expect": f"{QR} ssh titans-1", "contains": ["--node all --worker all", "host.sh setup my-bucket"]}
START = {"expect": f"{QR} ssh titans-1", "contains": ["--node all --worker all", TRAIN]}
LOG = {"expect": f"{QR} ssh titans-1", "contains": ["--worker 0", "tail"], "stdout": "titans: its last sentence\n"}


def described(state, *, message="", initiator="SERVICE"):
    answer = {"name": "titans-1", "state": {"state": state, "stateInitiator": initiator}}
    if message:
        answer["state"]["failedData"] = {"error": {"code": 8, "message": message}}
    return {"expect": f"{QR} describe titans-1", "stdout": json.dumps(answer)}


def hosts(*each, code=0):
    """Four hosts' answer (a v6e-16 has four); fewer where ssh could not reach all."""
    each = each * 4 if len(each) == 1 else each
    return {"expect": f"{QR} ssh titans-1", "contains": ["host.sh status"], "stdout": status(*each), "code": code}


ABSENT_HOSTS = hosts(("absent", "-", 0))
ACTIVE = described("ACTIVE")


def running(step):
    return [ACTIVE, hosts(("running", "-", step))]


def exited(code, step):
    return [ACTIVE, hosts(("exited", code, step))]


CREATED = [ABSENT, CREATE, described("WAITING_FOR_RESOURCES"), described("PROVISIONING"), ACTIVE, ABSENT_HOSTS]
STARTED = [*CREATED, SETUP, START]


def watch(launcher, scenario, *options):
    """The launcher's end; every step of the scenario was asked for, and nothing else."""
    arguments = [*OPTIONS, "--type", "v6e-16", "--spot", "--poll", "0.001", *options]
    end = launcher("queued_resources.py", [*arguments, "--", "mac_170m", "--data.path", "/mnt/titans/data"], scenario)
    assert "fake:" not in end.err + end.out and len(end.asked) == len(scenario), (end, scenario[len(end.asked) :])
    assert "Traceback" not in end.err
    return end


def test_a_smooth_run_ends_with_the_slice_deleted(launcher):
    scenario = [*BEGIN, *STARTED, *running(0), *running(200), *exited(0, 400), DELETE]
    end = watch(launcher, scenario)
    assert end.code == 0 and end.err == ""
    assert "finished step 400; the run is in gs://my-bucket/runs/titans-1" in end.out


def test_keep_leaves_the_slice_and_says_how_to_delete_it(launcher):
    end = watch(launcher, [*BEGIN, *STARTED, *exited(0, 400)], "--keep")
    assert end.code == 0
    assert f"{DELETE['expect']}" in end.out


def test_a_preempted_slice_is_deleted_created_again_and_training_resumed(launcher):
    cut_off = [ACTIVE, hosts(("running", "-", 300), ("exited", 42, 300), code=255)]
    gone = [described("SUSPENDING"), described("SUSPENDED"), DELETE]
    scenario = [*BEGIN, *STARTED, *running(200), *cut_off, *gone, *STARTED, *running(500), *exited(0, 600), DELETE]
    end = watch(launcher, scenario)
    assert end.code == 0 and "finished step 600" in end.out
    starts = [line for line in end.asked if "host.sh start" in line]
    assert len(starts) == 2 and starts[0] == starts[1]  # the same command on the same run folder resumes
    assert end.asked.count(next(line for line in end.asked if " create " in line)) == 2


def test_preemptions_never_end_the_watch_while_checkpoints_advance(launcher):
    rounds = [
        step
        for i in range(1, 5)
        for step in [*STARTED, *running(100 * i), described("SUSPENDED"), DELETE]
    ]  # fmt: skip
    end = watch(launcher, [*BEGIN, *rounds, *STARTED, *exited(0, 500), DELETE], "--retries", "1")
    assert end.code == 0


def test_preemptions_without_progress_are_given_up(launcher):
    once = [*STARTED, described("SUSPENDED")]
    end = watch(launcher, [*BEGIN, *once, DELETE, *once, DELETE, *once], "--retries", "2")
    assert end.code == 1
    assert "given up: SUSPENDED, 3 times without a new checkpoint" in end.err and DELETE["expect"] in end.err


def test_a_failed_request_is_recreated_and_given_up_after_the_same_failure(launcher):
    def failed(operation):
        return described("FAILED", message=f"There is no more capacity in us-east5-b (operation {operation})")

    once = [ABSENT, CREATE, described("ACCEPTED")]
    end = watch(launcher, [*BEGIN, *once, failed(17), DELETE, *once, failed(23)], "--retries", "1")
    assert end.code == 1
    assert "given up: FAILED (There is no more capacity in us-east5-b (operation 23)), 2 times" in end.err


def test_refused_quota_is_asked_for_again(launcher):
    refused = {
        **CREATE,
        "code": 1,
        "stderr": "ERROR: (gcloud.compute.tpus.queued-resources.create) RESOURCE_EXHAUSTED: Quota limit "
        "'TPUV6EPreemptiblePerProjectPerZoneForTPUAPI' has been exceeded. Limit: 0 in zone us-east5-b.\n",
    }
    end = watch(launcher, [*BEGIN, ABSENT, refused, ABSENT, refused], "--retries", "1")
    assert end.code == 1
    assert "given up: refused (" in end.err and "Quota limit 'TPUV6E" in end.err
    end = watch(launcher, [*BEGIN, ABSENT, refused, *STARTED, *exited(0, 400), DELETE], "--retries", "1")
    assert end.code == 0


def test_a_refusal_that_time_does_not_solve_ends_at_once(launcher):
    denied = {**CREATE, "code": 1, "stderr": "ERROR: PERMISSION_DENIED: Cloud TPU API has not been used in project\n"}
    end = watch(launcher, [*BEGIN, ABSENT, denied])
    assert end.code == 1 and "PERMISSION_DENIED" in end.err and end.err.count("\n") == 1


def test_a_mistake_in_the_configuration_is_not_tried_again(launcher):
    end = watch(launcher, [*BEGIN, *STARTED, *exited(2, 0), LOG])
    assert end.code == 2
    assert "titans: its last sentence" in end.out
    assert "refused its configuration or data" in end.err and DELETE["expect"] in end.err


def test_after_the_mistake_is_corrected_the_same_slice_is_used(launcher):
    begin = [*BEGIN, *exited(2, 0), SETUP, START]
    end = watch(launcher, [*begin, *running(10), *exited(0, 400), DELETE])
    assert end.code == 0


def test_training_that_fails_is_started_again_and_given_up_without_progress(launcher):
    fails = [*exited(134, 100), LOG]
    again = [SETUP, START]
    end = watch(launcher, [*BEGIN, *STARTED, *fails, *again, *fails, *again, *fails], "--retries", "2")
    assert end.code == 1
    assert "given up: training ended with exit code 134, 3 times" in end.err


def test_training_is_started_again_after_a_host_was_restarted(launcher):
    restarted = [ACTIVE, hosts(*[("running", "-", 100)] * 3, ("absent", "-", 0))]
    end = watch(launcher, [*BEGIN, *STARTED, *running(100), *restarted, SETUP, START, *exited(0, 200), DELETE])
    assert end.code == 0


def test_fresh_machines_that_do_not_train_yet_are_no_failure(launcher, monkeypatch):
    monkeypatch.setattr(queued_resources, "UNREACHABLE_LOOKS", 1)
    silent = [ACTIVE, {**hosts(("running", "-", 1)), "stdout": "", "code": 255}]
    lost = [described("SUSPENDED"), DELETE, *STARTED, *silent, DELETE]
    end = watch(launcher, [*BEGIN, *STARTED, *lost, *STARTED, *exited(0, 400), DELETE], "--retries", "1")
    assert end.code == 0


def test_somebody_stopped_training(launcher):
    end = watch(launcher, [*BEGIN, *STARTED, *running(100), *exited(42, 150), *exited(42, 150)])
    assert end.code == 0
    assert "stopped and saved at step 150; run the same command again to go on" in end.out
    assert DELETE["expect"] in end.out
    end = watch(launcher, [*BEGIN, *exited(42, 150), SETUP, START, *running(160), *exited(0, 200), DELETE])
    assert end.code == 0  # the same command goes on


def test_somebody_deleted_the_machines(launcher):
    end = watch(launcher, [*BEGIN, *STARTED, *running(1), described("SUSPENDED", initiator="USER")])
    assert end.code == 1 and "somebody deleted the machines" in end.err


def test_hosts_that_never_answer_are_recreated(launcher, monkeypatch):
    monkeypatch.setattr(queued_resources, "UNREACHABLE_LOOKS", 3)
    silent = [ACTIVE, {**hosts(("running", "-", 1)), "stdout": "", "code": 255}] * 3
    end = watch(launcher, [*BEGIN, *STARTED, *silent, DELETE, *STARTED, *exited(0, 400), DELETE])
    assert end.code == 0


def test_gcloud_that_does_not_answer_is_asked_again_then_left(launcher, monkeypatch):
    monkeypatch.setattr(queued_resources, "FAILED_LOOKS", 3)
    broken = {"expect": f"{QR} describe", "code": 1, "stderr": "ERROR: There was a problem refreshing your tokens\n"}
    end = watch(launcher, [*BEGIN, broken, broken, *STARTED, *exited(0, 400), DELETE])
    assert end.code == 0
    end = watch(launcher, [*BEGIN, broken, broken, broken])
    assert end.code == 1 and "refreshing your tokens" in end.err


def test_several_slices(launcher):
    answers = {"expect": f"{QR} ssh titans-1", "contains": ["host.sh status"]}
    create = {"expect": f"{QR} create", "contains": ["--node-count 2 --node-prefix titans-1"]}
    eight = [ACTIVE, {**answers, "stdout": status(*[("exited", 0, 400)] * 8)}]
    start = {**START, "contains": ["host.sh start mac_170m", "--mesh.slice 2 --training.run_dir"]}
    started = [ABSENT, create, ACTIVE, {**answers, "stdout": status(*[("absent", "-", 0)] * 8)}, SETUP, start]
    end = watch(launcher, [*BEGIN, *started, *eight, DELETE], "--slices", "2")
    assert end.code == 0 and "8 of 8 hosts" in end.out
    assert "--topology v6e-16 --slices 2" in end.asked[1]


def test_ctrl_c_leaves_the_slice_and_says_how_to_delete_it(launcher):
    arguments = [*OPTIONS, "--type", "v6e-16", "--spot", "--poll", "60", "--", "mac_170m", "--data.path", "/x"]
    scenario = [*BEGIN, *running(10)]
    with launcher.start("queued_resources.py", arguments, scenario) as process:
        line = next(line for line in process.stdout if "latest checkpoint" in line)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert "running, latest checkpoint 10" in line and process.returncode == 130 and err == ""
    assert "left as it is" in out and DELETE["expect"] in out
    assert not any(" delete " in asked for asked in launcher.asked())


def test_every_state_of_the_api_has_an_action():
    # QueuedResourceState.State of the Cloud TPU API, v2.
    api = "CREATING ACCEPTED PROVISIONING FAILED DELETING ACTIVE SUSPENDING SUSPENDED WAITING_FOR_RESOURCES"
    assert set(queued_resources.STATES) == {*api.split(), "ABSENT"}


@pytest.mark.parametrize(
    "answers, started, verdict",
    [
        ("running running", True, Training.RUNNING),
        ("running running", False, Training.RUNNING),
        ("running", True, Training.UNREACHABLE),
        ("exited:2", True, Training.REFUSED),
        ("exited:2", False, Training.UNREACHABLE),
        ("exited:2 exited:2", False, Training.ABSENT),
        ("exited:0 exited:0", False, Training.ABSENT),
        ("exited:0 exited:0", True, Training.FINISHED),
        ("exited:0 exited:42", True, Training.FINISHED),  # a host whose view of the bucket is a little old
        ("exited:42 exited:42", True, Training.STOPPED),
        ("exited:42 running", True, Training.RUNNING),
        ("exited:137 running", True, Training.RUNNING),
        ("exited:137 exited:134", True, Training.FAILED),
        ("exited:1 exited:42", True, Training.FAILED),
        ("absent running", True, Training.ABSENT),
    ],
)
def test_what_the_hosts_say_together(answers, started, verdict):
    found = [(state, code or "-", 7) for state, _, code in (answer.partition(":") for answer in answers.split())]
    assert judge(common.read_hosts(status(*found)), expected=2, started=started) is verdict


def test_pauses_grow_and_stay_bounded():
    watch = queued_resources.Watch.__new__(queued_resources.Watch)
    watch.options = type("Options", (), {"poll": 30})
    pauses = watch._pauses()
    first = [next(pauses) for _ in range(20)]
    assert first[0] == 30 and first == sorted(first) and first[-1] == 120
    began = time.monotonic()
    assert all(next(pauses) == 120 for _ in range(10_000)) and time.monotonic() - began < 1


def test_dry_run_prints_the_commands_of_every_state_and_runs_none(launcher):
    arguments = [
        *OPTIONS,
        "--type",
        "v6e-16",
        "--spot",
        "--dry-run",
        "--",
        "mac_170m",
        "--data.path",
        "/mnt/titans/data",
    ]
    end = launcher("queued_resources.py", arguments)
    assert end.code == 0 and end.err == "" and end.asked == []
    printed = [line for line in end.out.splitlines() if line.startswith("+")]
    verbs = [
        "titans configs",
        "titans compile",
        "buckets describe",
        "tar",
        "storage cp",
        "describe",
        "create",
        "status",
        "setup",
        "start",
    ]
    verbs += ["delete", "follow", "stop"]
    assert len(printed) == len(verbs) and all(verb in line for verb, line in zip(verbs, printed, strict=True))
    assert printed[6] == "+ " + CREATE["expect"]
