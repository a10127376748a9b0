"""Rules about the classes of a program of stage 06: the cases in which the check tries them, and PyTorch's own classes."""

from collections.abc import Callable, Iterator
from itertools import islice

from workshop.check.evidence.events import CaseTried, Event
from workshop.check.evidence.run import Run
from workshop.check.rules.ending import ending
from workshop.check.rules.rule import NotJudged, Rule, Said, Seen, rule
from workshop.check.scenarios import BUILT_CASES

CASES = {
    "start": "a model that each rank has created with different random numbers",
    "odd": "a model with a tied, a frozen and an unused parameter, and one that only rank 0 uses",
    "no-gradient": "AdamW and a parameter without gradients",
    "twice": "two backward passes before the step",
    "changed": "a parameter that was replaced",
    "other-class": "a different class of optimizer",
    "shares": "parameters of different sizes",
    "scheduled": "a schedule of the learning rate and of weight_decay",
    "saved": "state_dict()",
    "loaded": "load_state_dict()",
    "loaded-part": "load_state_dict()",
    "uneven-sizes": "parameters whose size the ranks do not divide",
    "precision": "compute_dtype",
    "old-parameters": "a forward pass without a backward pass",
    "linear-layers": "column-parallel and row-parallel layers in a different model",
    "linear-model": "a transformer of a different size, without sequence parallelism",
    "linear-group": "a group of some of the ranks",
    "linear-undivided": "a layer whose features the ranks do not divide",
    "sequence-model": "a transformer of a different size, with sequence parallelism",
    "sequence-undivided": "a sequence whose tokens the ranks do not divide",
    "whole-state": "full_state_dict()",
    "experts-layer": "a layer with experts of a different size",
    "experts-group": "a group of some of the ranks",
    "experts-impossible": "impossible arguments",
    "no-tokens": "a rank without tokens, and experts that no token needs",
    "capacity": "a capacity factor",
    "balance": "the load-balancing loss",
    "order": "a mesh of four ranks",
    "parts": "a mesh of dp 2 and tp 2",
    "divided": "a mesh of dp 2 and cp 2",
    "computed": "a mesh of cp 2 and tp 2",
    "averaged": "a mesh of dp 2 and cp 2 or tp 2",
    "clipped": "clip_gradients() on a mesh of pp 2 and tp 2",
    "state": "checkpoint_state() on a mesh of dp 2 and tp 2",
    "resumed": "resume()",
    "microbatches": "linear layers as stages",
    "gpipe": "the schedule gpipe",
    "one-forward-one-backward": "the schedule 1f1b",
    "other-shape": "batches of different shapes",
    "stages": "stages whose outputs have different shapes and data types",
    "frozen-stage": "a stage without trained parameters",
    "whole-numbers": "a stage that returns integers",
    "one-stage": "a group of one rank",
    "microbatch-errors": "arguments that cannot work",
    "sequence-shards": "shard_sequence() and gather_sequence()",
    "attention": "queries, keys and values of sizes that the exercise does not use",
    "large-scores": "large scores",
    "attention-gradients": "queries, keys and values of sizes that the exercise does not use",
    "low-precision": "bfloat16",
    "one-member": "a group of one rank",
    "sequence-errors": "arguments that cannot work",
    "forward-bytes": "4 heads of queries and 2 of keys",
    "backward-bytes": "4 heads of queries and 2 of keys",
    "scores": "a causal mask",
    "scores-of-ranks": "a causal mask",
}


def _tried(run: Run, *names: str) -> Said:
    """What went wrong in these cases."""
    for name in names:
        results = [event for event in run.all(CaseTried) if event.name == name]
        wrong = next((each for each in results if each.problem), None)
        if not results:
            yield NotJudged(f"{CASES[name]}: an earlier case did not end", goal=True)
        elif wrong:
            yield Seen(f"with {CASES[name]}: {wrong.problem}", wrong.where)
            return
        elif all(each.problem is None for each in results):
            seen = ending(run) or Seen("the program ended")
            yield Seen(f"with {CASES[name]}: {seen.text}", seen.where, seen.detail)
            return


def case_rule(family: str, name: str, why: str, fix: str, *cases: str, after: tuple[Rule, ...] = ()) -> Rule:
    """Declare the rule that nothing goes wrong in some cases; ``family`` is the __name__ of the module that declares it."""

    def judge(run: Run) -> Said:
        yield from _tried(run, *cases)

    judge.__name__, judge.__doc__, judge.__module__ = name, f"The cases {', '.join(cases)}.", family
    return rule(why=why, fix=fix, runs=BUILT_CASES, needs=(CaseTried,), after=after)(judge)


def instead(family: str, name: str, what: str, used: Callable[[Run], Iterator[str]], needs: type[Event]) -> None:
    """Declare the rule that an exercise does not use the class of PyTorch that it builds."""

    def judge(run: Run) -> Said:
        for where in islice(used(run), 1):
            yield Seen(f"the program uses PyTorch's {what}", where)

    judge.__name__, judge.__doc__, judge.__module__ = name, "The program uses the class of PyTorch.", family
    why = "In this exercise you write this class yourself. PyTorch's class is only for comparison, with --pytorch."
    fix = f"Use your own class instead of {what}, unless --pytorch is given."
    rule(why=why, fix=fix, needs=(needs,), blocks=True)(judge)
