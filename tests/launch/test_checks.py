"""Names of slices, and mistakes: one sentence with what would work, before any command runs."""

import argparse
import json
import re
import shlex
import subprocess
import tarfile

import common
import pytest

from tests.launch.launching import CHECKED, CHECKOUT, DATA, OPTIONS, PREFLIGHT
from titans_jax.config import files

GOOD = [*OPTIONS, "--type", "v6e-8"]
TRAIN = ["--", "mac_170m"]


@pytest.mark.parametrize(
    "name, chips, hosts, runtime",
    [
        # chips and VMs from the tables of Google's pages on each version, not from the code
        ("v4-8", 4, 1, "tpu-ubuntu2204-base"),
        ("v4-32", 16, 4, "tpu-ubuntu2204-base"),
        ("v5litepod-1", 1, 1, "v2-alpha-tpuv5-lite"),
        ("v5litepod-8", 8, 1, "v2-alpha-tpuv5-lite"),
        ("v5litepod-16", 16, 4, "v2-alpha-tpuv5-lite"),
        ("v5litepod-256", 256, 64, "v2-alpha-tpuv5-lite"),
        ("v5p-8", 4, 1, "v2-alpha-tpuv5"),
        ("v5p-16", 8, 2, "v2-alpha-tpuv5"),
        ("v5p-1024", 512, 128, "v2-alpha-tpuv5"),
        ("v5p-12288", 6144, 1536, "v2-alpha-tpuv5"),
        ("v6e-4", 4, 1, "v2-alpha-tpuv6e"),
        ("v6e-8", 8, 1, "v2-alpha-tpuv6e"),
        ("v6e-16", 16, 4, "v2-alpha-tpuv6e"),
        ("v6e-256", 256, 64, "v2-alpha-tpuv6e"),
        ("tpu7x-8", 4, 1, None),
        ("tpu7x-256", 128, 32, None),
    ],
)
def test_slices(name, chips, hosts, runtime):
    found = common.parse_type(name)
    assert (found.chips, found.hosts, found.generation.runtime) == (chips, hosts, runtime)


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("v5e-8", "v5litepod-8 (runtime version v2-alpha-tpuv5-lite)"),
        ("v6-256", "v6e-256 (runtime version v2-alpha-tpuv6e)"),
        ("v6e-200", "v6e-256 (runtime version v2-alpha-tpuv6e)"),
        ("v6e-512", "v6e-256 (runtime version v2-alpha-tpuv6e)"),
        ("V6E-8", "v6e-8 (runtime version v2-alpha-tpuv6e)"),
        ("v5p-4", "v5p-8 (runtime version v2-alpha-tpuv5)"),
        ("v5p-1000", "v5p-1024 (runtime version v2-alpha-tpuv5)"),
        ("v5litpod-256", "v5litepod-256 (runtime version v2-alpha-tpuv5-lite)"),
        ("v7x-8", "tpu7x-8 (on GKE, launch/xpk.py)"),
        ("v6e", "v6e-8 (runtime version v2-alpha-tpuv6e)"),
        ("h100-8", "-"),
    ],
)
def test_an_unknown_type_names_the_nearest(name, nearest):
    with pytest.raises(common.LaunchError, match=re.escape(f"--type {name} is no accelerator type; use ")) as error:
        common.parse_type(name)
    assert nearest in str(error.value)
    common.parse_type(str(error.value).split("; use ")[1].split(" ")[0])  # what it says works


@pytest.mark.parametrize("script", ["tpu_vm.py", "queued_resources.py"])
@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "there is no configuration; end with -- CONFIG"),
        ([*GOOD, "--"], "there is no configuration after --"),
        ([*GOOD, "--", "mac_170"], "there is no configuration mac_170; use mac_170m"),
        ([*GOOD, "--", "/tmp/mine.py"], "there is no /tmp/mine.py in "),
        ([*GOOD, *TRAIN, "--training.run_dir", "/x"], "training.run_dir is set by the launcher"),
        ([*GOOD, *TRAIN, "--training.run-dir=/x"], "training.run_dir is set by the launcher"),
        ([*GOOD[2:], *TRAIN], "--name is missing; for example --name titans-1"),
        ([*GOOD[:2], *GOOD[4:], *TRAIN], "--project is missing; for example --project my-project"),
        ([*GOOD[:4], *GOOD[6:], *TRAIN], "--zone is missing; for example --zone us-east5-b"),
        ([*OPTIONS, *TRAIN], "--type is missing; for example --type v6e-8"),
        ([*GOOD, "--name", "Titans_1", *TRAIN], "--name is 'Titans_1'; use at most 39 lower-case letters, digits and"),
        ([*GOOD, "--name", "t" * 40, *TRAIN], "use at most 39 lower-case letters"),
        ([*GOOD, "--", str(CHECKOUT / "configs/quickstart.py")], "use the path of a file inside it, relative to it"),
        ([*GOOD, "--zone", "us-east5", *TRAIN], "--zone is 'us-east5'; use a zone, which ends in a letter, such as us"),
        ([*GOOD, "--project", "My Project", *TRAIN], "--project is 'My Project'; use the project's id, not its name"),
        ([*GOOD, "--bucket", "gs://b-1/runs", *TRAIN], "--bucket is 'b-1/runs'; use the bucket's name alone"),
        ([*GOOD, "--slices", "0", *TRAIN], "--slices is 0; use at least 1"),
        ([*GOOD, "--slices", "two", *TRAIN], "invalid int value: 'two'"),
        ([*GOOD, "--spotty", *TRAIN], "unrecognized arguments: --spotty"),
        ([*GOOD, "--nam", "another", *TRAIN], "unrecognized arguments: --nam"),
        ([*GOOD, "--type", "v5e-8", *TRAIN], "use v5litepod-8 (runtime version v2-alpha-tpuv5-lite)"),
        ([*GOOD, "--type", "tpu7x-8", *TRAIN], "--type is tpu7x-8; TPU7x needs GKE: launch/xpk.py"),
    ],
)
def test_a_mistake_ends_in_one_sentence_before_any_command(launcher, script, arguments, message):
    end = launcher(script, arguments)
    assert end.code == 2 and end.asked == [] and end.out == ""
    assert end.err.startswith("launch: ") and message in end.err and end.err.count("\n") == 1


def test_the_folder_of_a_bucket_may_begin_with_gs(launcher):
    end = launcher("tpu_vm.py", [*GOOD, "--bucket", "gs://other-bucket/", "--dry-run", *TRAIN])
    assert end.code == 0 and "gs://other-bucket/code" in end.out


def test_a_configuration_that_does_not_fit_ends_before_gcloud(launcher):
    scenario = [PREFLIGHT[0], {**PREFLIGHT[1], "code": 2, "stderr": "titans: it needs 20.1 GiB of 16 GiB\n"}]
    end = launcher("tpu_vm.py", [*GOOD, *TRAIN], scenario)
    assert end.code == 1 and "it needs 20.1 GiB" in end.err and "titans compile mac_170m --topology" in end.err
    assert len(end.asked) == 2


@pytest.mark.parametrize(
    "data, message",
    [
        ({"path": None}, "data.path is None, but data.source is jsonl; put the text into gs://my-bucket and give its"),
        ({"path": "text/"}, "data.path is 'text/', which the machines do not have; copy it into the bucket and give"),
        ({"tokenizer": "tokenizer.model"}, "data.tokenizer is 'tokenizer.model', which the machines do not have; copy"),
        ({"path": "/mnt/titans/../etc"}, "data.path is '/mnt/titans/../etc', which the machines do not have; copy"),
        ({"validation_path": "/v.jsonl"}, "and give --data.validation_path /mnt/titans/data/v.jsonl"),
    ],
)
def test_data_that_the_machines_would_not_have_is_refused_before_anything_is_paid_for(launcher, data, message):
    scenario = [{**CHECKED, "stdout": json.dumps({"data": {**DATA, **data}}) + "\n"}]
    end = launcher("queued_resources.py", [*GOOD, *TRAIN], scenario)
    assert end.code == 2 and message in end.err and len(end.asked) == 1


@pytest.mark.parametrize(
    "fields, message",
    [
        (
            {"init_from": "runs/a"},
            "training.init_from is 'runs/a', which the machines do not have; copy it into the buc",
        ),
        (
            {"evaluate_tasks": ["niah"], "evaluate_data": "data"},
            "training.evaluate_data is 'data', which the machines ",
        ),
    ],
)
def test_other_folders_that_the_machines_would_not_have_are_refused(launcher, fields, message):
    scenario = [{**CHECKED, "stdout": json.dumps({"data": DATA, "training": fields}) + "\n"}]
    end = launcher("queued_resources.py", [*GOOD, *TRAIN], scenario)
    assert end.code == 2 and message in end.err and len(end.asked) == 1


def test_every_folder_of_a_mixture_must_be_in_the_bucket(launcher):
    data = {**DATA, "source": "tokens", "path": None, "mixture": ["/mnt/titans/a=1", "/home/me/b=0.5"]}
    end = launcher("queued_resources.py", [*GOOD, *TRAIN], [{**CHECKED, "stdout": json.dumps({"data": data}) + "\n"}])
    assert end.code == 2 and len(end.asked) == 1
    assert "data.mixture is '/home/me/b', which" in end.err and "--data.mixture /mnt/titans/data/b=0.5" in end.err


def test_data_that_is_not_in_the_bucket_is_refused(launcher):
    scenario = [*PREFLIGHT[:4], {**PREFLIGHT[4], "code": 1, "stderr": "ERROR: One or more URLs matched no objects.\n"}]
    end = launcher("tpu_vm.py", [*GOOD, *TRAIN], scenario)
    assert end.code == 2 and "there is no gs://my-bucket/data/t.model (ERROR: One or more" in end.err
    assert len(end.asked) == 5


def test_what_training_would_refuse_is_refused_here(launcher):
    scenario = [{**CHECKED, "code": 2, "stderr": "titans: training.steps is 0; use at least 1\n"}]
    end = launcher("tpu_vm.py", [*GOOD, *TRAIN], scenario)
    assert end.code == 2 and end.err == "launch: training.steps is 0; use at least 1\n"


@pytest.mark.parametrize(
    "answer, message",
    [
        ({"stdout": "\n"}, "has no hierarchical namespace"),
        ({"stdout": "False\n"}, "has no hierarchical namespace"),
        ({"code": 1, "stderr": "ERROR: gs://my-bucket not found: 404.\n"}, "cannot be read (ERROR: gs://my-bucket not"),
    ],
)
def test_a_bucket_that_would_break_checkpoints_is_refused(launcher, answer, message):
    scenario = [{"expect": "gcloud storage buckets describe gs://my-bucket", **answer}]
    end = launcher("tpu_vm.py", [*GOOD, "--skip-preflight", *TRAIN], scenario)
    assert end.code == 2 and message in end.err and len(end.asked) == 1
    assert "gcloud storage buckets create gs://my-bucket --project my-project --location us-east5 " in end.err


def test_titans_that_is_not_installed_is_said(launcher):
    (launcher.bin / "titans").unlink()
    end = launcher("tpu_vm.py", [*GOOD, *TRAIN])
    assert (
        end.code == 2 and "titans is not installed here; see pip install" in end.err and "--skip-preflight" in end.err
    )


def test_every_shipped_configuration_can_be_launched():
    assert sorted(common.shipped_names()) == sorted(files.shipped_configs())
    for name in files.shipped_configs():
        common._check_training([name])


def test_a_configuration_in_a_file_of_several_is_uploaded_with_its_file():
    common._check_training(["configs/titans.py:mac_170m"])
    assert common.config_file(["configs/titans.py:mac_170m"]) == common.config_file(["configs/titans.py"])
    assert common.config_file(["mac_170m"]) is None


@pytest.mark.processes
@pytest.mark.slow
def test_what_is_uploaded_can_be_installed(tmp_path):
    """The real tar: what pyproject.toml asks for is in it, and no compiled files."""
    commands = common.Commands(dry_run=True)
    kept = []
    commands.run = lambda *command: kept.append(command)
    common.upload(commands, argparse.Namespace(name="t", bucket="b"), ["configs/titans.py"])
    archive = tmp_path / "t.tar.gz"
    subprocess.run([archive if "tar.gz" in word else word for word in kept[0]], cwd=CHECKOUT, check=True)
    with tarfile.open(archive) as tar:
        names = set(tar.getnames())
    wanted = "pyproject.toml README.md LICENSE titans_jax/cli.py configs/titans.py launch/host.sh launch/supervise.py"
    assert set(wanted.split()) <= names and not any("__pycache__" in name for name in names)


COMMANDS = [
    shlex.split(command.replace("\\\n", " "))
    for page in ("README.md", "launch/README.md")
    for command in re.findall(r"^    (launch/(?:[^\n]|(?<=\\)\n)+)", (CHECKOUT / page).read_text(), re.MULTILINE)
]


@pytest.mark.parametrize("command", COMMANDS, ids=[command[0] for command in COMMANDS])
def test_the_commands_of_the_readmes_are_accepted(launcher, command):
    named = [{"P": "my-project", "B": "my-bucket"}.get(word, word) for word in command[1:]]
    end = launcher(command[0].removeprefix("launch/"), ["--dry-run", *(w for w in named if w != "--dry-run")])
    assert end.code == 0 and end.err == "" and end.asked == []


def test_the_readmes_show_every_launcher():
    assert {command[0] for command in COMMANDS} == {
        f"launch/{name}.py" for name in ("tpu_vm", "queued_resources", "xpk")
    }


def test_what_the_image_copies_exists():
    lines = [line.split() for line in (CHECKOUT / "launch" / "Dockerfile").read_text().splitlines()]
    sources = [source for words in lines if words[:1] == ["COPY"] for source in words[1:-1]]
    assert {"pyproject.toml", "titans_jax", "launch"} <= set(sources)
    assert all((CHECKOUT / source).exists() for source in sources)
