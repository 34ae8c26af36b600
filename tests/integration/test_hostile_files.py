"""Hostile files end in one sentence with a hint and exit code 2, in bounded memory and time."""

from pathlib import Path

from support import hostile


def test_files_written_by_hand_are_refused(tmp_path: Path) -> None:
    hostile.preload(tmp_path)
    outcomes = [hostile.run(case) for case in hostile.by_hand(tmp_path)]
    assert len(outcomes) >= 30
    assert not [problem for one in outcomes if (problem := one.problem())]


def test_mutated_files_are_read_or_refused(tmp_path: Path) -> None:
    hostile.preload(tmp_path)
    originals = tuple(sorted((Path(__file__).parents[1] / "fixtures/documents-0.1").iterdir()))
    outcomes = [hostile.run(case) for case in hostile.fuzzed(tmp_path, 60, seed=7, originals=originals)]
    assert not [problem for one in outcomes if (problem := one.problem(may_succeed=True))]


def test_a_command_that_needs_too_much_memory_or_time_would_be_noticed(tmp_path: Path) -> None:
    """The test's own limits work: a crash, an endless run and a success are problems."""
    case = hostile.Case("x", ("show", "chat"))
    assert hostile.run(case).problem() == "x: exit 0: "
    for outcome in (
        hostile.Outcome(case, -1, 14, "", 30.0, 0),
        hostile.Outcome(case, -1, 11, "", 0.1, 0),
        hostile.Outcome(case, 1, 0, "Traceback (most recent call last):", 0.1, 0),
        hostile.Outcome(case, 2, 0, "error: no", 0.1, 0),
    ):
        assert outcome.problem()
