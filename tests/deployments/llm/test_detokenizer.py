"""Text from tokens: characters that tokens share, stop strings, and the tokenizers of two families."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.scripted_executor import EOS, byte_tokenizer
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from pliant.deployments.llm.detokenizer import Detokenizer, TokenBytes

TEXTS = ("the end of the beginning, 日本語 and 🎉🎉 naïve café", "def f(x):\n    return x  # été")


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentence_piece() -> Tokenizer:
    """As Llama 2 and Mistral have them: a space is part of a word, and bytes stand for what the vocabulary lacks."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"theanodfbgi,x():é"]
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "x")]
    pieces += [first + second for first, second in merges]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: index for index, piece in enumerate(pieces)},
            merges=merges,
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


BYTE_LEVEL, SENTENCE_PIECE, BYTES = byte_level(), sentence_piece(), byte_tokenizer()
CONTENTS = TokenBytes(BYTES)


def pieces(tokenizer: Tokenizer, tokens: list[int]) -> list[str]:
    detokenizer = Detokenizer(TokenBytes(tokenizer))
    return [*(detokenizer.push(token) for token in tokens), detokenizer.flush()]


@given(st.lists(st.integers(0, BYTE_LEVEL.get_vocab_size() - 1)))
def test_any_byte_level_tokens_give_what_the_tokenizer_decodes(tokens: list[int]) -> None:
    assert "".join(pieces(BYTE_LEVEL, tokens)) == BYTE_LEVEL.decode(tokens)


@given(st.text())
@example("the 日本 the")
def test_text_comes_back(text: str) -> None:
    assert "".join(pieces(BYTE_LEVEL, BYTE_LEVEL.encode(text).ids)) == text
    assert "".join(pieces(SENTENCE_PIECE, SENTENCE_PIECE.encode(text).ids)) == (f" {text}" if text else "")


def test_a_character_comes_when_it_is_whole() -> None:
    assert pieces(BYTES, list("a🎉".encode())) == ["a", "", "", "", "🎉", ""]


def test_what_cannot_become_a_character_is_replaced() -> None:
    assert pieces(BYTES, [0xE6, 0x97, ord("a")]) == ["", "", "�a", ""]
    assert pieces(BYTES, [0xFF, 0xE6]) == ["�", "", "�"]
    fallback = [SENTENCE_PIECE.token_to_id(piece) for piece in ("<0xF0>", "<0x9F>", "▁the", "<0xC3>", "<0xA9>")]
    assert pieces(SENTENCE_PIECE, fallback) == ["", "", "� the", "", "é", ""]


def test_special_tokens_and_unknown_rows_have_no_text() -> None:
    assert pieces(BYTES, [ord("a"), EOS, 10_000, ord("b")]) == ["a", "", "", "b", ""]


def test_words_keep_their_space_at_the_beginning() -> None:
    assert pieces(SENTENCE_PIECE, [SENTENCE_PIECE.token_to_id("▁the")]) == [" the", ""]


def test_a_tokenizer_of_words_separates_them() -> None:
    words = Tokenizer(models.WordLevel(vocab={"one": 0, "two": 1}, unk_token="one"))
    assert "".join(pieces(words, [0, 1])) == " one two"


def stopped(text: str, stops: list[str]) -> str | None:
    """`text` up to the stop text that is whole first; None if there is none."""
    for end in range(len(text) + 1):
        begins = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if begins:
            return text[: min(begins)]
    return None


SHORT = st.text("ab日", max_size=12)


@given(SHORT, st.lists(st.text("ab日", min_size=1, max_size=4), max_size=3))
def test_stop_strings(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(CONTENTS, stops)
    given_out = ""
    wanted = stopped(text, stops)
    for token in text.encode():
        given_out += detokenizer.push(token)
        assert (text if wanted is None else wanted).startswith(given_out)
        if detokenizer.stopped:
            break
    assert detokenizer.stopped == (wanted is not None)
    assert given_out + detokenizer.flush() == (text if wanted is None else wanted)


@given(SHORT, st.lists(st.text("ab日", min_size=1, max_size=4), min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_begin_a_stop_string(text: str, stops: list[str]) -> None:
    detokenizer = Detokenizer(CONTENTS, stops)
    given_out = "".join(detokenizer.push(token) for token in text.encode())
    if not detokenizer.stopped:
        held = text.removeprefix(given_out)
        assert not held or any(stop.startswith(held) for stop in stops)


def test_a_stop_string_may_share_tokens_with_text() -> None:
    tokenizer = Tokenizer(models.WordLevel(vocab={"x": 0, "end.\nAnd": 1}, unk_token="x"))
    detokenizer = Detokenizer(TokenBytes(tokenizer), ["\n"])
    assert (detokenizer.push(1), detokenizer.stopped, detokenizer.push(0), detokenizer.flush()) == (
        " end.",
        True,
        "",
        "",
    )


@pytest.mark.parametrize("stops", [(), ("ab",)])
@given(text=SHORT, cut=st.integers(0, 40))
def test_a_resumed_text_goes_on_where_it_was(stops: tuple[str, ...], text: str, cut: int) -> None:
    whole, before, after = (Detokenizer(CONTENTS, stops) for _ in range(3))
    tokens = list(text.encode())
    for token in tokens[:cut]:
        after.push(token)
    first = "".join(before.push(token) for token in tokens[:cut])
    second = "".join(after.push(token) for token in tokens[cut:]) + after.flush()
    assert first + second == "".join(whole.push(token) for token in tokens) + whole.flush()
