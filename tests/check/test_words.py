"""The words of findings: hints, figures, links, and the errors of libraries in plain words."""

import re

import pytest

import runs
from check.bank.replay import evidence, replayed
from check.bank.whole import case_of, families
from workshop.check.evidence.events import Ended, Joined, Raised
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import EXPLAINED, ending
from workshop.check.rules.pages import PAGES, page
from workshop.check.rules.rule import RULES
from workshop.check.verdict import Finding
from workshop.dev.documents import anchors


def verdict_of(name):
    """Return the verdict on the recorded evidence of a case."""
    case = case_of(name)
    (family,) = (family for family, cases in families().items() if case in (*cases[0], *cases[1]))
    return replayed(case, family)


@pytest.mark.parametrize("name", ["dropout", "emptied-tensor", "solution-language-model"])
def test_a_correct_program_gets_neither_an_error_nor_a_hint(name):
    assert verdict_of(name).findings == []


@pytest.mark.parametrize("name", ["group-never-destroyed", "first-batch-thrown-away", "same-dropout-on-all-ranks"])
def test_a_goal_is_met_despite_a_hint(name):
    verdict = verdict_of(name)
    assert [finding.is_error for finding in verdict.findings] == [False]
    assert "open" not in verdict.states().values()


def test_a_missing_figure_is_named():
    assert "no accuracy is given to log.write()" in verdict_of("nothing-reported").errors[0].seen


def test_figures_that_cannot_be_compared_are_reported_as_not_checked():
    verdict = verdict_of("images-as-rows")
    assert len(verdict.unchecked) == 1
    assert verdict.unchecked[0].startswith("the reported figures (AttributeError: ")


@pytest.mark.parametrize(
    ("name", "goal"),
    [("no-restarts", 3), ("runner-without-torchrun", 0), ("runner-of-one-process", 1), ("runner-without-exec", None)],
)
def test_a_finding_about_the_runner_belongs_to_a_goal(name, goal):
    assert verdict_of(name).first_open == goal


def test_a_lost_connection_is_explained():
    whole = evidence("ending")["sharded-only-rank-0-writes"].made["whole"]
    lost = "rank 0 lost its connection to rank 1, which had already ended (RuntimeError)"
    assert ending(whole).text.startswith(lost)
    # The verdict does not repeat it: the different calls of the ranks explain it.
    assert [finding.kind for finding in verdict_of("sharded-only-rank-0-writes").errors] == ["collectives-differ"]


# What libraries print: torch 2.15 and its NCCL and CUDA, except for device numbers and addresses.
PRINTED = {
    "finished reduction in|not used in producing the loss": "Expected to have finished reduction in the prior iteration "
    "before starting a new one. This error indicates that your module has parameters that were not used in producing loss.",
    "waiting for clients": "Timed out after 601 seconds waiting for clients. 1/2 clients joined.",
    "operation timeout|Timed out waiting": "[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=5, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600029 milliseconds before timing out.",
    "unhandled system error": "NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:317, unhandled system error "
    "(run with NCCL_DEBUG=INFO for details), NCCL version 2.21.5",
    "device-side assert triggered": "CUDA error: device-side assert triggered",
    "(CUDA|HIP) out of memory": "CUDA out of memory. Tried to allocate 2.50 GiB.",
    "invalid device ordinal": "CUDA error: invalid device ordinal",
    "no kernel image is available": "CUDA error: no kernel image is available for execution on the device",
    "Address already in use|EADDRINUSE": "The server socket has failed to listen on any local network address. port: 29500, "
    "useIpv6: false, code: -98, name: EADDRINUSE, message: address already in use",
}


def of_rank_0(message, *others):
    """Return a run of two ranks in which rank 0 raises an error with this message after these events of rank 1."""
    error = Raised(type="RuntimeError", message=message, traceback=f"RuntimeError: {message}")
    first = Process(1, [(0.0, Joined(rank=0, world_size=2)), (9.0, error)])
    return Run(2, [first, Process(2, [(0.0, Joined(rank=1, world_size=2)), *others])], 1, "", False, 9.0, "torchrun")


@pytest.mark.parametrize(("sign", "message"), PRINTED.items(), ids=PRINTED.keys())
def test_the_error_of_a_library_is_explained_with_a_remedy(sign, message):
    seen = ending(of_rank_0(message))
    assert seen.text == f"rank 0: {EXPLAINED[sign]} (RuntimeError)"
    assert message in seen.detail


@pytest.mark.parametrize(
    "message",
    [
        PRINTED["operation timeout|Timed out waiting"],
        "[/gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:2",
    ],
)
def test_an_error_caused_by_a_rank_that_ended_names_this_rank(message):
    seen = ending(of_rank_0(message, (1.0, Ended())))
    assert seen.text.startswith("rank 0 lost its connection to rank 1, which had already ended (RuntimeError)")


# ---------------------------------------------------------------- where to read more


@pytest.mark.parametrize("name", RULES)
def test_each_remedy_names_something_that_has_a_page(name):
    assert RULES[name].read, f"add a name to workshop/check/rules/pages.py: {RULES[name].fix}"
    assert Finding(RULES[name], "seen").as_dict()["read"] == RULES[name].read


def test_each_page_is_used_and_each_page_of_the_repository_exists():
    assert set(PAGES.values()) == {rule.read for rule in RULES.values()}
    assert list(PAGES) == sorted(PAGES)
    for address in PAGES.values():
        path, _, anchor = address.partition("#")
        if not re.match("https://", address):
            assert (runs.ROOT / path).is_file(), address
            assert not anchor or anchor in anchors(runs.ROOT / path), address


def test_the_page_is_that_of_the_first_and_longest_name_in_a_remedy():
    assert page("with fully_shard, not with torchrun") == PAGES["fully_shard"]
    assert page("call torch.distributed.checkpoint.load") == PAGES["torch.distributed.checkpoint"]
    assert page("a metaphor, resumed") == ""
