"""The referee: public-shaped programs that were written without sight of the rules."""

import pytest

from check.bank.referee import checked, versions

VERSIONS = {f"{each.shape}/{each.name}": each for each in versions()}
RIGHT = [name for name, each in VERSIONS.items() if each.kind != "mistake"]
OF_THE_CHECK = "please report this error of the check"
NAMED = [name for name, each in VERSIONS.items() if each.kinds]


@pytest.mark.parametrize("name", VERSIONS)
def test_each_version_can_be_made_and_points_at_one_line(name, tmp_path):
    version = VERSIONS[name]
    version.write(tmp_path / "program")
    if version.kind == "mistake":
        assert len(version.lines(tmp_path / "program")) == 1
        assert len(version.accepted(tmp_path / "program")) == 1 + len(version.also)
        assert version.says


@pytest.mark.full
@pytest.mark.parametrize("name", RIGHT)
def test_the_check_finds_nothing_in_a_correct_program(name):
    row = checked(VERSIONS[name])
    assert "broken" not in row, row
    assert row["errors"] == []
    assert not [each for each in row["not_checked"] if OF_THE_CHECK in each]


@pytest.mark.full
@pytest.mark.parametrize("name", NAMED)
def test_the_check_names_the_mistake(name):
    row = checked(VERSIONS[name])
    assert row["named"], row["errors"]
    assert not [each for each in row["not_checked"] if OF_THE_CHECK in each]
