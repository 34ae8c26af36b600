"""The lab's batching: schedules worked out by hand, and invariants under random load."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerband.testing.lab.batching import Batching, PagedCache, Request, SlotCache, Step, closed_loop
from powerband.testing.lab.truth import Curve, StepTimes

TIMES = StepTimes((Curve(0.0, (0.0,), (math.log(0.01),)),), prefill_s_per_token=0.001, request_s=0.5)


def paged(
    *, blocks: int = 100, block_tokens: int = 4, budget: int = 100, sequences: int = 8, caching: bool = True
) -> Batching:
    cache = PagedCache(blocks=blocks, block_tokens=block_tokens, prefix_caching=caching)
    return Batching(TIMES, cache, max_batched_tokens=budget, max_sequences=sequences)


def request(prompt: int, output: int, *, first: int = 0) -> Request:
    return Request(range(first, first + prompt), range(1000, 1000 + output))


def next_step(batching: Batching) -> Step:
    step = batching.step()
    assert step is not None
    return step


def run(batching: Batching, one: Request) -> Request:
    batching.add(one)
    while batching.step():
        pass
    return one


def test_a_prompt_is_computed_in_chunks_and_then_decoded() -> None:
    batching, one = paged(budget=4), request(5, 3)
    batching.add(one)
    steps = []
    while step := batching.step():
        steps.append((step.prefill_tokens, step.decode_sequences, len(step.tokens), len(step.finished)))
        assert step.duration_s == pytest.approx(0.01 + 0.001 * step.prefill_tokens)
    assert steps == [(4, 0, 0, 0), (1, 0, 1, 0), (0, 1, 1, 0), (0, 1, 1, 1)]
    assert batching.running == [] and batching.cache.usage == 0


def test_two_requests_interleave() -> None:
    batching, a, b = paged(), request(4, 3), request(3, 3, first=50)
    batching.add(a)
    assert next_step(batching).tokens == (a,)
    batching.add(b)
    mixed = next_step(batching)
    assert mixed.tokens == (a, b) and mixed.admitted == (b,)
    assert mixed.duration_s == pytest.approx(0.013)
    assert next_step(batching).finished == (a,)
    assert a in batching.running, "it runs until the step ends"
    assert next_step(batching).finished == (b,)
    assert batching.step() is None


def test_no_more_than_max_sequences_run_and_the_queue_is_first_come_first_served() -> None:
    batching = paged(sequences=2)
    requests = [request(4, 2, first=100 * number) for number in range(3)]
    for one in requests:
        batching.add(one)
    assert next_step(batching).admitted == tuple(requests[:2])
    assert len(batching.waiting) == 1
    assert next_step(batching).finished == tuple(requests[:2])
    assert next_step(batching).admitted == (requests[2],)


def test_prefix_hits_are_counted_in_whole_blocks() -> None:
    batching = paged(block_tokens=4)
    cached = [run(batching, request(size, 2)).cached for size in (10, 10, 8, 3)]
    assert cached == [0, 8, 4, 0], "the last token of a prompt is always computed"
    assert run(batching, request(10, 2, first=7)).cached == 0
    assert (batching.prefix_queries_tokens, batching.prefix_hits_tokens) == (10 + 10 + 8 + 3 + 10, 12)


def test_a_running_request_shares_its_blocks() -> None:
    batching = paged(block_tokens=4)
    a, b = request(8, 5), request(9, 5)
    batching.add(a)
    next_step(batching)
    batching.add(b)
    assert next_step(batching).prefill_tokens == 1
    assert batching.cache.usage == pytest.approx(4 / 100), "two shared blocks, and one for each"


def test_an_answer_is_part_of_the_next_prefix() -> None:
    batching = paged(block_tokens=4)
    run(batching, Request(range(6), range(50, 57)))
    next_turn = Request((*range(6), *range(50, 57), 99), (1,))
    assert run(batching, next_turn).cached == 12


def test_without_prefix_caching_nothing_is_found() -> None:
    batching = paged(caching=False)
    assert [run(batching, request(10, 2)).cached for _ in range(2)] == [0, 0]


def test_the_end_of_the_least_recently_used_prefix_is_evicted_first() -> None:
    batching = paged(blocks=4, block_tokens=4)
    run(batching, request(8, 1))  # two blocks stay in the prefix cache
    run(batching, request(12, 1, first=100))  # needs three of four blocks
    assert run(batching, request(9, 1)).cached == 4


@pytest.mark.parametrize(("caching", "computed_again"), [(True, 3), (False, 5)])
def test_the_newest_request_is_preempted_and_computed_again(caching: bool, computed_again: int) -> None:
    batching = paged(blocks=4, block_tokens=2, caching=caching)
    a, b = request(3, 4), request(3, 4, first=50)
    batching.add(a)
    batching.add(b)
    assert [next_step(batching).tokens for _ in range(2)] == [(a, b), (a, b)]
    assert next_step(batching).tokens == (a,)
    assert batching.preemptions == 1 and list(batching.waiting) == [b]
    assert next_step(batching).finished == (a,)
    resumed = next_step(batching)
    assert resumed.admitted == (b,) and resumed.prefill_tokens == computed_again
    assert b.generated == 3
    assert next_step(batching).finished == (b,)
    assert batching.step() is None and batching.cache.usage == 0
    assert batching.prefix_queries_tokens == 6, "the second admission is no query"


def test_an_aborted_request_frees_its_blocks() -> None:
    batching, a, b, c = paged(sequences=2), request(4, 9), request(4, 1, first=50), request(4, 9, first=90)
    for one in (a, b, c):
        batching.add(one)
    next_step(batching)
    for one in (a, b, c):
        batching.abort(one)
    assert batching.step() is None
    assert batching.cache.usage == 0 and not batching.waiting


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(ValueError, match="never fits"):
        paged(blocks=2, block_tokens=4).add(request(6, 3))


LOAD = st.lists(
    st.tuples(st.integers(1, 30), st.integers(1, 20), st.integers(0, 2), st.integers(0, 5)), min_size=1, max_size=15
)


@given(LOAD, st.integers(13, 40), st.integers(1, 12), st.integers(1, 5), st.booleans())
def test_random_loads_keep_the_limits_and_end(
    load: list[tuple[int, int, int, int]], blocks: int, budget: int, sequences: int, caching: bool
) -> None:
    batching = paged(blocks=blocks, block_tokens=4, budget=budget, sequences=sequences, caching=caching)
    cache = batching.cache
    assert isinstance(cache, PagedCache)
    requests = [request(prompt, output, first=100 * family) for prompt, output, family, _ in load]
    delays = [delay for *_, delay in load]
    got = dict.fromkeys(requests, 0)
    pending = list(zip(requests, delays, strict=True))
    for _ in range(10_000):
        while pending and pending[0][1] <= 0:
            batching.add(pending.pop(0)[0])
        step = batching.step()
        if pending:
            pending[0] = (pending[0][0], pending[0][1] - 1)
        elif step is None:
            break
        if step is None:
            continue
        assert step.prefill_tokens + step.decode_sequences <= budget
        assert len(batching.running) <= sequences
        shared = {key for one in batching.running for key in one.blocks if key is not None}
        used = len(shared) + sum(one.blocks.count(None) for one in batching.running)
        assert used <= blocks and cache.usage == pytest.approx(used / blocks)
        for one in batching.running:
            assert len(one.blocks) == math.ceil(one.computed / 4)
        for one in step.tokens:
            got[one] += 1
    assert got == {one: len(one.output) for one in requests}
    assert cache.free == blocks


def slots(count: int = 2, context: int = 40) -> Batching:
    cache = SlotCache(slots=count, context_per_slot=context)
    return Batching(TIMES, cache, max_batched_tokens=100, max_sequences=count)


def test_slots_limit_the_requests_and_share_nothing() -> None:
    batching = slots()
    requests = [request(20, 5) for _ in range(3)]
    for one in requests:
        batching.add(one)
    first = next_step(batching)
    assert first.admitted == tuple(requests[:2]) and first.prefill_tokens == 40, "equal prompts, no shared prefix"
    assert batching.cache.usage == pytest.approx(40 / 80)
    while batching.step():
        pass
    assert [one.cached for one in requests] == [0, 0, 19]


def test_a_slot_is_chosen_by_its_prefix_and_else_by_its_age() -> None:
    batching = slots()
    run(batching, request(20, 2))
    run(batching, request(20, 2, first=100))  # in the slot that was never used
    assert run(batching, request(10, 2, first=100)).cached == 9
    assert run(batching, request(20, 2, first=200)).cached == 0  # in the oldest slot
    assert run(batching, request(20, 2)).cached == 0
    assert run(batching, request(20, 2, first=200)).cached == 19


def test_a_slot_has_its_own_context_limit() -> None:
    batching = slots(context=24)
    batching.add(request(20, 4))
    with pytest.raises(ValueError, match="never fits"):
        batching.add(request(20, 5))


def test_a_closed_loop_in_virtual_time() -> None:
    found = closed_loop(paged(), users=1, requests=2, prompt_tokens=4, output_tokens=3)
    assert found.ttft_s == pytest.approx(0.5 + 0.014)
    assert found.tpot_s == pytest.approx(0.01)
    together = closed_loop(paged(), users=2, requests=2, prompt_tokens=4, output_tokens=3)
    assert together.ttft_s == pytest.approx(0.5 + 0.018)
    apart = closed_loop(paged(budget=4), users=2, requests=2, prompt_tokens=4, output_tokens=3)
    assert apart.ttft_s == pytest.approx(0.5 + (0.014 + (0.014 + 0.013 + 0.011)) / 2)
