"""A study in a log says how far it is, and at a terminal shows a bar."""

import io

import pytest
from rich.console import Console

from titans_jax.quiet_lines import QUIET_SECONDS
from titans_jax.studies.progress import StudyProgress


@pytest.mark.parametrize("terminal", (False, True), ids=("log", "terminal"))
def test_a_log_gets_a_line_now_and_then(terminal):
    """Ten steps of three tenths of the quiet time: lines after steps 4 and 8, whose rest takes as long as so far."""
    seconds = 0.0
    written = io.StringIO()
    console = Console(file=written, force_terminal=terminal, width=100)
    with StudyProgress(console, 20, lambda: seconds) as progress:
        progress.model("preset=titans", 0)
        for _ in range(10):
            seconds += 0.3 * QUIET_SECONDS
            progress.step()
    lines = [line for line in written.getvalue().splitlines() if "eta" in line]
    expected = [f"preset=titans  step {step} of 20  eta {(20 - step) * 0.3 * QUIET_SECONDS:,.0f} s" for step in (4, 8)]
    assert lines == ([] if terminal else expected)


def test_steps_that_a_model_did_not_take_are_passed_over():
    """A training that stops early leaves the rest of its steps to the next model's beginning."""
    seconds, written = 0.0, io.StringIO()
    with StudyProgress(Console(file=written, width=100), 20, lambda: seconds) as progress:
        progress.model("first", 0)
        progress.step()
        progress.model("second", 10)
        seconds = 2 * QUIET_SECONDS
        progress.step()
    assert written.getvalue() == f"second  step 11 of 20  eta {9 * 2 * QUIET_SECONDS / 11:,.0f} s\n"
