"""Names of other libraries, and what to write for them here.

The errors for unknown arguments, group keys, attributes and options of the command line answer with
these tables, and docs/migrating.md has a row for every name. A table maps answers to names. An
answer is a setting, or several joined by "|" of which a caller takes some, and perhaps a note after
a colon; or else a text.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Table = dict[str, str]
SETTING = re.compile(r"(\w+(?:\|\w+)*)(?:: (.+))?")

OPTIMIZERS: dict[str, Table] = {
    "DistributedShampoo": {
        "betas": "beta1 beta2",
        "betas: its second number": "beta2_diagonal",
        "beta3: of Shampoo, SOAP and Katie": "beta3",
        "dampening: of the momentum of Shampoo, SOAP and Katie": "dampening",
        "average|momentum: momentum for ClassicMomentumConfig": "iterate_averaging_config",
        "damping|eps": "epsilon",
        "damping": "kronecker_epsilon",
        "eps": "diagonal_epsilon",
        "factor_beta": "beta2_kronecker weighting_factor",
        "every": "precondition_frequency amortized_computation_frequency_config",
        "start": "start_preconditioning_step",
        "max_dim|max_size_dense": "max_preconditioner_dim",
        "order: None merges small dimensions": "use_merge_dims target_parameter_dimensionality",
        "exponent: a root, the reciprocal: 4 for 0.25": "inverse_exponent_override",
        "exponent": "exponent_override exponent_multiplier inv_root_override",
        "graft": "grafting_config grafting_type graft_type",
        "nesterov": "use_nesterov",
        "decay": "use_decoupled_weight_decay weight_decay_type",
        "deficient": "rank_deficient_stability_config",
        "tolerated": "num_tolerated_failed_amortized_computations",
        "factor_dtype": "factor_matrix_dtype inv_factor_matrix_dtype precision_config "
        "preconditioner_dtype factor_matrix_eigenvectors_dtype factor_matrix_eigenvalues_dtype",
        "the class is the preconditioner: isokron.Shampoo, SOAP, SignDescent or Muon": ""
        "preconditioner_config",
        "solver: of the roots of Shampoo": "amortized_computation_config",
        "call optimizer.distribute() under DDP, and nothing under FSDP2 or HSDP": ""
        "distributed_config DDPDistributedConfig DDPShampooConfig FullyShardDistributedConfig "
        "FullyShardShampooConfig HybridShardDistributedConfig HybridShardShampooConfig",
        "FSDP1 is not supported; shard the model with torch.distributed.fsdp.fully_shard": ""
        "FSDPDistributedConfig FSDPShampooConfig HSDPDistributedConfig HSDPShampooConfig",
        "leave it out; torch.compile(optimizer.direction) compiles what can be": ""
        "shampoo_pt2_compile_config ShampooPT2CompileConfig use_pytorch_compile",
        "leave it out; failed decompositions are repeated in float64": ""
        "use_protected_eigh retry_double_precision",
        "leave it out; optimizer.statistics() has the health of factors": ""
        "track_root_inv_residuals",
        "isokron has none": "use_pin_memory use_trace_scaling trace_scaling_exponent "
        "use_symmetric_packing drop_weighting_factor_on_gsquare ignored_basis_change_dims",
        "isokron.Shampoo": "DistributedShampoo RootInvShampooPreconditionerConfig "
        "EigendecomposedShampooPreconditionerConfig ShampooPreconditionerConfig "
        "DefaultShampooConfig",
        'isokron.Shampoo(statistic="kl_sum")': "RootInvKLShampooPreconditionerConfig "
        "EigendecomposedKLShampooPreconditionerConfig",
        'isokron.SOAP(basis="eigh", graft=None) with the group setting variances="kept"': ""
        "EigenvalueCorrectedShampooPreconditionerConfig DefaultEigenvalueCorrectedShampooConfig",
        'isokron.SOAP(basis="qr")': "DefaultSOAPConfig QREigendecompositionConfig",
        "isokron.Katie": "KatiePreconditionerConfig DistributedKatie",
        "isokron.SignDescent": "SignDescentPreconditionerConfig",
        'isokron.Muon(nesterov=False, scale=None), or in groups route="spectral", scale=None': ""
        "SpectralDescentPreconditionerConfig",
        'graft="sgd"; alone it is torch.optim.SGD': "SGDPreconditionerConfig SGDGraftingConfig",
        'graft="adagrad"; alone it is torch.optim.Adagrad': ""
        "AdaGradPreconditionerConfig AdaGradGraftingConfig",
        'graft="rmsprop"; alone it is torch.optim.RMSprop': ""
        "RMSpropPreconditionerConfig RMSpropGraftingConfig",
        'graft="adam"; alone it is isokron.AdamW': "AdamPreconditionerConfig AdamGraftingConfig",
        'deficient="lift"': "PerturbationConfig",
        'deficient="pseudo" with damping=0': "PseudoInverseConfig",
        "eigh is what finds roots": "EigenConfig EighEigendecompositionConfig",
        'isokron.Shampoo with the group setting solver="newton" or solver="higher"': ""
        "CoupledNewtonConfig CoupledHigherOrderConfig",
        'momentum, dampening, nesterov and decay="momentum"': "ClassicMomentumConfig",
        'average="primal"': "GeneralizedPrimalAveragingConfig",
        'average="schedule_free"': "ScheduleFreeConfig",
        'decay="l2", "decoupled" or "corrected"': "WeightDecayType",
    },
    "K-FAC": {
        "policy": "kfac_policy",
        'policy: "dense" for False': "kfac_use_woodbury",
        "rho": "kfac_auto_rho",
        "t_max": "kfac_auto_t_max",
        "store": "woodbury_store_device",
        "store_dtype": "woodbury_dtype",
        'method: "ekfac" for True': "use_eigenvalue_correction",
        'fisher: "exact" for True': "kfac_true_fisher_head",
        "every: of NaturalGradient": "update_freq",
        "max_condition: of NaturalGradient": "max_condition_number",
        "damping: one number, λ of G ⊗ A + λI": "damping_A damping_G",
        "give it to optimizer.distribute(reduce=…)": "kfac_distributed_reduce",
        "leave it out; a factorization that fails adds 1e-8 to 1e-3 of the mean diagonal": ""
        "kfac_eps",
        "isokron.NaturalGradient; isokron.curvature.fit has the factors": ""
        "KFACNaturalGradient KFAC EKFAC KFACOptimizer",
    },
    "optax": {
        "betas: (b1, b2)": "b1 b2",
        "learning_rate: of soap, quad and the like, not of their scale_by_ functions": "lr",
        "weight_decay_mask": "mask",
        "state_dtype|dtype": "mu_dtype",
        "give groups with other weight_decay": "weight_decay_mask",
    },
    "White-Kron": {
        "momentum": "b1",
        "normalize": "normalize_grads",
        "stacked": "scanned_layers",
        "lr|learning_rate": "learning_rate",
        "DTensors of FSDP2 say how parameters are sharded": "pipeline_axis_name "
        "pipeline_axis_size params_partition_specs",
        "the class is the update style: isokron.Quad or isokron.Skew": ""
        "preconditioner_update_style",
        "isokron.jax.PreconditionedState": "DenseState LeafState",
        "isokron.Quad, or isokron.jax.quad": "quad",
        "isokron.Skew, or isokron.jax.skew": "skew",
        "isokron.jax has it": "scale_by_quad scale_by_skew get_opt_state_partition_specs",
    },
    "fused AdamW": {
        "isokron.AdamW, whose kernel is isokron.kernels.triton_adamw": "TritonAdamW",
        'isokron.ShardedAdamW, or AdamW.distribute(gradients="sharded")': "TritonDistAdamW",
        "the state is DTensors, which know their shards": "ShardMetadata",
        "isokron.linalg.newton_schulz": "fast_newton_schulz",
        "isokron.kernels": "ai_kernel_factory",
    },
    "torch": {
        "lr": "learning_rate",
        "leave it out; kernels are chosen by the device": "fused foreach",
        "leave it out; steps are not captured or differentiated": "capturable differentiable",
        "decay": "decoupled_weight_decay weight_decouple",
        "momentum": "momentum_decay",
        "steps": "ns_steps",
        "coefficients": "ns_coefficients",
        "scale": "adjust_lr_fn",
        'isokron.AdamW(decay="l2"), or with weight_decay=0': "Adam",
    },
    "SOAP": {
        "factor_beta": "shampoo_beta",
        "every": "preconditioning_frequency preconditioning_compute_steps "
        "preconditioner_update_freq",
        "max_dim|max_size_dense": "max_precond_dim",
        "max_dim": "block_size",
        "max_size_dense": "max_size_triangular",
        "order": "merge_dims",
        "vectors": "precondition_1d",
        "use_bias_correction": "correct_bias",
        "any memory format works": "data_format",
    },
    "heavyball": {
        "factor_dtype|state_dtype": "storage_dtype",
        "warm lr up by a scheduler of torch.optim.lr_scheduler": "warmup_steps",
        "call torch.nn.utils.clip_grad_norm_ before the step": "gradient_clipping",
        "isokron has none": "cautious_weight_decay caution mars palm update_clipping ecc param_ecc",
        "leave it out; nothing is compiled": "compile_step",
        "every and start say when to refresh": "use_precond_schedule precond_scheduler",
        'isokron.Shampoo(statistic="kl")': "KLShampoo",
        "isokron.Quad and isokron.Skew are relatives of PSGD with Kronecker factors": ""
        "Kron PSGD PSGDKron",
        "isokron.Muon(isokron.param_groups(model))": "MuonAdamW MuonWithAuxAdam SingleDeviceMuon",
    },
    "param_groups": {
        "write isokron.param_groups(model, base_shapes=narrow)": "base_shapes",
        "write isokron.param_groups(model, match_adamw=True)": "match_adamw",
    },
}
# Their names are everyday words, which only attribution takes for theirs.
ATTRIBUTION: dict[str, Table] = {
    "bergson": {
        "dim: of build()": "projection_dim",
        "layers": "modules filter_modules",
        "folder": "run_path",
        "unit: of score()": "unit_normalize unit_norm",
        'mode: of score(), "mean"': "aggregation query_aggregation",
        "damping: of score() and build()": "damping_factor",
        'method: of fit(), "ekfac" for True': "ev_correction",
        'fisher: of fit(), "empirical" for True and "sampled" for False': "use_dataset_labels",
        "top: of score()": "top_k",
        "batch_size": "token_batch_size query_batch_size",
        "dtype": "precision hessian_dtype",
        "data": "dataset split subset",
        "text": "prompt_column text_field",
        "long": "truncation",
        "rows have the largest entries of whitened gradients; there are no random matrices": ""
        "projection_type projection_target",
        "top examples have scores of their tokens": "attribute_tokens",
        "K-FAC is damped by sides, EK-FAC by its mean eigenvalue": "inversion inversion_cfg",
        "start it by torchrun --nproc-per-node N -m isokron": "nproc_per_node nnode distributed",
        "isokron has none": "fsdp faiss reward_column chunk_length",
        "isokron.Attributor, whose methods take arguments in place of configs": "IndexConfig "
        "HessianConfig ScoreConfig QueryConfig DataConfig PreprocessConfig GradientProcessor "
        "collect_gradients",
        "fit": "hessian",
        "attribute: attribute RUN --method ekfac": "ekfac",
        "attribute: attribute RUN --dim 16": "trackstar",
        "attribute: attribute RUN --method unroll": "magic approx_unrolling",
        "score: score RUN --mode mean": "reduce",
        "evaluate": "validate",
    },
    "kronfluence": {
        "damping: of score() and build()": "damping_factor",
        "method: of fit()": "strategy",
        "examples: of fit()": "covariance_max_examples",
        'fisher: of fit(), "empirical" for True and "sampled" for False': "use_empirical_fisher",
        'mode: of score(), "mean"': "aggregate_query_gradients",
        "folder": "analysis_name output_dir",
        "batch_size": "per_device_train_batch_size per_device_query_batch_size",
        "by_layer: of score()": "compute_per_module_scores",
        "top examples have scores of their tokens": "compute_per_token_scores",
        "leave it out; shared weights are counted at each use": "has_shared_parameters",
        "isokron.Attributor": "Analyzer FactorArguments ScoreArguments",
        "leave it out; the model is used as it is": "prepare_model",
    },
    "torch": {"collate": "collate_fn", "train_set": "dataset train_dataset"},
}
# Whose names each caller asks for first.
FIRST = {
    **dict.fromkeys(("NaturalGradient", "fit"), "K-FAC"),
    **dict.fromkeys(("Quad", "Skew"), "White-Kron"),
    **dict.fromkeys(("AdamW", "ShardedAdamW", "Muon"), "torch"),
}


def answers(name: str, who: str) -> Iterator[str]:
    """The answers to a name, of the library that a caller resembles first.

    `who`: a class or function, or "isokron" for the module's attributes and the command line.
    """
    who = who.partition(".")[0]
    tables = [*OPTIMIZERS.items()] if who != "Attributor" else []
    tables += [*ATTRIBUTION.items()] if who in ("Attributor", "isokron") else []
    for _, table in sorted(tables, key=lambda item: item[0] != FIRST.get(who)):
        yield from (answer for answer, names in table.items() if name in names.split())


def hint(
    who: str, name: str, valid: Collection[str], cutoff: float = 0.75
) -> tuple[list[str], str]:
    """The valid settings that a name stands for, and what an error says; nothing if unknown."""
    otherwise = ""
    for answer in answers(name, who):
        match = SETTING.fullmatch(answer)
        if match is None:
            return [], answer
        settings, note = match[1].split("|"), match[2]
        if taken := [setting for setting in settings if setting in valid]:
            asked = f"did you mean {' or '.join(map(repr, taken))}?"
            return taken, f"{asked} ({note})" if note else asked
        alone = f"it is {' or '.join(map(repr, settings))} here, "
        otherwise = otherwise or alone + (note or f"which {who} does not take")
    # a name of another library is not misspelt, and what looks like it is another setting
    close = [] if otherwise else difflib.get_close_matches(name, sorted(valid), 1, cutoff)
    return close, f"did you mean {close[0]!r}?" if close else otherwise


def unknown_keyword(who: str, name: str, takes: Iterable[str], valid: Collection[str] = ()) -> str:
    """The error for a keyword that is not taken; valid settings that are not either are keys of
    parameter groups."""
    takes = takes if isinstance(takes, list) else sorted(takes)
    settings, text = ([name], "") if name in valid else hint(who, name, valid or takes)
    text = text or ("" if settings else f"it takes {', '.join(takes)}")
    if settings and not set(settings) & set(takes):
        text += (
            f"{' Put' if text else 'put'} it into the parameter group: "
            f"isokron.param_groups(model, {settings[0]}=…) or {{'params': …, {settings[0]!r}: …}}"
        )
    return f"{who} got an unexpected keyword argument {name!r}; {text}"


def answered(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a function, method or constructor: `unknown_keyword` answers unknown keywords."""
    takes = [name for name in inspect.signature(function).parameters if name != "self"]
    who = function.__qualname__.removesuffix(".__init__")

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in takes:
                raise TypeError(unknown_keyword(who, name, takes))
        return function(*args, **keywords)

    return checked
