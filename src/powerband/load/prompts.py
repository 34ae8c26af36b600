"""The requests of a workload, by number; the same seed gives the same requests.

Traffic is stored as columns of numbers, and texts are generated on demand, so that a million requests fit in memory.
"""

from __future__ import annotations

import json
import math
import random
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from powerband.core.workload import Adapter, Closed, Fixed, Length, Uniform, Workload
from powerband.errors import InputError
from powerband.load import arrivals
from powerband.load.recorded import MALFORMED, MAX_ID, json_rows, request_rows
from powerband.load.tokens import Vocabulary

_POOL_WORDS = 1 << 17
_SALT_BITS = 72  # 32 bits of the seed, 40 bits of the number
_SALT_FACTOR = 0x9E3779B97F4A7C15F39  # odd, so that multiplication modulo a power of two is a bijection
Messages = list[dict[str, str]]


@dataclass
class Traffic:
    """The requests of one run: due times, lengths, and texts on demand."""

    workload: Workload
    due_s: array[float]
    prompt_tokens: array[int]
    output_tokens: array[int]
    text: TextMaker
    adapters: list[Adapter | None] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.due_s)

    @property
    def turns(self) -> int:
        """Return the number of requests in a session."""
        return self.workload.turns.count if self.workload.turns else 1

    def requests(self) -> Iterator[tuple[int, int, int]]:
        """Yield session, prompt tokens and output tokens of every request; a prompt includes earlier turns."""
        for session, prompt in enumerate(self.prompt_tokens):
            for turn in range(self.turns):
                prompt += self.text.tokens(session, turn) if turn else 0
                output = self.output_tokens[session * self.turns + turn]
                yield session, prompt, output
                prompt += output

    def messages(self, number: int, *, turn: int = 0, earlier: Messages | None = None) -> Messages:
        """Return the messages of a request; a later turn contains the earlier turns and their answers."""
        return [*(earlier or []), *self.text.messages(number, turn)]

    def texts(self) -> list[str]:
        """Return the text of the first turn of every request."""
        chats = (self.messages(number) for number in range(len(self)))
        return ["\n".join(message["content"] for message in chat) for chat in chats]

    @cached_property
    def prefix_share(self) -> float:
        """Return the share of prompt tokens that an unlimited prefix cache would hit."""
        return self.text.cacheable_share(self)


class TextMaker:
    """Generate the text of requests; one subclass per source."""

    repeats = 0  # requests that repeat an earlier prompt although the workload does not allow it

    def messages(self, number: int, turn: int) -> Messages:
        """Return the messages that a turn adds."""
        raise NotImplementedError

    def tokens(self, number: int, turn: int) -> int:
        """Return the number of tokens that a turn adds, without a shared prefix."""
        raise NotImplementedError

    def cacheable_share(self, traffic: Traffic) -> float:
        """Return the share of prompt tokens that appeared in earlier requests as a prefix."""
        return 0.0


def long_tokens(lengths: Iterable[tuple[int, int]]) -> int:
    """Return the 95th percentile of prompt and answer together."""
    totals = sorted(prompt + output for prompt, output in lengths)
    return totals[int(0.95 * (len(totals) - 1))]


def prepare(workload: Workload, count: int, *, vocabulary: Vocabulary, base: Path | None = None) -> Traffic:
    """Prepare `count` requests, or sessions if the workload has turns; paths are relative to `base`."""
    base = base or Path()
    if workload.trace:
        return _of_trace(workload, count, vocabulary, base)
    rng = random.Random(f"lengths {workload.seed}")
    turns = workload.turns.count if workload.turns else 1
    text: TextMaker
    if workload.dataset:
        text = _DatasetText(workload, count, base, vocabulary)
        prompts = array("I", (text.tokens(number, 0) for number in range(count)))
    else:
        assert workload.prompt is not None
        text = _SyntheticText(workload, vocabulary)
        own = array("I", (_draw(workload.prompt, rng) for _ in range(count * turns)))
        text.own, text.prefixes = own, _prefixes(workload, count, rng)
        prefix_tokens = workload.prefix.tokens if workload.prefix else 0
        prompts = array(
            "I", (own[number * turns] + (prefix_tokens if text.prefixes[number] >= 0 else 0) for number in range(count))
        )
    assert workload.output is not None
    outputs = array("I", (_draw(workload.output, rng) for _ in range(count * turns)))
    due = arrivals.times_s(workload, count)
    return Traffic(workload, due, prompts, outputs, text, _adapters(workload, count))


def _prefixes(workload: Workload, count: int, rng: random.Random) -> array[int]:
    """Return the index of the shared prefix of each request; -1: none."""
    prefix = workload.prefix
    if prefix is None:
        return array("i", [-1]) * count
    pick = range(prefix.distinct)
    return array("i", (rng.choice(pick) if rng.random() < prefix.share else -1 for _ in range(count)))


def _adapters(workload: Workload, count: int) -> list[Adapter | None]:
    if not workload.adapters:
        return []
    rng = random.Random(f"adapters {workload.seed}")
    rest = max(0.0, 1 - sum(adapter.share for adapter in workload.adapters))
    return rng.choices([*workload.adapters, None], [*(adapter.share for adapter in workload.adapters), rest], k=count)


def _draw(length: Length, rng: random.Random) -> int:
    if isinstance(length, Fixed):
        return length.tokens
    if isinstance(length, Uniform):
        return rng.randint(length.low, length.high)
    sigma = math.log(length.p95 / length.median) / 1.6448536
    drawn = max(1, round(rng.lognormvariate(math.log(length.median), sigma)))
    return min(drawn, length.max) if length.max else drawn


@lru_cache(maxsize=8)  # every level of a study needs the same; drawing one holds up the senders of others for 0.1 s
def _pool(words: tuple[str, ...], seed: str) -> list[str]:
    return random.Random(seed).choices(words, k=_POOL_WORDS)


class _Words:
    """Text of an exact number of words: a unique salt, then a slice of a random sequence of words."""

    def __init__(self, workload: Workload, vocabulary: Vocabulary) -> None:
        self.words = vocabulary.words(workload.content)
        self.seed = workload.seed
        self.seeded_pool = _pool(self.words, f"river {workload.seed}")
        self.fixed_pool = _pool(self.words, "prefixes")

    def own(self, number: int, tokens: int) -> str:
        """Return the text of a number, different for every number and seed."""
        salt = self._salt(self.seed << 40 | number)[:tokens]
        return " ".join(salt + self._slice(self.seeded_pool, number, tokens - len(salt)))

    def shared(self, number: int, tokens: int) -> str:
        """Return the shared prefix of a number, the same for every seed."""
        salt = self._salt(number)[:tokens]
        return " ".join(salt + self._slice(self.fixed_pool, number, tokens - len(salt)))

    def _slice(self, pool: list[str], number: int, tokens: int) -> list[str]:
        start = number * 7919 % _POOL_WORDS
        words = pool[start : start + tokens]
        while len(words) < tokens:
            words += pool[: tokens - len(words)]
        return words

    def _salt(self, number: int) -> list[str]:
        """Encode a number in words, different for every number; consecutive numbers give dissimilar words."""
        mixed = number * _SALT_FACTOR % 2**_SALT_BITS
        salt = []
        for _ in range(math.ceil(_SALT_BITS / math.log2(len(self.words)))):
            mixed, digit = divmod(mixed, len(self.words))
            salt.append(self.words[digit])
        return salt


class _SyntheticText(TextMaker):
    own: array[int]
    prefixes: array[int]

    def __init__(self, workload: Workload, vocabulary: Vocabulary) -> None:
        self.words = _Words(workload, vocabulary)
        self.turns = workload.turns.count if workload.turns else 1
        tokens = workload.prefix.tokens if workload.prefix else 0
        self.prefix = lru_cache(maxsize=4096)(lambda number: self.words.shared(number, tokens))

    def messages(self, number: int, turn: int) -> Messages:
        index = number * self.turns + turn
        messages = [{"role": "user", "content": self.words.own(index, self.own[index])}]
        if turn == 0 and self.prefixes[number] >= 0:
            messages.insert(0, {"role": "system", "content": self.prefix(self.prefixes[number])})
        return messages

    def tokens(self, number: int, turn: int) -> int:
        return self.own[number * self.turns + turn]

    def cacheable_share(self, traffic: Traffic) -> float:
        prefix = traffic.workload.prefix
        length = prefix.tokens if prefix else 0
        prefixes = [length if number >= 0 else 0 for number in self.prefixes]
        first_use = len(set(self.prefixes) - {-1}) * length
        return _cacheable(prefixes, self.own, traffic, cached=sum(prefixes) - first_use)


def _cacheable(prefixes: Sequence[int], own: Sequence[int], traffic: Traffic, *, cached: int) -> float:
    """Return the cacheable share of prompt tokens: `cached` tokens of first turns, and the history of later turns."""
    total, turns = 0, traffic.turns
    for number, history in enumerate(prefixes):
        for turn in range(turns):
            index = number * turns + turn
            cached += history if turn else 0
            history += own[index]
            total += history
            history += traffic.output_tokens[index]
    return cached / total if total else 0.0


class _DatasetText(TextMaker):
    def __init__(self, workload: Workload, count: int, base: Path, vocabulary: Vocabulary) -> None:
        assert workload.dataset is not None
        rows = json_rows(base / workload.dataset.path)
        chats = [
            chat for number, row in enumerate(rows, 1) if (chat := _chat(row, f"{workload.dataset.path}:{number}"))
        ]
        if not chats:
            raise InputError(
                f"{workload.dataset.path} contains no prompts",
                hint="each line must be JSON with 'messages', 'turns', 'conversations', 'prompt', 'question' or 'text'",
            )
        order = list(range(len(chats)))
        random.Random(f"order {workload.seed}").shuffle(order)
        self.chats, self.order = chats, [order[number % len(order)] for number in range(count)]
        repeats = count - len({json.dumps(chats[chosen][0]) for chosen in self.order})
        self.repeats = 0 if workload.dataset.repeat else repeats
        texts = [" ".join(message["content"] for message in turn) for chat in chats for turn in chat]
        counted = iter(vocabulary.count(texts))
        self.lengths = [[next(counted) for _ in chat] for chat in chats]

    def tokens(self, number: int, turn: int) -> int:
        lengths = self.lengths[self.order[number]]
        return lengths[turn % len(lengths)]

    def messages(self, number: int, turn: int) -> Messages:
        chat = self.chats[self.order[number]]
        return chat[turn % len(chat)]

    def cacheable_share(self, traffic: Traffic) -> float:
        turns, count = traffic.turns, len(traffic)
        own = [self.tokens(number, turn) for number in range(count) for turn in range(turns)]
        seen: set[int] = set()
        cached = 0
        for number, chosen in enumerate(self.order):
            cached += own[number * turns] if chosen in seen else 0
            seen.add(chosen)
        return _cacheable([0] * count, own, traffic, cached=cached if self.repeats == 0 else 0)


def _chat(row: dict[str, Any], source: str) -> list[Messages]:
    """Return the turns of a dataset row, each as the messages that it adds."""
    try:
        return _turns(row)
    except MALFORMED as error:
        raise InputError(f"{source}: this line is not a chat: {error!r}"[:500], hint="see a dataset's keys") from None


def _turns(row: dict[str, Any]) -> list[Messages]:
    if isinstance(row.get("messages"), list):
        messages = [{"role": str(m["role"]), "content": str(m["content"])} for m in row["messages"]]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()
        return [messages] if messages else []
    if isinstance(row.get("turns"), list):
        return [[{"role": "user", "content": str(turn)}] for turn in row["turns"]]
    if isinstance(row.get("conversations"), list):
        turns = [str(one.get("value", "")) for one in row["conversations"] if one.get("from") in ("human", "user")]
        return [[{"role": "user", "content": text}] for text in turns if text]
    text = next((row[key] for key in ("prompt", "question", "instruction", "text") if row.get(key)), None)
    return [[{"role": "user", "content": str(text)}]] if text else []


class _TraceText(TextMaker):
    def __init__(self, workload: Workload, vocabulary: Vocabulary) -> None:
        assert workload.trace is not None
        self.words, self.block_tokens = _Words(workload, vocabulary), workload.trace.block_tokens
        self.lengths = array("I")
        self.ids = array("Q")  # hash ids of Mooncake blocks
        self.ends = array("Q")  # end index of each request's hash ids
        self.block = lru_cache(maxsize=1 << 15)(self._block)

    def tokens(self, number: int, turn: int) -> int:
        return self.lengths[number]

    def _block(self, hash_id: int) -> list[str]:
        return self.words.own(hash_id, self.block_tokens).split(" ")

    def messages(self, number: int, turn: int) -> Messages:
        tokens, begin = self.lengths[number], self.ends[number - 1] if number else 0
        ids = self.ids[begin : self.ends[number]]
        if not ids:
            content = self.words.own(number, tokens)
        else:
            words: list[str] = []
            for hash_id in ids:
                words += self.block(hash_id)
            content = " ".join(words[:tokens])
            if (rest := tokens - len(ids) * self.block_tokens) > 0:  # text after the last block is unique
                content += " " + self.words.own(number + (1 << 40), rest)
        return [{"role": "user", "content": content}]

    def cacheable_share(self, traffic: Traffic) -> float:
        seen: set[int] = set()
        cached = begin = 0
        for number in range(len(traffic)):
            ids = self.ids[begin : self.ends[number]]
            begin = self.ends[number]
            remaining = self.lengths[number]
            for hash_id in ids:
                if hash_id not in seen:
                    break
                cached += min(remaining, self.block_tokens)
                remaining -= self.block_tokens
            seen.update(ids)
        return cached / max(1, sum(self.lengths))


def _of_trace(workload: Workload, count: int, vocabulary: Vocabulary, base: Path) -> Traffic:
    """Read a trace into columns; after its end it repeats with new block ids, so that repeats are not cache hits."""
    assert workload.trace is not None
    text = _TraceText(workload, vocabulary)
    recorded, outputs = array("d"), array("I")
    max_rows = min(workload.trace.first or count, count)
    for when, prompt, output, ids in request_rows(workload.trace, base):
        recorded.append(when)
        text.lengths.append(max(1, prompt))
        outputs.append(max(1, output))
        text.ids.extend(ids)
        text.ends.append(len(text.ids))
        if len(recorded) >= max_rows:
            break
    if not recorded:
        raise InputError(
            f"{workload.trace.path} contains no requests", hint="use a Mooncake JSONL or an Azure CSV file"
        )
    length, blocks = len(recorded), len(text.ids)
    id_offset = max(text.ids, default=0) + 1
    for number in range(length, count):
        row, repeat = number % length, number // length
        begin, end = text.ends[row - 1] if row else 0, text.ends[row]
        text.lengths.append(text.lengths[row])
        outputs.append(outputs[row])
        text.ids.extend((hash_id + id_offset * repeat) % MAX_ID for hash_id in text.ids[begin:end])
        text.ends.append(repeat * blocks + end)
    due = arrivals.times_s(workload, count, recorded_s=recorded)
    return Traffic(workload, due, text.lengths, outputs, text, _adapters(workload, count))


def recorded_rate(workload: Workload, *, base: Path | None = None) -> float:
    """Return the mean rate of a trace at its recorded speed."""
    assert workload.trace is not None
    times = [row[0] for row in request_rows(workload.trace, base or Path())][: workload.trace.first]
    return max(1, len(times) - 1) / max(1e-9, times[-1] - times[0])


def users(workload: Workload) -> int:
    """Return the number of users of a closed loop; 0 for open arrivals."""
    return workload.arrivals.users if isinstance(workload.arrivals, Closed) else 0


def preview_count(workload: Workload, *, base: Path | None = None) -> int:
    """Return how many requests a preview shows: all of a trace, a thousand otherwise."""
    if workload.trace is None:
        return 1000
    return workload.trace.first or sum(1 for _ in request_rows(workload.trace, base or Path()))
