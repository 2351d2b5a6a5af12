"""The Llama 3 encoding as a NeMo tokenizer."""

from collections.abc import Sequence

from nemo.collections.common.tokenizers.tokenizer_spec import TokenizerSpec
from nemo.lightning import io

from nemo_hsmoe.data.tokenizer import Llama3BPE


class Llama3Tokenizer(Llama3BPE, TokenizerSpec, io.IOMixin):
    """`Llama3BPE` behind NeMo's `TokenizerSpec`. A token's text form is its id in decimal: BPE pieces need not be UTF-8."""

    def text_to_ids(self, text: str) -> list[int]:
        """Ids of `text`, without begin and end markers."""
        return self.encode(text)

    def ids_to_text(self, ids: Sequence[int]) -> str:
        """Text of `ids`."""
        return self.decode(ids)

    def text_to_tokens(self, text: str) -> list[str]:
        """Ids of `text` in decimal."""
        return [str(token) for token in self.encode(text)]

    def tokens_to_text(self, tokens: Sequence[str]) -> str:
        """Text of ids in decimal."""
        return self.decode([int(token) for token in tokens])

    def tokens_to_ids(self, tokens: Sequence[str]) -> list[int]:
        """Decimal forms to ids."""
        return [int(token) for token in tokens]

    def ids_to_tokens(self, ids: Sequence[int]) -> list[str]:
        """Ids to decimal forms."""
        return [str(token) for token in ids]
