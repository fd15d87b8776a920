//! Decides during a rollout whether the candidate is worse, by a test that may be looked at after every run.
//!
//! The interval is the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas, "Time-uniform central
//! limit theory and asymptotic confidence sequences" (Annals of Statistics 52, 2024; arXiv:2103.06476): with a probability of
//! 95 % the true difference is in the intervals of all times. Divided by its variance, a difference of two means is a Brownian
//! motion with drift, with the inverse of the variance as its time (Jennison and Turnbull, "Group Sequential Methods", 1999). So the
//! share of runs that the candidate gets may change at any time, if not because of the results.

/// The runs of one version so far.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sample {
    pub n: u64,
    pub mean: f64,
    /// The sample variance; 0 for a single run.
    pub variance: f64,
}

/// Candidate - current.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interval {
    pub difference: f64,
    pub low: f64,
    pub high: f64,
}

/// The probability that the truth is ever outside.
const ALPHA: f64 = 0.05;

impl Sample {
    /// A share of runs, such as those that did not fail.
    pub fn of_share(count: u64, n: u64) -> Self {
        let mean = count as f64 / n.max(1) as f64;
        Self {
            n,
            mean,
            variance: mean * (1.0 - mean) * n as f64 / n.saturating_sub(1).max(1) as f64,
        }
    }

    /// The variance as if one more run had differed by a score's whole range. A few runs with equal values do not prove that
    /// all have them: failures of 1 % raised false alarms in up to a third of the paths without this.
    fn cautious_variance(&self, range: f64) -> f64 {
        let n = self.n as f64;
        ((n - 1.0) * self.variance + range.powi(2)) / n
    }
}

/// The interval of the difference of both means; none before each version has `min_runs`. It is narrowest around `min_runs`,
/// which therefore must not change with the results.
pub fn interval(candidate: &Sample, current: &Sample, min_runs: u64) -> Option<Interval> {
    let min_runs = min_runs.max(1);
    if candidate.n.min(current.n) < min_runs {
        return None;
    }
    let difference = candidate.mean - current.mean;
    // Scores lie between 0 and 1, or their scale is unknown.
    let range = candidate.mean.abs().max(current.mean.abs()).max(1.0);
    let variances = [candidate, current].map(|sample| sample.cautious_variance(range));
    let variance = variances[0] / candidate.n as f64 + variances[1] / current.n as f64;
    // The number of runs of each version that would have this variance if both had the same number.
    let runs = (variances[0] + variances[1]) / variance;
    let tightest = -2.0 * ALPHA.ln();
    let rho_squared = (tightest + tightest.ln_1p()) / min_runs as f64;
    let time = runs * rho_squared;
    let reach = (variance * (time + 1.0) / time * ((time + 1.0) / ALPHA.powi(2)).ln()).sqrt();
    Some(Interval {
        difference,
        low: difference - reach,
        high: difference + reach,
    })
}

impl Interval {
    /// Whether the candidate is certainly more than `max_loss` below the current version.
    pub fn shows_loss(&self, max_loss: f64) -> bool {
        self.high < -max_loss
    }
}

#[cfg(test)]
mod tests {
    use super::{Sample, interval};

    /// The run of 10,000 after which a loss of more than `max_loss` is seen. Values are 0 or 1 with these means. Later, the
    /// candidate gets a half instead of a fifth of the runs. After the 2,000th, only every 20th is looked at, because tests are
    /// not optimized.
    fn loss_after(
        random: &mut fastrand::Rng,
        [current, candidate]: [f64; 2],
        max_loss: f64,
        min_runs: u64,
    ) -> Option<u64> {
        let mut counts = [(0, 0); 2];
        (1..=10_000).find(|run| {
            let share = if *run < 3_000 { 0.2 } else { 0.5 };
            let version = usize::from(random.f64() < share);
            let (ones, runs) = &mut counts[version];
            *runs += 1;
            *ones += u64::from(random.f64() < [current, candidate][version]);
            if *run > 2_000 && run % 20 != 0 {
                return false;
            }
            let [current, candidate] = counts.map(|(ones, runs)| Sample::of_share(ones, runs));
            interval(&candidate, &current, min_runs)
                .is_some_and(|interval| interval.shows_loss(max_loss))
        })
    }

    #[test]
    fn looking_all_the_time_raises_no_false_alarms() {
        // The loss that is just allowed, also with far too few runs to begin with, and rare scores.
        for (means, max_loss, min_runs) in [
            ([0.7, 0.65], 0.05, 200),
            ([0.7, 0.65], 0.05, 2),
            ([0.02, 0.02], 0.0, 50),
        ] {
            let mut random = fastrand::Rng::with_seed(41);
            let paths = (0..200).filter_map(|_| loss_after(&mut random, means, max_loss, min_runs));
            let alarms = paths.count();
            assert!(alarms <= 10, "{means:?} {min_runs}: {alarms} of 200");
        }
    }

    #[test]
    fn a_loss_is_found_within_some_thousand_runs() {
        let mut random = fastrand::Rng::with_seed(41);
        let paths = (0..50).map(|_| loss_after(&mut random, [0.7, 0.55], 0.05, 200));
        let mut after: Vec<u64> = paths.map(|run| run.expect("a loss")).collect();
        after.sort_unstable();
        assert!(after[25] < 2_500 && after[49] < 7_000, "{after:?}");
    }

    #[test]
    fn the_first_runs_decide_nothing() {
        let shows_loss = |failed| {
            let all = Sample::of_share(500, 500);
            interval(&Sample::of_share(0, failed), &all, 200).map(|it| it.shows_loss(0.05))
        };
        assert_eq!((shows_loss(199), shows_loss(200)), (None, Some(true)));
        let nothing = Sample::of_share(0, 0);
        assert_eq!(interval(&nothing, &nothing, 0), None);
        let one = Sample::of_share(1, 1);
        assert!(interval(&one, &nothing, 0).is_none());
        assert!(interval(&one, &one, 0).is_some_and(|it| it.low < -1.0 && it.high > 1.0));
    }

    /// The equation of the paper for one mean, whose variance is that of the difference.
    #[test]
    fn the_interval_is_that_of_the_paper() {
        let sample = Sample {
            n: 400,
            mean: 0.5,
            variance: 0.2,
        };
        let result = interval(&sample, &sample, 400).expect("an interval");
        let (alpha, time) = (0.05_f64, 400.0_f64);
        let sigma = (2.0 * (399.0 * 0.2 + 1.0) / 400.0_f64).sqrt();
        let rho_squared = (-2.0 * alpha.ln() + (-2.0 * alpha.ln() + 1.0).ln()) / time;
        let scaled = time * rho_squared + 1.0;
        let boundary = 2.0 * scaled / (time.powi(2) * rho_squared) * (scaled.sqrt() / alpha).ln();
        assert!(
            (result.high - sigma * boundary.sqrt()).abs() < 1e-12,
            "{result:?}"
        );
        assert_eq!((result.difference, result.low), (0.0, -result.high));
    }
}
