#!/usr/bin/env python3
"""Train on Google Kubernetes Engine through XPK: build the image, push it, submit the workload.

    launch/xpk.py --name titans-1 --project P --zone us-east5-b --cluster C --type v6e-256 --bucket B \\
        --image us-east5-docker.pkg.dev/P/titans/titans-jax:1 -- mac_760m --mesh.tensor 2 \\
        --training.gradient_accumulation 1 --data.path /mnt/titans/data/fineweb-edu

Kubernetes restarts a preempted workload; the exit code of `supervise.py` says whether the run is finished. The cluster
and its bucket storage are created once; launch/README.md has both commands.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

import common
from common import CHECKOUT, Commands, LaunchError


def workload(options: argparse.Namespace, train: list[str]) -> list[str]:
    """The command that submits training."""
    # exec: the SIGTERM that XPK's shell passes on must reach supervise.py, not a shell around it.
    supervise = ["exec", "python", "launch/supervise.py", "titans", "train"]
    command = shlex.join([*supervise, *common.training(options, train)])
    where = ["--cluster", options.cluster, "--project", options.project, "--zone", options.zone]
    shape = ["--tpu-type", options.type, "--num-slices", str(options.slices)]
    restarts = ["--max-restarts", str(options.restarts), "--termination-grace-period-seconds", "300"]
    return [
        "xpk", "workload", "create", "--workload", options.name, *where, *shape, "--docker-image", options.image,
        "--storage", options.storage, *restarts, "--command", command,
    ]  # fmt: skip


def run(arguments: Sequence[str]) -> int:
    """Check, compile here, build, push, submit."""
    parser = common.Parser(prog="launch/xpk.py", usage="%(prog)s [options] -- CONFIG [--field value ...]")
    common.add_options(parser)
    parser.add_argument("--cluster", help="GKE cluster, made by xpk cluster create")
    parser.add_argument("--image", help="where the image is pushed, with a tag")
    parser.add_argument("--storage", default="titans", help="the bucket as attached by xpk storage attach")
    parser.add_argument("--restarts", type=int, default=50, help="after preemptions and lost hosts")
    options, train = common.parse(parser, arguments)
    if options.restarts < 0:
        raise LaunchError(f"--restarts is {options.restarts}; use at least 0")
    file = common.config_file(train)
    if file is not None and CHECKOUT / "configs" not in (CHECKOUT / file).resolve().parents:
        raise LaunchError(f"{file} is not in the image; put the file into configs/")
    commands = Commands(options.dry_run)
    common.preflight(commands, options, train)
    commands.run("docker", "build", "--file", f"{CHECKOUT}/launch/Dockerfile", "--tag", options.image, str(CHECKOUT))
    commands.run("docker", "push", options.image)
    commands.run(*workload(options, train))
    where = ["--cluster", options.cluster, "--project", options.project, "--zone", options.zone]
    watch = ["xpk", "workload", "list", *where, "--wait-for-job-completion", options.name]
    print(f"# to wait for its end: {shlex.join(watch)}")
    print(f"# to stop it: {shlex.join(['xpk', 'workload', 'delete', '--workload', options.name, *where])}")
    return 0


if __name__ == "__main__":
    sys.exit(common.main(run))
