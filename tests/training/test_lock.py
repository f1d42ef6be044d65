"""One training in a run folder: who is refused, and whose lock is taken over."""

import errno
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from titans_jax.training import lock
from titans_jax.training.lock import RunInUse, RunLock


def silent(sentence):
    pass


def write(run_dir, **holder):
    (run_dir / "lock.json").write_text(json.dumps(holder))


def own_start():
    return lock._started(os.getpid())


def test_the_second_is_refused_and_the_first_goes_on(tmp_path):
    with RunLock(tmp_path) as first:
        with pytest.raises(RunInUse, match=f"process {os.getpid()} on .* trains in {tmp_path} since 20.*; wait until"):
            RunLock(tmp_path).__enter__()
        first.check()
    assert list(tmp_path.iterdir()) == []
    with RunLock(tmp_path):  # free again
        assert (tmp_path / "lock.json").is_file()


@pytest.mark.parametrize("process, started", [(1 << 22, 1.0), ("this one", 1.0), (None, None)])
def test_a_lock_of_a_process_that_is_gone_is_taken_over(tmp_path, monkeypatch, process, started):
    """Its number may be another process' by now, which started at another time."""
    monkeypatch.setattr(lock, "SETTLE", 0.0)
    process = os.getpid() if process == "this one" else process
    write(tmp_path, host=lock._host(), process=process, started=started, id="other")
    with RunLock(tmp_path, silent) as taken:
        assert json.loads((tmp_path / "lock.json").read_text())["process"] == os.getpid()
        taken.check()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", '{"host": "elsewhere/", "process": 1, "started": 1.0, "id": "other"}'])
def test_a_lock_of_another_host_is_watched(tmp_path, monkeypatch, text):
    """One that does not change is abandoned, as is one that was not written to its end; one that does is not."""
    monkeypatch.setattr(lock, "SETTLE", 0.0)
    monkeypatch.setattr(lock, "PATIENCE", 0.3)
    said = []
    (tmp_path / "lock.json").write_text(text)
    with RunLock(tmp_path, said.append):
        pass
    assert "waiting up to 0 s to see whether it still does" in said[0]

    (tmp_path / "lock.json").write_text(text)
    beating = threading.Timer(0.1, lambda: (tmp_path / "lock.json").write_text(text + " "))
    beating.start()
    with pytest.raises(RunInUse, match="trains in"):
        RunLock(tmp_path, silent).__enter__()
    beating.join()


def test_a_holder_whose_folder_was_taken_over_stops_and_leaves_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.02)
    with RunLock(tmp_path) as holder:
        write(tmp_path, host="elsewhere/", process=7, started=1.0, id="other")
        give_up = time.monotonic() + 10
        while not holder._lost and time.monotonic() < give_up:
            time.sleep(0.01)
        with pytest.raises(RunInUse, match="process 7 on elsewhere trains in .*, and took it over while this process"):
            holder.check()
    assert json.loads((tmp_path / "lock.json").read_text())["id"] == "other"


def test_a_process_that_ended_and_was_not_waited_for_holds_nothing():
    process = subprocess.Popen([sys.executable, "-c", ""])
    try:
        while lock._started(process.pid) is not None:
            time.sleep(0.01)
    finally:
        process.wait()


def test_a_beat_that_cannot_be_written_leaves_the_one_before(tmp_path, monkeypatch):
    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    with RunLock(tmp_path) as held:
        before = (tmp_path / "lock.json").read_text()
        with monkeypatch.context() as patched, pytest.raises(OSError, match="No space"):
            patched.setattr(lock.Path, "write_text", full)
            held._write(1)
        assert (tmp_path / "lock.json").read_text() == before
    assert list(tmp_path.iterdir()) == []


def test_two_that_take_over_at_once_do_not_share_a_file(tmp_path, monkeypatch):
    """The first moves its file into place between the other's write and move."""
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    move = lock.Path.replace

    def moving(path, target):
        monkeypatch.setattr(lock.Path, "replace", move)
        first._write(0)
        return move(path, target)

    monkeypatch.setattr(lock.Path, "replace", moving)
    second._write(0)
    assert json.loads((tmp_path / "lock.json").read_text())["id"] == second._own["id"]


def test_beats_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.02)
    with RunLock(tmp_path):
        first, give_up = (tmp_path / "lock.json").read_text(), time.monotonic() + 10
        while (tmp_path / "lock.json").read_text() in (first, "") and time.monotonic() < give_up:
            time.sleep(0.01)
        assert json.loads((tmp_path / "lock.json").read_text() or "{}").get("beat", 1) >= 1
