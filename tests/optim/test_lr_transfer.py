"""Learning rates carry over from AdamW, and from narrow models to wide ones."""

from copy import deepcopy
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import isokron
from isokron.optim.lr_transfer import METHOD_MULTIPLE, REST_MULTIPLE


class Layers(nn.Module):
    """One parameter of every kind that the width matters for."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.qkv = nn.MultiheadAttention(width, 2, bias=False)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width, bias=False)
        self.pixels = nn.Linear(12, width, bias=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50, bias=False)


def settings(optimizer: torch.optim.Optimizer, key: str) -> dict[str, float]:
    """The value of a group setting by parameter name."""
    return {name: group[key] for group in optimizer.param_groups for name in group["param_names"]}


def scales(make: Any, wide: nn.Module, base: Any, **keywords: Any) -> dict[str, float]:
    """lr_scale by parameter name."""
    groups = isokron.param_groups(wide, base_shapes=base, **keywords)
    return settings(make(groups, lr=1e-2), "lr_scale")


def test_adamw_divides_the_rate_of_a_matrix_by_the_growth_of_its_inputs() -> None:
    factors = scales(isokron.AdamW, Layers(64), Layers(16))
    matrices = {"qkv.in_proj_weight", "qkv.out_proj.weight", "up.weight", "down.weight"}
    assert {name for name, factor in factors.items() if factor != 1} == matrices | {"head.weight"}
    assert all(factors[name] == pytest.approx(1 / 4) for name in (*matrices, "head.weight"))
    assert factors["pixels.weight"] == 1  # as many inputs as in the narrow model


@pytest.mark.parametrize("method", ["Muon", "SOAP", "Shampoo", "Katie", "Quad"])
def test_methods_of_full_rank_divide_it_by_the_root_and_their_head_as_adamw(method: str) -> None:
    factors = scales(getattr(isokron, method), Layers(64), Layers(16))
    for name in ("qkv.in_proj_weight", "qkv.out_proj.weight", "up.weight", "down.weight"):
        assert factors[name] == pytest.approx(1 / 2), name
    assert factors["head.weight"] == pytest.approx(1 / 4)
    assert factors["table.weight"] == factors["norm.weight"] == factors["up.bias"] == 1


def test_the_factors_of_other_settings_follow_from_the_norm_of_their_updates() -> None:
    wide, base = Layers(64), Layers(16)

    def factor(make: Any, **keywords: Any) -> float:
        return scales(lambda groups, lr: make(groups, lr, **keywords), wide, base)["up.weight"]

    assert factor(isokron.Muon, scale="original") == pytest.approx(1)
    assert factor(isokron.Muon, scale="original", graft="adam") == pytest.approx(1 / 2)
    assert factor(isokron.SignDescent) == pytest.approx(1 / 4)
    # [256, 64] in 8 x 2 blocks of 32 and [64, 16] in 2 blocks [32, 16]: √(2·32 / (16·32))
    assert factor(isokron.SOAP, max_dim=32) == pytest.approx(sqrt(1 / 8))
    # blocks of one element are AdamW's
    assert factor(isokron.SOAP, max_dim=1) == pytest.approx(1 / 4)
    spectral = scales(isokron.SOAP, wide, base, route="spectral")
    assert spectral["up.weight"] == pytest.approx(1 / 2)


@pytest.mark.parametrize(("method", "growth"), [("AdamW", 4), ("SignDescent", 4), ("Muon", 2)])
def test_outputs_change_alike_at_every_width(method: str, growth: float) -> None:
    """lr·‖UX‖/√m, which without base_shapes grows with the width or its root."""

    def change(width: int, base: int) -> float:
        generator = torch.Generator().manual_seed(0)
        model = nn.Sequential(nn.Linear(width, width, bias=False), nn.Linear(width, 1, bias=False))
        base_model = nn.Sequential(*(nn.Linear(base, size, bias=False) for size in (base, 1)))
        groups = isokron.param_groups(model, base_shapes=base_model)
        optimizer = getattr(isokron, method)(groups, lr=1e-3, weight_decay=0.0)
        inputs = torch.randn(width, generator=generator).sign()  # one example: rank one
        if method == "Muon":  # whose update has full rank if the gradient has
            inputs = torch.linalg.qr(torch.randn(width, width, generator=generator))[0]
            inputs = inputs * sqrt(width)
        weight = model[0].weight
        before = weight.detach().clone()
        outputs = torch.randn(*inputs.shape[:-1], width, generator=generator)
        (model[0](inputs) * outputs).sum().backward()
        optimizer.step()
        moved: Tensor = inputs @ (weight - before).T
        return moved.square().mean().sqrt().item()

    assert change(128, 32) / change(32, 32) == pytest.approx(1, rel=0.05)
    assert change(128, 128) / change(32, 32) == pytest.approx(growth, rel=0.05)


def test_the_product_of_rate_and_decoupled_decay_is_the_same_at_every_width() -> None:
    groups = isokron.param_groups(
        Layers(64), base_shapes=Layers(16), weight_decay=0.2, lr_scale={"up.*": 3.0}
    )
    optimizer = isokron.Muon(groups, lr=1e-2)
    rates, decays = settings(optimizer, "lr_scale"), settings(optimizer, "weight_decay")
    assert rates["up.weight"] == pytest.approx(3 / 2)
    assert rates["up.weight"] * decays["up.weight"] == pytest.approx(3 * 0.2)
    assert rates["down.weight"] * decays["down.weight"] == pytest.approx(0.2)
    assert (decays["table.weight"], decays["norm.weight"]) == (0.2, 0.0)
    l2 = isokron.param_groups(Layers(64), base_shapes=Layers(16), weight_decay=0.2, decay="l2")
    assert settings(isokron.AdamW(l2), "weight_decay")["up.weight"] == 0.2


def test_shapes_by_name_do_as_well_as_the_narrow_model() -> None:
    base, wide = Layers(16), Layers(64)
    shapes = {name: tuple(param.shape) for name, param in base.named_parameters()}
    expected = scales(isokron.SOAP, wide, base)
    assert scales(isokron.SOAP, wide, shapes) == expected
    assert scales(isokron.SOAP, wide, base.state_dict()) == expected


def test_a_model_of_the_base_width_is_left_as_it_is() -> None:
    plain = isokron.param_groups(Layers(16))
    assert isokron.param_groups(Layers(16), base_shapes=Layers(16))[0].keys() == plain[0].keys()
    assert set(scales(isokron.Muon, Layers(16), Layers(16)).values()) == {1.0}


class Stacks(nn.Module):
    """Three projections side by side, and experts [4, out, in], in raw parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.randn(2 * width, width))
        self.experts = nn.Parameter(torch.randn(4, 16, width))
        self.positions = nn.Parameter(torch.randn(1, 9, width))


@pytest.mark.parametrize("split", [2, "sizes"])
def test_stacked_and_split_parameters_scale_as_their_matrices(split: Any) -> None:
    split = [48, 16, 64] if split == "sizes" else split
    keywords = {"split": {"fused": split}, "stacked": ["experts"], "adamw": ["positions"]}
    factors = scales(isokron.Muon, Stacks(64), Stacks(16), **keywords)
    assert factors["fused"] == pytest.approx(1 / 2)
    # [16, 64] and [16, 16]: √(16/64)/√64 ÷ √(16/16)/√16
    assert factors["experts"] == pytest.approx(1 / 4)
    assert factors["positions"] == 1


def test_weights_that_are_stored_as_inputs_by_outputs_are_read_that_way() -> None:
    def model(width: int) -> nn.Module:
        layers = nn.ConvTranspose2d(3, width, 3), nn.ConvTranspose2d(width, width, 3)
        return nn.Sequential(*layers, nn.Conv2d(width, 3, 1))

    factors = scales(isokron.AdamW, model(32), model(8))
    assert factors["0.weight"] == pytest.approx(1)
    assert factors["1.weight"] == factors["2.weight"] == pytest.approx(1 / 4)


def test_a_gpt2_is_scaled_through_its_transposed_layers() -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')

    def model(width: int) -> Any:
        sizes = {"vocab_size": 64, "n_positions": 8, "n_layer": 1, "n_head": 2, "n_inner": 32}
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=width, **sizes))

    factors = scales(isokron.AdamW, model(32), model(8))
    block = "transformer.h.0"
    assert factors[f"{block}.attn.c_attn.weight"] == pytest.approx(1 / 4)
    assert factors[f"{block}.mlp.c_fc.weight"] == pytest.approx(1 / 4)  # [width, 32]
    assert factors[f"{block}.mlp.c_proj.weight"] == pytest.approx(1)  # [32, width]
    assert factors["transformer.wte.weight"] == 1  # tied to the head: an embedding


METHODS = ["SOAP", "Shampoo", "Katie", "Muon", "Quad", "Skew", "SignDescent"]


@pytest.mark.parametrize("method", METHODS)
def test_with_match_adamw_all_methods_take_the_same_multiples_of_one_rate(method: str) -> None:
    groups = isokron.param_groups(Layers(16), match_adamw=True)
    optimizer = getattr(isokron, method)(groups, lr=3e-4, weight_decay=0.1)
    rates, decays = settings(optimizer, "lr_scale"), settings(optimizer, "weight_decay")
    matrices = {"qkv.in_proj_weight", "qkv.out_proj.weight", "up.weight", "down.weight"}
    matrices |= {"pixels.weight"}
    expected = {name: METHOD_MULTIPLE if name in matrices else REST_MULTIPLE for name in rates}
    assert rates == expected
    decayed = matrices | {"table.weight", "head.weight"}
    assert decays == {name: 0.1 if name in decayed else 0.0 for name in rates}


@pytest.mark.parametrize("make", [isokron.AdamW, isokron.ShardedAdamW])
def test_match_adamw_changes_nothing_for_adamw_itself(make: Any) -> None:
    if make is isokron.ShardedAdamW:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        optimizer = make(isokron.param_groups(Layers(16), match_adamw=True))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    assert set(settings(optimizer, "lr_scale").values()) == {1.0}


@pytest.mark.parametrize("method", ["SOAP", "Muon", "Quad"])
def test_a_step_with_match_adamw_is_one_with_the_multiples_by_hand(method: str) -> None:
    model, by_hand = Layers(16), Layers(16)
    by_hand.load_state_dict(model.state_dict())
    make = getattr(isokron, method)
    optimizer = make(isokron.param_groups(model, match_adamw=True), lr=3e-4, weight_decay=0.1)
    scale = {"matrices": METHOD_MULTIPLE, "*": REST_MULTIPLE}
    other = make(isokron.param_groups(by_hand, lr_scale=scale), lr=3e-4, weight_decay=0.1)
    for weight, same in zip(model.parameters(), by_hand.parameters(), strict=True):
        weight.grad = torch.randn_like(weight)
        same.grad = weight.grad.clone()
    for _ in range(3):
        optimizer.step()
        other.step()
    for weight, same in zip(model.parameters(), by_hand.parameters(), strict=True):
        torch.testing.assert_close(weight, same, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("keywords", [{"match_adamw": True}, {"lr_scale": {"matrices": 2, "*": 4}}])
def test_multiples_and_width_make_a_product(keywords: dict[str, Any]) -> None:
    factors = scales(isokron.SOAP, Layers(64), Layers(16), **keywords)
    assert factors["up.weight"] == pytest.approx(2 / 2)  # the width halves it
    assert factors["head.weight"] == pytest.approx(4 / 4)
    assert factors["table.weight"] == factors["norm.weight"] == factors["up.bias"] == 4


def test_describe_shows_the_multiples_before_and_after_an_optimizer_took_the_groups() -> None:
    def rates(subject: Any) -> dict[str, list[str]]:
        lines = [line.split("  ") for line in isokron.describe(subject).splitlines()[1:]]
        cells = [[cell.strip() for cell in line if cell] for line in lines]
        by_stepper: dict[str, set[str]] = {}
        for cell in cells:
            by_stepper.setdefault(cell[1], set()).add(cell[5])
        return {stepper: sorted(values) for stepper, values in by_stepper.items()}

    groups = isokron.param_groups(Layers(16), match_adamw=True)
    assert rates(groups) == {"AdamW": ["4"], "the method": ["2"]}
    assert rates(isokron.SOAP(groups)) == {"AdamW": ["4"], "SOAP": ["2"]}
    assert rates(isokron.AdamW(groups)) == {"AdamW": ["1"]}
    groups = isokron.param_groups(Layers(16), lr_scale={"matrices": 1.0, "*": 8.0})
    assert rates(groups) == {"AdamW": ["8"], "the method": ["1"]}
    assert rates(isokron.Muon(groups)) == {"AdamW": ["8"], "Muon": ["1"]}


def test_matrices_of_spectral_descent_have_the_rate_of_the_method() -> None:
    spectral = isokron.param_groups(Layers(16), match_adamw=True, route={"up.weight": "spectral"})
    assert settings(isokron.SOAP(spectral), "lr_scale")["up.weight"] == METHOD_MULTIPLE


def test_lora_pairs_keep_the_rate_that_adamw_had_for_them() -> None:
    peft = pytest.importorskip("peft", reason='pip install "isokron[hf]"')
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    lora = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["0", "1"]))
    for method, multiple in (((), 1.0), ("*lora_*", METHOD_MULTIPLE)):
        groups = isokron.param_groups(lora, match_adamw=True, method=method)
        assert set(settings(isokron.SOAP(groups), "lr_scale").values()) == {multiple}


def test_match_adamw_beside_multiples_is_refused() -> None:
    for scale in (2.0, {"up.*": 2.0}):
        with pytest.raises(ValueError, match=r"must be False where lr_scale is given.*keep one"):
            isokron.param_groups(Layers(16), match_adamw=True, lr_scale=scale)
    by_hand = {"params": [nn.Parameter(torch.zeros(4, 4))], "match_adamw": True, "lr_scale": 3.0}
    for make in (isokron.SOAP, isokron.AdamW):
        with pytest.raises(ValueError, match=r"match_adamw must be False where lr_scale is given"):
            make([by_hand])


def test_the_pages_state_the_multiples_of_match_adamw() -> None:
    rule = f"takes {METHOD_MULTIPLE:g} times it for what the method steps "
    rule += f"and {REST_MULTIPLE:g} times it for everything else"
    for page in ("from_adamw.md", "routing.md"):
        text = (Path(__file__).parents[2] / "docs" / page).read_text()
        assert rule in " ".join(text.split()), page
    by_hand = f'"*": {REST_MULTIPLE}}}'
    for page in ("from_adamw.md", "jax.md"):
        text = (Path(__file__).parents[2] / "docs" / page).read_text()
        assert f": {METHOD_MULTIPLE}, {by_hand}" in text, page
    doc = isokron.param_groups.__doc__
    assert f"it by {METHOD_MULTIPLE:g} for what the method" in doc
    assert f"by {REST_MULTIPLE:g} for everything else" in doc


def test_a_number_for_match_adamw_is_refused() -> None:
    message = r"match_adamw must be True or False, got 0\.0003; AdamW's learning rate .* optimizer"
    with pytest.raises(ValueError, match=message):
        isokron.param_groups(Layers(16), match_adamw=3e-4)  # type: ignore[arg-type]
    group = {"params": [nn.Parameter(torch.zeros(4, 4))], "match_adamw": 3e-4}
    with pytest.raises(ValueError, match=r"SOAP: match_adamw must be True or False; .* `lr`, got"):
        isokron.SOAP([group])
    with pytest.raises(TypeError, match=r"write isokron\.param_groups\(model, match_adamw=True\)"):
        isokron.SOAP(group["params"], match_adamw=True)  # type: ignore[call-arg]


def test_a_group_of_which_the_method_steps_only_a_part_is_refused() -> None:
    layers = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 8))
    groups = isokron.param_groups(layers, match_adamw=True, route="auto")
    with pytest.raises(ValueError, match=r"got a group with both, 'matrices.*'; leave `route` to"):
        isokron.Muon(groups)


def test_tensors_and_groups_of_the_caller_are_left_as_they_are() -> None:
    decay, scale = torch.tensor(0.1), torch.tensor(2.0)
    wide, base = Layers(64), Layers(16)
    groups = isokron.param_groups(wide, base_shapes=base, lr_scale=scale)
    more = [("by hand", nn.Parameter(torch.ones(2, 2)))]
    groups += [{"params": more, "match_adamw": True}]
    keys = [set(group) for group in groups]
    for make in (isokron.SOAP, isokron.Muon, isokron.SOAP):
        optimizer = make(groups, weight_decay=decay)
        *scaled, by_hand = optimizer.param_groups
        rates = {name: float(g["lr_scale"]) for g in scaled for name in g["param_names"]}
        decays = {name: float(g["weight_decay"]) for g in scaled for name in g["param_names"]}
        assert rates["up.weight"] == pytest.approx(2 / 2)
        assert decays["up.weight"] == pytest.approx(0.1 * 2)
        assert (rates["table.weight"], decays["table.weight"]) == (2.0, pytest.approx(0.1))
        assert by_hand["lr_scale"] == METHOD_MULTIPLE
    assert [set(group) for group in groups] == keys
    assert (float(decay), float(scale)) == (pytest.approx(0.1), 2.0)


def test_copies_and_loaded_states_are_not_scaled_again() -> None:
    def build() -> isokron.SOAP:
        groups = isokron.param_groups(Layers(64), base_shapes=Layers(16), match_adamw=True)
        return isokron.SOAP(groups)

    optimizer = build()
    expected = settings(optimizer, "lr_scale")
    assert settings(deepcopy(optimizer), "lr_scale") == expected
    other = build()
    other.load_state_dict(optimizer.state_dict())
    assert settings(other, "lr_scale") == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up.weight": None}, r"every trainable parameter, but has no 'up\.weight'; make it"),
        ({"up.weight": (64,)}, r"base_shapes\['up\.weight'\] must have 2 dimensions.*got \(64,\)"),
        ({"norm.weight": (128,)}, r"'norm\.weight'\].* at most .*\(64,\), got \(128,\); the base"),
        ({"up.weight": (0, 16)}, r"at least 1 .*got \(0, 16\)"),
    ],
)
def test_a_base_that_does_not_fit_is_refused_by_name(
    change: dict[str, tuple[int, ...] | None], message: str
) -> None:
    shapes = {name: param.shape for name, param in Layers(16).named_parameters()}
    base = {name: shape for name, shape in {**shapes, **change}.items() if shape is not None}
    with pytest.raises(ValueError, match=message):
        isokron.param_groups(Layers(64), base_shapes=base)


def test_a_base_that_is_neither_model_nor_mapping_is_refused() -> None:
    with pytest.raises(TypeError, match=r"narrow model or a mapping .* got int"):
        isokron.param_groups(Layers(64), base_shapes=16)
