"""Whether gradients, parameters and optimizers are connected as they should be, and in which mode the model runs."""

from __future__ import annotations

import enum

from gradflow_export.records.catalog.metric import MetricSpec


class Wiring(enum.IntFlag):
    """What the bits of ``parameter.wiring`` and ``parameter.hidden`` mean."""

    TRAINABLE = 1
    OWNED = 2
    GRADIENT = 4
    ZERO_RATE = 8
    CALLED = 16
    UNCALLED = 32
    WAITING = 64
    MADE = 128
    STEPPED = 256
    VECTOR = 512
    BESIDE = 1024
    LOOKED = 2048
    COPY = 4096


def specs() -> tuple[MetricSpec, ...]:
    """Return the metrics of this family, in the order of the documentation."""
    s = MetricSpec
    bits = (
        "sum of 1 requires_grad, 2 in an optimizer that stepped, 4 has a .grad before a step, 8 learning rate 0, "
        "16 its module was called, 32 its module was not called in the steps looked at, 64 in an optimizer that has "
        "not stepped yet, 128 made anew in a forward pass, 256 in an optimizer that stepped here, 512 at most one "
        "dimension, 1024 its module is one of a list of which two were given the same tensor, or different numbers of "
        "samples, 2048 its module was called while gradients were off, 4096 began as a copy of one that has a gradient"
    )
    # fmt: off
    return (
        s("parameter.wiring", "how a parameter is connected", "count", "parameter", bits, "definition", "c", low=0.0),
        s("parameter.hidden", "trained tensors that model.parameters() does not list", "count", "parameter",
          "the same sum, of tensors in plain lists, dicts and attributes of modules, and of modules that are called "
          "and not registered", "definition", "c", low=0.0),
        s("parameter.stale_gradient", "gradient left over from earlier steps", "share", "parameter",
          "least mean |.grad| that a backward pass since the last step found / mean |.grad| before this step, of 4 "
          "followed parameters; 0 where it was cleared", "definition", "c sampled", low=0.0),
        s("parameter.kept_gradient", "gradient that is still there at the step", "1", "parameter",
          "mean |.grad| before the step / sum over the backward passes of mean |gradient that arrived|, of 4 followed "
          "parameters; 0 where it was cleared in between", "definition", "c sampled", low=0.0),
        s("parameter.foreign_gradient", "gradient left over from another player's pass", "share", "parameter",
          "mean |.grad| that a pass found / mean |.grad| before this step, of the followed parameters, where a pass "
          "before it went on to what another optimizer holds, which stepped in between, and the later ones did not; "
          "else 0", "definition", "c sampled", low=0.0),
        s("loss.nested", "losses that hold each other", "count", "run",
          "longest row of losses of which each is the one before it and more terms, where backward was called on all "
          "of them and gradients were not cleared in between, or a step was; 1 without any", "definition", "c sampled",
          low=1.0),
        s("layer.taken_steps", "steps of sequences as taken", "count", "module",
          "length of the dimension that a layer with batch_first takes for time", "definition", "c sampled", low=0.0,
          batches="last"),
        s("parameter.frozen_size", "largest entry of a weight that is frozen", "1", "parameter",
          "max |w| of matrices without requires_grad, some steps after the first; of large ones of an even sample",
          "definition", "1P once", low=0.0),
        s("layer.cell_calls", "steps of a recurrent cell", "count", "module",
          "calls of a recurrent cell in the model's forward passes of one step", "definition", "c sampled", low=0.0),
        s("layer.taken_sequences", "number of sequences as taken", "count", "module",
          "length of the dimension that a layer with batch_first takes for the batch", "definition", "c sampled",
          low=0.0, batches="last"),
        s("layer.cut_off", "passes no gradient on", "1", "module",
          "1 at layers from whose outputs it was drawn or rounded without a gradient, 2 at those that are given it",
          "autograd graph", "c sampled", low=1.0, high=2.0),
        s("layer.discarded", "activation thrown away", "1", "module",
          "1 at layers whose output enters the next one as it is, and an activation of which nothing is left",
          "autograd graph", "c sampled", low=0.0, high=1.0),
        s("layer.repeated", "places of one layer", "count", "module",
          "how often one container holds the same layer, whose calls follow each other or are given the same",
          "definition", "c sampled", low=1.0),
        s("wiring.reloads", "returns to the first weights", "count", "run",
          "calls of load_state_dict after the first step that put the first weights back, running total", "definition",
          "c", low=0.0),
        s("wiring.orphans", "tensors in the optimizer that left the model", "count", "run",
          "tensors of the optimizer that are no parameters of the model, have no gradient, and have the shape of a "
          "parameter that no optimizer has", "definition", "c", low=0.0),
        s("wiring.lonely_passes", "backward passes without any step", "count", "run",
          "backward passes while no weight changed and no optimizer of the model stepped; told where gradients are "
          "cleared in between, or a copy of the model is trained", "definition", "c", low=0.0),
        s("wiring.gathering_passes", "gradients added up without any step", "count", "run",
          "backward passes whose gradients were kept while no weight changed, and the optimizer that holds the "
          "parameters never stepped", "definition", "c", low=0.0),
        s("wiring.blind_passes", "losses that lead to no parameter", "count", "run",
          "backward passes in a row on scalars whose graph, if there is one, reaches no parameter of the model",
          "definition", "c", low=0.0),
        s("wiring.foreign", "parameters whose copies are trained", "share", "run",
          "share of the model's parameters of whose shape an optimizer that steps holds a tensor, and none of them",
          "definition", "c", low=0.0, high=1.0),
        s("parameter.initial_gain", "gain of the first weights", "1", "parameter",
          "(mean w^2)^(1/2) (inputs of a unit)^(1/2) of the weights of layers before the first step",
          "He et al. 2015, arXiv:1502.01852", "1P once", low=0.0, scale="log"),
        s("parameter.row_spread", "difference between the units of a layer", "1", "parameter",
          "max |w_j - w_0| / max |w| over the rows of a layer's weights, before the first step and some steps later; 0 "
          "where all units are copies", "definition", "1P twice", low=0.0),
        s("parameter.initial_mean", "one-sidedness of the first weights", "share", "parameter",
          "|mean w| / (mean w^2)^(1/2) of evenly spaced weights of layers before the first step; 0.87 for uniform ones "
          "between 0 and 1", "definition", "1P once", low=0.0, high=1.0),
        s("parameter.row_parting", "parting of units that began at one number", "share", "parameter",
          "(sum |w_j - mean w|^2 / sum |w_j - c|^2)^(1/2) over the rows of a layer's weights that all began as the "
          "number c, some steps after the first; 0 where they move together", "definition", "1P once",
          low=0.0, high=1.0),
        s("parameter.row_doubles", "units that have a double", "share", "parameter",
          "share of the rows of a layer's weights that are the same as another row but for rounding, some steps "
          "after the first",
          "definition", "1P once", low=0.0, high=1.0),
        s("parameter.sibling_gap", "difference from the next of like layers", "1", "parameter",
          "max |w - v| / max |w| over evenly spaced weights, where v is of the next layer of the same name but for "
          "numbers, and shape, in turn; some steps after the first", "definition", "1P once", low=0.0),
        s("mode.evaluation_dropout", "dropout in evaluation mode", "share", "module",
          "share that dropout drops where it was called in a pass of the model in evaluation mode that drew random "
          "numbers", "definition", "c sampled", low=0.0, high=1.0),
        s("mode.evaluation_noise", "noise in evaluation mode", "1", "module",
          "1 where random numbers of a continuous distribution were drawn in a pass of the model in evaluation mode; "
          "told where evaluations do not repeat the same data", "definition", "c sampled", low=0.0, high=1.0),
        s("mode.evaluation_training", "evaluations in training mode", "count", "module",
          "passes without gradients since the last step in which dropout or BatchNorm acted as in training",
          "definition", "c", low=0.0),
        s("mode.parts_training", "evaluations of parts in training mode", "count", "module",
          "calls of children without gradients since the last step in which dropout or BatchNorm acted as in training, "
          "of a model that is not called itself; 0 of a child that was called and has none", "definition", "c",
          low=0.0),
        s("mode.training_evaluation", "training in evaluation mode", "1", "module",
          "1 where every pass of the step had dropout and BatchNorm in evaluation mode although earlier steps had not",
          "definition", "c", low=0.0, high=1.0),
    )
    # fmt: on
