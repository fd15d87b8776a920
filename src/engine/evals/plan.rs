//! Which runs an evaluation has, and when the next one may start. Pure.

use jiff::Timestamp;

use crate::domain::evaluation::{EvalId, EvalSlot};
use crate::domain::usage::Cost;
use crate::store::IdempotencyClaim;

/// The runs of a case. Those of one repetition follow each other, so that an evaluation that stops has pairs.
pub fn slots(case: u32, versions: u8, repeat: u32) -> impl Iterator<Item = EvalSlot> {
    (0..repeat).flat_map(move |repeat| {
        (0..versions).map(move |version| EvalSlot {
            case,
            repeat,
            version,
        })
    })
}

/// What an evaluation with these mean costs of a run, by version, will cost; `None` if one is not known.
pub fn estimate(mean_costs: &[Option<Cost>], runs_of_version: u64) -> Option<Cost> {
    let sum = mean_costs.iter().try_fold(0_u64, |sum, cost| {
        Some(sum.saturating_add((*cost)?.0.saturating_mul(runs_of_version)))
    });
    sum.map(Cost)
}

/// What an evaluation has spent, and what the runs at work will have.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spending {
    pub budget: Option<Cost>,
    /// The estimate of one run.
    pub expected: Option<Cost>,
    pub spent: Cost,
    pub ended: u64,
    pub running: u64,
}

impl Spending {
    /// Whether the budget has something left once the runs at work have ended, if they cost what others did.
    pub fn affords_another(&self) -> bool {
        let Some(budget) = self.budget else {
            return true;
        };
        let mean = match (self.ended, self.expected) {
            // The first run shows what one costs.
            (0, None) if self.running > 0 => return false,
            (0, expected) => expected.map_or(0, |cost| cost.0),
            (ended, _) => self.spent.0 / ended,
        };
        let pending = mean.saturating_mul(self.running);
        self.spent.0.saturating_add(pending) < budget.0
    }
}

/// The idempotency key of a run: a driver that starts it again gets the run that an earlier one has started.
pub fn claim(eval: EvalId, slot: EvalSlot, now: Timestamp) -> IdempotencyClaim {
    let EvalSlot {
        case,
        repeat,
        version,
    } = slot;
    IdempotencyClaim::own(
        format!("EVAL {eval}"),
        format!("{case}/{repeat}/{version}"),
        now,
    )
}

#[cfg(test)]
mod tests {
    use super::{Spending, estimate, slots};
    use crate::domain::usage::Cost;

    #[test]
    fn the_versions_of_a_case_follow_each_other() {
        let of_case: Vec<_> = slots(7, 2, 2)
            .map(|slot| (slot.case, slot.repeat, slot.version))
            .collect();
        assert_eq!(of_case, [(7, 0, 0), (7, 0, 1), (7, 1, 0), (7, 1, 1)]);
        assert!(slots(7, 2, 2).is_sorted());
    }

    #[test]
    fn an_estimate_needs_the_cost_of_each_version() {
        let costs = [Some(Cost(3)), Some(Cost(5))];
        assert_eq!(estimate(&costs, 10), Some(Cost(80)));
        assert_eq!(estimate(&[Some(Cost(3)), None], 10), None);
    }

    #[test]
    fn runs_at_work_are_counted_with_what_others_cost() {
        let spending = Spending {
            budget: Some(Cost(100)),
            expected: Some(Cost(40)),
            ..Spending::default()
        };
        let with = |spent: u64, ended: u64, running: u64| {
            let spent = Cost(spent);
            Spending {
                spent,
                ended,
                running,
                ..spending
            }
            .affords_another()
        };
        assert!(with(0, 0, 0) && with(0, 0, 2) && !with(0, 0, 3));
        assert!(with(60, 3, 1) && !with(60, 3, 2));
        assert!(!with(100, 10, 0));
        let unknown = |running: u64| {
            Spending {
                expected: None,
                running,
                ..spending
            }
            .affords_another()
        };
        assert!(unknown(0) && !unknown(1));
        let free = Spending {
            budget: None,
            ..spending
        };
        assert!(free.affords_another());
    }
}
