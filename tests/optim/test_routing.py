"""Routing finds parameters by what they are: on models of several kinds, whatever their names."""

import copy
import re
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import isokron
from cases import build


def kinds(model: nn.Module, **overrides: object) -> dict[str, str]:
    """Parameter name → what it is, by the name of its group."""
    groups = isokron.param_groups(model, **overrides)
    return {name: group["name"].split(" (")[0] for group in groups for name, _ in group["params"]}


def group_of(model: nn.Module, name: str, **overrides: object) -> dict[str, object]:
    groups = isokron.param_groups(model, **overrides)
    return next(g for g in groups if name in [n for n, _ in g["params"]])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.attention = nn.MultiheadAttention(8, 2)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)


class Decoder(nn.Module):
    """Names chosen to mislead: nothing here can be found by them."""

    def __init__(self, tied: bool = False, headless: bool = False) -> None:
        super().__init__()
        self.embed_norm = nn.Linear(8, 8)  # a plain matrix
        self.wte = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        if not headless:
            self.bias_like = nn.Linear(8, 20, bias=False)  # the head
            if tied:
                self.bias_like.weight = self.wte.weight


def test_embeddings_heads_norms_and_biases_go_to_adamw() -> None:
    found = kinds(Decoder())
    assert found["wte.weight"] == "embeddings"
    assert found["bias_like.weight"] == "heads"
    assert found["embed_norm.weight"] == "matrices"
    assert found["blocks.0.norm.weight"] == "norms"
    assert found["blocks.1.down.bias"] == "vectors"
    assert found["blocks.1.down.weight"] == "matrices"
    assert group_of(Decoder(), "blocks.0.norm.weight")["weight_decay"] == 0.0


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def checkpointed(model: nn.Module) -> nn.Module:
    """Its blocks in wrappers of activation checkpointing, all of it compiled."""
    for i, block in enumerate(model.blocks):  # type: ignore[arg-type]
        model.blocks[i] = checkpoint_wrapper(compiled(block))  # type: ignore[index, operator]
    return compiled(model)


def trained_by_ddp(model: nn.Module) -> nn.Module:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        return nn.parallel.DistributedDataParallel(compiled(model))
    finally:
        dist.destroy_process_group()


class Lightning(nn.Module):
    """A module around the model, of which it is the only part with parameters."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self.loss = model, nn.CrossEntropyLoss()


WRAPPERS: dict[str, Any] = {
    "compile": compiled,
    "checkpoint": checkpointed,
    "ddp": trained_by_ddp,
    "dataparallel": nn.DataParallel,
    "container": lambda model: nn.ModuleDict({"module": model}),
}


@pytest.mark.parametrize("wrapper", WRAPPERS)
@pytest.mark.parametrize("model", [Decoder(), Decoder(headless=True)], ids=["head", "headless"])
def test_a_wrapped_model_is_routed_as_the_bare_one(model: nn.Module, wrapper: str) -> None:
    choices: dict[str, Any] = {
        "adamw": ["blocks.1.up.*"],
        "lr_scale": {"blocks.*.down.weight": 0.5, "embeddings": 4.0, "vectors": 2.0},
        "base_shapes": model,
    }
    bare = isokron.param_groups(model, **choices)
    wrapped = WRAPPERS[wrapper](copy.deepcopy(model))
    groups = isokron.param_groups(wrapped, **{**choices, "base_shapes": wrapped})
    assert [g["name"] for g in groups] == [g["name"] for g in bare]
    for group, expected in zip(groups, bare, strict=True):
        assert [name for name, _ in group["params"]] == [name for name, _ in expected["params"]]
        assert {p for _, p in group["params"]} <= set(wrapped.parameters())
    with pytest.raises(ValueError, match=r"names look like embed_norm\.weight"):
        isokron.param_groups(wrapped, adamw="_orig_mod.*")


@pytest.mark.parametrize("wrapper", ["compile", "ddp", "dataparallel", "container"])
def test_natural_gradient_has_the_layers_of_the_bare_model(wrapper: str) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    bare = isokron.NaturalGradient(model, layers="2")
    wrapped = isokron.NaturalGradient(WRAPPERS[wrapper](model), layers="2")
    names = [[group["param_names"] for group in o.param_groups] for o in (bare, wrapped)]
    assert names[0] == names[1] == [["2.weight", "2.bias"], ["0.weight", "0.bias"]]


def test_the_head_of_a_model_is_that_of_the_module_around_it() -> None:
    backbone = Decoder(headless=True)
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
    )
    for model, heads in ((Decoder(), 1), (backbone, 0), (encoder, 0)):
        assert list(kinds(Lightning(model)).values()).count("heads") == heads


@pytest.mark.parametrize("wrapper", ["compile", "ddp", "container"])
def test_a_wrapped_backbone_of_transformers_has_no_head(wrapper: str) -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(**sizes, intermediate_size=32, vocab_size=30)
    bert = transformers.BertModel(config)
    bare = kinds(bert)
    assert bare["pooler.dense.weight"] == "matrices"
    assert kinds(WRAPPERS[wrapper](bert)) == bare
    assert list(kinds(Lightning(bert)).values()) == list(bare.values())


def test_a_tied_head_is_in_one_group_once() -> None:
    model = Decoder(tied=True)
    found = kinds(model)
    assert found["wte.weight"] == "embeddings"
    assert "bias_like.weight" not in found
    assert sorted(found) == sorted(name for name, _ in model.named_parameters())


def test_a_model_without_a_head_has_none() -> None:
    assert "heads" not in kinds(Decoder(headless=True)).values()
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False
    )
    assert "heads" not in kinds(encoder).values()
    assert kinds(nn.Linear(4, 4))["weight"] == "matrices"


def test_the_last_layer_of_a_sequence_is_its_head() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    assert [name for name, kind in kinds(model).items() if kind == "heads"] == ["4.weight"]


def test_an_embedding_under_weight_norm_is_an_embedding() -> None:
    table = nn.utils.parametrizations.weight_norm(nn.Embedding(10, 8))
    model = nn.Sequential(table, nn.Linear(8, 8), nn.Linear(8, 3))
    (group,) = (g for g in isokron.param_groups(model) if g["name"].startswith("embeddings"))
    assert "0.parametrizations.weight.original1" in [name for name, _ in group["params"]]


def test_a_head_under_weight_norm_is_a_head() -> None:
    head = nn.utils.parametrizations.weight_norm(nn.Linear(8, 3))
    found = kinds(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), head))
    assert found["2.parametrizations.weight.original1"] == "heads"


def test_a_lazy_layer_is_asked_to_run_first() -> None:
    with pytest.raises(ValueError, match="run one forward pass"):
        isokron.param_groups(nn.Sequential(nn.LazyLinear(3), nn.Linear(3, 2)))


def test_a_norm_with_a_matrix_of_scales_is_a_norm() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm((4, 6)), nn.Linear(6, 6), nn.Linear(6, 2))
    assert kinds(model)["1.weight"] == "norms"


def test_the_packed_projection_of_attention_is_three_matrices() -> None:
    group = group_of(Decoder(), "blocks.0.attention.in_proj_weight")
    assert (group["split"], group["split_dim"]) == (3, 0)
    assert group["name"] == "matrices (split in 3)"


def test_grouped_and_depthwise_convolutions_are_told_apart() -> None:
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3),
        nn.Conv2d(8, 8, 3, groups=2),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Flatten(),
        nn.Linear(8, 2),
    )
    found = kinds(model)
    assert [found[f"{i}.weight"] for i in (0, 1, 2, 4)] == [
        "matrices",
        "matrices",
        "filters",
        "heads",
    ]
    assert group_of(model, "1.weight")["split"] == 2


class LoraLinear(nn.Module):
    """The shape of a LoRA layer without its names: base, down [r, in], up [out, r]."""

    def __init__(self, base: nn.Module, fan_in: int, fan_out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = base
        self.x = nn.ModuleDict({"default": nn.Linear(fan_in, rank, bias=False)})
        self.y = nn.ModuleDict({"default": nn.Linear(rank, fan_out, bias=False)})


def test_lora_pairs_go_to_adamw_whatever_they_adapt() -> None:
    model = Decoder()
    model.requires_grad_(False)
    model.blocks[0].up = LoraLinear(model.blocks[0].up, 8, 16)
    model.wte = LoraLinear(model.wte, 20, 8)
    model.bias_like = LoraLinear(model.bias_like, 8, 20)
    found = kinds(model)
    assert set(found.values()) == {"adapters"}
    assert len(found) == 6  # frozen parameters are left out
    assert group_of(model, "wte.x.default.weight")["route"] == "adamw"
    pattern = "blocks.*.default.weight"
    assert group_of(model, "blocks.0.up.x.default.weight", method=pattern)["route"] == "method"


def llama_with_lora(targets: list[str], rank: int, **sizes: Any) -> Any:
    peft = pytest.importorskip("peft", reason="pip install peft")
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    layers = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=64, **layers, **sizes)
    lora = peft.LoraConfig(r=rank, target_modules=targets)
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), lora)


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    tensors = [t for entry in optimizer.state.values() for t in entry.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


@pytest.mark.parametrize("make", [isokron.SOAP, isokron.Katie, isokron.Shampoo, isokron.Muon])
def test_a_lora_model_keeps_no_more_state_than_under_adamw(make: Any) -> None:
    """With factors of both sides of every pair it would be tens of times as much."""
    targets = ["q_proj", "v_proj", "up_proj", "down_proj"]
    model = llama_with_lora(targets, 4, hidden_size=128, intermediate_size=256)
    tokens = torch.randint(64, (2, 8))
    model(input_ids=tokens, labels=tokens).loss.backward()
    sizes = []
    for optimizer in (make(isokron.param_groups(model)), isokron.AdamW(model.parameters())):
        optimizer.step()
        sizes.append(state_bytes(optimizer))
    assert sizes[0] <= 1.01 * sizes[1]  # step counters may differ


def test_a_bottleneck_is_no_adapter() -> None:
    """Narrow and wide again beside a square matrix, but all of it trained: the last is the head."""
    model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 3), nn.ReLU(), nn.Linear(3, 12))
    assert [n for n, kind in kinds(model).items() if kind == "heads"] == ["3.weight"]


def test_a_pair_of_raw_parameters_is_an_adapter_and_nobody_is_asked() -> None:
    model = Decoder().requires_grad_(False)
    layer = model.blocks[0].up
    layer.a, layer.b = nn.Parameter(torch.zeros(2, 8)), nn.Parameter(torch.zeros(16, 2))
    wrapped = nn.Module()
    wrapped.base, wrapped.a = (
        nn.Linear(8, 16).requires_grad_(False),
        nn.Parameter(torch.zeros(2, 8)),
    )
    wrapped.b = nn.Parameter(torch.zeros(16, 2))
    model.blocks[1].up = wrapped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert set(kinds(model).values()) == {"adapters"}
    with pytest.warns(UserWarning, match="known type, taken as matrices: 0.0"):
        isokron.param_groups(nn.Sequential(nn.ParameterList([torch.zeros(3, 4)]), nn.Linear(4, 2)))


def test_peft_adapters_of_a_hugging_face_model_are_found() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_key_value_heads": 1}
    targets = ["q_proj", "embed_tokens", "lm_head"]
    model = llama_with_lora(targets, 2, tie_word_embeddings=False, **sizes)
    found = kinds(model)
    assert set(found.values()) == {"adapters"}
    assert len(found) == 2 * (2 + 2)  # two layers, the embedding and the head


@pytest.mark.parametrize("tied", [True, False])
def test_a_hugging_face_gpt2_is_routed(tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    config = transformers.GPT2Config(
        n_layer=2, n_head=2, n_embd=16, vocab_size=50, n_positions=16, tie_word_embeddings=tied
    )
    model = transformers.GPT2LMHeadModel(config)
    found = kinds(model)
    assert found["transformer.wte.weight"] == found["transformer.wpe.weight"] == "embeddings"
    assert found["transformer.h.0.attn.c_attn.weight"] == "matrices"
    assert tied or found["lm_head.weight"] == "heads"
    group = group_of(model, "transformer.h.0.attn.c_proj.weight")
    assert group["name"] == "matrices"
    # Conv1D keeps [in, out]: its fused projection is split along the second dimension
    group = group_of(model, "transformer.h.0.attn.c_attn.weight")
    assert group["name"] == "matrices (split in 3 by columns)"
    assert (group["split"], group["split_dim"]) == (3, 1)
    isokron.Muon(isokron.param_groups(model, split={"*.c_attn.weight": (16, 32)}))


def test_cross_attention_of_gpt2_is_two_matrices_and_a_query() -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=16, vocab_size=50, n_positions=16, add_cross_attention=True
    )
    model = transformers.GPT2LMHeadModel(config)
    layer = "transformer.h.0.crossattention"
    assert group_of(model, f"{layer}.c_attn.weight")["split"] == 2
    assert "split" not in group_of(model, f"{layer}.q_attn.weight")


def test_every_trainable_parameter_is_in_exactly_one_group() -> None:
    model = Decoder()
    groups = isokron.param_groups(model)
    names = [name for group in groups for name, _ in group["params"]]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4)
        self.w = nn.Parameter(torch.randn(4, 8, 16))
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.einsum("bi,eij,bj->bi", x, self.w, x.repeat(1, 2)))


def test_weights_in_no_known_layer_are_asked_about_once_and_not_when_told() -> None:
    with pytest.warns(UserWarning, match=r"left to AdamW: w \(4, 8, 16\).*stacked="):
        isokron.param_groups(Experts())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        isokron.param_groups(Experts(), stacked=["w"])
        isokron.param_groups(Experts(), method=["w"])
        isokron.param_groups(Experts(), adamw=["w"])
        isokron.param_groups(nn.Sequential(nn.Conv2d(2, 3, 3), nn.LSTM(3, 4), nn.Linear(4, 2)))
        isokron.param_groups(nn.TransformerEncoderLayer(8, 2, 16))


@pytest.mark.parametrize("shape", [(4, 8, 16), (1, 17, 8), (99, 4)], ids=str)
def test_raw_stacks_and_tables_go_to_adamw_and_raw_matrices_do_not(shape: tuple[int, ...]) -> None:
    model = Experts()
    model.w = nn.Parameter(torch.randn(shape))
    with pytest.warns(UserWarning, match="no layer of a known type"):
        assert group_of(model, "w")["route"] == "adamw"
    assert group_of(model, "w", method="w")["route"] == "method"
    model.w = nn.Parameter(torch.randn(8, 16))
    with pytest.warns(UserWarning, match="taken as matrices: w"):
        assert group_of(model, "w")["route"] == "method"


def moe_config(transformers: Any, kind: str) -> Any:
    return getattr(transformers, f"{kind}Config")(
        vocab_size=64,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        head_dim=8,
    )


def test_experts_of_mixtral_are_matrices_of_their_own() -> None:
    """Muon's update of each expert's gate, up and down projection is orthogonal by itself."""
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    model = transformers.MixtralForCausalLM(moe_config(transformers, "Mixtral"))
    experts = "model.layers.0.mlp.experts"
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nobody is asked
        groups = isokron.param_groups(model)
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name[f"{experts}.down_proj"]["name"] == "matrices (stacked)"
    assert by_name[f"{experts}.gate_up_proj"]["name"] == "matrices (stacked, split in 2)"
    assert by_name["model.layers.0.mlp.gate.weight"]["name"] == "matrices"  # the router
    optimizer = isokron.Muon(groups, weight_decay=0.0)
    tokens = torch.randint(64, (8, 16))
    model(input_ids=tokens, labels=tokens).loss.backward()
    module = model.model.layers[0].mlp.experts
    before = [module.gate_up_proj.clone(), module.down_proj.clone()]
    optimizer.step()
    gate_up, down = module.gate_up_proj - before[0], module.down_proj - before[1]
    for update in (*down, *gate_up.chunk(2, 1)[0], *gate_up.chunk(2, 1)[1]):
        values = torch.linalg.svdvals(update.detach())
        assert values.min() > 0.3 * values.max()  # Newton-Schulz leaves them near 1


def test_biases_and_interleaved_gates_of_experts_are_left_as_they_are() -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    model = transformers.GptOssForCausalLM(moe_config(transformers, "GptOss"))
    experts = "model.layers.0.mlp.experts"
    assert group_of(model, f"{experts}.gate_up_proj")["name"] == "matrices (stacked)"
    assert kinds(model)[f"{experts}.gate_up_proj_bias"] == "vectors"


class HeadFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(8, 5)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8))


def test_a_head_that_comes_first_can_be_named() -> None:
    model = HeadFirst()
    for head in (model.out, "out.*", ["out.weight"]):
        found = kinds(model, head=head)
        assert [name for name, kind in found.items() if kind == "heads"] == ["out.weight"]
        assert found["body.2.weight"] == "matrices"
    assert "heads" not in kinds(model, head=[]).values()
    with pytest.raises(ValueError, match="head must be a module of the model"):
        isokron.param_groups(model, head=nn.Linear(8, 5))
    with pytest.raises(ValueError, match="head pattern 'lm_head' matches no"):
        isokron.param_groups(model, head="lm_head")


def test_heads_of_hugging_face_classifiers_have_one_output_a_label() -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    config = transformers.DeiTConfig(
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        image_size=16,
        patch_size=8,
        num_labels=7,
    )
    positions = {"adamw": "*position_embeddings"}
    found = kinds(transformers.DeiTForImageClassificationWithTeacher(config), **positions)
    heads = [name for name, kind in found.items() if kind == "heads"]
    assert heads == ["cls_classifier.weight", "distillation_classifier.weight"]
    backbone = transformers.DeiTModel(config)  # its pooler comes last and is no head
    assert "heads" not in kinds(backbone, **positions).values()


@pytest.mark.parametrize("layer", [nn.Linear(6, 1), nn.Conv2d(6, 1, 1)], ids=str)
def test_a_weight_of_one_row_keeps_its_decay(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer, nn.Linear(1, 6), nn.Linear(6, 6))
    group = group_of(model, "1.weight")
    assert group["name"] == "rows (adamw)"
    assert "weight_decay" not in group
    assert kinds(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 1)))["1.weight"] == "heads"
    assert group_of(model, "1.bias")["weight_decay"] == 0.0


def test_one_number_is_the_decay_of_all_that_decays() -> None:
    by_name = {
        name: group
        for group in isokron.param_groups(Decoder(), weight_decay=0.1)
        for name, _ in group["params"]
    }
    assert by_name["wte.weight"]["weight_decay"] == 0.1
    assert by_name["blocks.0.up.weight"]["weight_decay"] == 0.1
    assert by_name["blocks.0.up.bias"]["weight_decay"] == 0.0
    assert by_name["blocks.0.norm.weight"]["weight_decay"] == 0.0
    with pytest.raises(ValueError, match="param_groups: weight_decay must be a finite number"):
        isokron.param_groups(Decoder(), weight_decay="0.1")


def test_any_setting_of_groups_is_taken_for_all_or_by_pattern() -> None:
    model = Decoder()
    groups = isokron.param_groups(
        model,
        every=5,
        exponent={2: (2, 0)},  # one value: its keys are no patterns
        max_dim={"*.up.weight": 4},
        betas={"wte.*": (0.8, 0.9)},
        route="spectral",
    )
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert all(group["every"] == 5 and group["exponent"] == {2: (2, 0)} for group in groups)
    assert by_name["blocks.0.up.weight"]["max_dim"] == 4
    assert by_name["blocks.0.up.weight"]["name"] == "matrices (spectral, max_dim 4)"
    assert "max_dim" not in by_name["blocks.0.down.weight"]
    assert by_name["wte.weight"]["betas"] == (0.8, 0.9)
    routes = {by_name[name]["route"] for name in ("wte.weight", "blocks.0.up.bias")}
    assert routes == {"adamw"}
    assert len({group["name"] for group in groups}) == len(groups)
    isokron.Shampoo(groups)
    with pytest.raises(ValueError, match="param_groups: every must be a whole number"):
        isokron.param_groups(model, every={"wte.*": 0})
    with pytest.raises(TypeError, match="argument 'evry'; did you mean 'every'"):
        isokron.param_groups(model, evry=5)
    with pytest.raises(TypeError, match="argument 'qqq'; it takes adamw, "):
        isokron.param_groups(model, qqq=5)


def test_vectors_get_the_method_if_asked_for() -> None:
    model = Decoder()
    groups = isokron.param_groups(model, vectors=True)
    optimizer = isokron.SOAP(groups)
    for group in optimizer.param_groups:
        for name, param in zip(group["param_names"], group["params"], strict=True):
            table = name in ("wte.weight", "bias_like.weight")
            assert optimizer.traits.takes(param, group) == (not table), name
            assert group["weight_decay"] == (0.0 if param.ndim == 1 else 0.1), name


def test_names_of_groups_are_unique_and_say_what_the_group_does() -> None:
    groups = isokron.param_groups(
        Decoder(),
        adamw="embed_norm.weight",
        lr_scale={"blocks.0.*": 0.5},
        weight_decay={"*.down.weight": 0.3},
        split={"blocks.1.up.weight": (12, 4)},
    )
    names = [group["name"] for group in groups]
    assert len(set(names)) == len(names)
    assert {
        "matrices (adamw)",
        "embeddings (adamw)",
        "norms (adamw, lr × 0.5, no decay)",
        "matrices (split in 3)",
        "matrices (lr × 0.5, decay 0.3)",
        "matrices (split in 12+4)",
    } < set(names)


def test_describe_says_who_steps_what() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4), nn.Linear(4, 3))
    groups = isokron.param_groups(model, weight_decay=0.1, lr_scale={"1.weight": 0.5})
    lines = isokron.describe(groups).splitlines()
    assert len(lines) == 1 + len(groups)
    table = [re.split(r" {2,}", line) for line in lines]
    assert table[0][:4] == ["group", "stepped by", "tensors", "elements"]
    assert table[1] == ["embeddings (adamw)", "AdamW", "1", "400", "0.1", "-", "0.weight [100, 4]"]
    assert table[2][:6] == ["matrices (lr × 0.5)", "the method", "1", "16", "0.1", "0.5"]
    optimizer = isokron.Muon(groups)
    assert "Muon" in isokron.describe(optimizer)
    assert "the method" in isokron.describe(optimizer.param_groups)
    assert isokron.describe(model).splitlines()[1].startswith("embeddings (adamw)")
    with pytest.raises(TypeError, match=r"describe takes an isokron optimizer.*got generator"):
        isokron.describe(model.parameters())


def test_describe_shows_bare_tables_on_a_line_of_their_own() -> None:
    with pytest.warns(UserWarning, match="shaped like an embedding"):
        optimizer = isokron.SOAP([torch.randn(100, 4), torch.randn(4, 4)])
    assert [line.split()[1:3] for line in isokron.describe(optimizer).splitlines()[1:]] == [
        ["AdamW", "1"],
        ["SOAP", "1"],
    ]


@pytest.mark.parametrize(("layer", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.GRUCell, 3)])
def test_the_gates_of_a_recurrent_layer_are_matrices_of_their_own(layer: type, gates: int) -> None:
    groups = isokron.param_groups(layer(5, 6))
    (matrices,) = [group for group in groups if group["route"] == "method"]
    assert matrices["split"] == gates
    assert len(matrices["params"]) == 2
    isokron.Muon(groups)


def test_overrides_go_by_name_pattern() -> None:
    model = Experts()
    groups = isokron.param_groups(
        model,
        adamw="router.weight",
        method=["out.weight"],
        stacked=["w"],
        lr_scale={"out.*": 0.5},
        weight_decay={"w": 0.3},
    )
    by_name = {name: group for group in groups for name, _ in group["params"]}
    assert by_name["router.weight"]["route"] == "adamw"
    assert by_name["out.weight"]["route"] == "method"
    assert by_name["out.weight"]["lr_scale"] == by_name["out.bias"]["lr_scale"] == 0.5
    assert by_name["w"]["stacked"] == 1
    assert by_name["w"]["weight_decay"] == 0.3
    optimizer = isokron.Muon(groups)
    model(torch.randn(5, 8)).sum().backward()
    optimizer.step()
    assert {f"momentum.{i}" for i in range(4)} < set(optimizer.state[model.w])
    assert "exp_avg" in optimizer.state[model.router.weight]
    assert "momentum.0" in optimizer.state[model.out.weight]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"adamw": ["head.*"]}, r"adamw pattern 'head\.\*' matches no trainable parameter"),
        ({"split": {"*.qkv": 3}}, "split pattern"),
        ({"adamw": ["w"], "method": ["w"]}, "'w' matches both"),
        ({"method": ["*.bias"], "stacked": ["w"]}, "which is not a matrix"),
    ],
    ids=str,
)
def test_overrides_that_cannot_be_meant_are_named(
    overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        isokron.param_groups(Experts(), **overrides)


def test_a_model_with_nothing_to_train_is_refused() -> None:
    with pytest.raises(ValueError, match="no parameter that requires a gradient"):
        isokron.param_groups(nn.Linear(2, 2).requires_grad_(False))


def test_parameters_in_place_of_the_model_are_refused() -> None:
    with pytest.raises(TypeError, match=r"write isokron.param_groups\(model\)"):
        isokron.param_groups(nn.Linear(2, 2).parameters())
    with pytest.raises(
        TypeError, match=r"got a module; write Muon\(isokron.param_groups\(model\)\)$"
    ):
        isokron.Muon(nn.Linear(2, 2))


def stepped_by_adamw(shape: tuple[int, ...], **settings: Any) -> bool:
    """Whether bare parameters of this shape go to AdamW; only then is there a warning."""
    param = nn.Parameter(torch.empty(shape, device="meta"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = build(isokron.SOAP, [param], **settings)
    taken = optimizer.traits.takes(param, optimizer.param_groups[0])
    assert len(caught) == (not taken)
    return not taken


@pytest.mark.parametrize(
    "shape",
    [(50257, 768), (32000, 4096), (512, 64), (32000, 8192), (4096, 16), (8, 4096), (8, 512, 1024)],
    ids=str,
)
def test_bare_tables_go_to_adamw(shape: tuple[int, ...]) -> None:
    assert stepped_by_adamw(shape)
    assert not stepped_by_adamw(shape, route="method")


@pytest.mark.parametrize(
    "shape",
    [
        (3072, 768),  # up projection, four times as wide
        (768, 3072),
        (2304, 768),  # fused query, key and value
        (512, 512, 3, 3),
        (64, 192, 3, 3),  # of a U-Net's decoder
        (512, 512, 7, 7),
        (64, 3, 7, 7),
        (128, 8192),  # the one key head of multi-query attention
        (1000, 2048),
        (28672, 8192),  # inside the largest open models
    ],
    ids=str,
)
def test_bare_matrices_of_ordinary_layers_get_the_method(shape: tuple[int, ...]) -> None:
    assert not stepped_by_adamw(shape)


def test_bare_ends_of_a_model_go_to_adamw_if_they_are_tall() -> None:
    """A vocabulary of 256 at width 64 has the shape of an MLP's matrix."""
    inside = [(64, 64)] * 4 + [(256, 64), (64, 256)]
    params = [nn.Parameter(torch.empty(shape)) for shape in [(256, 64), *inside, (64,), (256, 64)]]
    with pytest.warns(UserWarning, match=r"number 0 of shape \(256, 64\), number 8 of shape"):
        optimizer = isokron.Muon(params)
    group = optimizer.param_groups[0]
    assert [optimizer.traits.takes(param, group) for param in params] == [
        False,
        *[True] * 6,
        False,
        False,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        few = isokron.Muon([params[0], *params[2:5], params[-1]]).param_groups[0]
        wide = isokron.Muon(params[1:-1]).param_groups[0]
    assert all(optimizer.traits.takes(param, few) for param in few["params"])
    assert all(optimizer.traits.takes(param, wide) for param in wide["params"] if param.ndim == 2)


def test_the_limits_of_a_table_can_be_moved() -> None:
    assert stepped_by_adamw((100, 80), max_rows=99)
    assert not stepped_by_adamw((31000, 8000), max_rows=None)
    assert not stepped_by_adamw((16, 31000, 8000), max_rows=None, stacked=1)
    assert not stepped_by_adamw((512, 64), split=2)
    with pytest.raises(ValueError, match="max_rows must be None or a whole number above 0"):
        build(isokron.SOAP, nn.Linear(2, 2).parameters(), max_rows=0)


def test_the_warning_names_tables_rule_and_remedies() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="shaped like an embedding") as caught:
        isokron.Quad(model.named_parameters())
    (text,) = [str(warning.message) for warning in caught]
    assert caught[0].filename == __file__
    for part in (
        "'0.weight' (100, 4)",
        "max_rows=30000",
        "isokron.param_groups(model)",
        "'method'",
    ):
        assert part in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        isokron.AdamW(model.parameters())
        isokron.SOAP(isokron.param_groups(nn.Sequential(nn.Linear(2, 99), nn.Linear(99, 3))))


def test_a_bare_table_has_the_state_of_adamw() -> None:
    model = nn.Sequential(nn.Embedding(100, 4), nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="shaped like an embedding"):
        optimizer = isokron.Quad(model.parameters())  # takes vectors too
    model(torch.arange(8)).square().sum().backward()
    optimizer.step()
    assert "exp_avg" in optimizer.state[model[0].weight]
    assert "exp_avg" not in optimizer.state[model[1].weight]
    assert "exp_avg" not in optimizer.state[model[1].bias]


def test_the_name_of_another_method_is_no_route() -> None:
    with pytest.raises(ValueError, match=r"one optimizer has one method.*got route='shampoo'"):
        build(isokron.SOAP, nn.Linear(2, 2).parameters(), route="shampoo")


@pytest.mark.parametrize("tied", [False, True])
def test_kinds_are_patterns_so_that_two_learning_rates_are_one_argument(tied: bool) -> None:
    model = Decoder(tied)
    scale = {"matrices": 1.0, "heads": 4.0, "*": 8.0}  # a tied embedding is an embedding
    groups = isokron.param_groups(model, lr_scale=scale, weight_decay={"embeddings": 0.3})
    by_name = {name: group for group in groups for name, _ in group["params"]}
    rates = {name: group["lr_scale"] for name, group in by_name.items()}
    found = kinds(model)
    assert rates == {name: scale.get(kind, 8.0) for name, kind in found.items()}
    assert ("heads" in found.values()) == (not tied)
    assert by_name["wte.weight"]["weight_decay"] == 0.3
    by_adamw = isokron.param_groups(model, adamw="matrices")
    assert all(group["route"] == "adamw" for group in by_adamw)
    with pytest.raises(ValueError, match=r"pattern 'embedding' matches no.*kinds are matrices, "):
        isokron.param_groups(model, lr_scale={"embedding": 4.0})
    for wrong in (0, -1.0, "4", float("inf"), float("nan"), True, None):
        for scale in (wrong, {"matrices": 1.0, "heads": wrong}):
            with pytest.raises(ValueError, match="lr_scale must be a finite number above 0"):
                isokron.param_groups(model, lr_scale=scale)


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_table_of_a_llama_is_an_embedding_and_described_as_one(tied: bool) -> None:
    transformers = pytest.importorskip("transformers", reason='pip install "isokron[hf]"')
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(
        vocab_size=50_000, num_attention_heads=2, tie_word_embeddings=tied, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    scale = {"matrices": 1.0, "embeddings": 8.0, "heads": 4.0, "norms": 2.0}
    groups = isokron.param_groups(model, lr_scale=scale, weight_decay=0.1)
    table = isokron.describe(isokron.SOAP(groups))
    lines = [re.split(r"  +", line) for line in table.splitlines()[1:]]
    heads = [["AdamW", "1", "800,000", "0.1", "4", "lm_head.weight [50000, 16]"]]
    assert [line[1:] for line in lines] == [
        ["AdamW", "1", "800,000", "0.1", "8", "model.embed_tokens.weight [50000, 16]"],
        ["SOAP", "7", "2,560", "0.1", "1", "model.layers.0.self_attn.q_proj.weight [16, 16]"],
        ["AdamW", "3", "48", "0", "2", "model.layers.0.input_layernorm.weight [16]"],
        *([] if tied else heads),
    ]


def test_two_learning_rates_are_those_of_torch_in_groups_of_its_own() -> None:
    models = [Decoder(), Decoder()]
    models[1].load_state_dict(models[0].state_dict())
    groups = isokron.param_groups(models[0], lr_scale={"matrices": 1.0, "*": 8.0})
    ours = isokron.AdamW(groups, lr=0.01, weight_decay=0.0)
    params = dict(models[1].named_parameters())
    matrices = [params[name] for name, kind in kinds(models[1]).items() if kind == "matrices"]
    others = [p for p in params.values() if all(p is not matrix for matrix in matrices)]
    theirs = torch.optim.AdamW(
        [{"params": matrices}, {"params": others, "lr": 0.08}],
        lr=0.01,
        weight_decay=0.0,
        fused=True,
    )
    for optimizer, model in zip((ours, theirs), models, strict=True):
        cycle = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        for seed in range(5):
            generator = torch.Generator().manual_seed(seed)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator)
            optimizer.step()
            cycle.step()
    for one, other in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
