"""The statistics that users see, each in one way: pure. None where a statistic is not defined."""

import math
import statistics
from collections.abc import Sequence


def mean(values: Sequence[float]) -> float | None:
    """The arithmetic mean; None of no values."""
    return statistics.fmean(values) if values else None


def sample_std(values: Sequence[float]) -> float | None:
    """The standard deviation of a sample (n - 1), as torch's `std`; None of fewer than two values."""
    return statistics.stdev(values) if len(values) > 1 else None


def standard_error(groups: Sequence[Sequence[float]]) -> float | None:
    """The standard error of the mean over all values, where those of a group are not independent of one another.

    Clustered by group as in Miller 2024 (arXiv 2411.00640), with the correction G/(G - 1) for few groups. Where each group
    has one value, that is the sample standard deviation over √n. None of fewer than two groups with values.
    """
    filled = [group for group in groups if group]
    if len(filled) < 2:
        return None
    values = [value for group in filled for value in group]
    centre = statistics.fmean(values)
    sums = (math.fsum(value - centre for value in group) for group in filled)
    return math.sqrt(math.fsum(total**2 for total in sums) * len(filled) / (len(filled) - 1)) / len(values)


def pass_at_k(graded: int, passed: int, k: int) -> float:
    """The chance that at least one of k rollouts, drawn without replacement from the graded ones, passed.

    The unbiased estimator of Chen et al. 2021 (arXiv 2107.03374). Needs 1 ≤ k ≤ graded.
    """
    return 1.0 - math.comb(graded - passed, k) / math.comb(graded, k)
