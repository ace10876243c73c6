"""Text to ids and back: nothing is lost, nothing special is read into a text, no half characters, exact stop strings.

The encodings here need no download: nano's pattern, or those of GPT-2 and gpt-oss, over the 256 single bytes.
"""

import base64
import json
import time

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st
from tiktoken_ext import openai_public

from nanograph.checkpoint import ASSETS
from nanograph.tokenizer import END_OF_TEXT, SPLIT, Detokenizer, Tokenizer, load_tokenizer

BYTES = {bytes([byte]): byte for byte in range(256)}
ROUND_TRIPS = {
    "emoji": "🧑‍🚀 👍🏽 🇩🇪",
    "combining marks": "e\u0301 n\u0303 a\u0300\u0323",
    "right to left": "שלם \u202bגדל\u202c",
    "NUL": "a\0b",
    "newlines": "\n\n\n",
    "other blanks": "\r\n\t\u00a0\u2028 \x85",
    "apostrophes": "'tis he's ne'er o'er 'twill",
    "one line of 100 kB": "to be or not to be " * 5400,
    "nothing": "",
}


def byte_tokenizer(*tokens, pattern=SPLIT, special=None):
    """Ids 0 to 255 are the bytes, then come `tokens`, then <|endoftext|>."""
    ranks = BYTES | {token: 256 + index for index, token in enumerate(tokens)}
    special = special or {END_OF_TEXT: len(ranks)}
    return Tokenizer(tiktoken.Encoding("bytes", pat_str=pattern, mergeable_ranks=ranks, special_tokens=special))


@pytest.fixture
def gpt_oss(monkeypatch):
    """gpt-oss's true pattern and special tokens, over single bytes."""
    monkeypatch.setattr(openai_public, "load_tiktoken_bpe", lambda *_, **__: BYTES)
    parts = openai_public.o200k_harmony()
    return byte_tokenizer(pattern=parts["pat_str"], special=parts["special_tokens"])


@pytest.fixture
def gpt2(monkeypatch):
    """GPT-2's true pattern, over single bytes."""
    monkeypatch.setattr(openai_public, "data_gym_to_mergeable_bpe_ranks", lambda *_, **__: BYTES)
    return byte_tokenizer(pattern=openai_public.gpt2()["pat_str"])


BYTE_TOKENIZER = byte_tokenizer()


def pieces(data, stop=(), tokenizer=BYTE_TOKENIZER):
    """What a Detokenizer hands out for bytes, one a token, up to where it stops; the last piece is finish()'s."""
    detokenizer = Detokenizer(tokenizer, stop)
    out = []
    for byte in data:
        out.append(detokenizer.push(byte))
        if detokenizer.stopped:
            break
    return [*out, detokenizer.finish()]


# Encoding


@pytest.mark.parametrize("text", ROUND_TRIPS.values(), ids=ROUND_TRIPS.keys())
def test_text_comes_back(text, gpt2, gpt_oss):
    for tokenizer in (BYTE_TOKENIZER, gpt2, gpt_oss):
        assert tokenizer.decode(tokenizer.encode(text)) == text


@given(st.text())
def test_any_text_comes_back(text):
    assert BYTE_TOKENIZER.decode(BYTE_TOKENIZER.encode(text)) == text


def test_spelling_of_a_special_token_is_plain_text(gpt_oss):
    """TOK-1."""
    text = "the token <|endoftext|> ends a text"
    assert 256 not in BYTE_TOKENIZER.encode(text)
    assert BYTE_TOKENIZER.decode(BYTE_TOKENIZER.encode(text)) == text
    assert max(gpt_oss.encode("<|return|>")) < 256
    assert gpt_oss.decode(gpt_oss.encode("<|return|>")) == "<|return|>"


@pytest.mark.parametrize("unit", ["a", " ", "\n", "\t", "!", "1", "é", "the "])
def test_a_million_equal_units(unit, gpt2, gpt_oss):
    """TOK-7. Blanks before a letter are the hard case: they made tiktoken panic in GPT-2's and gpt-oss's patterns."""
    text = unit * 1_000_000 + "x"
    for tokenizer in (BYTE_TOKENIZER, gpt2, gpt_oss):
        began = time.perf_counter()
        token_ids = tokenizer.encode(text)
        assert time.perf_counter() - began < 10
        assert bytes(token_ids).decode() == text


def test_a_million_letters_that_merge():
    """TOK-7. Merging inside one piece must not take quadratic time."""
    tokenizer = byte_tokenizer(*(b"a" * 2**power for power in range(1, 6)))
    began = time.perf_counter()
    token_ids = tokenizer.encode("a" * 1_000_000)
    assert time.perf_counter() - began < 10
    assert len(token_ids) == 1_000_000 / 32


def test_lone_surrogate_is_refused_in_one_line():
    with pytest.raises(ValueError, match=r"^prompt is not valid Unicode: lone surrogate at character 3$"):
        BYTE_TOKENIZER.encode("abc\ud83d and more")


def test_decoding_leaves_out_special_and_unknown_ids(gpt_oss):
    """A model's vocabulary may be padded past its encoding's."""
    assert BYTE_TOKENIZER.decode([104, 256, 105, 300]) == "hi"
    assert gpt_oss.decode([104, 200_002, 105, 201_087]) == "hi"


# Incremental decoding


def test_characters_come_whole():
    """TOK-3."""
    text = "é 😀 中"
    out = pieces(text.encode())
    assert "".join(out) == text
    assert not any("\ufffd" in piece for piece in out)


def test_two_requests_do_not_share_a_buffer():
    """TOK-3: interleaved, byte by byte."""
    first, second = Detokenizer(BYTE_TOKENIZER), Detokenizer(BYTE_TOKENIZER)
    texts = ["", ""]
    for a, b in zip("é😀é".encode(), "中😀z".encode()):
        texts[0] += first.push(a)
        texts[1] += second.push(b)
    assert texts == ["é😀é", "中😀z"]


def test_incomplete_and_invalid_bytes_are_told_apart():
    """TOK-5: a token that starts with a blank ends the wait for a third byte; nothing waits behind 0x80, which begins
    nothing."""
    detokenizer = Detokenizer(byte_tokenizer(b"\xe4\xb8", b" a"))
    assert [detokenizer.push(256), detokenizer.push(257)] == ["", "\ufffd a"]
    assert pieces(b"\x80ab") == ["\ufffd", "a", "b", ""]
    assert pieces(b"a\xe4\xb8") == ["a", "", "", "\ufffd"]


def test_special_token_inside_a_character():
    assert pieces([0xC3, 256, 0xA9]) == ["", "", "é", ""]


BYTE = st.one_of(st.integers(0, 255), st.sampled_from([0x80, 0xC3, 0xE2, 0x82, 0xF0, 0x9F]))


@given(st.lists(st.binary(min_size=1, max_size=4) | st.lists(BYTE, min_size=1, max_size=4).map(bytes), max_size=12))
def test_pieces_joined_are_the_whole_decode(tokens):
    """Any bytes, cut into tokens anywhere."""
    merged = sorted({token for token in tokens if len(token) > 1})
    tokenizer = byte_tokenizer(*merged)
    token_ids = [256 + merged.index(token) if len(token) > 1 else token[0] for token in tokens]
    detokenizer = Detokenizer(tokenizer)
    assert "".join(map(detokenizer.push, token_ids)) + detokenizer.finish() == tokenizer.decode(token_ids)


# Stop strings


@pytest.mark.parametrize(
    ("text", "stop", "kept"),
    [
        ("aaab", ["aab"], "a"),
        ("aaaab", ["aab"], "aa"),
        ("abab abac", ["abac"], "abab "),
        ("one\n\ntwo", ["\n\n"], "one"),
        ("x中y", ["中"], "x"),
        ("abcd", ["cd", "bcd"], "a"),
        ("abcd", ["abcdef", "cd"], "ab"),
        ("abc", ["abcdef"], "abc"),
        ("stop", ["stop"], ""),
    ],
)
def test_text_ends_before_a_stop_string(text, stop, kept):
    assert "".join(pieces(text.encode(), stop)) == kept


def test_what_may_begin_a_stop_string_is_held_back():
    assert pieces(b"xaay", ["aab"]) == ["x", "", "", "aay", ""]
    assert pieces(b"xaa", ["aab"]) == ["x", "", "", "aa"]


def test_stop_inside_a_token_and_nothing_after_it():
    detokenizer = Detokenizer(byte_tokenizer(b"c stop d"), ["stop"])
    assert (detokenizer.push(256), detokenizer.stopped) == ("c ", True)
    assert [detokenizer.push(97), detokenizer.finish()] == ["", ""]


WORD = st.text("ab", min_size=1, max_size=4)


@given(st.text("ab", max_size=20), st.lists(WORD, max_size=3))
@example("aaab", ["aab"])
@example("abab", ["bab", "aba"])
def test_stop_strings_against_a_search_of_every_prefix(text, stop):
    """The text ends at the shortest prefix that holds a stop string, less what begins where the first of those does."""
    whole = text
    for end in range(len(text) + 1):
        begins = [text[:end].find(word) for word in stop if word in text[:end]]
        if begins:
            whole = text[: min(begins)]
            break
    assert "".join(pieces(text.encode(), stop)) == whole


@given(st.text("ab", max_size=20), st.lists(WORD, min_size=1, max_size=3))
def test_no_more_is_held_back_than_may_begin_a_stop_string(text, stop):
    detokenizer, given_out = Detokenizer(BYTE_TOKENIZER, stop), ""
    for end, byte in enumerate(text.encode(), 1):
        given_out += detokenizer.push(byte)
        if detokenizer.stopped:
            return
        held = text[len(given_out) : end]
        assert text.startswith(given_out)
        assert not held or any(word.startswith(held) for word in stop)


# Where an encoding comes from


def write_vocabulary(folder, lines=None):
    """A vocabulary of the 256 bytes, or of the lines given."""
    lines = rank_lines(BYTES) if lines is None else lines
    (folder / "vocab.tiktoken").write_bytes(b"\n".join(lines) + b"\n")


def rank_lines(ranks):
    return [base64.b64encode(token) + b" %d" % rank for token, rank in ranks.items()]


def test_own_vocabulary(tmp_path):
    write_vocabulary(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 257)
    assert tokenizer.encode("hé") == [0x68, 0xC3, 0xA9]
    assert tokenizer.decode([0x68, 256]) == "h"


def test_shipped_vocabulary():
    """Speakers and blank lines are cheap, and no text is lost."""
    tokenizer = load_tokenizer(ASSETS, json.loads((ASSETS / "config.json").read_text())["vocab_size"])
    pieces = [tokenizer.decode([token]) for token in tokenizer.encode("\n\nROMEO:\nBut soft")]
    assert pieces == ["\n\n", "ROMEO", ":", "\n", "But", " soft"]
    for text in ROUND_TRIPS.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text


GOOD = rank_lines(BYTES)
BROKEN = {
    "empty": ([], "256 single bytes"),
    "a rank twice": ([*GOOD[:255], base64.b64encode(b"\xff") + b" 254"], "one rank"),
    "a token twice": ([*GOOD, base64.b64encode(b"a") + b" 256"], "one rank"),
    "a gap": ([*GOOD, base64.b64encode(b"ab") + b" 257"], "without gaps"),
    "a byte missing": ([*GOOD[:255], base64.b64encode(b"ab") + b" 255"], "256 single bytes"),
    "one too many": ([*GOOD, base64.b64encode(b"ab") + b" 256"], "257 ranks .* vocabulary of 257"),
    "not base64": ([*GOOD, b"!!! 256"], "no vocabulary of 'base64 rank' lines"),
    "not a number": ([*GOOD, b"YWI= x"], "no vocabulary of 'base64 rank' lines"),
    "three fields": ([*GOOD, b"YWI= 256 1"], "no vocabulary of 'base64 rank' lines"),
    "binary": ([b"\x00\xff\xfe"], "no vocabulary of 'base64 rank' lines"),
}


@pytest.mark.parametrize(("lines", "reason"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_vocabulary_is_refused_in_one_line(lines, reason, tmp_path):
    write_vocabulary(tmp_path, lines)
    with pytest.raises(ValueError, match=reason) as refusal:
        load_tokenizer(tmp_path, 257)
    assert str(tmp_path / "vocab.tiktoken") in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_unknown_vocabulary_size(tmp_path):
    with pytest.raises(ValueError, match=r"^a vocabulary of 4097 fits no known encoding: use token ids$"):
        load_tokenizer(tmp_path, 4097)


@pytest.mark.parametrize(("size", "name"), [(50257, "gpt2"), (201088, "o200k_harmony")])
def test_known_encoding_is_chosen_by_size(size, name, tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken, "get_encoding", lambda asked: BYTE_TOKENIZER.encoding if asked == name else None)
    assert load_tokenizer(tmp_path, size).encode("a") == [97]


def test_ranks_that_cannot_be_downloaded(tmp_path, monkeypatch):
    def no_network(name):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(tiktoken, "get_encoding", no_network)
    with pytest.raises(ValueError, match="TIKTOKEN_CACHE_DIR") as refusal:
        load_tokenizer(tmp_path, 50257)
    assert "gpt2" in str(refusal.value)
    assert "\n" not in str(refusal.value)
