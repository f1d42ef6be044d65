"""A few cases of the fuzzer; `python -m tests.fuzz.cases` runs as many as you like."""

import pytest

from tests.fuzz.cases import run_case, save_whole

CASES = 300


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return save_whole(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("seed", range(CASES))
def test_case(seed, tmp_path, whole):
    run_case(seed, tmp_path, whole)
