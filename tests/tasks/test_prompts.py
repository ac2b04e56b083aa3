"""Prompts with completions, written by a person or by the model, and what a model would say."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional

pytest.importorskip("transformers")

from tiny_models import DOCUMENTS, GPT2, SENTENCES, save, transformers

from isokron.tasks.documents import Document
from isokron.tasks.huggingface import classifier, language_model


@pytest.fixture
def task(folder):
    return language_model(folder("gpt2"), DOCUMENTS, evaluation=0)


@pytest.mark.parametrize(
    ("kind", "prompt", "completion", "context"),
    [
        ("gpt2", "The cat sat", " on the mat.", "The cat sat"),
        ("gpt2", "The cat sat ", "on the mat.", "The cat sat"),  # the blank belongs to " on"
        ("gpt2", "The dog slept on the lo", "g, and dreamt", "The dog slept on the l"),
        ("gpt2", "Half wolf, ", "½ sheep", "Half wolf, "),
        ("gpt2", "Rain fell", "\n", "Rain fell"),
        ("llama", "The cat sat", " on the mat.", "The cat sat"),
        ("metaspace", "The cat sat", " on the old mat.", "The cat sat"),
        ("metaspace", "The old town", "Peace", "The old town"),
    ],
)
def test_only_the_tokens_of_the_completion_have_a_loss(kind, prompt, completion, context, folder):
    task = language_model(folder(kind), DOCUMENTS, evaluation=0)
    model = task.model()
    batch, shown = task.prompt(model, prompt, completion)
    assert (shown.context, shown.text) == (context, prompt + completion)
    assert not shown.generated
    scores, targets = task.logits(model, batch)
    # the tokens are those of a document with the joined text
    whole_scores, whole = task.logits(model, task.read(prompt + completion))
    count = len(shown.tokens)
    assert count >= 1
    assert (targets != -100).sum() == count
    assert targets[0, -count - 1 : -1].tolist() == whole[0, -count - 1 : -1].tolist()
    torch.testing.assert_close(scores, whole_scores)
    terms = functional.cross_entropy(whole_scores[0], whole[0], reduction="none")
    torch.testing.assert_close(task.losses(model, batch), terms[-count - 1 : -1].mean()[None])
    assert task.show(batch)[0].text == shown.text


def test_a_tokenizer_without_offsets_counts_the_bytes_of_the_completion(tmp_path):
    config = transformers.GPT2Config(**{**GPT2, "vocab_size": 384})
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    transformers.ByT5Tokenizer().save_pretrained(tmp_path)  # bytes, and a mark at the end
    task = language_model(tmp_path, DOCUMENTS[:1], evaluation=0)
    batch, shown = task.prompt(task.model(), "half ", "½ sheep")
    assert (shown.context, "".join(shown.tokens)) == ("half ", "½ sheep")
    assert len(shown.tokens) == len("½ sheep".encode()) + 1
    generated, shown = task.prompt(task.model(), "half ", max_new_tokens=3)
    assert shown.context == "half "
    assert generated[0][0, :5].tolist() == batch[0][0, :5].tolist()
    assert generated[1].item() == 8  # the mark of the end does not stand before what is written


@pytest.mark.parametrize("kind", ["gpt2", "llama", "metaspace"])
def test_without_a_completion_the_model_writes_the_likeliest_one(kind, folder):
    task = language_model(folder(kind), DOCUMENTS, evaluation=0)
    model = task.model()
    batch, shown = task.prompt(model, "The cat", max_new_tokens=6)
    tokens = task.read("The cat")[0].long()
    first = tokens.shape[1]
    for _ in range(6):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], 1)
    assert batch[0].tolist() == tokens.tolist()
    assert shown.generated
    assert shown.context == "The cat"
    assert len(shown.tokens) == 6
    (again,) = task.show(batch)
    assert (again.context, again.tokens) == (shown.context, shown.tokens)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder(kind))
    assert task.said(model, batch) == tokenizer.decode(tokens[0, first:])
    assert shown.to_json()["generated"]


def test_writing_stops_at_the_end_of_text_and_at_the_end_of_the_context(tmp_path):
    task = language_model(save("llama", tmp_path), DOCUMENTS, evaluation=0)
    model = task.model()
    batch, shown = task.prompt(model, "stone " * 12, max_new_tokens=100)
    assert batch[1].item() == 64
    tokens = batch[0][0, -len(shown.tokens) :].tolist()
    other = next(token for token in tokens if token != tokens[0])
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    for end, count in ((other, tokens.index(other)), (tokens[0], 0)):
        config.eos_token_id = [299, end]
        config.save_pretrained(tmp_path)
        task = language_model(tmp_path, DOCUMENTS, evaluation=0)
        if count:
            assert task.prompt(model, "stone " * 12)[1].tokens == shown.tokens[:count]
        else:
            with pytest.raises(ValueError, match="ends the text at once; give another completion"):
                task.prompt(model, "stone " * 12)


def test_writing_leaves_every_mode_and_weight_as_it_was(task):
    model = task.model()
    model.train()
    model.transformer.h[0].eval()
    modes = [module.training for module in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    outcomes = {task.prompt(model, "The cat", max_new_tokens=4)[1].tokens for _ in range(3)}
    assert len(outcomes) == 1  # without dropout
    task.said(model, task.read("The cat sat"))
    assert [module.training for module in model.modules()] == modes
    assert all(tensor.equal(before[name]) for name, tensor in model.state_dict().items())


def test_a_chat_template_makes_the_prompt_the_users_message(folder):
    task = language_model(folder("chat"), DOCUMENTS, evaluation=0)
    model = task.model()
    _, shown = task.prompt(model, "Who sat?", " The cat.")
    assert shown.context == "user: Who sat?<end>assistant:"
    assert "".join(shown.tokens) == " The cat."
    _, shown = task.prompt(model, "Who sat?", max_new_tokens=2)
    assert shown.context == "user: Who sat?<end>assistant:"
    plain = language_model(folder("chat"), DOCUMENTS, evaluation=0, chat=False)
    assert plain.prompt(model, "Who sat?", " The cat.")[1].context == "Who sat?"


@pytest.mark.parametrize(
    ("prompt", "completion", "message"),
    [
        ("stone " * 60, None, r"prompt 'stone .* tokens or more, but the model takes 64; shorten"),
        ("The cat", " sat" * 80, r"tokens or more, but the model takes 64; shorten"),
        (" ", "x", "must have words"),
        ("The cat", "", "no token"),
    ],
)
def test_prompts_that_cannot_be_asked_are_explained(prompt, completion, message, task):
    with pytest.raises(ValueError, match=message):
        task.prompt(task.model(), prompt, completion)


def test_a_language_model_says_its_likeliest_token_at_every_target(task, folder):
    model = task.model()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder("gpt2"))
    batch = task.read("The cat sat on the mat.")
    scores, targets = task.logits(model, batch)
    likeliest = scores.argmax(-1)[targets != -100]
    assert task.said(model, batch) == tokenizer.decode(likeliest)


def test_a_classifier_says_the_class_it_predicts(folder):
    task = classifier(folder("bert"), DOCUMENTS, evaluation=0)
    model = task.model()
    batch = task.read("The cat sat. => bad")
    best = int(task.logits(model, batch)[0].argmax())
    assert task.said(model, batch) == ["good", "bad"][best]
    assert task.prompt is None


def test_documents_without_a_token_to_predict_are_skipped_and_named(folder):
    documents = [Document("x", "a"), *DOCUMENTS, Document("y", ""), Document("z", " \n")]
    task = language_model(folder("gpt2"), documents, evaluation=0)
    assert task.skipped == ("x", "y", "z")
    assert list(task.ids) == [document.id for document in DOCUMENTS]
    for document, shown in zip(DOCUMENTS, task.show(task.train.tensors), strict=True):
        assert (shown.title, shown.text) == (document.id, document.text)
    labelled = [Document(d.id, d.text, "good") for d in documents]
    assert classifier(folder("bert"), labelled, evaluation=0).skipped == ("y", "z")


def test_lengths_are_the_tokens_of_every_training_example(task):
    assert list(task.lengths) == task.train.tensors[1].tolist()
    assert max(task.lengths) == task.train.tensors[0].shape[1]


def test_without_held_out_documents_there_is_no_evaluation(task):
    assert task.evaluation is None
    with pytest.raises(ValueError, match="no evaluation examples: all of its data are training"):
        _ = task.held_out


def test_a_model_in_bfloat16_stays_in_it(folder):
    task = language_model(folder("gpt2"), DOCUMENTS, evaluation=0, dtype=torch.bfloat16)
    model = task.model()
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    batch, _ = task.prompt(model, "The cat", max_new_tokens=3)
    assert task.losses(model, batch).isfinite().all()
    stored = language_model(folder("gpt2"), DOCUMENTS, evaluation=0, dtype="auto")
    assert next(stored.model().parameters()).dtype == torch.bfloat16


ON_DEVICE = """
import sys
sys.path[:0] = {paths!r}
import second_device, torch
from isokron.tasks.documents import Document
from isokron.tasks.huggingface import classifier, language_model
for kind, make in (("gpt2", language_model), ("llama", language_model), ("bert", classifier)):
    documents = [Document(str(k), text, "good") for k, text in enumerate({texts!r})]
    task = make({folder!r} + "/" + kind, documents, evaluation=0)
    model = task.model()
    batches = [task.train.batch(torch.arange(3)), task.read("The cat sat on")]
    if task.prompt:
        batches += [task.prompt(model, "The cat", " sat")[0]]
    expected = [(task.losses(model, batch), task.said(model, batch)) for batch in batches]
    model.to("npu")
    if task.prompt:
        task.prompt(model, "The cat", max_new_tokens=3)
    for batch, (losses, said) in zip(batches, expected, strict=True):
        batch = tuple(tensor.to("npu") for tensor in batch)
        torch.testing.assert_close(task.losses(model, batch).cpu(), losses)
        assert task.said(model, batch) == said
        assert task.show(batch)
print("done")
"""


def test_everything_runs_where_the_model_is(tmp_path):
    for kind in ("gpt2", "llama", "bert"):
        save(kind, tmp_path / kind)
    paths = [str(Path(__file__).parent.parent)]
    code = ON_DEVICE.format(paths=paths, texts=SENTENCES[:4], folder=str(tmp_path))
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert outcome.stdout.strip().endswith("done"), outcome.stderr[:3000]
