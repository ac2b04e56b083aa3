"""Steps of DistributedShampoo (at f606606), replayed with the settings of docs/migrating.md."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import isokron

DATA = Path(__file__).with_name("distributed_shampoo")
CONFIGS: dict[str, Any] = json.loads((DATA / "manifest.json").read_text())
NAMES = {
    "lr": "lr",
    "weight_decay": "weight_decay",
    "use_bias_correction": "use_bias_correction",
    "beta3": "beta3",
    "epsilon": "damping",
    "precondition_frequency": "every",
    "start_preconditioning_step": "start",
    "max_preconditioner_dim": "max_dim",
}
PAGE = Path(__file__).parents[2] / "docs/migrating.md"
# of the page's table: by configuration, how far isokron goes astray
DIFFERENCES = {
    name: float(figure)
    for name, figure in re.findall(r"^\| `(\w+)` \|.*\| ([\d.e-]+) \|$", PAGE.read_text(), re.M)
}
# recorded in float32 there: eigenvectors and eigenvalues, or scalars
EXACT = 1e-5


def translated(config: dict[str, Any]) -> dict[str, Any]:
    """What docs/migrating.md makes of a configuration."""
    theirs, kind = dict(config["settings"]), config["preconditioner"]
    beta1, beta2 = theirs.pop("betas")
    ours: dict[str, Any] = {"betas": (beta1, min(beta2, 0.999)), "factor_beta": beta2}
    ours |= {"exponent": None, "deficient": "lift", "graft": None, "max_dim": None}
    ours |= {"refresh": "together", "weight_decay": 0.0}
    if grafted := re.match(r"(\w+)PreconditionerConfig", theirs.pop("grafting_config", "")):
        ours["graft"] = grafted[1].lower()
    if moments := theirs.pop("iterate_averaging_config", None):
        mu, dampening, nesterov = re.findall(r"=([\w.]+)", moments)
        ours |= {"momentum": float(mu), "dampening": float(dampening), "decay": "momentum"}
        ours["nesterov"] = nesterov == "True"
    if decay := theirs.pop("weight_decay_type", None):
        ours["decay"] = decay.split("'")[1].lower()
    if config["target_parameter_dimensionality"] == 1:
        ours["order"] = None
    overrides = ast.literal_eval(
        (re.search(r"exponent_override=(\{.*?\}+)[,)]", kind) or ["", "{}"])[1]
    )
    for order, powers in overrides.items():  # theirs are exponents, ours the roots: 0.25 → 4
        powers = powers if isinstance(powers, dict) else dict.fromkeys(range(order), powers)
        roots = [1 / powers[i] if powers[i] else 0 for i in range(order)]
        ours["exponent"] = {order: roots}
    if "PseudoInverse" in kind:
        ours["deficient"] = "pseudo"
    return ours | {NAMES[name]: value for name, value in theirs.items()}


def optimizer_of(
    config: dict[str, Any], params: list[nn.Parameter], **further: Any
) -> torch.optim.Optimizer:
    kind, ours = config["preconditioner"], translated(config)
    make: Any = isokron.Shampoo
    if kind.startswith("SignDescent"):
        make = isokron.SignDescent
        shared = ("lr", "weight_decay", "use_bias_correction")
        ours = {"momentum": ours["betas"][0]} | {k: ours[k] for k in shared if k in ours}
    elif kind.startswith("SpectralDescent"):
        ours |= {"route": "spectral", "scale": None}
    elif kind.startswith("EigenvalueCorrected"):
        make = isokron.SOAP
        ours |= {"eps": ours.pop("damping"), "basis": "eigh", "variances": "kept"}
        del ours["exponent"], ours["deficient"]
    elif "KLShampoo" in kind:
        ours["statistic"] = "kl_sum"
    return make([{"route": "method", "vectors": True, **ours, **further, "params": params}])


def distance(name: str, **further: Any) -> float:
    """From the recorded parameters, relative to how far these have moved; the most of any."""
    config = CONFIGS[name]
    recorded = np.load(DATA / f"{name}.npz")
    random = np.random.default_rng(1)
    start = [random.standard_normal(shape) for shape in config["shapes"]]
    params = [nn.Parameter(torch.tensor(value)) for value in start]
    optimizer = optimizer_of(config, params, **further)
    distances = []
    for t in range(30):
        for i, param in enumerate(params):
            grad = random.standard_normal(param.shape) * (1 + i)
            missing = config["missing_gradients"] and (t + i) % 3 == 0
            param.grad = None if missing else torch.tensor(grad)
        optimizer.step()
        for i, param in enumerate(params):
            if f"{t + 1}.{i}" in recorded:
                there = recorded[f"{t + 1}.{i}"]
                moved = np.linalg.norm(there - start[i])
                off = np.linalg.norm(param.detach().numpy() - there)
                distances.append(off / moved if moved else off)
    assert len(distances) == len(recorded) == 3 * len(params)
    return float(max(distances))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_configuration_takes_the_recorded_steps_or_is_in_the_table(name: str) -> None:
    if name in DIFFERENCES:  # to the digits of the page
        assert distance(name) == pytest.approx(DIFFERENCES[name], rel=0.05)
    else:
        assert distance(name) < EXACT


@pytest.mark.parametrize("name", ["eigendecomposed", "eigendecomposed_override_0.5_every3"])
def test_bases_and_eigenvalues_take_the_recorded_steps(name: str) -> None:
    assert distance(name, form="eigen") < EXACT


def test_every_row_of_the_table_is_a_configuration_that_differs() -> None:
    assert len(DIFFERENCES) < len(CONFIGS) / 4
    assert set(DIFFERENCES) <= set(CONFIGS)
    assert min(DIFFERENCES.values()) > EXACT
