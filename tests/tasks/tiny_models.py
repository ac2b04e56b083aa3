"""Tiny Hugging Face models with random weights, and tokenizers trained on six sentences."""

import pytest
import torch

from isokron.tasks.documents import Document

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

SENTENCES = [
    "The cat sat on the mat.",
    "A dog — half wolf, ½ sheep — slept on the log, and dreamt of 😀.",
    "War and peace.",
    "Rain fell, and the river rose over the old stone bridge.",
    "The cat and the dog sat  in the rain. ",
    "Peace came late to the old town.",
]
DOCUMENTS = [
    Document(f"d{k}", text, "bad" if k % 2 else "good") for k, text in enumerate(SENTENCES)
]


def byte_pairs(**special):
    """As GPT-2's: byte-level BPE without marks."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE())
    core.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<end>"],
        show_progress=False,
    )
    core.train_from_iterator(SENTENCES, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, **special)


def with_beginning():
    """As Llama's: a mark at the beginning of every text."""
    core = byte_pairs(bos_token="<end>").backend_tokenizer
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<end> $A", special_tokens=[("<end>", 0)]
    )
    return transformers.PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<end>")


def metaspace():
    """As Llama 2's: a blank is put before every text and is part of the word that follows."""
    core = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="first")
    core.decoder = tokenizers.decoders.Metaspace(prepend_scheme="first")
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    core.train_from_iterator(SENTENCES, trainer)
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def with_chat():
    """A chat template whose turns end with the end of text."""
    tokenizer = byte_pairs(eos_token="<end>")
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role }}: {{ message.content }}<end>{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    return tokenizer


def words():
    """As BERT's: lower-case words between marks; unknown ones are lost."""
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
    core = tokenizers.Tokenizer(tokenizers.models.WordLevel(unk_token="[UNK]"))
    core.normalizer = tokenizers.normalizers.Lowercase()
    core.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    trainer = tokenizers.trainers.WordLevelTrainer(special_tokens=names, show_progress=False)
    core.train_from_iterator(SENTENCES[:4], trainer)
    core.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
    )


CLASSES = {"id2label": {0: "good", 1: "bad"}, "label2id": {"good": 0, "bad": 1}}
GPT2 = {
    "vocab_size": 300, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
LLAMA = {
    "vocab_size": 300, "max_position_embeddings": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip
BERT = {
    "vocab_size": 80, "max_position_embeddings": 48, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 2, **CLASSES,
}  # fmt: skip
ROBERTA = {**BERT, "max_position_embeddings": 50, "pad_token_id": 0}


def make(kind):
    """The model and the tokenizer of a kind."""
    t = transformers
    return {
        "gpt2": lambda: (t.GPT2LMHeadModel(t.GPT2Config(**GPT2)), byte_pairs()),
        "chat": lambda: (t.GPT2LMHeadModel(t.GPT2Config(**GPT2)), with_chat()),
        "metaspace": lambda: (t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)), metaspace()),
        "llama": lambda: (t.LlamaForCausalLM(t.LlamaConfig(**LLAMA)), with_beginning()),
        "bert": lambda: (t.BertForSequenceClassification(t.BertConfig(**BERT)), words()),
        "roberta": lambda: (
            t.RobertaForSequenceClassification(t.RobertaConfig(**ROBERTA)),
            words(),
        ),
        "gpt2-classes": lambda: (
            t.GPT2ForSequenceClassification(t.GPT2Config(**GPT2, **CLASSES)),
            byte_pairs(eos_token="<end>"),
        ),
    }[kind]()


def save(kind, folder):
    """A folder with a model of this kind in half precision."""
    torch.manual_seed(0)
    model, tokenizer = make(kind)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
