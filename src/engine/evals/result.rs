//! What an evaluation has measured: a pure function of the ends of its runs.

use std::collections::BTreeMap;

use crate::domain::comparison::{compare, summarize};
use crate::domain::evaluation::{
    CaseEnd, CaseOutcome, DurationSummary, EvalResult, EvalRun, FlippedCase, NEW, OLD,
    ScorerResult, VersionTotals,
};
use crate::domain::gate::{Amount, Gate, Measures, ScorerMeasures};
use crate::domain::run::RunId;
use crate::domain::score::ScoreValue;

/// Cases that the result names.
const MAX_FLIPPED: usize = 1_000;
/// Reasons that a scorer's result names.
const MAX_REASONS: usize = 10;

/// The runs of an evaluation as far as they have ended, and what it was to find out.
pub struct Measured<'m> {
    /// In the order of their slots.
    pub runs: &'m [EvalRun],
    /// The ids of the cases, by number.
    pub case_ids: &'m [String],
    pub has_old: bool,
    pub scorers: &'m [String],
    pub gates: &'m [Gate],
}

/// The ends of a case's runs, by version.
struct CaseEnds<'m> {
    id: &'m str,
    completed: [Vec<(RunId, &'m CaseEnd)>; 2],
}

pub fn result(measured: &Measured<'_>) -> EvalResult {
    let versions = if measured.has_old { 2 } else { 1 };
    let cases = counted_cases(measured, versions);
    let mut totals = [NEW, OLD].map(|version| total(measured, &cases, version));
    let (mut scorers, mut flipped) = (BTreeMap::new(), BTreeMap::<usize, Vec<String>>::new());
    for name in measured.scorers {
        let result = scorer_result(measured, &cases, versions, name);
        if measured.has_old {
            let is_pass_fail = result.comparison.p.is_some();
            for (index, case) in cases.iter().enumerate() {
                if has_flipped(case, name, is_pass_fail) {
                    flipped.entry(index).or_default().push(name.clone());
                }
            }
        }
        scorers.insert(name.clone(), result);
    }
    let flipped = flipped.into_iter().take(MAX_FLIPPED);
    let flipped = flipped.filter_map(|(index, scorers)| flipped_case(&cases[index], scorers));
    let mut result = EvalResult {
        scorers,
        totals: std::mem::take(&mut totals[usize::from(NEW)]),
        against: measured
            .has_old
            .then(|| std::mem::take(&mut totals[usize::from(OLD)])),
        flipped: flipped.collect(),
        gates: Vec::new(),
    };
    let measures = measures(measured, &result);
    let gates = measured.gates.iter();
    result.gates = gates.map(|gate| gate.check(&measures)).collect();
    result
}

/// The cases of which each version has a run that ended well.
fn counted_cases<'m>(measured: &'m Measured<'_>, versions: usize) -> Vec<CaseEnds<'m>> {
    let same_case = |a: &EvalRun, b: &EvalRun| a.slot.case == b.slot.case;
    let cases = measured.runs.chunk_by(same_case).filter_map(|runs| {
        let case = runs.first()?.slot.case;
        let mut completed = [Vec::new(), Vec::new()];
        for run in runs {
            if let (Some(id), Some(end)) = (run.run, &run.end)
                && end.outcome == CaseOutcome::Completed
                && let Some(of_version) = completed.get_mut(usize::from(run.slot.version))
            {
                of_version.push((id, end));
            }
        }
        let id = measured.case_ids.get(case as usize)?;
        let counts = completed[..versions].iter().all(|runs| !runs.is_empty());
        counts.then_some(CaseEnds { id, completed })
    });
    cases.collect()
}

fn total(measured: &Measured<'_>, cases: &[CaseEnds<'_>], version: u8) -> VersionTotals {
    let index = usize::from(version);
    let mut totals = VersionTotals {
        cases: cases.len() as u64,
        ..VersionTotals::default()
    };
    let mut durations = Vec::new();
    for case in cases {
        let runs = &case.completed[index];
        let mean = |number: fn(&CaseEnd) -> u64| {
            let sum: f64 = runs.iter().map(|(_, end)| number(end) as f64).sum();
            sum / runs.len().max(1) as f64
        };
        totals.tokens += mean(|end| end.tokens);
        totals.turns += mean(|end| end.turns);
        totals.tool_calls += mean(|end| end.tool_calls);
        let costs: Vec<f64> = runs
            .iter()
            .filter_map(|(_, end)| Some(end.cost?.to_usd()))
            .collect();
        if let Some(mean) = summarize(&costs).mean {
            totals.cost = Some(totals.cost.unwrap_or_default() + mean);
        }
        durations.extend(runs.iter().map(|(_, end)| end.duration_ms));
    }
    durations.sort_unstable();
    totals.duration = DurationSummary {
        p50: percentile(&durations, 50),
        p95: percentile(&durations, 95),
    };
    let runs = measured.runs.iter();
    for run in runs.filter(|run| run.slot.version == version) {
        match run.end.as_ref().map(|end| (end.outcome, &end.error)) {
            Some((CaseOutcome::Failed, error)) => {
                let code = error.clone().unwrap_or_else(|| "internal".to_owned());
                *totals.errors.entry(code).or_default() += 1;
            }
            Some((CaseOutcome::Diverged, _)) => totals.diverged += 1,
            _ => {}
        }
    }
    totals
}

/// The nearest rank.
fn percentile(sorted: &[u64], percent: usize) -> Option<u64> {
    let rank = (sorted.len() * percent).div_ceil(100);
    sorted.get(rank.max(1) - 1).copied()
}

fn scorer_result(
    measured: &Measured<'_>,
    cases: &[CaseEnds<'_>],
    versions: usize,
    name: &str,
) -> ScorerResult {
    let mut is_pass_fail = true;
    let mut labels: BTreeMap<String, Vec<u64>> = BTreeMap::new();
    let mut values: [Vec<f64>; 2] = [Vec::new(), Vec::new()];
    for case in cases {
        let means = [NEW, OLD].map(|version| {
            let mut numbers = Vec::new();
            for (_, end) in &case.completed[usize::from(version)] {
                match end.scores.get(name) {
                    Some(ScoreValue::Number(number)) => {
                        let number = number.to_f64();
                        is_pass_fail &= number == 0.0 || number == 1.0;
                        numbers.push(number);
                    }
                    Some(ScoreValue::Label(label)) => {
                        let counts = labels.entry(label.clone());
                        let counts = counts.or_insert_with(|| vec![0; versions]);
                        counts[usize::from(version)] += 1;
                    }
                    None => {}
                }
            }
            summarize(&numbers).mean
        });
        // Pair and all: a case without a value in one version has none in the other.
        if let Some(means) = means[..versions]
            .iter()
            .copied()
            .collect::<Option<Vec<f64>>>()
        {
            for (values, mean) in values.iter_mut().zip(means) {
                values.push(mean);
            }
        }
    }
    let [new, old] = &values;
    let mut comparison = compare(&[], false);
    if measured.has_old {
        let pairs: Vec<(f64, f64)> = new.iter().copied().zip(old.iter().copied()).collect();
        comparison = compare(&pairs, is_pass_fail);
    }
    comparison.n = new.len() as u64;
    let mut errors = BTreeMap::new();
    let ends = measured.runs.iter().filter_map(|run| run.end.as_ref());
    for why in ends.filter_map(|end| end.unscored.get(name)) {
        let why = without_run(why);
        if errors.len() < MAX_REASONS || errors.contains_key(&why) {
            *errors.entry(why).or_default() += 1;
        }
    }
    ScorerResult {
        versions: values[..versions]
            .iter()
            .map(|values| summarize(values))
            .collect(),
        comparison,
        labels,
        errors,
    }
}

/// Whether the case passes in one version only, or has another label.
fn has_flipped(case: &CaseEnds<'_>, scorer: &str, is_pass_fail: bool) -> bool {
    let verdict = |version: u8| {
        let (mut numbers, mut label) = (Vec::new(), None);
        for (_, end) in &case.completed[usize::from(version)] {
            match end.scores.get(scorer) {
                Some(ScoreValue::Number(number)) => numbers.push(number.to_f64()),
                Some(ScoreValue::Label(text)) => label = label.or(Some(text.as_str())),
                None => {}
            }
        }
        let passes = summarize(&numbers).mean.filter(|_| is_pass_fail);
        (passes.map(|mean| mean >= 0.5), label)
    };
    let ((new, new_label), (old, old_label)) = (verdict(NEW), verdict(OLD));
    let differs = |new: Option<bool>, old: Option<bool>| new.zip(old).is_some_and(|(a, b)| a != b);
    let labels = new_label.zip(old_label);
    differs(new, old) || labels.is_some_and(|(new, old)| new != old)
}

fn flipped_case(case: &CaseEnds<'_>, scorers: Vec<String>) -> Option<FlippedCase> {
    let first = |version: u8| Some(case.completed[usize::from(version)].first()?.0);
    let (a, b) = (first(OLD)?, first(NEW)?);
    Some(FlippedCase {
        case: case.id.to_owned(),
        scorers,
        a,
        b,
        compare: format!("/runs/{a}/diff/{b}"),
    })
}

fn measures(measured: &Measured<'_>, result: &EvalResult) -> Measures {
    let scorers = result.scorers.iter().map(|(name, scorer)| {
        let mean = scorer.versions.first().and_then(|new| new.mean);
        let low = scorer.comparison.low;
        (name.clone(), ScorerMeasures { mean, low })
    });
    let errors = |totals: &VersionTotals| totals.errors.values().sum::<u64>() as i64;
    let mut amounts = BTreeMap::new();
    if let Some(old) = result.against.as_ref().filter(|old| old.cases > 0) {
        let new = &result.totals;
        let milliseconds = |duration: Option<u64>| duration.map(|it| it as f64);
        let known = [
            (Amount::Cost, new.cost, old.cost),
            (Amount::Tokens, Some(new.tokens), Some(old.tokens)),
            (Amount::Turns, Some(new.turns), Some(old.turns)),
            (
                Amount::ToolCalls,
                Some(new.tool_calls),
                Some(old.tool_calls),
            ),
            (
                Amount::P50,
                milliseconds(new.duration.p50),
                milliseconds(old.duration.p50),
            ),
            (
                Amount::P95,
                milliseconds(new.duration.p95),
                milliseconds(old.duration.p95),
            ),
        ];
        let known = known.into_iter();
        amounts.extend(known.filter_map(|(amount, new, old)| Some((amount, new.zip(old)?))));
    }
    let ended = measured.runs.iter();
    let ended = ended.filter(|run| run.slot.version == NEW && run.end.is_some());
    let ended = ended.count();
    Measures {
        has_old: measured.has_old,
        scorers: scorers.collect(),
        amounts,
        added_errors: errors(&result.totals) - result.against.as_ref().map_or(0, errors),
        diverged_share: (ended > 0).then(|| result.totals.diverged as f64 / ended as f64),
    }
}

/// The reason without the judge's run in parentheses, so that equal reasons are counted together.
fn without_run(why: &str) -> String {
    let named = why.split_once(" (run_");
    let around = named.and_then(|(before, rest)| Some((before, rest.split_once(')')?.1)));
    around.map_or_else(
        || why.to_owned(),
        |(before, after)| format!("{before}{after}"),
    )
}

#[cfg(test)]
mod tests {
    use super::{Measured, percentile, result, without_run};
    use crate::domain::evaluation::{CaseEnd, CaseOutcome, EvalRun, EvalSlot, NEW, OLD};
    use crate::domain::gate::Gate;
    use crate::domain::run::RunId;
    use crate::domain::score::{ScoreNumber, ScoreValue};
    use crate::domain::usage::Cost;

    fn slot(case: u32, repeat: u32, version: u8) -> EvalSlot {
        EvalSlot {
            case,
            repeat,
            version,
        }
    }

    fn run(slot: EvalSlot, end: CaseEnd) -> EvalRun {
        EvalRun {
            slot,
            run: Some(RunId::new()),
            end: Some(end),
        }
    }

    fn number(value: f64) -> ScoreValue {
        ScoreValue::Number(ScoreNumber::new(value).expect("a number"))
    }

    fn completed(values: &[(&str, ScoreValue)], milliseconds: u64) -> CaseEnd {
        let scores = values.iter();
        CaseEnd {
            outcome: CaseOutcome::Completed,
            error: None,
            scores: scores
                .map(|(name, value)| ((*name).to_owned(), value.clone()))
                .collect(),
            cost: Some(Cost::from_usd(0.5)),
            tokens: 10,
            turns: 2,
            tool_calls: 1,
            duration_ms: milliseconds,
            ..CaseEnd::failed("")
        }
    }

    fn diverged() -> CaseEnd {
        CaseEnd {
            outcome: CaseOutcome::Diverged,
            error: None,
            ..CaseEnd::failed("")
        }
    }

    fn measure(runs: &[EvalRun], has_old: bool, gates: &[Gate]) -> super::EvalResult {
        let ids: Vec<String> = (0..9).map(|case| format!("c{case}")).collect();
        let scorers = ["good".to_owned(), "tone".to_owned()];
        result(&Measured {
            runs,
            case_ids: &ids,
            has_old,
            scorers: &scorers,
            gates,
        })
    }

    #[test]
    fn a_failed_or_diverged_case_is_left_out_of_both_versions() {
        let good = |value: f64| completed(&[("good", number(value))], 100);
        let runs = [
            run(slot(0, 0, NEW), good(1.0)),
            run(slot(0, 0, OLD), good(0.0)),
            run(slot(1, 0, NEW), good(1.0)),
            run(slot(1, 0, OLD), CaseEnd::failed("timeout")),
            run(slot(2, 0, NEW), diverged()),
            run(slot(2, 0, OLD), good(1.0)),
            run(slot(3, 0, NEW), good(0.0)),
            run(slot(3, 0, OLD), good(0.0)),
            EvalRun {
                slot: slot(4, 0, NEW),
                run: None,
                end: None,
            },
        ];
        let gates = ["errors <= -1", "diverged <= 25%", "cost <= 1x", "p95 <= 1x"];
        let gates = gates.map(|gate| Gate::parse(gate).expect(gate));
        let result = measure(&runs, true, &gates);
        let scorer = &result.scorers["good"];
        let means: Vec<_> = scorer.versions.iter().map(|it| (it.n, it.mean)).collect();
        assert_eq!(means, [(2, Some(0.5)), (2, Some(0.0))]);
        let comparison = &scorer.comparison;
        assert_eq!((comparison.n, comparison.difference), (2, Some(0.5)));
        assert_eq!((comparison.wins, comparison.p), (1, Some(1.0)));
        let old = result.against.as_ref().expect("an old version");
        assert_eq!((result.totals.cases, old.cases), (2, 2));
        assert_eq!((result.totals.diverged, old.errors["timeout"]), (1, 1));
        assert_eq!((result.totals.cost, old.tokens), (Some(1.0), 20.0));
        let [flipped] = &result.flipped[..] else {
            panic!("one case has flipped: {:?}", result.flipped);
        };
        assert_eq!(
            (&*flipped.case, &*flipped.scorers),
            ("c0", &["good".to_owned()][..])
        );
        assert_eq!(flipped.a, runs[1].run.expect("a run"));
        assert!(
            result.gates.iter().all(|gate| gate.held),
            "{:?}",
            result.gates
        );
    }

    #[test]
    fn repetitions_are_averaged_within_their_case() {
        let good = |value: f64| completed(&[("good", number(value))], 10);
        let runs = [
            run(slot(0, 0, NEW), good(0.0)),
            run(slot(0, 1, NEW), good(1.0)),
            run(slot(0, 2, NEW), CaseEnd::failed("timeout")),
            run(slot(1, 0, NEW), good(1.0)),
        ];
        let result = measure(&runs, false, &[]);
        let scorer = &result.scorers["good"];
        assert_eq!(
            (scorer.versions[0].n, scorer.versions[0].mean),
            (2, Some(0.75))
        );
        assert_eq!(
            (scorer.comparison.n, scorer.comparison.difference),
            (2, None)
        );
        assert_eq!((result.totals.turns, result.against), (4.0, None));
        assert_eq!(result.totals.duration.p95, Some(10));
    }

    #[test]
    fn labels_are_counted_and_flip() {
        let tone = |label: &str| {
            let label = ScoreValue::label(label).expect("a label");
            completed(&[("tone", label)], 10)
        };
        let runs = [
            run(slot(0, 0, NEW), tone("kind")),
            run(slot(0, 0, OLD), tone("rude")),
            run(slot(1, 0, NEW), tone("kind")),
            run(slot(1, 0, OLD), tone("kind")),
        ];
        let result = measure(&runs, true, &[]);
        let scorer = &result.scorers["tone"];
        assert_eq!(
            (&scorer.labels["kind"], &scorer.labels["rude"]),
            (&vec![2, 1], &vec![0, 1])
        );
        assert_eq!(scorer.comparison.difference, None);
        assert_eq!(result.flipped.len(), 1);
    }

    #[test]
    fn percentiles_are_nearest_ranks() {
        assert_eq!(percentile(&[], 50), None);
        assert_eq!(percentile(&[7], 95), Some(7));
        let twenty: Vec<u64> = (1..=20).collect();
        let both = (percentile(&twenty, 50), percentile(&twenty, 95));
        assert_eq!(both, (Some(10), Some(19)));
    }

    #[test]
    fn reasons_are_equal_whichever_run_they_name() {
        let of_run = |run: &str| format!("judge (run_{run}) answers with no value: EOF (line 1)");
        assert_eq!(without_run(&of_run("1")), without_run(&of_run("2")));
        assert_eq!(without_run("it is gone"), "it is gone");
    }
}
