"""What each type of issue means, why it is bad, and what to do about it (floor 0, no dependencies)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

MEANINGS: Mapping[str, str] = MappingProxyType({
    "VANISHING": (
        "the gradient shrinks from the last block to the first, or the first layers get a thousandth of the "
        "gradient of the last"
    ),
    "EXPLODING": ("the gradient or the activations grow from block to block, or the loss and the gradient norm "
                  "jump together"),
    "DEAD": "most units of an activation module output 0 for every sample",
    "SATURATION": "most outputs of an activation lie in its flat region, and the loss is still high",
    "NUMERICAL": (
        "NaN or Inf, with the place where it began: input, weights, layer of the forward or backward pass, or "
        "loss; with micro-batch and rank"
    ),
    "UNSTABLE": "gradient norms or directions oscillate from step to step",
    "BOTTLENECK": "one block passes on far less gradient or information than its neighbors",
    "STAGNATION": "trainable parameters do not change",
    "LOSS_SPIKE": "the loss jumps far above its recent range",
    "DIVERGING": "the loss left a level it had reached, or rose above its initial values, and stays up",
    "MEMORY_USAGE": "memory is nearly used up",
    "MEMORY_LEAK": "memory use grows with every step",
    "ATTENTION_COLLAPSE": "every head of a layer attends almost entirely to one key, before anything was learned",
    "HEAD_REDUNDANCY": "the heads of a layer have nearly the same attention weights",
    "RANK_COLLAPSE": "after a stack of attention all tokens of a sequence are nearly the same",
    "POLICY_COLLAPSE": "a policy takes one action almost always although training has not converged",
    "EXCESS_EXPLORATION": "the actions of a policy stay random",
    "RECURRENT_SUBCRITICAL": (
        "the state of a recurrent layer decays within a few time steps, and the loss has not halved"
    ),
    "RECURRENT_SUPERCRITICAL": (
        "the state of a recurrent layer multiplies a gradient by more than ten over the sequence"
    ),
    "ROTATION": "limit cycle: parameters orbit instead of converging, as with adversarial losses (GAN)",
    "OPTIMIZER_STATE": (
        "`eps` dominates the denominator of Adam, momentum covers more steps than the second moment, or the state is "
        "new at each step"
    ),
    "DESYNC": (
        "the ranks of a distributed run no longer hold the same weights, or copies within the model that "
        "should be equal are not"
    ),
    "NOT_TRAINING": (
        "trainable parameters get no update, with the mistake: a detached graph, parameters missing from the "
        "optimizer, a plain list, a learning rate of 0"
    ),
    "WRONG_LOSS": (
        "the loss does not fit its inputs: softmax before cross-entropy, broadcast shapes, targets out of range of "
        "the output activation, softmax over one class or the batch"
    ),
    "DATA_SCALE": "inputs or targets are not normalized, and the model is no better than a constant prediction",
    "BAD_TARGETS": "targets are all the same, are unrelated to the inputs, or are copies of them",
    "LEARNING_RATE": (
        "updates are far too large or too small, or the schedule has decayed to nothing, and the loss does not fall"
    ),
    "BAD_INIT": ("identical units, layers that stay at zero, or initial weights of a far too large or small scale"),
    "CAPACITY": (
        "layers that add no capacity: stacked linear layers without an activation, one layer listed several times, "
        "or a normalization over one value or two"
    ),
    "STALE_GRAD": "gradients of earlier steps are still in `.grad` when new ones are accumulated",
    "EVAL_RANDOM": "evaluation drops units or draws noise, training does not, or outputs of both differ in size",
    "NOT_LEARNING": "no other issue is detected, but the loss stays at that of the best constant prediction",
    "LEAKAGE": "target leakage: a column of the inputs equals the target",
    "UNDERFLOW": "float16 gradients underflow to 0 because the loss is not scaled",
    "COLLAPSE": "the outputs of a layer, and of all layers after it, are nearly the same for every sample",
    "OVERFITTING": "the evaluation loss rises while the training loss falls",
})  # fmt: skip
"""What is wrong, by issue type."""

HARMS: Mapping[str, str] = MappingProxyType({
    "VANISHING": "Layers near the input hardly change, and the model learns with its last layers only.",
    "EXPLODING": "One step can undo what was learned, and the loss ends in NaN.",
    "DEAD": "No gradient passes through these units, so they and what leads to them stay as they are.",
    "SATURATION": "The derivative there is nearly 0, so little gradient reaches the layers before it.",
    "NUMERICAL": "NaN spreads to all weights with the next step, and the run cannot recover.",
    "UNSTABLE": "Steps undo each other, and the loss falls slowly or not at all.",
    "BOTTLENECK": (
        "What lies before the block learns from little gradient, and what lies after it sees little of the input."
    ),
    "STAGNATION": "These parameters learn nothing, although they take memory and time.",
    "LOSS_SPIKE": "Part of what was learned is lost, and a larger spike can end the run.",
    "DIVERGING": "What was learned is lost, or the model becomes worse with each step.",
    "MEMORY_USAGE": "The next larger batch, or an evaluation, ends the process.",
    "MEMORY_LEAK": "The process runs out of memory sooner or later, often hours into training.",
    "ATTENTION_COLLAPSE": "The layer passes on one token and ignores all others, and its gradient is nearly 0.",
    "HEAD_REDUNDANCY": "All heads compute the same, so that most of the layer's parameters are wasted.",
    "RANK_COLLAPSE": "Later layers cannot distinguish the tokens, so no output can depend on the position.",
    "POLICY_COLLAPSE": "The policy no longer tries other actions, so it cannot find out that one of them is better.",
    "EXCESS_EXPLORATION": "The policy does not use what it has learned, and returns stay low.",
    "RECURRENT_SUBCRITICAL": (
        "The layer cannot remember anything for longer, so it cannot learn dependencies over more steps."
    ),
    "RECURRENT_SUPERCRITICAL": "Longer sequences make the gradient explode, and steps become unusable.",
    "ROTATION": "Training goes on without end, and its result depends on when it is stopped.",
    "OPTIMIZER_STATE": "Steps have another size than the learning rate promises: far too small, or suddenly too large.",
    "DESYNC": "The replicas train different models, and averaged gradients fit none of them.",
    "NOT_TRAINING": "Part of the model keeps its initial weights, while the rest learns to do without it.",
    "WRONG_LOSS": (
        "The loss may still fall, but its minimum is not what you want, so accuracy stays low and no curve shows "
        "why."
    ),
    "DATA_SCALE": "The first layer saturates or hardly reacts, and no learning rate suits all weights.",
    "BAD_TARGETS": "The model learns nothing about the inputs, or only to copy them.",
    "LEARNING_RATE": "Training takes far longer than necessary, or never arrives.",
    "BAD_INIT": "Units that begin alike stay alike, and a wrong scale costs the first part of training, or all of it.",
    "CAPACITY": "The model can represent less than its number of parameters suggests.",
    "STALE_GRAD": (
        "Each step follows a sum of old gradients, like momentum that never decays, and the loss oscillates or "
        "grows."
    ),
    "EVAL_RANDOM": "Evaluation results are noisy and too low, and decisions based on them are wrong.",
    "NOT_LEARNING": "The model predicts the same for every input, however long it trains.",
    "LEAKAGE": "The loss is excellent in training, and the model fails wherever the target is not known.",
    "UNDERFLOW": "Weights whose gradients are 0 do not change.",
    "COLLAPSE": "The output no longer depends on the input, and no gradient tells samples apart.",
    "OVERFITTING": "The model learns the training samples by heart, and becomes worse on all others.",
})  # fmt: skip
"""Why it is bad."""

REMEDIES: Mapping[str, str] = MappingProxyType({
    "VANISHING": (
        "Add a skip connection around each block and a normalization before it, use ReLU or GELU instead of "
        "Sigmoid or Tanh, and scale the initial weights."
    ),
    "EXPLODING": (
        "Lower the learning rate, clip the gradient norm, normalize before each block, and scale the initial "
        "weights down."
    ),
    "DEAD": (
        "Lower the learning rate, normalize the inputs of the layer, or use LeakyReLU or GELU; reset units that "
        "are dead already."
    ),
    "SATURATION": "Normalize the inputs of the activation, scale the initial weights down, or use ReLU or GELU.",
    "NUMERICAL": (
        "Look at the operation that is named: add an eps to a division, logarithm or root, remove NaN from the "
        "data, and train in bfloat16 or with a GradScaler."
    ),
    "UNSTABLE": "Lower the learning rate, use larger batches, or clip the gradient norm.",
    "BOTTLENECK": "Widen the block, add a skip connection around it, or scale its initial weights.",
    "STAGNATION": (
        "Pass the parameters to the optimizer, connect them to the loss, or freeze them with "
        "requires_grad_(False) if they are meant to stay."
    ),
    "LOSS_SPIKE": (
        "Look at the batch of this step, clip the gradient norm, and lower the learning rate or lengthen the "
        "warm-up if it happens again."
    ),
    "DIVERGING": (
        "Check what changed at the step of the issue: the data, the learning rate, the weights; continue from a "
        "checkpoint before it."
    ),
    "MEMORY_USAGE": "Use smaller batches with gradient accumulation, checkpointing, or lower precision.",
    "MEMORY_LEAK": (
        "Keep loss.item() instead of loss, detach() what you store between steps, and clear lists that grow."
    ),
    "ATTENTION_COLLAPSE": (
        "Scale the scores by 1 / sqrt(head size), lower the learning rate or use a warm-up, and normalize queries "
        "and keys."
    ),
    "HEAD_REDUNDANCY": (
        "Initialize the heads differently, use fewer heads, or check whether they share a projection by mistake."
    ),
    "RANK_COLLAPSE": "Keep the skip connection around each attention layer, and check masks and positional encodings.",
    "POLICY_COLLAPSE": "Add or raise an entropy bonus, lower the learning rate, and normalize advantages.",
    "EXCESS_EXPLORATION": "Lower the entropy bonus, check that rewards reach the loss, and that its sign is right.",
    "RECURRENT_SUBCRITICAL": (
        "Use an LSTM or GRU with a forget gate bias of 1 or more, or orthogonal recurrent weights."
    ),
    "RECURRENT_SUPERCRITICAL": (
        "Scale the recurrent weights to a spectral radius of 1, use orthogonal weights, and clip the gradient "
        "norm."
    ),
    "ROTATION": (
        "Use different learning rates or more steps for one of the players, averaged weights, or a gradient "
        "penalty."
    ),
    "OPTIMIZER_STATE": (
        "Lower eps, choose betas whose averages last a few dozen steps, scale the loss, and create the optimizer once."
    ),
    "DESYNC": (
        "Build all replicas from the same seed or checkpoint, call the DistributedDataParallel wrapper instead of "
        "its module, and share a tensor instead of copying it."
    ),
    "NOT_TRAINING": (
        "Find the detach(), no_grad(), .data or .item() in the way, put layers in nn.ModuleList, and build the "
        "optimizer from model.parameters() once all layers exist."
    ),
    "WRONG_LOSS": (
        "Give the loss what its documentation asks for: logits instead of probabilities, equal shapes, classes in "
        "dimension 1, and targets that the output can reach."
    ),
    "DATA_SCALE": (
        "Subtract the mean and divide by the standard deviation of the training data, for inputs and for "
        "regression targets."
    ),
    "BAD_TARGETS": (
        "Look at one batch: which target belongs to which input? Shuffle both together, and shift tokens by one."
    ),
    "LEARNING_RATE": (
        "Change the learning rate by the factor that the issue names, shorten the warm-up, or lengthen the "
        "schedule."
    ),
    "BAD_INIT": (
        "Use the initialization that belongs to the activation, nn.init.kaiming_normal_ for ReLU, and draw each "
        "unit and layer anew."
    ),
    "CAPACITY": "Put an activation between linear layers, create each layer anew, and use the result of F.relu(x).",
    "STALE_GRAD": "Call optimizer.zero_grad() once before each backward pass, or once per accumulated batch.",
    "EVAL_RANDOM": "Call model.eval() before an evaluation, model.train() after it; prepare inputs of both alike.",
    "NOT_LEARNING": (
        "Check that inputs belong to targets, overfit a single batch, then change the learning rate; gradflow "
        "doctor train.py tries these for you."
    ),
    "LEAKAGE": "Remove the column or the time step that holds the target from the inputs.",
    "UNDERFLOW": "Use torch.amp.GradScaler, or bfloat16.",
    "COLLAPSE": "Lower the learning rate, normalize before the layer, and check its initial weights and its inputs.",
    "OVERFITTING": (
        "Stop at the best evaluation loss; add data, augmentation, weight decay or dropout, or use a smaller "
        "model."
    ),
})  # fmt: skip
"""What to do about it."""
