"""Record the evidence of the bank: ``./workshop.sh test --full tests/check/rules --record``."""

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--record", action="store_true", help="save the evidence of the real runs for the daily tests by replay"
    )


@pytest.fixture(scope="module")
def recording(request):
    """A dictionary for the evidence of the cases of a module; with --record it is written to the file of the family."""
    records = {}
    yield records
    if records and request.config.getoption("--record", False):
        # Imported only here, because pytest loads this file for every test of the check.
        from check.bank.cases import family_of
        from check.bank.replay import save

        cases = (*request.module.MISTAKES, *request.module.STYLES)
        save(family_of(request.module.__file__), records, [case.name for case in cases])


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A function that returns a new folder."""
    return lambda name: tmp_path_factory.mktemp(name)
