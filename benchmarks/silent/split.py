"""Which program is in which half: drawn at random before any rule was run, type by type."""

from __future__ import annotations

import random

SEED = 20261121
PROGRAMS = {
    "NOT_TRAINING": (
        "layer_replaced_after_optimizer",
        "layers_in_plain_list",
        "parameters_in_plain_dict",
        "optimizer_of_encoder_only",
        "groups_not_appended",
        "filters_under_no_grad",
        "argmax_between_networks",
        "threshold_by_sign",
        "pretrained_embedding_frozen",
        "layer_never_called",
        "layer_made_in_forward",
        "step_missing",
        "zero_grad_before_step",
        "pure_bfloat16",
        "checkpoint_of_frozen_input",
        "unfreezing_skips_frozen",
        "weights_reset_every_epoch",
    ),
    "WRONG_LOSS": (
        "softmax_before_cross_entropy",
        "softmax_before_cross_entropy_language",
        "sigmoid_before_bce_with_logits",
        "sigmoid_before_cross_entropy",
        "softmax_before_nll",
        "broadcast_mse",
        "cross_entropy_of_one_output",
        "softmax_over_batch",
        "relu_on_regression_output",
        "kl_of_probabilities",
        "masks_of_255",
        "tanh_for_labels_of_800",
    ),
    "DATA_SCALE": (
        "autoencoder_of_raw_pixels",
        "wide_and_deep_unscaled",
        "energies_unscaled",
        "divided_by_255_twice",
        "raw_pixels_into_cnn",
    ),
    "BAD_TARGETS": (
        "inputs_shuffled_alone",
        "labels_all_one_class",
        "labels_all_ignored",
        "labels_from_second_loader",
    ),
    "LEARNING_RATE": (
        "adam_rate_too_high",
        "scheduler_every_batch",
        "lambda_returns_rate",
        "sum_instead_of_mean",
        "unscaled_loss_divided_by_scale",
        "lstm_rate_too_high",
    ),
    "BAD_INIT": (
        "head_of_variance_one",
        "gate_zero_twice",
        "weights_all_equal",
        "normal_weights_deep",
        "tiny_weights_deep",
    ),
    "CAPACITY": (
        "no_activation_between_linears",
        "no_activation_in_head",
        "relu_result_discarded",
        "activation_after_the_loop",
    ),
    "STALE_GRAD": (
        "zero_grad_missing_heatmap",
        "discriminator_not_zeroed",
        "zero_grad_every_epoch",
        "zero_grad_missing_clipped",
        "zero_grad_missing_lora",
    ),
    "EVAL_RANDOM": (
        "functional_dropout_always_on",
        "dropout_made_in_forward",
        "attention_dropout_in_evaluation",
        "evaluated_in_training_mode",
    ),
    "DESYNC": (
        "tied_head_is_a_copy",
        "siamese_branches_copied",
        "norm_copies_clipped_apart",
    ),
    "NOT_LEARNING": (
        "view_instead_of_permute",
        "actor_loss_without_minus",
    ),
    "HEALTHY": (
        "backbone_frozen_on_purpose",
        "lora",
        "zero_init_residual",
        "warmup_from_zero",
        "accumulation",
        "progressive_unfreezing",
        "gan_alternation",
        "label_smoothing",
        "bce_on_one_hot",
        "log_softmax_and_nll",
        "mc_dropout_in_evaluation",
        "vae_sampling",
        "tiny_rate_finetuning",
        "mse_on_one_hot",
        "weight_tying",
        "auxiliary_head_rarely_used",
        "mixture_of_experts",
        "rare_tokens",
        "deep_linear_on_purpose",
        "linear_regression",
        "large_workable_targets",
        "batchnorm_first_on_raw_pixels",
        "softmax_regression_from_zero",
        "mean_teacher",
        "target_network",
        "gradient_penalty",
        "checkpointing",
        "autocast_and_clipping",
        "lbfgs",
        "rare_positives",
        "negative_gaussian_likelihood",
        "encoder_of_cloned_layers",
        "policy_gradient",
        "contrastive",
        "mostly_noise",
        "relu_output_on_counts",
    ),
}


def halves(seed: int = SEED) -> tuple[dict[str, tuple[str, ...]], dict[str, tuple[str, ...]]]:
    """Return the programs of the half for development and of the held-out half, by type.

    Of a type with an odd number the odd one goes to the half that has fewer programs so far.
    """
    chance = random.Random(seed)
    dev: dict[str, tuple[str, ...]] = {}
    heldout: dict[str, tuple[str, ...]] = {}
    balance = 0
    for kind, names in PROGRAMS.items():
        order = chance.sample(names, len(names))
        cut = len(order) // 2 + (len(order) % 2 if balance <= 0 else 0)
        balance += 2 * cut - len(order)
        dev[kind], heldout[kind] = tuple(order[:cut]), tuple(order[cut:])
    return dev, heldout
