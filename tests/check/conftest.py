"""Recording the evidence of the bank: ``./workshop.sh test --full tests/check/rules --record``."""

import pytest


def pytest_addoption(parser):
    parser.addoption(
        "--record", action="store_true", help="keep what the bank's real runs make, for the daily tests by replay"
    )


@pytest.fixture(scope="module")
def recording(request):
    """Takes the evidence of each case of a module by its name, and with --record writes it to the family's file."""
    records = {}
    yield records
    if records and request.config.getoption("--record", False):
        from check.bank.cases import family_of  # only here: this file is read for all tests below it
        from check.bank.replay import save

        cases = (*request.module.MISTAKES, *request.module.STYLES)
        save(family_of(request.module.__file__), records, [case.name for case in cases])
