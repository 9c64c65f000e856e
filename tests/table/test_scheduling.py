"""The simulator of scale.md: bounds that every schedule keeps, and small schedules known by hand."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.benchmarks.scheduling import Costs, Failure, Job, longest_chain, makespan, queue

seconds = st.integers(0, 50).map(float)
workers = st.integers(1, 6)


@st.composite
def tables(draw: st.DrawFn) -> list[Job]:
    """Cells, some of which start from an earlier one."""
    jobs: list[Job] = []
    for duration in draw(st.lists(seconds, min_size=1, max_size=14)):
        after = draw(st.none() | st.integers(0, len(jobs) - 1)) if jobs else None
        jobs.append(Job(duration, after))
    return jobs


@given(tables(), workers)
def test_no_schedule_is_shorter_than_its_work_or_longer_than_grahams_bound(jobs: list[Job], count: int) -> None:
    total, chain = sum(job.seconds for job in jobs), longest_chain(jobs)
    found = makespan(queue(jobs, count))
    assert max(total / count, chain) <= found + 1e-9
    assert found <= total / count + (1 - 1 / count) * chain + 1e-9


@given(tables(), workers, seconds, seconds)
def test_overheads_are_paid_once_a_worker_and_once_a_cell(
    jobs: list[Job], count: int, start: float, cell: float
) -> None:
    longer = [Job(job.seconds + cell, job.after) for job in jobs]
    assert queue(jobs, count, Costs(start, cell)) == pytest.approx([start + end for end in queue(longer, count)])


@given(tables())
def test_one_worker_runs_cells_one_after_the_other(jobs: list[Job]) -> None:
    ends = queue(jobs, 1)
    assert ends == [sum(job.seconds for job in jobs[: i + 1]) for i in range(len(jobs))]


@given(tables(), workers)
def test_a_cell_ends_after_the_one_that_it_starts_from(jobs: list[Job], count: int) -> None:
    ends = queue(jobs, count)
    assert all(job.after is None or ends[job.after] + job.seconds <= end for job, end in zip(jobs, ends, strict=True))


@settings(max_examples=300)
@given(
    st.lists(seconds, min_size=1, max_size=12),
    workers,
    st.lists(st.tuples(st.integers(0, 5), seconds, st.integers(0, 20).map(float)), max_size=5),
    st.sampled_from([Costs(), Costs(3, 2), Costs(3, 2, 5), Costs(save_every=4)]),
)
def test_a_failure_only_adds(
    durations: list[float], count: int, lost: list[tuple[int, float, float]], costs: Costs
) -> None:
    """Each failure, in order of time, to what the earlier ones left."""
    jobs = [Job(duration) for duration in durations]
    failures = sorted((Failure(worker % count, at, back) for worker, at, back in lost), key=lambda each: each.at)
    found = [makespan(queue(jobs, count, costs, failures[:n])) for n in range(len(failures) + 1)]
    assert found == sorted(found)
    total = sum(durations) + costs.cell * len(jobs)
    assert found[0] >= costs.start + total / count - 1e-9


def test_a_lost_cell_continues_from_its_checkpoint_on_another_worker() -> None:
    jobs, never = [Job(10.0), Job(4.0), Job(4.0)], Failure(0, 7.0)
    assert queue(jobs, 2) == [10, 4, 8]
    assert queue(jobs, 2, failures=[never]) == [18, 4, 8], "all ten seconds again, after the running cell"
    assert queue(jobs, 2, Costs(save_every=3.0), [never]) == [12, 4, 8], "six of ten seconds are kept"
    assert queue(jobs, 2, Costs(save_every=3.0), [Failure(0, 7.0, back=0.5)]) == [11.5, 4, 8]
    assert queue(jobs, 2, Costs(start=1.0, save_every=3.0), [Failure(0, 8.0, back=0.0)]) == [13, 5, 9]


def test_work_without_workers_is_an_error() -> None:
    with pytest.raises(ValueError, match="no worker is left for 1 cells"):
        queue([Job(5.0)], 1, failures=[Failure(0, 1.0)])
    assert queue([Job(1.0)], 1, failures=[Failure(0, 1.0)]) == [1.0], "what ends at that moment has ended"
    assert makespan(queue([], 3)) == 0 and math.isinf(Failure(0, 1.0).back)
