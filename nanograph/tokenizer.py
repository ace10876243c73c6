"""Text to token ids and back, over tiktoken's encodings: nano's own, GPT-2's and gpt-oss's.

Tokens are bytes, not characters: one character may span several tokens. A stream of text therefore goes through a
Detokenizer, which never hands out half a character, nor text that may turn out to begin a stop string.

Nothing is loaded before text has to be encoded or decoded: prompts of token ids need no tokenizer.

Read first: nothing. Read next: engine.py.
"""

import base64
import codecs
from datetime import date

# Where nano's text is cut before byte pairs merge: words and marks keep the blank before them, newlines come in runs.
SPLIT = r"'(?:[sdmt]|ll|ve|re)\b| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\n+|[^\S\n]+"
END_OF_TEXT = "<|endoftext|>"
SYSTEM_MESSAGE = (  # as gpt-oss has seen it in training
    "You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\nCurrent date: {}\n\n"
    "Reasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
KNOWN = {50257: "gpt2", 201088: "o200k_harmony"}  # vocabulary size -> tiktoken's name
# The most characters that tiktoken gets at a time. Its own patterns overflow their stack at a million blanks in a row,
# with a panic that no `except Exception` sees.
MAX_CHARACTERS = 500_000


def load_tokenizer(folder, vocab_size):
    """The Tokenizer of a checkpoint folder: over its own `vocab.tiktoken`, else the encoding of that vocabulary size.

    Raises ValueError for a broken vocabulary file, for a size that fits no known encoding, and where tiktoken cannot
    download its ranks.
    """
    path = folder / "vocab.tiktoken"
    if path.is_file():
        return Tokenizer(own_encoding(path, vocab_size))
    if vocab_size not in KNOWN:
        raise ValueError(f"a vocabulary of {vocab_size} fits no known encoding: use token ids")
    return Tokenizer(known_encoding(KNOWN[vocab_size]))


def own_encoding(path, vocab_size):
    """A tiktoken.Encoding from a rank file, one `base64(bytes) rank` a line, with <|endoftext|> as its last id.

    Raises ValueError unless the ranks are 0, 1, 2 … up to the vocabulary's size, each token once, and all single bytes
    are among them.
    """
    import tiktoken

    try:
        pairs = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in pairs}
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no vocabulary of 'base64 rank' lines: {error}") from None
    if sorted(ranks.values()) != list(range(len(pairs))) or not all(bytes([byte]) in ranks for byte in range(256)):
        raise ValueError(f"{path} must give each token one rank, from 0 without gaps, and hold all 256 single bytes")
    if len(ranks) + 1 != vocab_size:
        raise ValueError(f"{path} has {len(ranks)} ranks and {END_OF_TEXT}, config.json a vocabulary of {vocab_size}")
    return tiktoken.Encoding(path.name, pat_str=SPLIT, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: len(ranks)})


def known_encoding(name):
    """One of tiktoken's encodings, downloaded or from its cache."""
    import tiktoken

    try:
        return tiktoken.get_encoding(name)
    except Exception as error:  # whatever the network stack of the day raises
        reason = f"{type(error).__name__}: {error}".splitlines()[0][:120]
        raise ValueError(
            f"tiktoken cannot download the ranks of {name} ({reason}): "
            "set TIKTOKEN_CACHE_DIR to a folder that holds them"
        ) from None


class Tokenizer:
    """encode and decode over a tiktoken.Encoding. hidden_ids: tokens that are no part of a text, the special ones."""

    def __init__(self, encoding):
        self.encoding = encoding
        self.hidden_ids = self.special_ids(*encoding.special_tokens_set)

    def special_ids(self, *names):
        return frozenset(map(self.encoding.encode_single_token, names))

    def encode(self, text):
        """Token ids. What spells a special token is plain text.

        Raises ValueError for a lone surrogate (half of a UTF-16 pair): no bytes spell it, so it could not come back.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"prompt is not valid Unicode: lone surrogate at character {error.start}") from None
        parts = (text[start : start + MAX_CHARACTERS] for start in range(0, len(text), MAX_CHARACTERS))
        return [token for part in parts for token in self.encoding.encode_ordinary(part)]

    def encode_chat(self, text):
        """Token ids of a user's message to gpt-oss, up to where the answer begins. What the user types is plain text.

        In the harmony format, which gpt-oss was trained on: https://github.com/openai/harmony/blob/main/docs/format.md.
        """
        start, message, end = map(self.encoding.encode_single_token, ("<|start|>", "<|message|>", "<|end|>"))
        ids = []
        for role, content in (("system", SYSTEM_MESSAGE.format(date.today())), ("user", text)):
            ids += [start, *self.encode(role), message, *self.encode(content), end]
        return [*ids, start, *self.encode("assistant")]

    def decode_bytes(self, token_ids):
        """The bytes of tokens. Special tokens, and ids that the encoding does not know, have none."""
        return b"".join(map(self.token_bytes, token_ids))

    def token_bytes(self, token_id):
        if token_id in self.hidden_ids:
            return b""
        try:
            return self.encoding.decode_single_token_bytes(token_id)
        except KeyError:  # a model's vocabulary may be padded past its encoding's
            return b""

    def decode(self, token_ids):
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(token_ids).decode("utf-8", errors="replace")


class Detokenizer:
    """Text of one request, token by token. The pieces, joined, are the whole text up to the first stop string.

    tokenizer: a Tokenizer; stop: non-empty strings that end the text and are not part of it. The text is searched after
    each token, and ends where the first of the strings found in it begins; `stopped` then says so.
    """

    def __init__(self, tokenizer, stop=()):
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""  # decoded, but perhaps the beginning of a stop string

    def push(self, token_id):
        """Take a token; return the text that has become certain."""
        return self._release(self._utf8.decode(self.tokenizer.token_bytes(token_id)))

    def finish(self):
        """The end of the text: what was held back, unfinished characters as U+FFFD."""
        text = self._release(self._utf8.decode(b"", final=True)) + self._held
        self._held = ""
        return text

    def _release(self, text):
        if self.stopped:
            return ""
        text = self._held + text
        found = [at for at in (text.find(stop) for stop in self.stop) if at >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def _possible_start(self, text):
        """The first place from which the text, continued, could be a stop string."""
        longest = max(map(len, self.stop), default=1) - 1
        starts = range(max(0, len(text) - longest), len(text))
        return next((at for at in starts if any(stop.startswith(text[at:]) for stop in self.stop)), len(text))
