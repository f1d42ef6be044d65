"""Finding the other processes, and which rows each of them reads."""

import dataclasses
import socket
from types import SimpleNamespace

import jax
import pytest

from titans_jax import cli
from titans_jax.config import ProcessesConfig
from titans_jax.sharding import processes


@pytest.fixture
def started(monkeypatch):
    """Arguments of the calls of jax.distributed.initialize, which does nothing."""
    calls = []
    monkeypatch.setattr(jax.distributed, "initialize", lambda *arguments, **options: calls.append(arguments))
    for name in ("TPU_WORKER_HOSTNAMES", "TPU_PROCESS_ADDRESSES", "MEGASCALE_COORDINATOR_ADDRESS"):
        monkeypatch.delenv(name, raising=False)
    return calls


@pytest.mark.parametrize(
    "platforms, environment, joins",
    [
        ("cpu", {"TPU_WORKER_HOSTNAMES": "a,b"}, False),  # someone who wants the CPU of a TPU host
        ("tpu,cpu", {}, True),  # a TPU VM: jax asks its metadata server
        ("tpu,cpu", {"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ("tpu,cpu", {"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ("tpu,cpu", {"TPU_WORKER_HOSTNAMES": "localhost", "MEGASCALE_COORDINATOR_ADDRESS": "a"}, True),
    ],
)
def test_hosts_of_a_slice_find_each_other(started, monkeypatch, platforms, environment, joins):
    monkeypatch.setattr(processes.jax, "config", SimpleNamespace(jax_platforms=platforms))
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    processes.start(ProcessesConfig())
    assert started == [()] * joins


def test_hosts_that_do_not_find_each_other_do_not_train_alone(monkeypatch):
    """The server that could name them is silent; the chips still say how many hosts there are."""

    def unreachable():
        raise ConnectionError("no route")

    monkeypatch.setattr(jax.distributed, "initialize", unreachable)
    monkeypatch.setattr(processes, "_may_be_one_of_several_tpu_hosts", lambda: True)
    processes.start(ProcessesConfig())  # one host: nobody is missing
    monkeypatch.setattr(jax, "process_count", lambda: 4)
    with pytest.raises(processes.ProcessesError, match=r"not found \(no route\); start all 4 again, or name them with"):
        processes.start(ProcessesConfig())


def test_a_port_in_use_is_refused(started):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(
            processes.ProcessesError, match=f"port {port} of processes.coordinator .* in use.; use anot"
        ):
            processes.start(ProcessesConfig(f"localhost:{port}", 2, 0))
    assert started == []


def test_a_coordinator_that_does_not_answer(started, monkeypatch):
    monkeypatch.setattr(processes, "PATIENCE", 0)
    with socket.socket() as closed:
        closed.bind(("localhost", 0))
        port = closed.getsockname()[1]
        with pytest.raises(processes.ProcessesError, match="process 1 got no answer from .*refused.*; start process 0"):
            processes.start(ProcessesConfig(f"localhost:{port}", 2, 1))
    assert started == []


@pytest.mark.parametrize(
    "arguments, message",
    [
        ("--processes.coordinator here", "processes.count is None, but processes.coordinator is here; give all of"),
        ("--processes.index 0", "processes.coordinator is None, but processes.index is 0; give all of"),
        ("--processes.coordinator here --processes.count 2 --processes.index 0", "'here'; use host:port of process 0"),
        ("--processes.coordinator h:99999 --processes.count 2 --processes.index 0", "'h:99999'; use host:port"),
        ("--processes.coordinator h:1 --processes.count 0 --processes.index 0", "count is 0; use at least 1"),
        ("--processes.coordinator h:1 --processes.count 2 --processes.index 2", "index is 2; use 0 to 1, as"),
        ("--processes.coordinator h:1 --processes.count 2 --processes.index -1", "index is -1; use 0 to 1, as"),
        ("--profile.steps 10", "profile.steps is '10'; use first:last with 1 <= first < last, such as 10:15"),
        ("--profile.steps 5:5", "profile.steps is '5:5'; use first:last"),
        ("--profile.steps 0:5", "profile.steps is '0:5'; use first:last"),
        ("--profile.steps 5:-1", "profile.steps is '5:-1'; use first:last"),
        (
            "--profile.steps 9000:9001",
            "profile.steps is '9000:9001', behind the last step; use a first step of at most",
        ),
    ],
)
def test_mistakes(tmp_path, capsys, arguments, message):
    assert cli.main(["train", "quickstart", *arguments.split(), "--training.run_dir", str(tmp_path / "run")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


@dataclasses.dataclass(frozen=True)
class Device:
    id: int
    process_index: int


@pytest.mark.parametrize(
    "devices, expected",
    [
        # Two processes with two devices each: rows in order, rows interleaved as on a torus, and tensor across both.
        ([(0, slice(0, 2)), (0, slice(2, 4)), (1, slice(4, 6)), (1, slice(6, 8))], [(0, 2), (1, 2)]),
        ([(1, slice(0, 2)), (0, slice(2, 4)), (1, slice(4, 6)), (0, slice(6, 8))], [(1, 2), (0, 2)]),
        ([(0, slice(0, 4)), (1, slice(0, 4)), (0, slice(4, 8)), (1, slice(4, 8))], [(0, 1), (0, 1)]),
    ],
)
def test_share_of_batch(monkeypatch, devices, expected):
    rows = {Device(i, process): (where, slice(None)) for i, (process, where) in enumerate(devices)}
    place = SimpleNamespace(devices_indices_map=lambda shape: rows)
    shares = []
    for process in range(2):
        monkeypatch.setattr(jax, "process_index", lambda process=process: process)
        shares.append(processes.share_of_batch(place, 8))
    assert shares == expected
