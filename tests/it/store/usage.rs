//! Sums of usage: by days of any time zone, with limits of the number of values, after a migration, and until they expire.

use std::collections::BTreeMap;
use std::time::Duration;

use axed::domain::calendar::{quarter_from, quarter_of, quarter_start, time_zone};
use axed::domain::period_budget::BudgetCharge;
use axed::domain::run::{Run, Scope};
use axed::domain::usage::Cost;
use axed::domain::usage_sums::UsageSums;
use axed::store::run_store::RunStore;
use axed::store::usage::{BudgetPeriod, MAX_VALUES, OTHER, UsageDimension, UsageQuery};
use axed::store::{Change, Progress};
use jiff::Timestamp;
use jiff::tz::TimeZone;

use crate::store::fixtures::{
    Opened, completing, count, fresh, opening, record, root, sqlite, write,
};

fn at(text: &str) -> Timestamp {
    text.parse().expect("a time")
}

fn query(by: &[UsageDimension]) -> UsageQuery {
    UsageQuery {
        by: by.to_vec(),
        time_zone: TimeZone::UTC,
        since: None,
        until: None,
        owner: None,
        agent: None,
        visible_agents: None,
        labels: Vec::new(),
        max_rows: 10_000,
    }
}

/// Writes a run that was accepted at that time and used that many tokens.
async fn write_run(store: &dyn RunStore, scope: &Scope, run: Run, tokens: u64) {
    let opening = write(scope, Change::Create(Box::new(fresh(run))), 1);
    store.write(opening).await.expect("opened");
    let mut closing = completing(scope, "done");
    let Change::Finish(finished) = &mut closing.change else {
        panic!("no end");
    };
    finished.progress.usage.tokens.input = tokens;
    finished.progress.usage.cost = Some(Cost(tokens * 7));
    store.write(closing).await.expect("ended");
}

async fn sums_by_day(store: &dyn RunStore, query: UsageQuery) -> BTreeMap<String, (i128, i128)> {
    let report = store.usage(query).await.expect("a report");
    let rows = report.rows.expect("few rows");
    let total: i128 = rows.iter().map(|row| row.sums.input_tokens).sum();
    assert_eq!(report.totals.input_tokens, total);
    let day = |day: Option<jiff::civil::Date>| day.map_or(String::new(), |day| day.to_string());
    let sums = |sums: &UsageSums| (sums.runs, sums.input_tokens);
    rows.iter()
        .map(|row| (day(row.day), sums(&row.sums)))
        .collect()
}

/// Days are read from sums by day in UTC, corrected by quarter hours. The sums must be those over the runs.
async fn days_of_any_zone_have_the_sums_of_their_runs(opened: &Opened) {
    let store = &*opened.store;
    let first = at("2026-03-26T00:00:00Z");
    let mut runs = Vec::new();
    for n in 0_u64..400 {
        let minutes = n * 7919 % (6 * 24 * 60);
        let created_at = first + Duration::from_secs(60 * minutes);
        let scope = root();
        let mut run = record(&scope, "solo");
        run.created_at = created_at;
        write_run(store, &scope, run, n * n + 1).await;
        runs.push((created_at, i128::from(n * n + 1)));
    }
    for (zone, since, until) in [
        ("UTC", None, None),
        ("Europe/Berlin", None, None),
        ("Asia/Kathmandu", Some(at("2026-03-27T03:20:00Z")), None),
        ("Pacific/Auckland", None, Some(at("2026-03-30T23:50:00Z"))),
        (
            "America/St_Johns",
            Some(at("2026-03-28T10:00:00Z")),
            Some(at("2026-03-28T12:00:00Z")),
        ),
        (
            "UTC",
            Some(at("2026-03-27T11:00:00Z")),
            Some(at("2026-03-30T13:00:00Z")),
        ),
    ] {
        let time_zone = time_zone(zone).expect("a zone");
        let counts = |time: &Timestamp| {
            since.is_none_or(|since| *time >= quarter_start(quarter_of(since)))
                && until.is_none_or(|until| *time < quarter_start(quarter_from(until)))
        };
        for by_day in [true, false] {
            let mut expected: BTreeMap<String, (i128, i128)> = BTreeMap::new();
            for (time, tokens) in runs.iter().filter(|(time, _)| counts(time)) {
                let day = time.to_zoned(time_zone.clone()).date().to_string();
                let sums = expected
                    .entry(if by_day { day } else { String::new() })
                    .or_default();
                *sums = (sums.0 + 1, sums.1 + tokens);
            }
            let by: &[UsageDimension] = if by_day { &[UsageDimension::Day] } else { &[] };
            let query = UsageQuery {
                time_zone: time_zone.clone(),
                since,
                until,
                ..query(by)
            };
            assert_eq!(
                sums_by_day(store, query).await,
                expected,
                "{zone} {since:?} {until:?}"
            );
        }
    }
}

#[tokio::test]
async fn values_above_the_limit_are_counted_together() {
    let opened = sqlite();
    let store = &*opened.store;
    for n in 0..MAX_VALUES + 20 {
        let scope = root();
        let mut run = record(&scope, "solo");
        run.labels = BTreeMap::from([
            ("request".to_owned(), n.to_string()),
            ("team".to_owned(), format!("team{}", n % 2)),
        ]);
        write_run(store, &scope, run, 3).await;
    }
    let label = |name: &str| UsageDimension::Label(name.to_owned());
    let report = store
        .usage(query(&[label("request")]))
        .await
        .expect("a report");
    let rows = report.rows.expect("few rows");
    assert_eq!(rows.len(), MAX_VALUES + 1);
    let other = rows
        .iter()
        .find(|row| row.values == [Some(OTHER.to_owned())]);
    assert_eq!(other.expect("the others").sums.runs, 20);
    let total = 3 * i128::try_from(MAX_VALUES + 20).expect("a number");
    assert_eq!(report.totals.input_tokens, total);
    // The other labels of these runs are still exact.
    let teams = store
        .usage(query(&[label("team")]))
        .await
        .expect("a report");
    let teams: Vec<_> = teams
        .rows
        .expect("rows")
        .iter()
        .map(|row| row.sums.runs)
        .collect();
    assert_eq!(teams, [510, 510]);
    let few = UsageQuery {
        max_rows: 10,
        ..query(&[label("request")])
    };
    assert!(store.usage(few).await.expect("a report").rows.is_none());
}

#[tokio::test]
async fn a_run_that_ends_twice_counts_once() {
    let opened = sqlite();
    let scope = root();
    write_run(&*opened.store, &scope, record(&scope, "solo"), 5).await;
    let again = opened.store.write(completing(&scope, "again")).await;
    assert!(again.is_err());
    let totals = opened
        .store
        .usage(query(&[]))
        .await
        .expect("a report")
        .totals;
    assert_eq!((totals.runs, totals.roots, totals.input_tokens), (1, 1, 5));
    assert_eq!((totals.cost, totals.priced), (35, 1));
}

#[tokio::test]
async fn expired_sums_are_removed_by_whole_days() {
    let opened = sqlite();
    let store = &*opened.store;
    for day in 1..=4 {
        let scope = root();
        let mut run = record(&scope, &format!("agent{day}"));
        run.created_at = at(&format!("2026-03-0{day}T15:00:00Z"));
        write_run(store, &scope, run, 1).await;
    }
    while store
        .trim_usage(at("2026-03-03T20:00:00Z"))
        .await
        .expect("trimmed")
    {}
    let report = store
        .usage(query(&[UsageDimension::Agent]))
        .await
        .expect("a report");
    let agents: Vec<_> = report
        .rows
        .expect("rows")
        .into_iter()
        .flat_map(|row| row.values)
        .collect();
    assert_eq!(
        agents,
        [Some("agent3".to_owned()), Some("agent4".to_owned())]
    );
    assert_eq!(count(opened.place.path(), "usage_series"), 2);
    assert_eq!(count(opened.place.path(), "usage_days"), 2);
    let scope = root();
    write_run(store, &scope, record(&scope, "agent1"), 1).await;
    assert_eq!(
        store.usage(query(&[])).await.expect("a report").totals.runs,
        3
    );
}

shared_stories!(
    days_of_any_zone_have_the_sums_of_their_runs,
    charges_are_kept,
);

/// What was charged to a budget stays while the clock is wrong, and is removed when it is old.
async fn charges_are_kept(opened: &Opened) {
    let store = &*opened.store;
    let scope = root();
    store.write(opening(&scope, "solo")).await.expect("opened");
    let charge = async |day: i64| {
        let charge = BudgetCharge {
            budget: "all".to_owned(),
            quarter: day * 96,
            tokens: 10,
            cost: 0,
            period_start: day * 96,
            alerts: vec![500],
        };
        let progress = Progress {
            charges: vec![charge],
            ..Progress::default()
        };
        let charged = store.write(write(&scope, Change::Progress(progress), 1));
        charged.await.expect("charged");
    };
    let used = async |day: i64| {
        let period = BudgetPeriod {
            start: day * 96,
            end: (day + 1) * 96,
        };
        let usage = store.budget_usage("all".to_owned(), period).await;
        let usage = usage.expect("a read");
        (usage.tokens, usage.alerts)
    };
    charge(1000).await;
    // For a moment the clock is a year ahead.
    charge(1365).await;
    charge(1365).await;
    charge(1000).await;
    assert_eq!(used(1000).await, (20, vec![500]));
    charge(1062).await;
    charge(1070).await;
    assert_eq!(used(1000).await, (0, Vec::new()));
    assert_eq!(used(1062).await, (10, vec![500]));
}
