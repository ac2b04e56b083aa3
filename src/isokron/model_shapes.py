"""Models by name on the meta device: modules and shapes, and no weights in memory."""

import difflib
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from isokron import tasks
from isokron.tasks.catalog import import_optional, load_object

# layers, width, width of the MLP, vocabulary, width of keys and values, learned positions
FAMILIES = {
    "gpt2": (12, 768, 3072, 50257, 768, 1024),  # Radford et al., 2019
    "gpt2-medium": (24, 1024, 4096, 50257, 1024, 1024),
    "gpt2-large": (36, 1280, 5120, 50257, 1280, 1024),
    "gpt2-xl": (48, 1600, 6400, 50257, 1600, 1024),
    "llama-7b": (32, 4096, 11008, 32000, 4096, 0),  # 2302.13971
    "llama-13b": (40, 5120, 13824, 32000, 5120, 0),
    "llama-70b": (80, 8192, 28672, 32000, 1024, 0),  # 2307.09288
    "mistral-7b": (32, 4096, 14336, 32000, 1024, 0),  # 2310.06825
    "llama3-8b": (32, 4096, 14336, 128256, 1024, 0),  # 2407.21783
    "llama3-70b": (80, 8192, 28672, 128256, 1024, 0),
}


def make_model(spec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """A model on the meta device, in `dtype`.

    `spec`: a family, a built-in task, `module:function`, or a folder with a Hugging Face
    config.json.
    """
    folder = Path(spec).expanduser()
    build: Any
    if spec in FAMILIES:
        build = partial(decoder, *FAMILIES[spec])
    elif (folder / "config.json").is_file():
        why = "Hugging Face models need the package transformers"
        transformers = import_optional("transformers", "hf", why)
        config = transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True)
        named = getattr(transformers, (config.architectures or [""])[0], None)
        build = partial(named or transformers.AutoModel.from_config, config)
    elif ":" in spec:
        build = load_object(spec, "model")
    elif {spec, f"{spec}-tiny"} & set(tasks.names()):
        build = tasks.load(spec).model
    else:
        names = [*FAMILIES, *tasks.names()]
        close = difflib.get_close_matches(spec, names, n=2)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        raise ValueError(
            f"no model named {spec!r}; {hint}built in are {', '.join(names)}; give others as "
            "module:function, path/to/file.py:function or a folder with a Hugging Face config.json"
        )
    with torch.device("meta"):
        model: Any = build() if callable(build) else build
        model = model.model() if isinstance(model, tasks.Task) else model
    if not isinstance(model, nn.Module) or not any(p.requires_grad for p in model.parameters()):
        kind = type(model).__name__
        raise ValueError(f"model {spec!r} must be a module with trainable parameters, got {kind}")
    return model.to("meta", dtype)


def decoder(
    layers: int, width: int, mlp: int, vocabulary: int, keys: int, positions: int
) -> nn.Module:
    """The modules of GPT-2 (learned positions, biases, a tied head) or Llama, without forward."""
    linear = partial(nn.Linear, bias=positions > 0)
    norm = nn.LayerNorm if positions else nn.RMSNorm
    qkv = {"query": width, "key": keys, "value": keys}
    inner = {"up": mlp} if positions else {"gate": mlp, "up": mlp}

    def block() -> nn.Module:
        outputs = {"query_key_value": sum(qkv.values())} if positions else qkv
        parts: dict[str, nn.Module] = {"attention_norm": norm(width), "feed_norm": norm(width)}
        parts |= {k: linear(width, n) for k, n in {**outputs, "out": width, **inner}.items()}
        return nn.ModuleDict({**parts, "down": linear(mlp, width)})

    parts: dict[str, nn.Module] = {"tokens": nn.Embedding(vocabulary, width)}
    parts |= {"positions": nn.Embedding(positions, width)} if positions else {}
    parts |= {"blocks": nn.ModuleList(block() for _ in range(layers)), "norm": norm(width)}
    return nn.ModuleDict(parts if positions else {**parts, "head": linear(width, vocabulary)})
