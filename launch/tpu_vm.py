#!/usr/bin/env python3
"""Train on a Cloud TPU VM, one host or a whole pod: create it, install, start training on every host, show the log.

    launch/tpu_vm.py --name titans-1 --project P --zone us-west4-a --type v5litepod-8 --bucket B -- mac_170m

An existing VM of this name is used. Training goes on when the terminal closes; the same command shows the log again,
or goes on with a run that was stopped. For machines that may be preempted use launch/queued_resources.py.
"""

import argparse
import shlex
import sys
from collections.abc import Sequence

import common
from common import STOPPED, Commands, LaunchError


def gcloud(options: argparse.Namespace, verb: str, *arguments: str) -> list[str]:
    """A command about this TPU VM."""
    where = ["--project", options.project, "--zone", options.zone]
    return ["gcloud", "compute", "tpus", "tpu-vm", verb, options.name, *where, *arguments]


def ssh(options: argparse.Namespace, command: str, worker: str) -> list[str]:
    """`command` on one host, or on all at once."""
    return gcloud(options, "ssh", "--worker", worker, *common.SSH_FLAGS, "--command", command)


def run(arguments: Sequence[str]) -> int:
    """Check, compile here, upload, create, start, follow."""
    parser = common.Parser(prog="launch/tpu_vm.py", usage="%(prog)s [options] -- CONFIG [--field value ...]")
    common.add_options(parser)
    common.add_vm_options(parser)
    options, train = common.parse(parser, arguments)
    if options.slices > 1:
        raise LaunchError(f"--slices is {options.slices}; several slices need launch/queued_resources.py")
    commands = Commands(options.dry_run)
    common.preflight(commands, options, train)
    common.upload(commands, options, train)
    create(commands, options)
    everywhere = "all" if options.slice.hosts > 1 else "0"
    commands.run(*ssh(options, common.on_hosts_setup(options), everywhere))
    commands.run(*ssh(options, common.on_hosts_start(options, train), everywhere))
    try:
        return follow(commands, options)
    finally:
        stop, delete = ssh(options, common.on_hosts_stop(), everywhere), gcloud(options, "delete", "--quiet")
        print(f"# to save a checkpoint and stop: {shlex.join(stop)}")
        print(f"# it costs money until it is deleted: {shlex.join(delete)}")


def create(commands: Commands, options: argparse.Namespace) -> None:
    """Create the VM unless it is there."""
    commands.note("unless it is there")
    found = commands.ask(*gcloud(options, "describe", "--format", "value(acceleratorType,state)"))
    kind, _, state = found.stdout.strip().rpartition("/")[2].partition("\t")
    if found.returncode == 0 and kind and kind != options.type:
        raise LaunchError(f"--type is {options.type}, but {options.name} is a {kind}; use {kind}, or another --name")
    if state in ("PREEMPTED", "TERMINATED", "STOPPED"):
        delete = shlex.join(gcloud(options, "delete", "--quiet"))
        raise LaunchError(f"{options.name} is {state}; delete it, with {delete}, and run this again")
    if found.returncode and "NOT_FOUND" not in found.stderr:
        raise LaunchError(f"gcloud could not describe {options.name}: {common.last_line(found.stderr)}")
    if found.returncode or options.dry_run:
        what = ["--accelerator-type", options.type, "--version", options.runtime_version]
        commands.run(*gcloud(options, "create", *what, *options.gcloud))


def follow(commands: Commands, options: argparse.Namespace) -> int:
    """Show the first host's log until training ends there; returns 0 if it finished, or stopped and saved."""
    try:
        commands.run(*ssh(options, common.on_hosts_follow(), "0"))
    except KeyboardInterrupt:
        print("# the log is no longer shown; training goes on; the same command shows it again")
        return 130
    except LaunchError:
        # ssh passes on the exit code of the remote command, but also has codes of its own: ask the hosts.
        answer = commands.ask(*ssh(options, common.on_hosts_status(options), "0"))
        hosts = common.read_hosts(answer.stdout)
        if not hosts or hosts[0].code != STOPPED:
            raise
    return 0


if __name__ == "__main__":
    sys.exit(common.main(run))
