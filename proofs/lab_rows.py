"""The measured rows that the lab's engines are built on: their selection, and how well left-out rows are predicted."""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from powerband.testing.lab import truth
from powerband.testing.lab.batching import Batching, Latencies, PagedCache, closed_loop
from powerband.testing.lab.truth import Row

SOURCE = Path(__file__).parent / "data" / "silicon" / "silicon_clean.csv"
TABLE = Path(truth.__file__).with_name("truth.csv")
COLUMNS = ("model", "system", "backend", "precision", "tp", "isl", "osl", "concurrency", "ttft_ms", "tpot_ms")
_LEAST = 4  # concurrencies of a series
_LONGEST = 1024  # output tokens
SPREAD = 0.1  # of lengths: most rows were measured with InferenceMAX's random_range_ratio of 0.8


def select() -> list[dict[str, str]]:
    """Return the rows of the table.

    Of each model, system, precision and tp: one backend (vLLM if it was measured) in one version and split of experts,
    and of that, at the longest answers up to 1024 tokens, the series with the shortest and the longest prompts.
    """
    configs: dict[tuple[str, ...], dict[tuple[str, ...], dict[tuple[int, int], dict[int, dict[str, str]]]]] = (
        defaultdict(lambda: defaultdict(lambda: defaultdict(dict)))
    )
    with SOURCE.open() as stream:
        for raw in csv.DictReader(stream):
            if raw["scored"] != "True" or raw["pp_size"] != "1" or raw["attention_dp_size"] not in ("", "1"):
                continue
            if raw["model_path"] not in truth.ACTIVE_PARAMETERS:
                continue
            users = int(float(raw["conc"] or raw["batch_size"]))
            row = dict(
                zip(
                    COLUMNS,
                    (
                        raw["model_path"], raw["system"].replace("_", "-"), raw["backend"], raw["precision"] or "bf16",
                        raw["tp_size"], raw["isl"], raw["osl"], str(users),
                        f"{float(raw['silicon_ttft_ms']):.5g}", f"{float(raw['silicon_tpot_ms']):.5g}",
                    ),
                    strict=True,
                )
            )  # fmt: skip
            config = (row["model"], row["system"], row["precision"], row["tp"])
            variant = (raw["backend"], raw["backend_version"], raw["moe_tp_size"], raw["moe_ep_size"])
            configs[config][variant][int(row["isl"]), int(row["osl"])].setdefault(users, row)
    found = []
    for _, variants in sorted(configs.items()):
        long = {
            variant: {shape: rows for shape, rows in series.items() if len(rows) >= _LEAST}
            for variant, series in variants.items()
        }
        _, series = max(long.items(), key=lambda one: (one[0][0] == "vllm" and bool(one[1]), _size(one[1]), one[0]))
        lengths = [(isl, osl) for isl, osl in series if osl <= _LONGEST]
        longest = [(isl, osl) for isl, osl in lengths if osl == max(osl for _, osl in lengths)]
        for shape in sorted(set(longest) & {min(longest, default=()), max(longest, default=())}):
            found += [row for _, row in sorted(series[shape].items())]
    return found


def write() -> None:
    """Write the table."""
    with TABLE.open("w", newline="") as stream:
        table = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        table.writeheader()
        table.writerows(select())


def left_out() -> Iterator[tuple[Row, Latencies]]:
    """Yield each row that is not at an end of its series, with the latencies simulated from the other rows."""
    configs: dict[tuple[str, ...], list[Row]] = defaultdict(list)
    for row in truth.read_rows():
        configs[row.model, row.system, row.precision, str(row.tp)].append(row)
    for rows in configs.values():
        for row in rows:
            series = [one.concurrency for one in rows if (one.isl, one.osl) == (row.isl, row.osl)]
            if min(series) < row.concurrency < max(series):
                yield row, simulated(row, [one for one in rows if one is not row])


def simulated(row: Row, known: Sequence[Row]) -> Latencies:
    """Simulate the load of a row with the step times of other rows."""
    blocks = row.concurrency * (2 * (row.isl + row.osl) + 16) // 16
    batching = Batching(
        truth.step_times_from(known),
        PagedCache(blocks=blocks, prefix_caching=False),
        max_batched_tokens=truth.CHUNK_TOKENS,
        max_sequences=row.concurrency,
    )
    return closed_loop(
        batching,
        users=row.concurrency,
        requests=truth.ROUNDS * row.concurrency,
        prompt_tokens=row.isl,
        output_tokens=row.osl,
        spread=SPREAD,
    )


def _size(series: dict[tuple[int, int], dict[int, dict[str, str]]]) -> int:
    return sum(map(len, series.values()))


if __name__ == "__main__":
    write()
