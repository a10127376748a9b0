"""Whether the steps train the model."""

import math
from functools import partial
from itertools import islice, pairwise

from workshop.check.evidence.events import GraphMeasured, StepBegun
from workshop.check.evidence.misuses import (
    EvaluationGraph,
    GradientsMixed,
    InHalfPrecision,
    InputsWithoutGradients,
    LabelsShifted,
    LossOfProbabilities,
    NeverFilled,
    RecomputedAtRandom,
)
from workshop.check.evidence.process import Process
from workshop.check.evidence.run import Run
from workshop.check.evidence.sketches import difference
from workshop.check.rules.ending import crash, ended_early
from workshop.check.rules.processes import no_group, wrong_group
from workshop.check.rules.rule import Said, Seen, rule
from workshop.check.rules.words import listed, named, plural
from workshop.check.scenarios import WHOLE

ROUNDED, SHARE = 5, 0.1  # steps that show that values do not change, and the share of such values

# How programs make parameters in half precision.
IN_HALF = r"\.(bfloat16|half)\(\)|\.to\(.*torch\.(bfloat16|float16|half)|from_\w+\(.*dtype|set_default_dtype\(.*16"

# A rule about the steps of one process: if it finds something, the reported figures cannot be right.
of_steps = partial(rule, after=(no_group, wrong_group), spoils=True, anywhere=True)


@of_steps(
    why="The optimizer changes parameters that the model does not use, so the model stays as it was.",
    fix="Create the optimizer from the parameters of the model that computes the loss, after the last change to that model.",
    instead_of=(crash, ended_early),
)
def wrong_parameters(run: Run) -> Said:
    """The optimizer holds none of the model's parameters."""
    for process in run.trained[:1]:
        # An optimizer with copies of the parameters (in float32, or of a part of them) gets their gradients from the program.
        # With learning rates of 0, get_state_dict of torch.distributed.checkpoint takes a step that creates the state.
        steps = [step for step in process.steps if any(step.before.rates or [1.0])]
        copies = any(gradient for step in steps for gradient in step.before.gradients)
        if steps and not copies and not any(step.before.sharded or step.before.of_model for step in steps):
            where = process.steps[0].before.made or process.step_where
            yield Seen("the optimizer holds none of the parameters that the forward pass uses", where)


@of_steps(
    why="These parameters get gradients, but they never change, so that part of the model stays as it was.",
    fix="Create the optimizer after the last change to the model, from model.parameters(); freeze with requires_grad_(False).",
    after=(no_group, wrong_group, wrong_parameters),
)
def parameters_forgotten(run: Run) -> Said:
    """Parameters of the model have gradients, and the optimizer has parameters that were in their place before."""
    for process in run.trained[:1]:
        own = (step.before for step in process.steps if step.before.of_model)  # others have copies of the parameters
        names = next((begun.forgotten for begun in own if begun.forgotten), [])
        if names:
            where = process.steps[0].before.made or process.step_where
            yield Seen(f"no optimizer holds {listed(names)}, although backward() computes their gradients", where)


@of_steps(
    why="to_empty() only allocates memory, with any values in it. Training begins with these values, or with NaN.",
    fix="After to_empty(), initialize every parameter: call the reset_parameters() of each layer, also of those inside other "
    "modules, or load a checkpoint that has all of them.",
    needs=(NeverFilled,),
    origin="call:to_empty",
)
def never_initialized(run: Run) -> Said:
    """Parameters that nothing has set after ``to_empty()`` are trained."""
    for process in run.trained[:1]:
        for event in process.of(NeverFilled)[:1]:
            names = listed([name.removeprefix("module.") for name in event.names])
            seen = (
                f"{plural(len(event.names), 'parameter')} of {event.of} ({names}) have no values yet at the first step"
            )
            yield Seen(f"{seen}: nothing sets them after to_empty()", event.where)


@of_steps(
    why="NaN in the loss becomes NaN in all gradients and parameters, so nothing after it trains the model.",
    fix="Find the first operation that returns NaN with set_detect_anomaly(True) of torch.autograd: a division by zero, a mean "
    "over no values, the logarithm of 0, or a learning rate that is too high.",
    instead_of=(crash, ended_early),
    after=(no_group, wrong_group, never_initialized),
)
def loss_not_finite(run: Run) -> Said:
    """From some backward pass on, the loss of a rank is NaN or infinite; or its parameters are."""
    for process in run.trained:
        losses = [each for each in process.backwards if each.loss is not None]
        wrong = [not math.isfinite(each.loss or 0.0) for each in losses]
        if wrong and wrong[-1] and 2 * sum(wrong) >= len(wrong) - wrong.index(True):
            number = wrong.index(True)
            first = losses[number]
            seen = f"the loss of {named(process, 'the program')} is {first.loss} from backward pass {number + 1} on"
            yield Seen(seen, first.where)
            return
        for number, step in enumerate(process.steps, 1):
            # The padding of a part is not initialized, so it may be NaN. If a parameter is, the loss is too in the next step.
            weights = step.after.weights if step.after and not step.before.sharded else []
            if any(each and not math.isfinite(each[0]) for each in weights):
                seen = f"the parameters of {named(process, 'the program')} are NaN or infinite after step {number}"
                backwards = step.backwards[-1:]
                yield Seen(seen, backwards[0].where if backwards else step.before.where)
                return


@of_steps(
    why="Parameters that do not change, or a loss that does not fall, mean that nothing is learned.",
    fix="Call backward() before step(). Use no detach(), .data or no_grad() in the loss, and check learning rate and labels.",
    after=(no_group, wrong_group, wrong_parameters, loss_not_finite),
)
def no_learning(run: Run) -> Said:
    """There is no gradient, or the parameters do not change."""
    for process in run.trained[:1]:
        steps = process.steps
        gradients = [gradient for step in steps for gradient in step.before.gradients]
        if all(gradient is None or gradient[0] == 0 for gradient in gradients):
            seen = "every gradient is zero" if any(gradients) else "there is no gradient"
            yield Seen(seen, process.step_where, origin="" if any(gradients) else "sync")
        elif difference(steps[0].before.weights, (steps[-1].after or steps[-1].before).weights) == 0:
            yield Seen(f"the parameters do not change in {plural(len(steps), 'step')}", process.step_where)


@no_learning.also(WHOLE, last=True)
def loss_does_not_fall(run: Run) -> Said:
    """The loss is constant, or rises: the few steps of a check cannot show more."""
    for process in run.trained[:1]:
        backwards = process.backwards
        losses = [each.loss for each in backwards if each.loss is not None]
        if len(losses) < 6 or process.optimizers > 1 or not all(map(math.isfinite, losses)):
            return
        third = len(losses) // 3
        first, last = sum(losses[:third]) / third, sum(losses[-third:]) / third
        rises = run.asked is not None and last > first + 0.1 * abs(first)  # that of a policy gradient may rise
        if rises or (max(losses) == min(losses) and run.divided != "stages"):
            seen = f"the loss goes from {first:.3f} to {last:.3f} in {len(process.steps)} steps"
            yield Seen(seen, backwards[0].where)


@of_steps(
    why="The gradients of earlier steps are added to those of the new batch, so each step also repeats the old ones.",
    fix="Call optimizer.zero_grad() once before the first backward() of each step.",
    after=(no_group, wrong_group, wrong_parameters, no_learning),
)
def gradients_pile_up(run: Run) -> Said:
    """The first backward pass of a step adds to the gradients of the previous step."""
    for process in run.trained[:1]:
        if process.optimizers > 1 or not process.steps[0].before.of_model:
            continue  # a generator's backward pass leaves gradients in the discriminator; copies get their gradients later
        piled = [each for step in process.steps[1:] for each in step.backwards[:1] if each.leftover]
        if len(piled) > len(process.steps) // 3:
            yield Seen("the first backward() of a step adds to the gradients of the previous step", piled[0].where)


@rule(
    why="The autograd graph of every step stays in memory, until the run is out of memory.",
    fix="Keep numbers, not tensors with a graph: store or add up loss.detach() or loss.item().",
    after=(no_group, wrong_group, wrong_parameters, no_learning),
    anywhere=True,
    origin="kept",
)
def graph_kept(run: Run) -> Said:
    """The largest autograd graph in memory grows by about the same number of nodes each time."""
    for process in run.trained[:1]:
        sizes = [event.nodes for event in process.of(GraphMeasured)]
        growth = [later - earlier for earlier, later in pairwise(sizes)]
        # A model that skips blocks at random also has larger and smaller graphs. A GRU has a node for each time.
        longer = _elements(process, 6) / _elements(process, 2)
        if sizes and sizes[-1] < 1.6 * longer * sizes[0]:
            return
        if len(sizes) > 1 and sizes[-1] >= 1.6 * sizes[0] and min(growth) >= 6 and max(growth) <= 2 * min(growth):
            where, steps = process.step_where, len(sizes) * 2
            yield Seen(f"a graph grows from {sizes[0]} to {sizes[-1]} nodes in the first {steps} steps", where)


@graph_kept.also(WHOLE, needs=(EvaluationGraph,), after=(no_group, wrong_group, no_learning))
def graph_kept_in_evaluation(run: Run) -> Said:
    """In an evaluation with gradients, the graph grows by the same number of nodes with each batch."""
    for event in run.trained[0].of(EvaluationGraph)[:1] if run.trained else ():
        first, *_, last = event.nodes
        growth = [later - earlier for earlier, later in pairwise(event.nodes)]
        if last >= 2 * first and min(growth) >= 6 and max(growth) <= 2 * min(growth):
            batches = " and ".join(map(str, (event.batches[0] - 1, event.batches[-1] - 1)))
            seen = f"in an evaluation with gradients, a graph has {first} and {last} nodes after {batches} batches"
            yield Seen(
                seen,
                event.where,
                fix="Evaluate in `with torch.no_grad():`, or decorate the function with it.",
                origin="here",
            )
            return


def _elements(process: Process, number: int) -> int:
    """The number of elements of a sample of a step; 1 if it is not known."""
    forwards = [each.forward for step in process.steps[number : number + 1] for each in step.backwards]
    shapes = [forward.shape for forward in forwards if forward and forward.shape]
    return max(1, math.prod(shapes[-1])) if shapes else 1


@rule(
    why="The loss applies the softmax or the sigmoid itself (nll_loss: it needs logarithms). Applied twice, it makes all outputs "
    "similar: the loss cannot become small, and the gradients are too small.",
    fix="Pass the outputs of the model without softmax or sigmoid (logits) to cross_entropy or binary_cross_entropy_with_logits; "
    "give nll_loss the result of log_softmax.",
    needs=(
        LossOfProbabilities,
        RecomputedAtRandom,
    ),
    anywhere=True,
)
def loss_of_probabilities(run: Run) -> Said:
    """A loss that needs the outputs of a model gets probabilities."""
    for event in run.trained[0].of(LossOfProbabilities)[:1] if run.trained else ():
        yield Seen(f"{event.name} gets the result of {event.of}", event.where)


@rule(
    why="The model compares its output for each token with the label of the next one. With shifted labels it learns the token "
    "after the next one.",
    fix="Pass the same tokens as input_ids and as labels (labels=input_ids), with -100 for those that do not count.",
    needs=(LabelsShifted,),
    anywhere=True,
    origin=r"text:\blabels\W.*\[.*\b1:\s*\]",
)
def labels_shifted(run: Run) -> Said:
    """A language model of transformers, which shifts the labels itself, gets shifted labels."""
    for event in run.trained[0].of(LabelsShifted)[:1] if run.trained else ():
        yield Seen(f"{event.model} shifts its labels itself, and gets labels that the program has shifted", event.where)


@of_steps(
    why="Reentrant checkpointing computes gradients only if an input of the layer needs one. The layer is not trained.",
    fix="Call torch.utils.checkpoint.checkpoint() with use_reentrant=False, or enable_input_require_grads() in transformers.",
    needs=(InputsWithoutGradients,),
    instead_of=(crash, ended_early),
)
def checkpointed_without_gradients(run: Run) -> Said:
    """The inputs of a checkpointed layer need no gradient, as those of the first one, or after frozen layers."""
    for event in islice(run.all(InputsWithoutGradients), 1):
        yield Seen(
            "with use_reentrant=True, the parameters of this layer get no gradients: none of its inputs needs one",
            event.where,
        )


@of_steps(
    why="The backward pass recomputes the layer with different random numbers, such as other dropout masks, so its gradients are "
    "not those of the loss.",
    fix="Call torch.utils.checkpoint.checkpoint() with preserve_rng_state=True, which is the default.",
    needs=(RecomputedAtRandom,),
)
def recomputed_at_random(run: Run) -> Said:
    """A checkpointed layer draws random numbers, and the random state is not restored before its recomputation."""
    for event in islice(run.all(RecomputedAtRandom), 1):
        yield Seen("with preserve_rng_state=False, this layer is recomputed with different random numbers", event.where)


@of_steps(
    why="bfloat16 and float16 have few digits: a step that changes a parameter by less than about 1/256 of its value (float16: "
    "1/2048) is rounded away, each time. These values are never trained.",
    fix="Keep the parameters in float32 and compute in bfloat16: leave out .to(torch.bfloat16), and use torch.autocast(), or "
    "MixedPrecisionPolicy(param_dtype=torch.bfloat16) with fully_shard.",
    needs=(InHalfPrecision,),
    after=(no_group, wrong_group, wrong_parameters, no_learning),
    origin=rf"text:{IN_HALF}",
)
def steps_rounded_away(run: Run) -> Said:
    """Values of parameters in half precision have gradients, but no step changes them."""
    for process in run.trained[:1]:
        for event in process.of(InHalfPrecision):
            steps = [each.before for each in process.steps if each.before.made == event.where]
            steps = [each for each in steps if len(each.weights) > event.places[-1]]
            rates = [max(each.rates, default=0.0) for each in steps]
            if len(steps) < ROUNDED or rates[-1] > max(rates[: len(rates) // 2]):
                continue  # while the learning rate still rises, later steps may be large enough
            kept = {place: _unchanged(place, steps) for place in event.places}
            values = [value for each in kept.values() for value in each]
            most = [place for place, each in kept.items() if len(each) > 1 and 2 * sum(each) >= len(each)]
            if most and sum(values) >= SHARE * len(values):
                names = listed([steps[0].names[place] or "?" for place in most])
                share = (
                    f"{sum(values) / len(values):.0%} of the values that the check looks at, most of them in {names}"
                )
                seen = f"{share}, are the same after {plural(len(steps), 'step')}, although they have gradients"
                yield Seen(f"{seen}: they are {event.dtype}, and each step is rounded away", event.where)
                return


def _unchanged(place: int, steps: list[StepBegun]) -> list[bool]:
    """Whether each recorded value of a parameter is the same before all steps; only of values that mostly have a gradient."""
    weights = [step.weights[place] for step in steps]
    gradients = [step.gradients[place] for step in steps]
    if not all(weights) or not all(gradients):
        return []
    tables = [[each[1] for each in part if each] for part in (weights, gradients)]
    with_gradient = [2 * sum(map(bool, values)) > len(values) for values in zip(*tables[1], strict=False)]
    same = [len(set(values)) == 1 for values in zip(*tables[0], strict=False)]
    return [each for each, counts in zip(same, with_gradient, strict=False) if counts]


@of_steps(
    why="Each step also uses gradients of the loss of another optimizer, such as that of a generator, which wants the opposite.",
    fix="Call zero_grad() of this optimizer right before the backward() of its own loss.",
    needs=(GradientsMixed,),
    after=(no_group, wrong_group, wrong_parameters, no_learning),
)
def gradients_mixed(run: Run) -> Said:
    """An optimizer uses gradients that the backward pass for another optimizer has left in its parameters."""
    for event in run.trained[0].of(GradientsMixed)[:1] if run.trained else ():
        names = f" of {listed(event.names)}" if event.names else ""
        seen = f"backward() adds to the gradients{names} of backward() at {event.other}, which is for another optimizer"
        yield Seen(f"{seen}, and the step uses both", event.where)
