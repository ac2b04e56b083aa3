"""Names of other libraries: answered by every error, and on the page of migrations."""

import inspect
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from torch import nn

import isokron
import isokron.jax
from isokron import curvature, names
from isokron.cli.app import app
from isokron.optim.settings import GROUP_KEYS, SWITCHES

PATH = Path(__file__).parents[1] / "docs/migrating.md"
PAGE = PATH.read_text()
CALL = r"(?:\.\w+)+(?:\((?:[^()]|\([^()]*\))*\))?"
CODE = re.compile(rf'(?:isokron|optimizer|torch){CALL}|\w+="\w+"')
TABLES = [("", *item) for item in names.OPTIMIZERS.items() if item[0] != "param_groups"]
TABLES += [("Attributor", *item) for item in names.ATTRIBUTION.items()]
ANSWERS = [
    (who, library, name, answer) for who, library, table in TABLES for name, answer in table.items()
]


def weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(4, 4))


def fit(**keywords: Any) -> Any:
    return curvature.fit(nn.Linear(2, 2), [], isokron.losses.CrossEntropy(), **keywords)


CALLERS: dict[str, Callable[..., Any]] = {
    "Shampoo": lambda **keywords: isokron.Shampoo([weight()], **keywords),
    "Katie": lambda **keywords: isokron.Katie([weight()], **keywords),
    "Quad": lambda **keywords: isokron.Quad([weight()], **keywords),
    "AdamW": lambda **keywords: isokron.AdamW([weight()], **keywords),
    "NaturalGradient": lambda **keywords: isokron.NaturalGradient(nn.Linear(2, 2), **keywords),
    "fit": fit,
    "Attributor": lambda **keywords: isokron.Attributor("run", nn.Linear(2, 2), [], **keywords),
    "score": partial(isokron.Attributor.score, None),  # refused before it is asked what it is of
    "jax": isokron.jax.soap,
}


@pytest.mark.parametrize(
    ("caller", "name", "text"),
    [
        ("Shampoo", "inverse_exponent_override", r"'exponent'\? \(a root, the reciprocal: 4 for"),
        ("Shampoo", "num_tolerated_failed_amortized_computations", "'tolerated'"),
        ("Shampoo", "preconditioner_config", "the class is the preconditioner"),
        ("Shampoo", "dampening", "put it into the parameter group"),
        ("Shampoo", "beta3", "put it into the parameter group"),
        ("AdamW", "dampening", "of the momentum of Shampoo, SOAP and Katie"),
        ("Shampoo", "capturable", "leave it out"),
        ("Katie", "beta2_diagonal", r"'betas'\? \(its second number\)"),
        ("Katie", "diagonal_epsilon", "'eps'"),
        ("Katie", "kronecker_epsilon", "'damping'"),
        ("Quad", "b1", "'momentum'"),
        ("Quad", "scanned_layers", "'stacked'"),
        ("NaturalGradient", "kfac_policy", "'policy'"),
        ("NaturalGradient", "kfac_use_woodbury", r"'policy'\? \(\"dense\" for False\)"),
        ("NaturalGradient", "update_freq", "'every'"),
        ("NaturalGradient", "polici", "'policy'"),
        ("fit", "woodbury_dtype", "'store_dtype'"),
        ("fit", "update_freq", "it is 'every' here, of NaturalGradient"),
        ("Attributor", "projection_dim", r"it is 'dim' here, of build\(\)"),
        ("Attributor", "collate_fn", "'collate'"),
        ("Attributor", "filter_modules", "'layers'"),
        ("score", "unit_normalize", r"'unit'\? \(of score\(\)\)"),
        ("jax", "lr", "'learning_rate'"),
        ("jax", "b1", "'betas'"),
        ("jax", "fused", "leave it out"),
        ("jax", "mask", "'weight_decay_mask'"),
        ("jax", "route", "it takes basis, beta3, betas"),
    ],
)
def test_a_name_of_another_library_is_answered(caller: str, name: str, text: str) -> None:
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'; .*{text}"):
        CALLERS[caller](**{name: 1})


@pytest.mark.parametrize("name", [name for who, _, name, _ in ANSWERS if not who])
def test_no_name_of_another_library_does_nothing_as_a_group_key(name: str) -> None:
    """It is refused with an answer, unless it is a setting here too."""
    optimizer = isokron.Katie([weight()])
    if name not in {*optimizer.defaults, *SWITCHES}:
        with pytest.raises(ValueError, match=f"unknown key '{name}' in a parameter group; .+"):
            optimizer.add_param_group({"params": [weight()], name: 1})
        assert len(optimizer.param_groups) == 1


def test_what_users_keep_in_their_groups_is_left_alone() -> None:
    assert isokron.Katie([{"params": [weight()], "note": 1}]).param_groups[0]["note"] == 1


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("DistributedShampoo", "here: isokron.Shampoo"),
        ("TritonAdamW", "here: isokron.AdamW"),
        ("TritonDistAdamW", "here: isokron.ShardedAdamW"),
        ("fast_newton_schulz", "here: isokron.linalg.newton_schulz"),
        ("KFACNaturalGradient", "here: isokron.NaturalGradient"),
        ("KFAC", "here: isokron.NaturalGradient"),
        ("Kron", "here: isokron.Quad and isokron.Skew"),
        ("PSGD", "here: isokron.Quad"),
        ("Adam", "here: isokron.AdamW"),
        ("quad", "here: isokron.Quad, or isokron.jax.quad"),
        ("HessianConfig", "here: isokron.Attributor"),
    ],
)
def test_a_class_of_another_library_is_answered(name: str, text: str) -> None:
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; {text}"):
        getattr(isokron, name)


def settings_of(answer: str) -> list[str]:
    match = names.SETTING.fullmatch(answer)
    return match[1].split("|") if match else []


def arguments() -> set[str]:
    """Of all that takes any: optimizers and their groups, fit, Attributor, JAX, command line."""
    attributor = inspect.getmembers(isokron.Attributor, inspect.isfunction)
    functions = [curvature.fit, isokron.NaturalGradient, *(method for _, method in attributor)]
    functions += [getattr(isokron.jax, name) for name in ("quad", "soap", "shampoo", "muon")]
    taken = {name for function in functions for name in inspect.signature(function).parameters}
    commands: Any = typer_commands()
    options = {param.name for command in commands.values() for param in command.params}
    return taken | options | set(commands) | GROUP_KEYS | {"betas", "state_dtype"}


def typer_commands() -> Any:
    import typer

    group: Any = typer.main.get_command(app)
    return group.commands


def test_every_answer_is_something_there_is() -> None:
    there = arguments()
    for _, library, name, answer in ANSWERS:
        assert set(settings_of(answer)) <= there, (library, name)
        for public in re.findall(r"isokron(?:\.\w+)+", answer):
            resolve_name(public)


def glossary(library: str) -> str:
    """The table of a library on the page."""
    lines = ["| their name | ours |", "|---|---|"]
    for _, of, table in TABLES:
        for answer in dict.fromkeys(table.values()) if of == library else ():
            left = ", ".join(f"`{name}`" for name in table if table[name] == answer)
            match = names.SETTING.fullmatch(answer)
            if match is None:
                text = CODE.sub(r"`\g<0>`", answer)
                lines.append(f"| {left} | {text} |")
                continue
            right = " or ".join(f"`{name}`" for name in match[1].split("|"))
            lines.append(f"| {left} | {right}{f', {match[2]}' if match[2] else ''} |")
    return "\n".join(lines)


def with_glossaries(page: str) -> str:
    """The page with its tables of names as they should be."""
    pattern = r"<!-- names: (.+?) -->\n\n(?:\|.*\n)*\n?"
    return (
        re.sub(pattern, lambda m: f"<!-- names: {m[1]} -->\n\n{glossary(m[1])}\n\n", page).rstrip(
            "\n"
        )
        + "\n"
    )


def test_the_page_has_the_table_of_every_library() -> None:
    """`python tests/test_names.py` writes them."""
    assert set(re.findall(r"<!-- names: (.+?) -->", PAGE)) == {of for _, of, _ in TABLES}
    assert with_glossaries(PAGE) == PAGE


if __name__ == "__main__":
    PATH.write_text(with_glossaries(PAGE))
