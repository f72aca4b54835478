"""The tokenizer of an exported folder, as HuggingFace's fast tokenizers read it: a token is a byte of UTF-8."""

import json
from typing import Any

MASK, PAD = "[MASK]", "[PAD]"


def tokenizer_files(longest: int, mask: int | None) -> dict[str, str]:
    """File name -> text. longest: tokens the model takes. mask: an encoder's mask token, or None of a decoder.

    A decoder's tokenizer takes the special tokens' names as text too, so that every text is exactly its bytes. Padding
    has the first id that nothing else has; the model never reads it, the attention mask hides it.
    """
    special = ({} if mask is None else {MASK: mask}) | {PAD: 256 if mask is None else max(256, mask + 1)}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    model: dict[str, Any] = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": name, **flags} for name, number in special.items()],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {**model, "vocab": {character: byte for byte, character in enumerate(alphabet())}, "merges": []},
    }
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": longest,
        "pad_token": PAD,
        **({"split_special_tokens": True} if mask is None else {"mask_token": MASK}),
        "padding_side": "left" if mask is None else "right",
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    return {
        "tokenizer.json": json.dumps(tokenizer, indent=1, ensure_ascii=False) + "\n",
        "tokenizer_config.json": json.dumps(settings, indent=2) + "\n",
    }


def alphabet() -> list[str]:
    """The printable character that stands for each byte in byte-level tokenizers (GPT-2): itself where it is printable
    in Latin-1, else the next character from U+0100 on.
    """
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in shown)
    replaced = {byte: chr(256 + number) for number, byte in enumerate(others)}
    return [replaced.get(byte, chr(byte)) for byte in range(256)]
