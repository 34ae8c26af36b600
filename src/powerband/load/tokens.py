"""Token counts by the model's tokenizer, from local files."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from powerband import catalog, untrusted
from powerband.core import gguf
from powerband.errors import InputError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_MIN_WORDS = 64  # with fewer single-token words, use the whole word list


class Vocabulary:
    """Words for synthetic text that are one token each, and token counts of texts, for one model."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer

    @property
    def has_tokenizer(self) -> bool:
        """Return whether counts come from the model's tokenizer; otherwise a word counts as one token."""
        return self._tokenizer is not None

    def words(self, content: str) -> tuple[str, ...]:
        """Return the words of a content type that are one token each after a space, so that n words are n tokens."""
        listed = catalog.words(content)
        if self._tokenizer is None:
            return listed
        codes = self._tokenizer.encode_batch([f" {word}" for word in listed], add_special_tokens=False)
        single = tuple(word for word, code in zip(listed, codes, strict=True) if len(code.ids) == 1)
        return single if len(single) >= _MIN_WORDS else listed

    def count(self, texts: list[str]) -> list[int]:
        """Return the number of tokens of each text."""
        if self._tokenizer is None:
            return [len(text.split()) for text in texts]
        return [len(code.ids) for code in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@cache
def vocabulary(source: str | Path | None) -> Vocabulary:
    """Return the vocabulary of a model directory or GGUF file; without one, a word counts as one token."""
    path = Path(source).expanduser() if source else None
    if path is None or not path.exists():
        return Vocabulary(None)
    if path.is_dir():
        file = path / "tokenizer.json"
        return Vocabulary(_from_json(file) if file.is_file() else None)
    return Vocabulary(_from_gguf(path))


def _from_json(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    text = untrusted.text(path, max_bytes=untrusted.MAX_TOKENIZER_BYTES)
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"{path} is not a usable tokenizer: {error}"[:500], hint="download it again") from None


def _from_gguf(path: Path) -> Tokenizer | None:
    """Build the byte-level BPE tokenizer of a GGUF header; None for other kinds of vocabulary."""
    try:
        with path.open("rb") as stream:
            header: dict[str, Any] = gguf.read_header(stream, vocabulary=True)
    except (OSError, gguf.NotGguf):
        return None
    if header.get("tokenizer.ggml.model") != "gpt2" or "tokenizer.ggml.merges" not in header:
        return None
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    try:
        vocab = {str(token): number for number, token in enumerate(header["tokenizer.ggml.tokens"])}
        merges = [(left, right) for left, right in (one.split(" ", 1) for one in header["tokenizer.ggml.merges"])]
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    except Exception as error:  # the library raises nothing more specific
        raise InputError(f"the tokenizer in {path} is not usable: {error}"[:500], hint="download it again") from None
    digits = pre_tokenizers.Split(Regex(r"\p{N}"), "isolated")
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    return tokenizer
