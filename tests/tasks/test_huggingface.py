"""Hugging Face models and data of one's own as tasks, made on the spot and read from folders."""

import json
import socket
import sys
import warnings

import pytest
import torch
from torch.nn import functional

from isokron import curvature
from isokron.tasks.documents import Document
from isokron.tasks.huggingface import classifier, language_model

transformers = pytest.importorskip("transformers")

from tiny_models import DOCUMENTS, GPT2, SENTENCES, byte_pairs  # noqa: E402


@pytest.fixture
def offline(monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


LANGUAGE = ["gpt2", "llama"]
CLASSIFIERS = ["bert", "roberta", "gpt2-classes"]


def task_of(kind, folder, **options):
    make_task = language_model if kind in LANGUAGE else classifier
    return make_task(folder(kind), DOCUMENTS, **options)


@pytest.mark.parametrize("kind", LANGUAGE + CLASSIFIERS)
def test_padding_changes_nothing(kind, folder, offline):
    task = task_of(kind, folder)
    model = task.model()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert not model.training
    batch = task.train.batch(torch.arange(len(task.train)))
    assert len(set(batch[1].tolist())) > 2
    scores, targets = task.logits(model, batch)
    losses = task.losses(model, batch)
    for i in range(len(task.train)):
        alone_scores, alone_targets = task.logits(model, task.train.batch(torch.tensor([i])))
        if kind in LANGUAGE:
            length = batch[1][i] - 1
            assert (targets[i, length:] == -100).all()
            tokens = batch[0][i, : length + 1].long()
            plain = model(tokens[None]).logits[0, :-1]
            torch.testing.assert_close(scores[i, :length], plain)
            torch.testing.assert_close(alone_scores[0, :-1], plain)
            assert alone_targets[0, -1] == -100
            own = alone_targets[0, :-1].tolist()
            assert own == targets[i, :length].tolist() == tokens[1:].tolist()
            torch.testing.assert_close(losses[i], functional.cross_entropy(plain, tokens[1:]))
        else:
            tokens = batch[0][i, : batch[1][i]].long()
            torch.testing.assert_close(scores[i], model(tokens[None]).logits[0])
            torch.testing.assert_close(alone_scores[0], scores[i])
            torch.testing.assert_close(losses[i], functional.cross_entropy(scores[i], targets[i]))


SIZES = {
    "vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("GPTNeoX", {}),
        ("Mistral", {"num_key_value_heads": 2}),
        ("Qwen2", {"num_key_value_heads": 2}),
        ("Gemma", {"num_key_value_heads": 2, "head_dim": 8}),
        ("OPT", {"ffn_dim": 48, "word_embed_proj_dim": 32}),  # positions begin at 2
        ("Bloom", {"n_layer": 2, "n_head": 4}),  # no positions
        ("Mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}),
        ("Qwen2Moe", {"num_key_value_heads": 2, **EXPERTS}),
        ("Mamba", {"state_size": 4}),
    ],
)
def test_other_architectures_score_padded_batches_and_write(name, settings, tmp_path):
    config = getattr(transformers, f"{name}Config")(**{**SIZES, **settings})
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(tmp_path)
    byte_pairs().save_pretrained(tmp_path)
    task = language_model(tmp_path, DOCUMENTS, evaluation=0)
    model = task.model()
    batch = task.train.batch(torch.arange(4))
    scores, _ = task.logits(model, batch)
    for row, tokens, length in zip(scores, *batch[:2], strict=True):
        plain = model(tokens[None, :length].long()).logits[0]
        torch.testing.assert_close(row[:length], plain, rtol=1e-4, atol=1e-5)
    written, shown = task.prompt(model, "The cat", max_new_tokens=3)
    count = len(shown.tokens)
    likeliest = model(written[0].long()).logits[0, -count - 1 : -1].argmax(-1)
    assert written[0][0, -count:].tolist() == likeliest.tolist()


@pytest.mark.parametrize("kind", LANGUAGE + CLASSIFIERS)
def test_curvature_fits_and_no_layer_shares_its_inputs_among_examples(kind, folder):
    task = task_of(kind, folder)
    model = task.model()
    batches = [task.train.batch(part) for part in torch.arange(len(task.train)).split(3)]
    loss = curvature.CrossEntropy(forward=task.logits)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*fewer inputs than the batch has examples")
        warnings.filterwarnings("ignore", message="curvature of .*RMSNorm.* is not known")
        fitted = curvature.fit(model, batches, loss)
    assert len(fitted.layers) > 8


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_every_example_has_its_own_gradient_of_positions(kind, folder):
    task = task_of(kind, folder)
    model = task.model()
    name = {"gpt2": "transformer.wpe", "bert": "bert.embeddings.position_embeddings"}[kind]
    embedding = model.get_submodule(name)
    with curvature.capture(model, name) as events:
        task.losses(model, task.train.batch(torch.arange(3))).sum().backward()
    (event,) = events
    for i in range(3):
        model.zero_grad()
        task.losses(model, task.train.batch(torch.tensor([i]))).sum().backward()
        own = torch.zeros_like(embedding.weight).index_add(0, event.inputs[0, i], event.grads[0, i])
        torch.testing.assert_close(own, embedding.weight.grad)


def test_padding_is_not_among_the_inputs_of_curvature(folder):
    task = task_of("gpt2", folder, evaluation=0)
    model = task.model()

    def fitted(size):
        batches = [task.train.batch(some) for some in torch.arange(len(task.train)).split(size)]
        found = curvature.fit(
            model, batches, curvature.CrossEntropy(task.logits), layers="*.mlp.c_fc"
        )
        return [layer.statistics["input"] for layer in found.layers.values()]

    padded, alone = fitted(len(task.train)), fitted(1)  # alone, no example is filled up
    for one, other in zip(padded, alone, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", LANGUAGE)
def test_what_is_shown_is_the_text_with_one_piece_a_target(kind, folder):
    task = task_of(kind, folder, evaluation=0)
    batch = task.train.batch(torch.arange(len(task.train)))
    _, targets = task.logits(task.model(), batch)
    for document, shown, own in zip(DOCUMENTS, task.show(batch), targets, strict=True):
        assert shown.title == document.id
        assert shown.text == document.text
        assert len(shown.tokens) == (own != -100).sum()
        assert (shown.context == "") == (kind == "llama")  # its first token is the mark
    assert "😀" in task.show(batch)[1].tokens


def test_what_is_shown_of_a_classifiers_text_is_the_text_as_it_was_written(folder):
    task = task_of("bert", folder, evaluation=0)
    batch = task.train.batch(torch.arange(len(task.train)))
    for document, shown, length in zip(DOCUMENTS, task.show(batch), batch[1], strict=True):
        assert (shown.title, shown.label) == (document.id, document.label)
        assert shown.text == document.text
        assert len(shown.tokens) == length


def test_tokens_of_unknown_origin_are_decoded(folder):
    task = task_of("gpt2", folder)
    tokens, lengths, numbers, first = task.read("a ½ wolf 😀 sat")
    (shown,) = task.show((tokens, lengths, numbers, first))
    (decoded,) = task.show((tokens, lengths, torch.full_like(numbers, -1), first))
    assert (decoded.text, decoded.title) == ("a ½ wolf 😀 sat", "")
    assert len(decoded.tokens) == len(shown.tokens)


def test_a_tokenizer_that_knows_no_places_shows_what_it_decodes(tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**GPT2, "vocab_size": 384, "n_positions": 128})
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)  # bytes, and a mark at the end
    task = language_model(tmp_path, DOCUMENTS, evaluation=0)
    for document, shown in zip(DOCUMENTS, task.show(task.train.tensors), strict=True):
        assert shown.text == document.text
        assert len(shown.tokens) == len(document.text.encode())
        assert shown.tokens[-1] == ""


def test_a_query_is_tokenized_as_documents_are(folder):
    task = task_of("llama", folder, evaluation=0)
    batch = task.read(SENTENCES[1])
    length = int(task.train.tensors[1][1])
    assert batch[0][0].tolist() == task.train.tensors[0][1, :length].tolist()
    model = task.model()
    own = task.losses(model, task.train.batch(torch.tensor([1])))
    torch.testing.assert_close(task.losses(model, batch), own)
    (shown,) = task.show(batch)
    assert (shown.text, shown.title) == (SENTENCES[1], "")


def test_a_query_to_a_classifier_may_name_its_label(folder):
    task = task_of("bert", folder)
    model = task.model()
    scores, targets = task.logits(model, task.read("The cat sat. => bad"))
    assert targets.tolist() == [1]
    (shown,) = task.show(task.read("The cat sat. => 0"))
    assert (shown.text, shown.label) == ("The cat sat.", "good")
    # without one it is about the label that the model gives
    plain, given = task.logits(model, task.read("The cat sat."))
    torch.testing.assert_close(plain, scores)
    assert given.tolist() == scores.argmax(-1).tolist()
    assert task.show(task.read("The cat sat."))[0].label == ""
    with pytest.raises(
        ValueError, match=r"the query has the label 'awful', .* good, bad, or 0 to 1"
    ):
        task.read("The cat sat. => awful")


def test_long_documents_are_refused_cut_or_split(folder):
    whole = task_of("gpt2", folder, evaluation=0)
    lengths = whole.train.tensors[1].tolist()
    long = max(range(len(lengths)), key=lengths.__getitem__)
    message = r"document 'd\d' has \d+ tokens, more than the 9 .* long='cut' or long='split'"
    with pytest.raises(ValueError, match=message):
        task_of("gpt2", folder, context=9)

    cut = task_of("gpt2", folder, evaluation=0, context=9, long="cut")
    assert list(cut.ids) == [d.id for d in DOCUMENTS]
    tokens = whole.train.tensors[0][long, : lengths[long]].tolist()
    assert cut.train.tensors[0][long].tolist() == tokens[:9]
    (shown,) = cut.show(cut.train.batch(torch.tensor([long])))
    assert SENTENCES[long].startswith(shown.text)
    assert len(shown.tokens) == 8

    split = task_of("gpt2", folder, evaluation=0, context=9, long="split")
    own = [i for i, name in enumerate(split.ids) if name.startswith(f"d{long}#")]
    assert [split.ids[i] for i in own] == [f"d{long}#{k}" for k in range(len(own))]
    batch = split.train.batch(torch.tensor(own))
    targets = split.logits(split.model(), batch)[1]
    assert targets[targets != -100].tolist() == tokens[1:]  # each token is predicted once
    parts = split.show(batch)
    assert parts[0].context + "".join("".join(part.tokens) for part in parts) == SENTENCES[long]


def test_a_cut_text_of_a_classifier_keeps_its_marks(folder):
    task = task_of("bert", folder, evaluation=0, context=6, long="cut")
    tokens, lengths, _, _ = task.train.tensors
    assert lengths.tolist() == [6] * len(DOCUMENTS)
    assert set(tokens[:, 0].tolist()) == {2}
    assert set(tokens[:, -1].tolist()) == {3}
    (shown,) = task.show(task.train.batch(torch.tensor([1])))
    assert shown.text == "A dog — half"


def test_data_come_from_files_and_a_tenth_is_held_out_by_hash(folder, tmp_path):
    path = tmp_path / "texts.jsonl"
    rows = [{"text": f"{SENTENCES[k % 6]} {k}", "label": k % 2} for k in range(30)]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    tasks = [language_model(folder("gpt2"), path), classifier(folder("bert"), str(path))]
    held_out = []
    for task in tasks:
        assert (len(task.train), len(task.evaluation), len(task.ids)) == (27, 3, 27)
        titles = {shown.title for shown in task.show(task.evaluation.tensors)}
        assert titles | set(task.ids) == {str(k) for k in range(1, 31)}
        held_out.append(titles)
        assert task.trained
    assert held_out[0] == held_out[1]
    assert tasks[0].name == "gpt2"
    given = language_model(folder("gpt2"), path, evaluation=path)
    assert (len(given.train), len(given.evaluation)) == (30, 30)
    (shown,) = given.show(given.evaluation.batch(torch.tensor([3])))
    assert shown.text == rows[3]["text"]


@pytest.mark.parametrize(
    ("kind", "documents", "options", "message"),
    [
        ("gpt2", DOCUMENTS, {"context": 65}, "between 2 and the model's 64, got 65"),
        ("gpt2", DOCUMENTS, {"long": "drop"}, "long must be one of error, cut, split, got 'drop'"),
        ("bert", DOCUMENTS, {"long": "split"}, "long must be one of error, cut, got 'split'"),
        ("gpt2", DOCUMENTS, {"evaluation": 0.99}, "leaves some to train on, got 0.99"),
        ("gpt2", [Document("x", "a"), Document("y", " ")], {"evaluation": 0}, "two tokens or more"),
        ("gpt2", [], {"evaluation": 0}, "two tokens or more, got none"),
        ("gpt2", DOCUMENTS, {"evaluation": []}, "two tokens or more, got none"),
        ("bert", [*DOCUMENTS, Document("x", "a", "so-so")], {},
         "document 'x' has the label 'so-so', which the model does not know; it knows good, bad"),
    ],
)  # fmt: skip
def test_bad_calls_are_explained(kind, documents, options, message, folder):
    make_task = language_model if kind in LANGUAGE else classifier
    with pytest.raises(ValueError, match=message):
        make_task(folder(kind), documents, **options)


def test_a_query_that_is_too_long_or_empty_is_refused(folder):
    task = task_of("gpt2", folder)
    with pytest.raises(
        ValueError, match=r"the query has \d+ tokens, more than the 64 .* use long='cut'$"
    ):
        task.read("stone " * 60)
    with pytest.raises(ValueError, match="two tokens or more, got none"):
        task.read(" ")
    cut = task_of("gpt2", folder, long="cut")
    assert cut.read("stone " * 60)[0].shape == (1, 64)


def test_a_model_without_all_of_its_weights_is_not_taken_for_trained(folder):
    task = classifier(
        folder("gpt2"), [Document(d.id, d.text, str(k % 2)) for k, d in enumerate(DOCUMENTS)]
    )
    with pytest.raises(ValueError, match=r"no weights for score\.weight; train the model first"):
        task.model()


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", ""])
def test_a_folder_that_is_not_there_is_not_looked_for_on_the_hub(name, offline):
    with pytest.raises(ValueError, match=r"no folder '.*' with a model; give the folder"):
        language_model(name, DOCUMENTS)


def test_the_folder_one_is_in_has_a_name(folder, monkeypatch):
    monkeypatch.chdir(folder("gpt2"))
    assert language_model(".", DOCUMENTS).name == "gpt2"


def test_a_folder_without_a_model_is_named(tmp_path, offline):
    with pytest.raises(ValueError, match=str(tmp_path)):
        language_model(tmp_path, DOCUMENTS)


def test_a_tokenizer_of_another_model_is_refused(folder, tmp_path):
    torch.manual_seed(0)
    config = transformers.GPT2Config(**{**GPT2, "vocab_size": 90})
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    byte_pairs().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"gives token \d+, but the model has only 90"):
        language_model(tmp_path, DOCUMENTS)


def test_missing_transformers_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "isokron\[hf\]"'):
        language_model("gpt2", DOCUMENTS)
