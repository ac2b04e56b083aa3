"""The text of each token."""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

WINDOW = 16  # tokens decoded together to find the text of the last one


def completion_pieces(
    tokenizer: Any, context: str, completion: str, options: dict[str, Any]
) -> tuple[str, list[str]]:
    """The text before the completion's first token, and the text of each of its tokens."""
    text = context + completion
    if tokenizer.is_fast:
        texts = text_pieces(tokenizer, text, options)
        # a token that spans both belongs to the completion
        first = sum(end <= len(context) for end in accumulate(map(len, texts)))
    else:
        # without offsets: the first token that differs from those of the context
        tokens, before = (tokenizer(part, **options)["input_ids"] for part in (text, context))
        texts = decoded_pieces(tokenizer, tokens)
        first = sum(tokens[:count] == before[:count] for count in range(1, len(tokens) + 1))
    first = max(1, first)  # the first token of a text is not predicted
    return "".join(texts[:first]), texts[first:]


def text_pieces(tokenizer: Any, text: str, options: dict[str, Any]) -> list[str]:
    """The characters of every token of a text; special tokens have none."""
    offsets = tokenizer(text, return_offsets_mapping=True, **options)["offset_mapping"]
    # text between two tokens belongs to the later one, trailing blanks to the last
    ends = list(accumulate((end for _, end in offsets), max))
    if not text[ends[-1] :].strip():
        ends = [len(text) if end == ends[-1] else end for end in ends]
    return [text[start:end] for start, end in pairwise([0, *ends])]


def decoded_pieces(tokenizer: Any, tokens: list[int], first: int = 0) -> list[str]:
    """The text that every token from `first` on adds to the decoded text before it."""
    options = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    pieces = []
    for end in range(first + 1, len(tokens) + 1):
        window = tokens[max(0, end - WINDOW) : end]
        before, text = (tokenizer.decode(part, **options) for part in (window[:-1], window))
        # tokens within a character decode to nothing, or to a replacement character
        text = text.rstrip("\ufffd") if end < len(tokens) else text
        pieces.append(text[len(before.rstrip("\ufffd")) :])
    return pieces
