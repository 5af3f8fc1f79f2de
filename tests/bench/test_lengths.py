import numpy as np
import pytest

from rolloutd.bench.lengths import BETWEEN_PROMPTS_SHARE, LogNormal, Tokens

WIDE = LogNormal(7.056, 0.988, 1, 10**9)


def split(logs: np.typing.NDArray[np.float64]) -> tuple[float, float]:
    """Variance between and within groups, by analysis of variance; shape (groups, samples)."""
    within = float(logs.var(axis=1, ddof=1).mean())
    between = float(logs.mean(axis=1).var(ddof=1)) - within / logs.shape[1]
    return between, within


def draw(dist: LogNormal, groups: int, samples: int, share: float = BETWEEN_PROMPTS_SHARE) -> Tokens:
    return dist.draw_groups(np.random.default_rng(1), np.random.default_rng(2), groups, samples, share)


@pytest.mark.parametrize("share", [0.0, BETWEEN_PROMPTS_SHARE, 1.0])
def test_variance_of_the_log_splits_as_asked_and_the_marginal_does_not_move(share: float) -> None:
    logs = np.log(draw(WIDE, 20_000, 8, share))
    between, within = split(logs)
    assert between / (between + within) == pytest.approx(share, abs=0.01)
    assert between + within == pytest.approx(0.988**2, rel=0.02)
    assert logs.mean() == pytest.approx(7.056, abs=0.02)


def test_w1_output_has_the_published_percentiles() -> None:
    """P50 1,160 and P90 4,115. Mean and p99 are those of the clipped distribution, by integration."""
    lengths = draw(LogNormal(7.056, 0.988, 1, 16_384), 50_000, 8)
    assert np.percentile(lengths, 50) == pytest.approx(1_160, rel=0.02)
    assert np.percentile(lengths, 90) == pytest.approx(4_115, rel=0.02)
    assert np.percentile(lengths, 99) == pytest.approx(np.exp(7.056 + 0.988 * 2.3263), rel=0.03)
    assert lengths.mean() == pytest.approx(1_864, rel=0.02)
    assert (lengths == 16_384).mean() == pytest.approx(0.0037, abs=0.001)


def test_second_epoch_keeps_the_prompt_part_and_renews_the_rest() -> None:
    first = WIDE.draw_groups(np.random.default_rng(1), np.random.default_rng(2), 20_000, 1)
    second = WIDE.draw_groups(np.random.default_rng(1), np.random.default_rng(3), 20_000, 1)
    correlation = np.corrcoef(np.log(first[:, 0]), np.log(second[:, 0]))[0, 1]
    assert correlation == pytest.approx(BETWEEN_PROMPTS_SHARE, abs=0.02)


def test_lengths_stay_in_range_and_reach_both_ends() -> None:
    lengths = LogNormal(4.97, 0.45, 100, 200).draw(np.random.default_rng(0), 10_000)
    assert lengths.shape == (10_000,)
    assert (lengths.min(), lengths.max()) == (100, 200)


def test_a_length_beyond_any_integer_is_clipped_not_wrapped() -> None:
    assert set(LogNormal(60.0, 0.0, 1, 5).draw(np.random.default_rng(0), 3).tolist()) == {5}


def test_capping_lowers_the_upper_end_and_never_raises_it() -> None:
    assert WIDE.capped(256) == LogNormal(7.056, 0.988, 1, 256)
    assert LogNormal(1.0, 1.0, 4, 8).capped(100).high_tokens == 8
    with pytest.raises(ValueError, match="cap of 3 tokens is under the shortest length, 4"):
        LogNormal(1.0, 1.0, 4, 8).capped(3)


@pytest.mark.parametrize(
    ("sigma", "low", "high", "message"), [(-0.1, 1, 2, "sigma"), (0.1, 0, 2, "range"), (0.1, 3, 2, "range")]
)
def test_impossible_distributions_are_refused(sigma: float, low: int, high: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LogNormal(1.0, sigma, low, high)


def test_impossible_share_is_refused() -> None:
    with pytest.raises(ValueError, match="between_share"):
        draw(WIDE, 1, 1, 1.5)
