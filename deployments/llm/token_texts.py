"""What single tokens say, for log-probabilities: a token may be a part of a character only, so it is bytes first."""

from __future__ import annotations

from typing import NamedTuple

from tokenizers import Tokenizer

from pliant.deployments.llm.detokenizer import TokenBytes


class TokenText(NamedTuple):
    """`content` is the token's share of a text; `text` names the token, and is the same unless that is impossible."""

    text: str
    content: bytes


class TokenTexts(dict[int, TokenText]):
    """The texts of a tokenizer's tokens; worked out when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._contents = TokenBytes(tokenizer)
        self._added = {index: token.content for index, token in tokenizer.get_added_tokens_decoder().items()}

    def __missing__(self, token: int) -> TokenText:
        content = self._contents[token]
        try:
            text = content.decode() or self._added.get(token, "")
        except UnicodeDecodeError:
            text = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content)  # as OpenAI writes it
        found = self[token] = TokenText(text, content)
        return found
