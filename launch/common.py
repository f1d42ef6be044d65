"""Parts shared by all launchers: TPU slices by name, checks of the user's arguments, and commands with a dry run.

Only Python's standard library is needed on the machine that launches.
"""

import argparse
import difflib
import itertools
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

CHECKOUT = Path(__file__).resolve().parent.parent
MOUNT = "/mnt/titans"
"""Where every host sees the bucket. The same on TPU VMs and on GKE, so a run can move from one to the other."""
STOPPED = 42
"""Exit code of `supervise.py` when training stopped and saved before its last step; XPK restarts on it."""


class LaunchError(Exception):
    """The user's request cannot work. The message is one sentence that says what would."""


class CommandError(LaunchError):
    """A command failed, or the run cannot go on."""


# Slices


@dataclass(frozen=True)
class Generation:
    """One TPU generation: its names, its slices, and how these are divided into hosts."""

    name: str
    prefix: str
    runtime: str | None
    """`--runtime-version` for JAX; None where slices are available through GKE only."""
    cores_per_chip: int
    """Type names of v4, v5p and TPU7x count cores, two on each chip; those of v5e and v6e count chips."""
    sizes: tuple[int, ...]
    """Chips of the slices that exist; for generations with a 3D torus, of the usual slices."""
    one_host: tuple[int, ...]
    """Chips of the slices with a single host; larger ones have a host for every 4 chips."""


_FLAT = (1, 4, 8, 16, 32, 64, 128, 256)
# Parts of a cube of 64 chips, and boxes of cubes up to 4 x 4 x 6 of them.
_BOXES = {a * b * c for a, b, c in itertools.combinations_with_replacement(range(1, 7), 3) if a * b * c <= 96}
_CUBES = (4, 8, 16, 32, *(64 * cubes for cubes in sorted(_BOXES)))
GENERATIONS = (
    Generation("v4", "v4", "tpu-ubuntu2204-base", 2, tuple(n for n in _CUBES if n <= 4096), (4,)),
    Generation("v5e", "v5litepod", "v2-alpha-tpuv5-lite", 1, _FLAT, (1, 4, 8)),
    Generation("v5p", "v5p", "v2-alpha-tpuv5", 2, _CUBES, (4,)),
    Generation("v6e", "v6e", "v2-alpha-tpuv6e", 1, _FLAT, (1, 4, 8)),
    Generation("TPU7x", "tpu7x", None, 2, (1, *_CUBES), (1, 4)),
)


@dataclass(frozen=True)
class Slice:
    """A TPU slice."""

    type: str
    generation: Generation
    chips: int

    @property
    def hosts(self) -> int:
        """Machines, each of which runs one training process."""
        return 1 if self.chips in self.generation.one_host else self.chips // 4


def parse_type(text: str) -> Slice:
    """The slice with the accelerator type `text`, such as v5litepod-256, v6e-256 or v5p-1024.

    Raises:
      LaunchError: names the nearest type that exists, and its runtime version.
    """
    prefix, _, count = text.lower().rpartition("-")
    aliases = {"v5e": "v5litepod", "v5lite": "v5litepod", "v6": "v6e", "v7x": "tpu7x", "tpu-v7x": "tpu7x"}
    prefixes = {generation.prefix: generation for generation in GENERATIONS}
    numbered = re.fullmatch("[1-9][0-9]*", count)
    if prefix in prefixes and text == text.lower() and numbered:
        generation = prefixes[prefix]
        chips, rest = divmod(int(count), generation.cores_per_chip)
        if not rest and chips in generation.sizes:
            return Slice(text, generation, chips)
    near = aliases.get(prefix) or next(iter(difflib.get_close_matches(prefix or text.lower(), prefixes, 1, 0.3)), "v6e")
    generation = prefixes[near]
    wanted = int(count) / generation.cores_per_chip if numbered else 8
    chips = min(generation.sizes, key=lambda size: abs(size - wanted))
    runtime = f"runtime version {generation.runtime}" if generation.runtime else "on GKE, launch/xpk.py"
    raise LaunchError(
        f"--type {text} is no accelerator type; use {near}-{chips * generation.cores_per_chip} ({runtime}), or another "
        f"size of {', '.join(g.prefix for g in GENERATIONS)}"
    )


# Arguments


class Parser(argparse.ArgumentParser):
    """Options, then -- CONFIG [--field value ...]; a mistake is a LaunchError.

    Options are written in full: with --nam for --name a slice would be made, or deleted, under a name nobody meant.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, **arguments)

    def error(self, message: str) -> NoReturn:
        raise LaunchError(f"{message}; see {self.prog} --help")


def add_options(parser: Parser) -> None:
    """The options that every launcher has."""
    add = parser.add_argument
    add("--name", help="of the slice or workload, and of the run: gs://BUCKET/runs/NAME")
    add("--project", help="Google Cloud project id")
    add("--zone", help="such as us-east5-b")
    add("--type", help="accelerator type, such as v6e-256 (chips) or v5p-1024 (cores)")
    add("--slices", type=int, default=1, help="slices of that type, connected by the data-center network")
    add("--bucket", help="holds code, data and runs; seen by every host as " + MOUNT)
    add("--skip-preflight", action="store_true", help="do not check and compile the configuration here first")
    add("--dry-run", action="store_true", help="print the exact commands and run none")


def add_vm_options(parser: Parser) -> None:
    """The options of the launchers that create TPU VMs."""
    add = parser.add_argument
    add("--runtime-version", help="software of the VM; the default is the generation's own for JAX")
    add("--gcloud", action="append", default=[], help="one more flag for create, such as --gcloud=--network=my-net")


def parse(parser: Parser, arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The checked options, and CONFIG [--field value ...] for `titans train`.

    Raises:
      LaunchError: before any command has run.
    """
    arguments = list(arguments)
    if "--help" in arguments or "-h" in arguments:
        parser.parse_args(["--help"])
    if "--" not in arguments:
        raise LaunchError("there is no configuration; end with -- CONFIG, for example -- mac_170m")
    middle = arguments.index("--")
    options, train = parser.parse_args(arguments[:middle]), arguments[middle + 1 :]
    _check(options)
    _check_training(train)
    options.slice = parse_type(options.type)
    if "runtime_version" in options:
        options.runtime_version = options.runtime_version or options.slice.generation.runtime
        if options.runtime_version is None:
            raise LaunchError(f"--type is {options.type}; {options.slice.generation.name} needs GKE: launch/xpk.py")
    return options, train


_EXAMPLES = {
    "name": "titans-1", "project": "my-project", "zone": "us-east5-b", "type": "v6e-8", "bucket": "my-bucket",
    "cluster": "my-cluster", "image": "us-east5-docker.pkg.dev/my-project/titans/titans-jax:1",
}  # fmt: skip

_PATTERNS = {
    "name": (r"[a-z]([-a-z0-9]{0,37}[a-z0-9])?", "at most 39 lower-case letters, digits and hyphens, a letter first"),
    "project": (r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]", "the project's id, not its name or number"),
    "zone": (r"[a-z]+-[a-z]+[0-9]+-([a-z]|ai[0-9]+[a-z])", "a zone, which ends in a letter"),
    "bucket": (r"[a-z0-9][-_.a-z0-9]{1,61}[a-z0-9]", "the bucket's name alone, without a folder"),
    "cluster": (r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", "at most 40 lower-case letters, digits and hyphens"),
    "image": (r"[a-z0-9][-a-z0-9._]*(:[0-9]+)?(/[-a-z0-9._]+)+(:[-\w.]+)?", "a registry path"),
}


def _check(options: argparse.Namespace) -> None:
    for name, example in _EXAMPLES.items():
        if name in options and getattr(options, name) is None:
            raise LaunchError(f"--{name} is missing; for example --{name} {example}")
    if options.bucket.startswith("gs://"):
        options.bucket = options.bucket.removeprefix("gs://").rstrip("/")
    for name, (pattern, what) in _PATTERNS.items():
        if name in options and not re.fullmatch(pattern, value := getattr(options, name)):
            raise LaunchError(f"--{name} is {value!r}; use {what}, such as {_EXAMPLES[name]}")
    if options.slices < 1:
        raise LaunchError(f"--slices is {options.slices}; use at least 1")


def _check_training(train: list[str]) -> None:
    if not train or train[0].startswith("-"):
        raise LaunchError("there is no configuration after --; for example -- mac_170m --training.steps 1000")
    if any(argument.partition("=")[0].replace("-", "_") == "__training.run_dir" for argument in train):
        raise LaunchError("training.run_dir is set by the launcher, to runs/NAME in the bucket; use --name for another")
    config, file = train[0], config_file(train)
    if file is not None:
        inside = not Path(file).is_absolute() and CHECKOUT in (CHECKOUT / file).resolve().parents
        if not inside or not (CHECKOUT / file).is_file():
            raise LaunchError(f"there is no {file} in {CHECKOUT}; use the path of a file inside it, relative to it")
    elif config not in (names := shipped_names()):
        near = difflib.get_close_matches(config, names, n=1, cutoff=0)
        raise LaunchError(f"there is no configuration {config}; use {near[0]}, another of configs/, or a Python file")


def config_file(train: list[str]) -> str | None:
    """The file of a configuration given as FILE.py or FILE.py:NAME, None for one given by name."""
    found = re.fullmatch(r"(.*\.py)(:.*)?", train[0])
    return found and found[1]


def shipped_names() -> list[str]:
    """The configurations in configs/: the keys of `configs` in its files, and files with one `config`."""
    files = {file.stem: file.read_text() for file in (CHECKOUT / "configs").glob("*.py")}
    keys = {stem: re.findall(r'^    "(\w+)": ', text, re.MULTILINE) for stem, text in files.items()}
    return [name for stem, names in keys.items() for name in names or [stem]]


def run_dir(options: argparse.Namespace) -> str:
    """Where every host sees the run folder."""
    return f"{MOUNT}/runs/{options.name}"


def training(options: argparse.Namespace, train: list[str]) -> list[str]:
    """The arguments of `titans train` on the hosts: the user's, the slices to spread over, and the run folder."""
    slices = ["--mesh.slice", str(options.slices)] if options.slices > 1 else []
    return [*train, *slices, "--training.run_dir", run_dir(options)]


# Commands


class Commands:
    """Runs commands in the checkout; with `dry_run` prints them instead."""

    def __init__(self, dry_run: bool):
        self.dry_run = dry_run

    def note(self, text: str) -> None:
        """In a dry run, print a line that says when the next commands are run."""
        if self.dry_run:
            print(f"# {text}")

    def run(self, *command: str) -> None:
        """Run a command, with its output on the terminal.

        Raises:
          LaunchError: the command failed, or is not installed.
        """
        print("+", shlex.join(command), flush=True)
        if self.dry_run:
            return
        if (code := self._start(command).returncode) != 0:
            raise CommandError(f"{shlex.join(command[:4])} ... ended with code {code}; its output above says why")

    def ask(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command and return its exit code and output, even if it fails. In a dry run: success and no output."""
        if self.dry_run:
            print("+", shlex.join(command), flush=True)
            return subprocess.CompletedProcess(command, 0, "", "")
        return self._start(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)

    @staticmethod
    def _start(command: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
        try:
            return subprocess.run(command, cwd=CHECKOUT, **options)
        except FileNotFoundError as error:
            hint = {"gcloud": "https://cloud.google.com/sdk", "titans": "pip install '.[tpu]', or use --skip-preflight"}
            raise LaunchError(
                f"{command[0]} is not installed here; see {hint.get(command[0], 'launch/README.md')}"
            ) from error


def preflight(commands: Commands, options: argparse.Namespace, train: list[str]) -> None:
    """Check the whole training command and compile its step for the slice on this machine, and look at the bucket.

    Raises:
      LaunchError: training would refuse its configuration or not find its data, its step does not fit the slice, or the
        bucket would break checkpoints.
    """
    if not options.skip_preflight:
        places = _places(commands, options, train)
        _check_places(places)
        slices = ["--slices", str(options.slices)] if options.slices > 1 else []
        commands.run("titans", "compile", train[0], "--topology", options.type, *slices, *train[1:])
    # --raw: in some versions gcloud's own description of a bucket leaves this field out.
    where = ["--project", options.project, "--raw", "--format", "value(hierarchicalNamespace.enabled)"]
    found = commands.ask("gcloud", "storage", "buckets", "describe", f"gs://{options.bucket}", *where)
    create = (
        f"gcloud storage buckets create gs://{options.bucket} --project {options.project} --location "
        f"{options.zone.rpartition('-')[0]} --uniform-bucket-level-access --enable-hierarchical-namespace"
    )
    if found.returncode:
        raise LaunchError(f"gs://{options.bucket} cannot be read ({last_line(found.stderr)}); to create it: {create}")
    if not commands.dry_run and found.stdout.strip().lower() != "true":
        raise LaunchError(
            f"gs://{options.bucket} has no hierarchical namespace, without which a checkpoint is not written whole or "
            f"not at all; use another bucket, made with: {create}"
        )
    if not options.skip_preflight:
        _check_in_bucket(commands, options, places)


class Place(NamedTuple):
    """A file or folder that training will read, and the field that names it; weight: what follows a folder of
    data.mixture, such as =0.5."""

    field: str
    path: str
    weight: str = ""


def _places(commands: Commands, options: argparse.Namespace, train: list[str]) -> list[Place]:
    """The files and folders that training will read; none in a dry run."""
    found = commands.ask("titans", "configs", *training(options, train))
    if found.returncode:
        raise LaunchError(last_line(found.stderr).removeprefix("titans: "))
    if commands.dry_run:
        return []
    config = json.loads(found.stdout)
    data, run = config["data"], config.get("training", {})
    if data["source"] != "python" and data["path"] is None and not data.get("mixture"):
        raise LaunchError(
            f"data.path is None, but data.source is {data['source']}; put the text into gs://{options.bucket} and give "
            f"its place, such as --data.path {MOUNT}/data/text"
        )
    names = ["path", "validation_path", *["tokenizer"] * (data["tokenizer"] != "byte")]
    places = [Place(f"data.{name}", data[name]) for name in names if data.get(name) is not None]
    for folder, _, weight in (each.rpartition("=") for each in data.get("mixture") or ()):
        places.append(Place("data.mixture", folder, f"={weight}"))
    if run.get("init_from") is not None:
        places.append(Place("training.init_from", run["init_from"]))
    if run.get("evaluate_tasks"):
        places.append(Place("training.evaluate_data", run["evaluate_data"]))
    return places


def _check_places(places: list[Place]) -> None:
    for field, path, weight in places:
        if not path.startswith(MOUNT + "/") or ".." in Path(path).parts:
            raise LaunchError(
                f"{field} is {path!r}, which the machines do not have; copy it into the bucket and give --{field} "
                f"{MOUNT}/data/{Path(path).name}{weight}"
            )


def _check_in_bucket(commands: Commands, options: argparse.Namespace, places: list[Place]) -> None:
    for field, path, _ in places:
        address = f"gs://{options.bucket}{path.removeprefix(MOUNT).rstrip('/')}"
        found = commands.ask("gcloud", "storage", "ls", "--project", options.project, address)
        if found.returncode:
            raise LaunchError(
                f"{field} is {path!r}, but there is no {address} ({last_line(found.stderr)}); copy it there"
            )


def last_line(text: str) -> str:
    """The last line that is not blank."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"


def upload(commands: Commands, options: argparse.Namespace, train: list[str]) -> None:
    """Copy this checkout's code, with uncommitted changes, to the bucket, from which every host fetches it."""
    what = ["titans_jax", "configs", "launch", "pyproject.toml", "README.md", "LICENSE"]
    if (file := config_file(train)) is not None:
        what.append(file)
    with tempfile.TemporaryDirectory() as folder:  # a new folder, which no other user of this machine can have made
        archive = f"{folder}/{options.name}.tar.gz"
        commands.run("tar", "--create", "--gzip", "--file", archive, "--exclude", "__pycache__", *what)
        commands.run("gcloud", "storage", "cp", archive, code(options))


def code(options: argparse.Namespace) -> str:
    """Address of the uploaded code."""
    return f"gs://{options.bucket}/code/{options.name}.tar.gz"


# Commands that the hosts of TPU VMs run, over ssh. Every command returns soon: gcloud runs them on 64 hosts at a time,
# and one that waited for training would keep the other hosts from starting.

SSH_FLAGS = ("--quiet", "--ssh-flag=-oConnectTimeout=20", "--ssh-flag=-oServerAliveInterval=20")
"""With these flags a host that is gone is noticed within minutes."""


@dataclass(frozen=True)
class Host:
    """One host's line: titans-host NAME running|exited|absent CODE STEP."""

    name: str
    state: str
    code: int | None
    step: int


def read_hosts(text: str) -> list[Host]:
    """The hosts' lines in the output of ssh."""
    found = re.findall(r"^titans-host (\S+) (running|exited|absent) (\d+|-) (\d+)\s*$", text, re.MULTILINE)
    return [Host(name, state, None if code == "-" else int(code), int(step)) for name, state, code, step in found]


def on_hosts_setup(options: argparse.Namespace) -> str:
    """Fetch the code, install it and mount the bucket; quick when it was done before."""
    fetch = f"mkdir -p titans_jax && gcloud storage cat {code(options)} | tar --extract --gzip --directory titans_jax"
    return f"set -o pipefail; {fetch} && titans_jax/launch/host.sh setup {options.bucket} {MOUNT}"


def on_hosts_start(options: argparse.Namespace, train: list[str]) -> str:
    """Start training, unless it is running."""
    return shlex.join(["titans_jax/launch/host.sh", "start", *training(options, train)])


def on_hosts_status(options: argparse.Namespace) -> str:
    """One line from each host: titans-host NAME running|exited|absent CODE STEP."""
    script = "titans_jax/launch/host.sh"
    return f"test -x {script} && {script} status {run_dir(options)} || echo titans-host $(hostname) absent - 0"


def on_hosts_follow() -> str:
    """Show the log until training ends."""
    return "titans_jax/launch/host.sh follow"


def on_hosts_stop() -> str:
    """Save a checkpoint and stop."""
    return "titans_jax/launch/host.sh stop"


def main(run: Callable[[Sequence[str]], int]) -> int:
    """`run` the command line; returns its exit code, 2 (the request cannot work) or 1 (a command failed)."""
    try:
        return run(sys.argv[1:])
    except LaunchError as error:
        print(f"launch: {error}", file=sys.stderr)
        return 1 if isinstance(error, CommandError) else 2
