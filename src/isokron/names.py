"""Names of other libraries, and what to write for them here.

The errors for unknown arguments, group keys, attributes and options of the command line answer with
these tables, and docs/migrating.md shows them. An answer is a setting, or several joined by "|" of
which a caller takes some, and perhaps a note after a colon; or else a text.
"""

import difflib
import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

Table = dict[str, str]  # their name → answer
SETTING = re.compile(r"(\w+(?:\|\w+)*)(?:: (.+))?")


def tables(text: str) -> dict[str, Table]:
    """By library. Lines are `name=setting` pairs, or `answer <- names`; deeper ones continue."""
    result: dict[str, Table] = {}
    table: Table = {}
    for line in re.sub(r"\n {8}", " ", text.strip()).splitlines():
        answer, arrow, names = line.strip().partition(" <- ")
        if not line.startswith(" "):
            table = result[line] = {}
        elif arrow:
            table |= dict.fromkeys(names.split(), answer)
        else:
            table |= {name: ours for name, _, ours in (s.partition("=") for s in line.split())}
    return result


OPTIMIZERS = tables("""
DistributedShampoo
    beta1=betas beta2=betas epsilon=damping|eps kronecker_epsilon=damping diagonal_epsilon=eps
    beta2_kronecker=factor_beta weighting_factor=factor_beta precondition_frequency=every
    amortized_computation_frequency_config=every start_preconditioning_step=start
    max_preconditioner_dim=max_dim|max_size_dense exponent_override=exponent use_nesterov=nesterov
    exponent_multiplier=exponent inv_root_override=exponent grafting_config=graft
    grafting_type=graft graft_type=graft use_decoupled_weight_decay=decay weight_decay_type=decay
    rank_deficient_stability_config=deficient factor_matrix_dtype=factor_dtype
    num_tolerated_failed_amortized_computations=tolerated precision_config=factor_dtype
    inv_factor_matrix_dtype=factor_dtype preconditioner_dtype=factor_dtype
    factor_matrix_eigenvectors_dtype=factor_dtype factor_matrix_eigenvalues_dtype=factor_dtype
    betas: its second number <- beta2_diagonal
    beta3: of Shampoo, SOAP and Katie <- beta3
    dampening: of the momentum of Shampoo, SOAP and Katie <- dampening
    average|momentum: momentum for ClassicMomentumConfig <- iterate_averaging_config
    order: None merges small dimensions <- use_merge_dims target_parameter_dimensionality
    exponent: a root, the reciprocal: 4 for 0.25 <- inverse_exponent_override
    the class is the preconditioner: isokron.Shampoo, SOAP, SignDescent, … <- preconditioner_config
    solver: of the roots of Shampoo <- amortized_computation_config
    solver="eigh", "newton" or "higher" in a group of isokron.Shampoo <- EigenConfig
        EighEigendecompositionConfig CoupledNewtonConfig CoupledHigherOrderConfig
    call optimizer.distribute() under DDP, and nothing under FSDP2 or HSDP <- distributed_config
        DDPDistributedConfig FullyShardDistributedConfig HybridShardDistributedConfig
        DDPShampooConfig FullyShardShampooConfig HybridShardShampooConfig
    FSDP1 is not supported; use torch.distributed.fsdp.fully_shard <- FSDPDistributedConfig
        HSDPDistributedConfig FSDPShampooConfig HSDPShampooConfig
    leave it out; torch.compile(optimizer.direction) compiles what can be <- use_pytorch_compile
        shampoo_pt2_compile_config ShampooPT2CompileConfig
    leave it out; failed decompositions are repeated in float64, and optimizer.statistics() tells
        <- use_protected_eigh retry_double_precision track_root_inv_residuals
    isokron has none <- use_pin_memory use_trace_scaling trace_scaling_exponent
        use_symmetric_packing drop_weighting_factor_on_gsquare ignored_basis_change_dims
    isokron.Shampoo <- DistributedShampoo RootInvShampooPreconditionerConfig DefaultShampooConfig
        ShampooPreconditionerConfig
    isokron.Shampoo with form="eigen" in its groups <- EigendecomposedShampooPreconditionerConfig
    isokron.Shampoo(statistic="kl_sum", exponent=None) <- RootInvKLShampooPreconditionerConfig
        EigendecomposedKLShampooPreconditionerConfig
    isokron.SOAP(basis="eigh", graft=None) with the group setting variances="kept" <-
        EigenvalueCorrectedShampooPreconditionerConfig DefaultEigenvalueCorrectedShampooConfig
    isokron.SOAP(basis="qr") <- DefaultSOAPConfig QREigendecompositionConfig
    isokron.Katie <- KatiePreconditionerConfig DistributedKatie
    isokron.SignDescent <- SignDescentPreconditionerConfig
    isokron.Muon(nesterov=False, scale=None), or in groups route="spectral", scale=None <-
        SpectralDescentPreconditionerConfig
    graft="sgd", "adagrad", "rmsprop" or "adam"; alone they are in torch.optim <- SGDGraftingConfig
        SGDPreconditionerConfig AdaGradPreconditionerConfig RMSpropPreconditionerConfig
        AdamPreconditionerConfig AdaGradGraftingConfig RMSpropGraftingConfig AdamGraftingConfig
    deficient="lift", or "pseudo" with damping=0 <- PerturbationConfig PseudoInverseConfig
    momentum, dampening, nesterov and decay="momentum" <- ClassicMomentumConfig
    average="primal" or "schedule_free" <- GeneralizedPrimalAveragingConfig ScheduleFreeConfig
    decay="l2", "decoupled" or "corrected" <- WeightDecayType
K-FAC
    kfac_policy=policy kfac_auto_rho=rho kfac_auto_t_max=t_max woodbury_store_device=store
    woodbury_dtype=store_dtype
    policy: "dense" for False <- kfac_use_woodbury
    method: "ekfac" for True <- use_eigenvalue_correction
    fisher: "exact" for True <- kfac_true_fisher_head
    every: of NaturalGradient <- update_freq
    max_condition: of NaturalGradient <- max_condition_number
    damping: of NaturalGradient (λ_G, λ_A), G the output side <- damping_A damping_G
    give it to optimizer.distribute(reduce=…) <- kfac_distributed_reduce
    leave it out; a factorization that fails adds 1e-8 to 1e-3 of the mean diagonal <- kfac_eps
    isokron.NaturalGradient, or isokron.curvature.fit <- KFACNaturalGradient KFAC EKFAC
        KFACOptimizer
optax
    mask=weight_decay_mask mu_dtype=state_dtype|dtype
    betas: (b1, b2) <- b1 b2
    learning_rate: of soap, quad and the like, not of their scale_by_ functions <- lr
    give groups with other weight_decay <- weight_decay_mask
White-Kron
    b1=momentum normalize_grads=normalize scanned_layers=stacked
    learning_rate=lr|learning_rate
    DTensors of FSDP2 say how parameters are sharded <- params_partition_specs
        pipeline_axis_name pipeline_axis_size
    the class is the update style: isokron.Quad or isokron.Skew <- preconditioner_update_style
    isokron.jax.PreconditionedState <- DenseState LeafState
    isokron.Quad, or isokron.jax.quad <- quad
    isokron.Skew, or isokron.jax.skew <- skew
    isokron.jax has it <- scale_by_quad scale_by_skew get_opt_state_partition_specs
fused AdamW
    isokron.AdamW, which has a Triton kernel for GPUs <- TritonAdamW
    isokron.ShardedAdamW, or AdamW.distribute(gradients="sharded") <- TritonDistAdamW
    the state is DTensors, which know their shards <- ShardMetadata
    isokron.linalg.newton_schulz <- fast_newton_schulz
    isokron.kernels <- ai_kernel_factory
torch
    learning_rate=lr decoupled_weight_decay=decay weight_decouple=decay momentum_decay=momentum
    ns_steps=steps ns_coefficients=coefficients adjust_lr_fn=scale
    leave it out; kernels are chosen by the device <- fused foreach
    leave it out; steps are not captured or differentiated <- capturable differentiable
    isokron.AdamW(decay="l2"), or with weight_decay=0 <- Adam
SOAP
    shampoo_beta=factor_beta preconditioning_frequency=every preconditioner_update_freq=every
    preconditioning_compute_steps=every max_precond_dim=max_dim|max_size_dense block_size=max_dim
    max_size_triangular=max_size_dense merge_dims=order precondition_1d=vectors
    correct_bias=use_bias_correction
    any memory format works <- data_format
heavyball
    storage_dtype=factor_dtype|state_dtype
    warm lr up by a scheduler of torch.optim.lr_scheduler <- warmup_steps
    call torch.nn.utils.clip_grad_norm_ before the step <- gradient_clipping
    isokron has none <- cautious_weight_decay caution mars palm update_clipping ecc param_ecc
    leave it out; nothing is compiled <- compile_step
    every and start say when to refresh <- use_precond_schedule precond_scheduler
    isokron.Shampoo(statistic="kl") <- KLShampoo
    isokron.Quad and isokron.Skew are relatives of PSGD with Kronecker factors <- Kron PSGD PSGDKron
    isokron.Muon(isokron.param_groups(model)) <- MuonAdamW MuonWithAuxAdam SingleDeviceMuon
param_groups
    write isokron.param_groups(model, base_shapes=narrow) <- base_shapes
    write isokron.param_groups(model, match_adamw=True), or in JAX lr_scale={"*.kernel": 2, "*": 4}
        <- match_adamw
""")
# Their names are everyday words, which only attribution takes for theirs.
ATTRIBUTION = tables("""
bergson
    modules=layers filter_modules=layers run_path=folder precision=dtype hessian_dtype=dtype
    token_batch_size=batch_size query_batch_size=batch_size dataset=data split=data subset=data
    prompt_column=text text_field=text truncation=long hessian=fit validate=evaluate
    dim: of build() <- projection_dim
    unit: of score() <- unit_normalize unit_norm
    mode: of score(), "mean" <- aggregation query_aggregation
    damping: of score() and build() <- damping_factor
    method: of fit(), "ekfac" for True <- ev_correction
    fisher: of fit(), "empirical" for True and "sampled" for False <- use_dataset_labels
    top: of score() <- top_k
    rows have the largest entries of whitened gradients; there are no random matrices <-
        projection_type projection_target
    top examples have scores of their tokens <- attribute_tokens
    K-FAC is damped by sides, EK-FAC by its mean eigenvalue <- inversion inversion_cfg
    start it by torchrun --nproc-per-node N -m isokron <- nproc_per_node nnode distributed
    isokron has none <- fsdp faiss reward_column chunk_length
    isokron.Attributor, whose methods take arguments in place of configs <- IndexConfig DataConfig
        HessianConfig ScoreConfig QueryConfig PreprocessConfig GradientProcessor collect_gradients
    attribute: attribute RUN --method ekfac <- ekfac
    attribute: attribute RUN --dim 16 <- trackstar
    attribute: attribute RUN --method unroll <- magic approx_unrolling
    score: score RUN --mode mean <- reduce
kronfluence
    analysis_name=folder output_dir=folder per_device_train_batch_size=batch_size
    per_device_query_batch_size=batch_size
    damping: of score() and build() <- damping_factor
    method: of fit() <- strategy
    examples: of fit() <- covariance_max_examples
    fisher: of fit(), "empirical" for True and "sampled" for False <- use_empirical_fisher
    mode: of score(), "mean" <- aggregate_query_gradients
    by_layer: of score() <- compute_per_module_scores
    top examples have scores of their tokens <- compute_per_token_scores
    leave it out; shared weights are counted, and the model is as it is <- prepare_model
        has_shared_parameters
    isokron.Attributor <- Analyzer FactorArguments ScoreArguments
torch
    collate_fn=collate dataset=train_set train_dataset=train_set
""")
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
    libraries = [*OPTIMIZERS.items()] if who != "Attributor" else []
    libraries += [*ATTRIBUTION.items()] if who in ("Attributor", "isokron") else []
    for _, table in sorted(libraries, key=lambda item: item[0] != FIRST.get(who)):
        if name in table:
            yield table[name]


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


def answered(function: Callable[P, R], valid: Collection[str] = ()) -> Callable[P, R]:
    """Decorate a function, method or constructor: `unknown_keyword` answers unknown keywords."""
    takes = [name for name in inspect.signature(function).parameters if name != "self"]
    constructs = function.__name__ == "__init__"

    @functools.wraps(function)
    def checked(*args: P.args, **keywords: P.kwargs) -> R:
        for name in keywords:
            if name not in takes:
                who = type(args[0]).__name__ if constructs else function.__qualname__
                raise TypeError(unknown_keyword(who, name, takes, valid))
        return function(*args, **keywords)

    return checked
