"""Text from tokens as they come: characters that tokens share, and stop strings.

A token is bytes, and a character may be spread over several tokens, so text is decoded from the tokens' bytes. That is
exact for the tokenizers of the Llama family, byte-level or with byte fallback, and never fails. The `tokenizers`
library's own DecodeStream holds back everything while the text ends in an invalid byte, cannot be asked for what it
holds at the end, and raises on some byte fallbacks.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_Utf8 = codecs.getincrementaldecoder("utf-8")


class TokenBytes(dict[int, bytes]):
    """The bytes that each token stands for within a text, none for special tokens; worked out when first asked for."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = {index for index, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder = json.dumps(json.loads(tokenizer.to_str())["decoder"])
        self._byte_level = _bytes_by_character() if '"ByteLevel"' in decoder else None
        self._byte_fallback = '"ByteFallback"' in decoder
        self._before = next((token for token in range(tokenizer.get_vocab_size()) if self._is_word(token)), None)

    def __missing__(self, token: int) -> bytes:
        content = self[token] = self._content(token)
        return content

    def _is_word(self, token: int) -> bool:
        text = self._tokenizer.decode([token])
        return text.isascii() and text.isalnum()

    def _content(self, token: int) -> bytes:
        piece = self._tokenizer.id_to_token(token)
        if piece is None or token in self._special:  # models may have more rows than the tokenizer has tokens
            return b""
        if self._byte_level and all(character in self._byte_level for character in piece):
            return bytes(self._byte_level[character] for character in piece)
        if self._byte_fallback and (byte := _BYTE.fullmatch(piece)):
            return bytes([int(byte[1], 16)])
        return self._behind_a_word(token)

    def _behind_a_word(self, token: int) -> bytes:
        """Decoded within a text, because some decoders strip the space that a text begins with."""
        if self._before is None:
            return self._tokenizer.decode([token]).encode()
        word = self._tokenizer.decode([self._before])
        return self._tokenizer.decode([self._before, token]).removeprefix(word).encode()


class Detokenizer:
    """The text of one answer, given its tokens one by one; it ends before the first of the `stop` texts.

    Text is held back while a character is incomplete or a stop text may be beginning. U+FFFD stands for bytes that
    cannot become a character. The text does not depend on how it is spread over tokens, so that of a resumed answer,
    whose first tokens were pushed again, goes on exactly where it was.
    """

    def __init__(self, contents: TokenBytes, stop: Sequence[str] = (), least: int = 0) -> None:
        """Stop texts that are whole before the answer has `least` tokens, or begin there, are texts like others."""
        self._least = least
        self._contents = contents
        self._utf8 = _Utf8(errors="replace")
        self._stop = tuple(text for text in stop if text)
        self._beginnings = {text[0] for text in self._stop}
        self._held = ""
        self.stopped = False
        """Whether a stop text came: nothing comes after it."""

    def push(self, token: int) -> str:
        """The text that is new with `token`."""
        text = self._utf8.decode(self._contents[token])
        if self._least > 0:
            self._least -= 1
            return text
        return self._release(text) if self._stop else text

    def flush(self) -> str:
        """The text that was held back, as no more tokens come."""
        text = self._utf8.decode(b"", final=True)
        if not self._stop:
            return text
        text = self._release(text)
        text, self._held = text + self._held, ""
        return text

    def _release(self, text: str) -> str:
        if self.stopped:
            return ""
        if not self._held and self._beginnings.isdisjoint(text):
            return text
        text = self._held + text
        ends = [(begin + len(stop), begin) for stop in self._stop if (begin := text.find(stop)) >= 0]
        if ends:
            self.stopped, self._held = True, ""
            return text[: min(ends)[1]]
        kept = len(text) - max(_begun(text, stop) for stop in self._stop)
        self._held = text[kept:]
        return text[:kept]


def _begun(text: str, stop: str) -> int:
    """How many characters at the end of `text` may begin `stop`."""
    for begun in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:begun]):
            return begun
    return 0


def _bytes_by_character() -> dict[str, int]:
    """Byte-level tokenizers write a byte that is no visible character as the next one from U+0100 on."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(0x100 + rank): byte for rank, byte in enumerate(hidden)}
