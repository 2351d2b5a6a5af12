"""The Llama 3 byte-pair encoding, from the ranks that the `llama-models` package carries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from llama_models.llama3.tokenizer import Tokenizer as Llama3Encoding

BEGIN_OF_TEXT = 128_000
END_OF_TEXT = 128_001
PADDING = 128_004
VOCABULARY_SIZE = 128_256


class Llama3BPE:
    """Llama 3 BPE with 128,256 ids: `<|begin_of_text|>` 128000, `<|end_of_text|>` 128001, padding 128004 (a reserved id)."""

    vocab_size = VOCABULARY_SIZE
    bos = bos_id = BEGIN_OF_TEXT
    eod = eos = eos_id = END_OF_TEXT
    pad = pad_id = PADDING
    unique_identifiers: ClassVar[dict] = {"class": "Llama3BPE", "vocab_size": VOCABULARY_SIZE}

    def __init__(self) -> None:
        self._encoding = Llama3Encoding.get_instance()

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; the spelling of a special token inside the text stays ordinary text."""
        return self._encoding.encode(text, bos=False, eos=False, disallowed_special=())

    def encode_document(self, text: str) -> list[int]:
        """Ids of `text` between begin-of-text and end-of-text."""
        return [BEGIN_OF_TEXT, *self.encode(text), END_OF_TEXT]

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; bytes that do not form UTF-8 become U+FFFD."""
        return self._encoding.decode(list(ids))
