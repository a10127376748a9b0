"""The reports for other programs: JUnit XML and SARIF."""

import dataclasses
import json
import re
from xml.etree import ElementTree

import pytest
from rich.console import Console

from check import small
from workshop.check.baseline import sieve
from workshop.check.command import check_command
from workshop.check.judge import BUG, ask
from workshop.check.junit import as_junit
from workshop.check.report import show, show_all
from workshop.check.rules.rule import RULES, Detector, Seen
from workshop.check.sarif import as_sarif
from workshop.check.scenarios import WHOLE
from workshop.check.settings import Settings
from workshop.check.verdict import Finding, Verdict


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A repository with the program in a folder."""
    root = tmp_path_factory.mktemp("repository")
    (root / ".git").mkdir()
    folder = root / "my programs"
    folder.mkdir()
    (folder / "train.py").write_text(small.PROGRAM)
    return folder


@pytest.fixture(scope="module")
def verdict(folder):
    *_, verdict = check_command(small.COMMAND, folder=folder)
    assert {finding.kind for finding in verdict.findings} == set(small.MISTAKES)
    return verdict


def changed(verdict, *findings):
    return dataclasses.replace(verdict, findings=list(findings))


def suite_of(text):
    """Return the suite, and its cases by their names."""
    suite = ElementTree.fromstring(text.encode())[0]
    return suite, {case.get("name"): case for case in suite}


def outcomes(case):
    return [child.tag for child in case]


def results(text):
    return json.loads(text)["runs"][0]["results"]


def test_junit_has_a_test_for_each_rule_that_judged(verdict):
    suite, cases = suite_of(as_junit(verdict))
    for kind in small.MISTAKES:
        (failure,) = cases[kind]
        assert failure.tag == "failure"
        assert f"where: train.py:{small.line_of(kind)}" in failure.text
        assert RULES[kind].fix in failure.text
    assert outcomes(cases["hang"]) == outcomes(cases["weights-differ"]) == []
    for name in ("never-resumes", "shares-overlap", *verdict.unchecked):  # no checkpoint; better explained; unchecked
        assert outcomes(cases[name]) == ["skipped"], name
    assert (suite.get("failures"), int(suite.get("tests"))) == ("2", len(cases))
    assert int(suite.get("skipped")) == len(list(suite.iter("skipped")))
    assert "still-torchrun" not in cases  # a rule for job scripts


def test_all_findings_of_a_rule_are_in_its_test(verdict):
    rule = RULES["two-writers"]
    errors = [Finding(rule, f"\x1b[1mfile {name} <&>", f"train.py:{line}") for name, line in (("a", 3), ("b", 3))]
    _, cases = suite_of(as_junit(changed(verdict, *errors, Finding(rule, "a hint", advice=True))))
    failure, output = cases["two-writers"]
    assert failure.get("message") == "[1mfile a <&>; [1mfile b <&>"
    assert failure.text.count(f"why: {rule.why}") == 2
    assert output.tag == "system-out"
    assert output.text.startswith("a hint")


def test_findings_with_the_same_words_at_different_lines_are_all_kept(verdict, folder):
    rule = RULES["two-writers"]
    both = changed(verdict)
    both.add([Finding(rule, "said", f"train.py:{line}") for line in (3, 7, 3)])
    assert [finding.where for finding in both.errors] == ["train.py:3", "train.py:7"]
    places = [each["locations"][0]["physicalLocation"] for each in results(as_sarif(both, folder))]
    assert [place["region"]["startLine"] for place in places] == [3, 7]


def test_what_is_hidden_has_neither_failed_nor_passed(verdict, folder):
    sifted = sieve(Settings(folder, ignore=("two-writers",), write_baseline=folder / "known.json"))(verdict)
    assert (sifted.status, verdict.status) == (0, 1)
    _, cases = suite_of(as_junit(sifted))
    assert outcomes(cases["two-writers"]) == outcomes(cases["same-samples"]) == ["skipped"]
    assert results(as_sarif(sifted, folder)) == []


def test_a_rule_that_could_not_judge_has_not_passed(verdict):
    rule = RULES["weights-differ"]
    missed = dataclasses.replace(verdict, missed={rule.detectors[0]})
    assert outcomes(suite_of(as_junit(missed))[1][rule.name]) == ["skipped"]


def test_a_program_that_cannot_be_judged_is_an_error(tmp_path):
    (tmp_path / "train.py").write_text("print('hello')")
    *_, verdict = check_command(["python", "train.py"], folder=tmp_path)
    _, cases = suite_of(as_junit(verdict))
    assert outcomes(cases["judged"]) == ["error"]
    assert {name for name, case in cases.items() if not len(case)} == set()
    (run,) = json.loads(as_sarif(verdict, tmp_path))["runs"]
    assert [each["executionSuccessful"] for each in run["invocations"]] == [False]


def test_an_error_of_a_rule_is_reported_and_costs_no_other_finding(verdict):
    broken = Detector(RULES["crash"], lambda run: [1 / run], (WHOLE,))
    sound = Detector(RULES["hang"], lambda run: [Seen("it hangs", "train.py:1")], (WHOLE,))
    known = Verdict(verdict.subject)
    ask(known, [broken, sound], {WHOLE: 0})
    assert [finding.seen for finding in known.findings] == ["it hangs"]
    assert known.unchecked == [f"crash ({BUG} ZeroDivisionError: division by zero)"]


def test_sarif_has_what_code_scanning_requires(verdict, folder):
    log = json.loads(as_sarif(verdict, folder))
    assert (log["version"], log["$schema"]) == ("2.1.0", "https://json.schemastore.org/sarif-2.1.0.json")
    (run,) = log["runs"]
    rules = run["tool"]["driver"]["rules"]
    assert run["tool"]["driver"]["name"] == "workshop-check"
    for each in rules:
        for text in (each["shortDescription"], each["fullDescription"], each["help"]):
            assert 0 < len(text["text"]) <= 1024
        assert re.match("https://", each.get("helpUri", "https://"))
    assert {each["id"]: each.get("helpUri") for each in rules}["same-samples"] == RULES["same-samples"].read
    for result in run["results"]:
        kind = result["ruleId"]
        assert rules[result["ruleIndex"]]["id"] == kind
        assert result["level"] == "error"
        assert RULES[kind].why in result["message"]["text"]
        (location,) = result["locations"]
        line, text = small.line_of(kind), small.MISTAKES[kind][0]
        indent = len(text) - len(text.lstrip())
        assert location["physicalLocation"] == {
            "artifactLocation": {"uri": "my%20programs/train.py"},  # from the top of the repository
            "region": {"startLine": line, "startColumn": indent + 1, "endLine": line, "endColumn": len(text) + 1},
        }


@pytest.mark.parametrize("kind", RULES)
def test_each_rule_has_a_short_description(kind):
    assert RULES[kind].detectors[0].function.__doc__


def test_the_fingerprint_is_that_of_the_line_and_equal_lines_are_counted(verdict, folder):
    def prints(where):
        found = [Finding(RULES["two-writers"], seen, where) for seen in ("first", "second")]
        return [
            each["partialFingerprints"]["primaryLocationLineHash"] for each in results(as_sarif(made(found), folder))
        ]

    def made(found):
        return changed(verdict, *found)

    first, second = prints("train.py:3")
    assert (first[-2:], second[-2:]) == (":1", ":2")
    assert first[:-2] == second[:-2] != prints("train.py:4")[0][:-2]


def test_the_level_of_a_hint_is_lower_and_it_needs_no_line(verdict, folder):
    hints = [
        Finding(RULES["several-print"], "said", advice=True),
        Finding(RULES["not-destroyed"], "said", "gone.py:7", advice=True),
    ]
    found = results(as_sarif(changed(verdict, *hints), folder))
    assert [each["level"] for each in found] == ["warning", "note"]
    for each in found:
        place = each["locations"][0]["physicalLocation"]
        assert place["artifactLocation"]["uri"] == "my%20programs/train.py"
        assert place["region"]["startLine"] == 1


def test_a_file_is_found_by_its_name_alone(verdict, folder):
    inner = folder / "package" / "inner"
    inner.mkdir(parents=True)
    (inner / "data.py").write_text("import torch\n")
    (found,) = results(as_sarif(changed(verdict, Finding(RULES["hang"], "said", "data.py:1")), folder))
    place = found["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "my%20programs/package/inner/data.py"


def test_both_reports_are_written_if_the_program_hangs(tmp_path):
    (tmp_path / "train.py").write_text(small.HANGS)
    (tmp_path / "out.xml").write_text("old")
    done = small.check(tmp_path, "--junit", "out.xml", "--sarif", "out.sarif", "--", *small.COMMAND)
    assert done.returncode == 1, done.stdout + done.stderr
    _, cases = suite_of((tmp_path / "out.xml").read_text())
    failed = {name for name, case in cases.items() if "failure" in outcomes(case)}
    assert failed <= {"hang", "crash", "collectives-differ"}
    assert outcomes(cases["same-samples"]) == ["skipped"]  # what was left unfinished is not judged
    (found,) = results((tmp_path / "out.sarif").read_text())
    assert found["ruleId"] in failed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.sarif", "out.xml", "train.py"]


def test_a_check_that_is_stopped_prints_as_json_what_it_knows(verdict, capsys):
    def verdicts():
        yield dataclasses.replace(verdict, complete=False, checking="whether one process computes the same")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        show_all(verdicts(), json_only=True, verbose=False)
    report = json.loads(capsys.readouterr().out)
    assert (report["complete"], report["passed"]) == (False, False)
    assert {finding["kind"] for finding in report["findings"]} == set(small.MISTAKES)
    clean = dataclasses.replace(verdict, findings=[])
    assert [dataclasses.replace(clean, complete=complete).status for complete in (False, True)] == [2, 0]


def test_an_error_is_printed_once_as_soon_as_it_is_known(verdict, capsys):
    first, *others = verdict.findings
    shown = None
    for findings, checking in (([], "the run"), ([first], "the rest"), ([first], "more"), ([first, *others], "")):
        now = dataclasses.replace(verdict, findings=findings, complete=not checking, checking=checking)
        shown = show(now, Console(width=400), before=shown)
        print("---")
    texts = [" ".join(part.split()) for part in capsys.readouterr().out.split("---")]
    assert [" ".join(first.seen.split()) in text for text in texts[:4]] == [False, True, False, False]
    assert ["the check goes on" in text for text in texts[:4]] == [False, True, False, False]
