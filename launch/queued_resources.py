#!/usr/bin/env python3
"""Train on a queued resource of Cloud TPU until the run is finished, through preemptions.

    launch/queued_resources.py --name titans-1 --project P --zone us-east5-b --type v6e-256 --bucket B --spot \\
        -- mac_760m --mesh.tensor 2 --training.gradient_accumulation 1 \\
        --data.path /mnt/titans/data/fineweb-edu --data.tokenizer /mnt/titans/data/tokenizer.model

A queued resource that was preempted is SUSPENDED for good and still uses quota: this program deletes it, asks for it
again, and runs the same command on the same run folder, which goes on from its latest checkpoint. The program can be
stopped (Ctrl-C) and run again at any time: it continues from whatever state it finds.
"""

import argparse
import collections
import datetime
import json
import re
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from enum import Enum

import common
from common import STOPPED, CommandError, Commands, Host, LaunchError

# The state machine


class Do(Enum):
    """The action for a state of the queued resource."""

    CREATE = "create it"
    WAIT = "wait"
    TRAIN = "see that training runs"
    RECREATE = "delete it and create it again"


STATES = {
    "ABSENT": Do.CREATE,
    "CREATING": Do.WAIT,
    "ACCEPTED": Do.WAIT,
    "WAITING_FOR_RESOURCES": Do.WAIT,
    "PROVISIONING": Do.WAIT,
    "ACTIVE": Do.TRAIN,
    "SUSPENDING": Do.WAIT,
    "SUSPENDED": Do.RECREATE,
    "FAILED": Do.RECREATE,
    "DELETING": Do.WAIT,
}
"""State of the queued resource -> what to do. ABSENT is our word for NOT_FOUND; a state not listed here means wait."""


class Training(Enum):
    """The state of training on all hosts together, and the action for it."""

    UNREACHABLE = "not every host answers: look again"
    ABSENT = "start it"
    RUNNING = "wait"
    FINISHED = "done"
    STOPPED = "somebody stopped it: leave it so"
    REFUSED = "a mistake of the user: no restart solves it"
    FAILED = "start it again"


def judge(hosts: Sequence[Host], expected: int, started: bool) -> Training:
    """The state machine of training on an ACTIVE slice.

    started: whether this program has started training on these machines or seen it run; the exit code of an earlier
    training is ignored.
    """
    states = {host.state for host in hosts}
    codes = {host.code for host in hosts if host.state == "exited"}
    if started and 2 in codes:
        return Training.REFUSED
    if len(hosts) < expected:
        return Training.UNREACHABLE
    if "absent" in states or not started and states != {"running"}:
        return Training.ABSENT
    if "running" in states:  # if other hosts have ended, jax ends these within minutes
        return Training.RUNNING
    if codes - {0, STOPPED}:
        return Training.FAILED
    return Training.FINISHED if 0 in codes else Training.STOPPED


# The watch

UNREACHABLE_LOOKS = 20
"""An ACTIVE resource is recreated after this many looks in a row at which not all hosts answer."""
FAILED_LOOKS = 10
"""The watch ends after this many looks in a row at which gcloud fails."""


class Watch:
    """One queued resource, watched until training is finished or cannot go on."""

    def __init__(self, options: argparse.Namespace, train: list[str], commands: Commands):
        self.options, self.train, self.commands = options, train, commands
        self.expected_hosts = options.slice.hosts * options.slices
        self.started, self.deleted, self.step, self.said = False, False, 0, ""
        self.looks: collections.Counter[Training] = collections.Counter()
        self.failures: collections.Counter[str] = collections.Counter()

    def run(self) -> None:
        """Watch until training is finished, or stopped by somebody.

        Raises:
          LaunchError: training cannot go on. The slice is left as it is.
        """
        before = ""
        while True:
            state, detail, by_user = self.look()
            words = f"{state} ({detail})" if detail else state
            if state != before:
                self.say(words)
                before, pauses = state, self._pauses()
            do = STATES.get(state, Do.WAIT)
            if do is Do.CREATE:
                self.create()
            elif do is Do.RECREATE:
                if by_user and not self.deleted:
                    raise CommandError(f"{words}: somebody deleted the machines, so they are not asked for again")
                self.count(words)
                self.delete()
            elif do is Do.TRAIN and self.attend():
                return
            time.sleep(next(pauses))

    def attend(self) -> bool:
        """Look at training on an ACTIVE slice and act on it; returns whether training is over."""
        hosts = self.hosts()
        training = judge(hosts, self.expected_hosts, self.started)
        self._progress(hosts, training)
        self.looks = collections.Counter({training: self.looks[training] + 1})
        if training is Training.RUNNING:
            self.started = True
        elif training is Training.ABSENT:
            if self.started:
                self.count("training is gone from a host, which was restarted")
            self.start()
        elif training is Training.REFUSED:
            self._show_log()
            raise LaunchError(
                "titans train refused its configuration or data, the sentence is above; correct it and run the command "
                f"again, the slice is left as it is; {self.how_to_delete()}"
            )
        elif training is Training.FAILED:
            self._show_log()
            codes = sorted({host.code for host in hosts if host.code})
            self.count(f"training ended with exit code {' and '.join(map(str, codes))}")
            self.start()
        elif training is Training.FINISHED:
            self._finish()
            return True
        elif training is Training.STOPPED and self.looks[training] > 1:
            # Not at the first look: machines that are being taken away may answer before the state changes.
            self.say(f"stopped and saved at step {self.step}; run the same command again to go on")
            self.say(self.how_to_delete())
            return True
        elif training is Training.UNREACHABLE and self.looks[training] >= UNREACHABLE_LOOKS:
            self.count("the hosts of an ACTIVE slice do not answer")
            self.delete()
        return False

    def count(self, failure: str) -> None:
        """Note a failure.

        Raises:
          LaunchError: it has happened too often since the last step that was saved.
        """
        kind = re.sub(r"\d+", "#", failure)  # messages hold numbers of operations
        self.failures[kind] += 1
        if (times := self.failures[kind]) > self.options.retries:
            raise CommandError(
                f"given up: {failure}, {times} times without a new checkpoint; run the same command again to go on "
                f"trying; {self.how_to_delete()}"
            )

    def _progress(self, hosts: Sequence[Host], training: Training) -> None:
        step = max((host.step for host in hosts), default=0)
        if step > self.step:
            self.step = step
            self.failures.clear()
        answers = f"{len(hosts)} of {self.expected_hosts} hosts answer"
        self.say(f"training is {training.name.lower()}, latest checkpoint {self.step}, {answers}")

    def _finish(self) -> None:
        self.say(f"finished step {self.step}; the run is in gs://{self.options.bucket}/runs/{self.options.name}")
        if self.options.keep:
            self.say(self.how_to_delete())
        else:
            self.delete()

    def _pauses(self) -> Iterator[float]:
        """Seconds between looks: short after a change, growing to four times that."""
        factor = 1.0
        while True:
            yield self.options.poll * factor
            factor = min(1.2 * factor, 4)

    def say(self, text: str) -> None:
        """Print a line with the time, unless it is the same as the last one."""
        if text != self.said:
            print(f"{datetime.datetime.now():%Y-%m-%d %H:%M:%S} {self.options.name}: {text}", flush=True)
            self.said = text

    # Commands of gcloud

    def gcloud(self, verb: str, *arguments: str) -> list[str]:
        """A command about this queued resource."""
        name, where = self.options.name, ["--project", self.options.project, "--zone", self.options.zone]
        return ["gcloud", "compute", "tpus", "queued-resources", verb, name, *where, *arguments]

    def ssh(self, command: str, worker: str = "all") -> list[str]:
        """`command` on every host at once, or on one host of the first slice."""
        node = "all" if worker == "all" else "0"
        return self.gcloud("ssh", "--node", node, "--worker", worker, *common.SSH_FLAGS, "--command", command)

    def look(self) -> tuple[str, str, bool]:
        """State of the queued resource, the message that came with it, and whether a user's action led to it."""
        for pause in [self.options.poll] * FAILED_LOOKS:
            answer = self.commands.ask(*self.gcloud("describe", "--format", "json"))
            if answer.returncode == 0:
                return read_state(answer.stdout)
            if "NOT_FOUND" in answer.stderr:
                return "ABSENT", "", False
            self.say(f"gcloud does not answer: {common.last_line(answer.stderr)}")
            time.sleep(pause)
        raise CommandError(
            f"gcloud could not describe {self.options.name} {FAILED_LOOKS} times in a row "
            f"({common.last_line(answer.stderr)}); run the same command again when it can; {self.how_to_delete()}"
        )

    def create(self) -> None:
        """Ask for the queued resource; if it is refused for lack of quota or capacity, a later look asks again."""
        self.started = self.deleted = False
        answer = self.commands.ask(*self.create_command())
        if answer.returncode == 0:
            return
        message = common.last_line(answer.stderr)
        if not re.search("RESOURCE_EXHAUSTED|quota|UNAVAILABLE|INTERNAL|DEADLINE_EXCEEDED", answer.stderr, re.I):
            raise CommandError(f"gcloud refused to create {self.options.name}: {message}")
        self.say(f"gcloud refused to create it: {message}")
        self.count(f"refused ({message})")

    def create_command(self) -> list[str]:
        """The gcloud command that creates the slices."""
        options = self.options
        nodes = ["--node-id", options.name]
        if options.slices > 1:
            nodes = ["--node-count", str(options.slices), "--node-prefix", options.name]
        tier = [f"--{tier}" for tier in ("spot", "reserved") if getattr(options, tier)]
        kind = ["--accelerator-type", options.type, "--runtime-version", options.runtime_version]
        return self.gcloud("create", *nodes, *kind, *tier, *options.gcloud)

    def delete_command(self) -> list[str]:
        """The command that deletes the queued resource with its machines, and waits until name and quota are free."""
        return self.gcloud("delete", "--force", "--quiet")

    def delete(self) -> None:
        """Delete the queued resource and its machines; the bucket keeps its content."""
        self.say("deleting it")
        self.deleted = True
        answer = self.commands.ask(*self.delete_command())
        if answer.returncode and "NOT_FOUND" not in answer.stderr:
            self.say(f"gcloud could not delete it: {common.last_line(answer.stderr)}")

    def how_to_delete(self) -> str:
        return f"the slice costs money until it is deleted: {shlex.join(self.delete_command())}"

    def hosts(self) -> list[Host]:
        """The state of training on every host that answers."""
        return common.read_hosts(self.commands.ask(*self.ssh(common.on_hosts_status(self.options))).stdout)

    def start(self) -> None:
        """Install and start training on every host; if that fails on one, the next look decides what to do."""
        self.say("installing and starting training on every host")
        for command in (common.on_hosts_setup(self.options), common.on_hosts_start(self.options, self.train)):
            answer = self.commands.ask(*self.ssh(command))
            if answer.returncode:
                self.say(f"a host could not be prepared: {common.last_line(answer.stderr)}")
                self.count("a host could not be prepared")
                return
        self.started = True

    def _show_log(self) -> None:
        answer = self.commands.ask(*self.ssh("tail --lines 20 titans.log", worker="0"))
        print(answer.stdout, end="", flush=True)


def read_state(text: str) -> tuple[str, str, bool]:
    """State, message and whether a user's action led to it, in the JSON of `queued-resources describe`."""
    state = json.loads(text).get("state", {})
    message = state.get("failedData", {}).get("error", {}).get("message", "")
    return state.get("state", "STATE_UNSPECIFIED"), message, state.get("stateInitiator") == "USER"


# The program


def dry_run(watch: Watch) -> None:
    """Print the commands of every state, in the order of a run that is preempted once."""
    commands = watch.commands
    commands.note("every look")
    commands.ask(*watch.gcloud("describe", "--format", "json"))
    commands.note("NOT_FOUND")
    commands.ask(*watch.create_command())
    commands.note("ACTIVE: every look")
    watch.hosts()
    commands.note("ACTIVE and not training")
    for command in (common.on_hosts_setup(watch.options), common.on_hosts_start(watch.options, watch.train)):
        commands.ask(*watch.ssh(command))
    commands.note("SUSPENDED or FAILED: before it is created again" + ("" if watch.options.keep else "; and finished"))
    commands.ask(*watch.delete_command())
    commands.note("yours, at any time: the log; save a checkpoint and stop")
    commands.ask(*watch.ssh(common.on_hosts_follow(), worker="0"))
    commands.ask(*watch.ssh(common.on_hosts_stop()))


def run(arguments: Sequence[str]) -> int:
    """Check, compile here, upload, watch."""
    parser = common.Parser(prog="launch/queued_resources.py", usage="%(prog)s [options] -- CONFIG [--field value ...]")
    common.add_options(parser)
    tiers = parser.add_mutually_exclusive_group()
    tiers.add_argument("--spot", action="store_true", help="cheaper, and preempted at any time")
    tiers.add_argument("--reserved", action="store_true", help="from your reservation")
    common.add_vm_options(parser)
    parser.add_argument("--keep", action="store_true", help="do not delete the slice when training is finished")
    parser.add_argument("--retries", type=int, default=5, help="of one failure without a new checkpoint in between")
    parser.add_argument("--poll", type=float, default=30, help="seconds between looks; up to four times as many later")
    options, train = common.parse(parser, arguments)
    if not 0 < options.poll <= 3600:
        raise LaunchError(f"--poll is {options.poll}; use a number of seconds up to 3600")
    if options.retries < 0:
        raise LaunchError(f"--retries is {options.retries}; use at least 0")
    commands = Commands(options.dry_run)
    watch = Watch(options, train, commands)
    common.preflight(commands, options, train)
    common.upload(commands, options, train)
    if options.dry_run:
        dry_run(watch)
        return 0
    try:
        watch.run()
    except KeyboardInterrupt:
        watch.say("no longer watched, and left as it is; the same command watches again; " + watch.how_to_delete())
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(common.main(run))
