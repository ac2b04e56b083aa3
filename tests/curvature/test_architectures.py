"""Experts, adapters, compiled models and bfloat16: gradients of examples equal autograd's."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from isokron.curvature import CrossEntropy, Selection, find_layers, fit
from isokron.curvature.backward import Passes
from isokron.curvature.check import check_layers
from isokron.curvature.layers import Layer, unpack
from isokron.curvature.statistics import Uses
from tiny_text_config import TEXT, VOCABULARY

transformers = pytest.importorskip("transformers")

EXAMPLES, LENGTH = 3, 6


@dataclass(frozen=True)
class Case:
    config: str
    model: str
    options: Mapping[str, Any]
    dtype: torch.dtype = torch.float64


CASES: dict[str, Case] = {
    "llama": Case("LlamaConfig", "LlamaForCausalLM", TEXT),
    "mixtral": Case(
        "MixtralConfig",
        "MixtralForCausalLM",
        {**TEXT, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 96},
        torch.float32,
    ),
}


def build(case: Case) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.options)
    model: nn.Module = getattr(transformers, case.model)(config).to(case.dtype)
    for param in model.parameters():  # norms are neither 0 nor 1, biases not 0
        param.data.add_(0.1 * torch.randn_like(param))
    return model


def logits(model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
    inputs, targets = batch
    return model(**inputs).logits, targets


LOSS = CrossEntropy(logits)


def data() -> tuple[dict[str, Tensor], Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (EXAMPLES, LENGTH))
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    targets[1, 3:] = -100
    return {"input_ids": ids}, targets


def example_gradients(
    model: nn.Module, batch: Any, loss: Any, layers: list[Layer], dtype: torch.dtype
) -> list[dict[str, Tensor]]:
    """∇ of every example by Σ_s g̃āᵀ of what the passes show, as parameters."""
    like = {name: param.detach().to(dtype) for name, param in model.named_parameters()}
    like = {name.removeprefix("_orig_mod."): value for name, value in like.items()}
    found: list[dict[str, Tensor]] = [{} for _ in range(EXAMPLES)]

    def fold(layer: Layer, uses: Uses) -> None:
        assert uses.grads.size(1) == EXAMPLES, layer.name
        uses = uses.written()
        if uses.kind == "diagonal":
            rows = {"weight": (uses.grads * uses.inputs).sum(2), "bias": uses.grads.sum(2)}
            matrices = torch.stack([rows[key][0] for key in layer.layout.params], 1)[None]
        elif uses.kind == "index":
            one_hot = nn.functional.one_hot(uses.inputs, layer.columns).to(dtype)
            matrices = torch.einsum("bnso,bnsi->bnoi", uses.grads, one_hot)
        else:
            matrices = torch.einsum("bnso,bnsi->bnoi", uses.grads, uses.inputs)
        for n in range(EXAMPLES):
            for key, value in unpack(layer.layout, matrices[:, n]).items():
                name = layer.layout.params[key]
                total = found[n].setdefault(name, torch.zeros_like(like[name]))
                part = layer.layout.part(key, total)
                part += value.reshape(part.shape)

    Passes(model, [batch], loss, layers, dtype=dtype, weighting="linear").over(fold)
    return found


def autograd(model: nn.Module, batch: Any, n: int) -> dict[str, Tensor]:
    inputs, targets = batch
    one = {key: value[n : n + 1] for key, value in inputs.items()}
    terms, weights = LOSS(model, (one, targets[n : n + 1]))
    names, params = zip(*model.named_parameters(), strict=True)
    grads = torch.autograd.grad((terms * weights).sum(), params, allow_unused=True)
    return {
        name: torch.zeros_like(param) if grad is None else grad
        for name, param, grad in zip(names, params, grads, strict=True)
    }


def assert_gradients(model: nn.Module, selection: Selection, batch: Any) -> None:
    found = example_gradients(model, batch, LOSS, selection.layers, next(model.parameters()).dtype)
    model.eval()
    names = {name for layer in selection.layers for name in layer.layout.params.values()}
    for n, grads in enumerate(found):
        want = autograd(model, batch, n)
        for name in sorted(names):
            right, got = want[name], grads.get(name, torch.zeros_like(want[name]))
            # transformers' norms compute in float32, also where the model does not
            tolerance = max(1e-5, 500 * torch.finfo(right.dtype).eps) * float(right.abs().max())
            torch.testing.assert_close(got, right, rtol=0, atol=tolerance + 1e-12, msg=name)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_experts_are_the_same_whatever_computes_them(implementation: str) -> None:
    model, batch = build(CASES["mixtral"]), data()
    model.set_experts_implementation(implementation)
    selection = find_layers(model, "*.experts,*.gate")
    assert len(selection.layers) == 2 * (4 * 2 + 1)
    assert selection.layers[4].name == "model.layers.0.mlp.experts.1.down_proj"
    assert_gradients(model, selection, batch)


def test_one_expert_may_be_named() -> None:
    model, batch = build(CASES["mixtral"]), data()
    selection = find_layers(model, "model.layers.1.mlp.experts.2.down_proj")
    (layer,) = selection.layers
    assert layer.shape == (1, 8, 96)
    found = example_gradients(model, batch, LOSS, selection.layers, torch.float32)
    for n, grads in enumerate(found):
        want = autograd(model.eval(), batch, n)["model.layers.1.mlp.experts.down_proj"]
        got = grads.get("model.layers.1.mlp.experts.down_proj", torch.zeros_like(want))
        torch.testing.assert_close(got[2], want[2], rtol=1e-4, atol=1e-5)
        assert not got[:2].any()


def test_an_expert_that_no_token_is_sent_to_has_curvature_zero() -> None:
    model, batch = build(CASES["mixtral"]), data()
    for name, param in model.named_parameters():
        if name.endswith("gate.weight"):  # the inputs of the router are shifted to be positive
            param.data[3] = -100 * torch.ones(8)
            param.data[:3] = torch.randn(3, 8)
        elif name.endswith("post_attention_layernorm.weight"):
            param.data.fill_(1.0)
    hook = [
        module.register_forward_pre_hook(lambda _, args: (args[0].abs(),))
        for name, module in model.named_modules()
        if name.endswith("mlp.gate")
    ]
    curvature = fit(model, [batch, batch], LOSS, layers="*.experts")
    assert len(hook) == 2
    for name, value in curvature.trace().items():
        assert value == 0 if ".experts.3." in name else value > 0, name


def test_only_the_adapters_of_a_model_with_lora_are_covered() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], lora_dropout=0.5)
    model, batch = peft.get_peft_model(build(CASES["llama"]), settings), data()
    for name, param in model.named_parameters():
        if "lora_B" in name:  # begins at 0
            nn.init.normal_(param)
    selection = check_layers(model, batch, LOSS, find_layers(model))
    assert len(selection.layers) == 2 * 2 * 2
    learned = [param.numel() for param in model.parameters() if param.requires_grad]
    assert selection.covered == sum(learned)
    assert {item.reason for item in selection.left_out} == {"frozen", "embedding"}
    assert "+ 17 more (frozen)" in selection.summary()
    named = find_layers(model, "*.q_proj.base_layer")
    assert len(named.layers) == 2
    for param in model.parameters():  # for autograd
        param.requires_grad_()
    assert_gradients(model, selection, batch)
    assert_gradients(model, named, batch)


def test_a_compiled_model_shows_its_layers_under_their_own_names() -> None:
    model, batch = build(CASES["llama"]), data()
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        LOSS(compiled, batch)
    count = len(graphs)
    assert count
    selection = check_layers(compiled, batch, LOSS, find_layers(compiled))
    assert [x.name for x in selection.layers] == [x.name for x in find_layers(model).layers]
    found = example_gradients(compiled, batch, LOSS, selection.layers, torch.float64)
    assert len(graphs) == count  # hooks are not compiled
    want = example_gradients(model, batch, LOSS, selection.layers, torch.float64)
    for mine, theirs in zip(found, want, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            torch.testing.assert_close(mine[name], value)


def test_a_model_in_bfloat16_has_gradients_in_float32() -> None:
    case, batch = CASES["llama"], data()
    half, full = build(case).bfloat16(), build(case).bfloat16().double()
    selection = check_layers(half, batch, LOSS, find_layers(half))
    assert len(selection.layers) == len(find_layers(full).layers)
    found = example_gradients(half, batch, LOSS, selection.layers, torch.float32)
    for n, grads in enumerate(found):
        want = autograd(full.eval(), batch, n)
        for name, value in grads.items():
            assert value.dtype == torch.float32
            assert (value - want[name]).norm() <= 0.1 * want[name].norm(), name
