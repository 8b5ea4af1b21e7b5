"""Words leave a text by equation 5, whatever the tokenizer, and what stays is still a text."""

import itertools
import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Encoding, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from pliant.deployments.cascade.pruning import Words, find_words, prune, read_words
from pliant.texts import Pair, joined

CORPUS = [
    "this paper is beautifully written and enjoyable to read",
    "the don't state-of-the-art, 3.14 (hello) world!",
    "我的书很好 とても カタカナ",
]
SPECIAL = ["[CLS]", "[SEP]", "[UNK]"]
KINDS = ("wordpiece", "byte-bpe", "unigram", "one-piece")


@cache
def tokenizer(kind: str) -> Tokenizer:
    """A tiny tokenizer like that of BERT, RoBERTa, XLM-R or, as `one-piece` (words are not split beforehand), T5."""
    options = {"special_tokens": SPECIAL, "show_progress": False}
    if kind == "wordpiece":
        made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        made.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=90, **options))
    elif kind == "byte-bpe":
        made = Tokenizer(models.BPE())
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        made.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=290, initial_alphabet=alphabet, **options))
    else:
        made = Tokenizer(models.Unigram())
        made.pre_tokenizer = pre_tokenizers.Metaspace(split=kind == "unigram")
        made.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=90, unk_token="[UNK]", **options))
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 0), ("[SEP]", 1)]
    )
    return made


def encode(kind: str, *texts: str, most: int | None = None) -> Encoding:
    """As a model would read them that takes at most that many tokens."""
    made = tokenizer(kind)
    made.no_truncation() if most is None else made.enable_truncation(most)
    return made.encode(*texts)


def reading(text: str, importance: dict[str, float]) -> Words:
    """A text of whose words those in `importance` received that many times the mean, and all others twice the mean."""
    spans = find_words(text)
    return Words(text, spans, np.array([importance.get(text[span.start : span.end], 2.0) for span in spans]))


def words_of(text: str) -> list[str]:
    return [text[span.start : span.end] for span in find_words(text)]


def squeezed(text: str) -> str:
    return "".join(text.split())


texts = st.one_of(
    st.text(max_size=60),
    st.text(alphabet="ab .,'-()\n我好とカー👍é\u0301ไท5", max_size=60),
    st.lists(st.sampled_from([*" ".join(CORPUS).split(), "  ", "\n", "...", "👩‍👩‍👧", "a" * 300]), max_size=12).map(
        " ".join
    ),
)


@st.composite
def queries(draw: st.DrawFn) -> tuple[list[str], Encoding, np.ndarray]:
    """One text or two, their encoding, whole or truncated, and an importance for each token."""
    given_texts = draw(st.lists(texts, min_size=1, max_size=2))
    encoding = encode(draw(st.sampled_from(KINDS)), *given_texts, most=draw(st.none() | st.integers(5, 20)))
    few = st.sampled_from([0.0, 0.5, 1.0, 1.5, 7.25])
    importance = draw(st.lists(few, min_size=len(encoding), max_size=len(encoding)))
    return given_texts, encoding, np.array(importance, np.float32)


@given(queries(), st.sampled_from([0.25, 0.5, 0.9, 1.0, 1.5]))
@settings(max_examples=120)
def test_prunes_exactly_the_words_of_equation_5(query, alpha) -> None:
    given_texts, encoding, importance = query
    own = [i for i, number in enumerate(encoding.sequence_ids) if number is not None]
    mean = sum(float(importance[i]) for i in own) / max(1, len(own))
    for number, words in enumerate(read_words(joined(tuple(given_texts)), encoding, importance)):
        tokens = [(encoding.offsets[i], float(importance[i])) for i in own if encoding.sequence_ids[i] == number]
        seen = max((end for (_, end), _ in tokens), default=0)
        greatest = []
        for start, end, _ in words.spans:
            received = [value for (first, beyond), value in tokens if first < end and beyond > start]
            greatest.append(max(received) if received and end <= seen and mean else math.inf)
        kept = [value > alpha * mean for value in greatest]
        proper = [i for i, span in enumerate(words.spans) if span.kind != "p"] or range(len(kept))
        if proper:
            kept[max(proper, key=lambda i: greatest[i])] = True
        stay = [words.text[span.start : span.end] for span, keep in zip(words.spans, kept, strict=True) if keep]
        pruned = prune((words,), alpha)
        assert pruned[1:] == (len(kept), kept.count(False))
        assert squeezed(pruned.text) == "".join(stay)


@given(queries())
@settings(max_examples=120)
def test_fewer_words_stay_as_alpha_grows_but_one_always_does(query) -> None:
    for text, words in zip(query[0], read_words(joined(tuple(query[0])), *query[1:]), strict=True):
        assert prune((words,), 0).text == text
        results = [prune((words,), alpha) for alpha in (0, 0.3, 0.7, 1, 2, 100)]
        for less, more in itertools.pairwise(results):
            assert less.pruned <= more.pruned
            remaining = iter(squeezed(less.text))
            assert all(character in remaining for character in squeezed(more.text))  # in order
        for pruned in results:
            assert (pruned.text == text) == (not pruned.pruned)
            assert pruned.words == len(words.spans)
            assert bool(squeezed(pruned.text)) == bool(squeezed(text))


@given(
    st.lists(st.tuples(st.sampled_from(["don't", "3.14", "naïve", "हिन्दी", "x", "我", "とて", "ไทย"]), st.booleans()))
)
def test_words_do_not_run_together(choice) -> None:
    text = " ".join(word for word, _ in choice)
    spans = find_words(text)
    words = Words(text, spans, np.array([2.0 if keep else 0.5 for _, keep in choice]))
    if any(keep for _, keep in choice):
        assert words_of(words.rest(1)[0]) == [word for word, keep in choice if keep]


@given(texts)
def test_nothing_but_white_space_lies_between_words(text) -> None:
    assert "".join(words_of(text)) == squeezed(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("This paper, don't you (think)?", ["This", "paper", ",", "don't", "you", "(", "think", ")?"]),
        ("see https://a.org/b?c=1, e-mail me@x.y!", ["see", "https://a.org/b?c=1", ",", "e-mail", "me@x.y", "!"]),
        ("我的书。很好。", ["我", "的", "书", "。", "很", "好", "。"]),
        ("コーヒーを飲みました", ["コーヒー", "を", "飲", "みました"]),
        ("한국어 문장입니다.", ["한국어", "문장입니다", "."]),
        ("हिन्दी भाषा", ["हिन्दी", "भाषा"]),
        ("great ❤️👩‍👩‍👧 cafe\u0301 \u0301", ["great", "❤️👩‍👩‍👧", "cafe\u0301", "\u0301"]),
        ("", []),
        (" \n\t ", []),
    ],
)
def test_finds_words_in_any_script(text, words) -> None:
    assert words_of(text) == words


@pytest.mark.parametrize(
    ("text", "dropped", "expected"),
    [
        (
            "this paper is beautifully written and enjoyable to read.",
            "is and to read .",
            "this paper beautifully written enjoyable",
        ),
        ("  The  red\n\ncat sat. ", "red", "  The  cat sat. "),
        ("well, hello (there) friend", "hello", "well, (there) friend"),
        ("I saw, of course, it", "of course", "I saw,, it"),
        ("say (hello there)", "hello", "say (there)"),
        ("say (hello there)", "there", "say (hello)"),
        ("say (hello there)", "(", "say hello there)"),
        ("a fine paper, read it", "paper", "a fine, read it"),
        ("a fine paper, read it", "paper ,", "a fine read it"),
        ("The end.", "The", "end."),
        ("The end.", "end .", "The"),
        ("我的书。很好", "的 。", "我书很好"),
        ("foo我bar", "我", "foo bar"),
        ("foo 我bar", "foo", "我bar"),
        ("a\nb\nc", "b", "a\nc"),
    ],
)
def test_spaces_and_punctuation_stay_where_they_belong(text, dropped, expected) -> None:
    rest = reading(text, dict.fromkeys(dropped.split(), 0.5)).rest(0.5)
    assert rest == (expected, len(dropped.split()))


@pytest.mark.parametrize("kind", KINDS)
def test_a_word_stays_for_any_one_of_its_tokens(kind) -> None:
    text = "hello beautifully xylophone world"
    encoding = encode(kind, text)
    start = text.index("xyl")
    within = [i for i, (s, e) in enumerate(encoding.offsets) if s >= start and start < e <= start + 9]
    assert len(within) > 1 or kind == "wordpiece"
    for token in within:
        importance = np.zeros(len(encoding), np.float32)
        importance[token] = 1
        assert prune(read_words(text, encoding, importance), 0.5) == ("xylophone", 4, 3)


def test_the_most_important_proper_word_stays_when_all_would_go() -> None:
    text = "fine , paper !"
    assert reading(text, {"fine": 0.2, "paper": 0.3, ",": 0.9, "!": 0.1}).rest(1) == ("paper", 3)
    assert reading(text, {"fine": 0.2, "paper": 0.3}).rest(1) == (", paper !", 1)
    assert reading("?? !", {"??": 0.2, "!": 0.3}).rest(1) == ("!", 1)


def test_special_tokens_do_not_count() -> None:
    encoding = encode("wordpiece", "hello world")
    importance = np.where(encoding.special_tokens_mask, 1e6, 1.0)
    (words,) = read_words("hello world", encoding, importance)
    np.testing.assert_array_equal(words.importance, [1, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_texts_of_a_pair_are_pruned_apart_by_one_mean(kind) -> None:
    pair = Pair("hello world", "this paper")
    encoding = encode(kind, *pair)
    importance = np.array([3.0 if number == 0 else 1.0 for number in encoding.sequence_ids])
    first, second = read_words(pair, encoding, importance)
    assert prune((first, second), 1) == (("hello world", "this"), 4, 1)
    assert first.importance[0] == pytest.approx(3 * second.importance[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_model_has_not_read_to_its_end_stays(kind) -> None:
    text = "hello world xylophone the end"
    within = sum(0 < end < text.index("xylophone") + 4 for _, end in encode(kind, text).offsets)
    encoding = encode(kind, text, most=within + 2)
    (words,) = read_words(text, encoding, np.ones(len(encoding)))
    assert words.rest(5) == ("xylophone the end", 2)


@pytest.mark.parametrize("text", ["", "   "])
def test_an_empty_text_stays_as_it_is(text) -> None:
    encoding = encode("wordpiece", text)
    (words,) = read_words(text, encoding, np.ones(len(encoding)))
    assert prune((words,), 0.7) == (text, 0, 0)


def test_a_model_that_attends_to_nothing_prunes_nothing() -> None:
    encoding = encode("wordpiece", "hello world")
    (words,) = read_words("hello world", encoding, np.zeros(len(encoding)))
    assert words.rest(1) == ("hello world", 0)


@pytest.mark.parametrize("alpha", [-0.1, float("nan"), float("inf")])
def test_refuses_an_alpha_that_means_nothing(alpha) -> None:
    with pytest.raises(ValueError, match="alpha must be a number from 0 up"):
        reading("hello world", {}).rest(alpha)


@pytest.mark.parametrize("importance", [np.ones(3), np.ones((4, 1)), np.full(4, np.nan), np.full(4, -1.0), np.ones(0)])
def test_refuses_importance_that_is_not_one_number_a_token(importance) -> None:
    encoding = encode("wordpiece", "hello world", most=4)
    with pytest.raises(ValueError, match="importance must be 4 finite numbers"):
        read_words("hello world", encoding, importance)
