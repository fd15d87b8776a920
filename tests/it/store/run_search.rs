//! Runs are searched by their texts, ids, errors and costs.

use axed::domain::content::{Content, Part};
use axed::domain::failure::FailureCode;
use axed::domain::run::{Outcome, RunId, Scope, Status};
use axed::domain::search_text::SearchText;
use axed::domain::usage::Cost;
use axed::store::Change;
use axed::store::run_store::RunStore;
use axed::store::runs::{RunFilter, StatusCount};

use crate::store::fixtures::{
    Opened, child, closing, completing, failure, fresh, listed, opening, page, record, root,
    starting, write,
};
use crate::support::database::Database;

/// Longer than what is stored in the row of a run.
const LONG: usize = 100_000;

async fn run_of(store: &dyn RunStore, scope: &Scope, agent: &str, input: impl Into<Content>) {
    let mut run = record(scope, agent);
    run.input = input.into();
    let open = write(scope, Change::Create(Box::new(fresh(run))), 1);
    store.write(open).await.expect("opened");
}

fn of(text: &str) -> RunFilter {
    RunFilter {
        text: Some(SearchText::parse(text).expect(text)),
        ..page()
    }
}

async fn inputs_and_final_texts_are_searched(opened: &Opened) {
    let store = &*opened.store;
    let scopes: [Scope; 5] = std::array::from_fn(|_| root());
    let [greek, long, parts, failed, other] = scopes;
    run_of(store, &greek, "a", "Who was Σίσυφος?").await;
    let end = completing(&greek, "Ein König, voller ÄRGER \u{0} auf der Straße.");
    store.write(end).await.expect("closed");
    let text = "x".repeat(LONG) + " haystack " + &"x".repeat(LONG);
    run_of(store, &long, "b", &*text).await;
    let end = completing(&long, &text.replace("haystack", "needle"));
    store.write(end).await.expect("closed");
    let texts = ["first line\nof two", "a \"quoted\" part"];
    let texts = texts.map(|text| Part::Text {
        text: text.to_owned(),
    });
    run_of(store, &parts, "a", Content::Parts(texts.into())).await;
    run_of(store, &failed, "a", "fails").await;
    let end = Outcome::Failed {
        failure: failure(),
        partial: Some("as far as it came".to_owned()),
    };
    store.write(closing(&failed, end)).await.expect("closed");
    run_of(store, &other, "b", "who else?").await;

    for (text, wanted) in [
        ("ΣΊΣΥΦΟΣ", &[greek.run][..]),
        ("σίσυφοσ", &[greek.run]),
        ("ärger", &[greek.run]),
        ("STRAẞE", &[greek.run]),
        ("STRASSE", &[]),
        ("argER", &[]),
        ("WHO ", &[other.run, greek.run]),
        ("xHAYSTACK", &[]),
        ("x haystack x", &[long.run]),
        ("NEEDLE", &[long.run]),
        ("line\nof", &[parts.run]),
        ("\"Quoted\"", &[parts.run]),
        ("\\\"quoted", &[]),
        ("far as it", &[failed.run]),
        ("overloaded", &[]),
        ("%", &[]),
        ("?", &[other.run, greek.run]),
    ] {
        assert_eq!(listed(store, of(text)).await, wanted, "{text}");
    }
    let of_a = RunFilter {
        agent: Some("a".to_owned()),
        ..of("who")
    };
    assert_eq!(listed(store, of_a).await, [greek.run]);
    let active = RunFilter {
        status: Some(Status::Queued),
        ..of("who")
    };
    assert_eq!(listed(store, active).await, [other.run]);
    let limit = 1;
    let first = store.list(RunFilter { limit, ..of("who") }).await;
    let first = first.expect("a page");
    assert_eq!((first.runs.len(), first.next), (1, Some(other.run)));
    let rest = RunFilter {
        before: first.next,
        ..of("who")
    };
    assert_eq!(listed(store, rest).await, [greek.run]);
    let limit = 0;
    let none = store.list(RunFilter { limit, ..of("who") }).await;
    assert!(none.expect("a page").runs.is_empty());
}

async fn a_part_of_an_id_finds_its_run(opened: &Opened) {
    let store = &*opened.store;
    let (first, second) = (root(), root());
    let below = child(&first);
    for scope in [&first, &second, &below] {
        store.write(opening(scope, "a")).await.expect("opened");
    }
    let id = first.run.to_string();
    for part in [&id[4..], &id[id.len() - 10..], &*id] {
        assert_eq!(listed(store, of(part)).await, [first.run], "{part}");
    }
    let parts = RunFilter {
        include_children: true,
        ..of(&id[..10])
    };
    let all = [below.run, second.run, first.run];
    assert_eq!(listed(store, parts).await, all, "all of some hours");
    // A whole id is no guess.
    let whole = of(&below.run.to_string());
    assert_eq!(listed(store, whole.clone()).await, [below.run]);
    for changed in [
        RunFilter {
            agent: Some("b".to_owned()),
            ..whole.clone()
        },
        RunFilter {
            before: Some(below.run),
            ..whole
        },
        of(&RunId::new().to_string()),
    ] {
        let found = store.list(changed).await.expect("a page");
        assert!(found.runs.is_empty() && found.next.is_none(), "{found:?}");
    }
}

async fn runs_are_found_by_error_and_range_of_cost(opened: &Opened) {
    let store = &*opened.store;
    let mut runs = Vec::new();
    for (cost, code) in [
        (Some(2), Some(FailureCode::Timeout)),
        (Some(5), Some(FailureCode::ProviderOverloaded)),
        (None, None),
        (Some(9), Some(FailureCode::ProviderOverloaded)),
    ] {
        let scope = root();
        run_of(store, &scope, "a", "go").await;
        let outcome = match code {
            None => Outcome::Completed {
                content: "done".to_owned(),
                structured: false,
            },
            Some(code) => Outcome::Failed {
                failure: axed::domain::failure::Failure { code, ..failure() },
                partial: None,
            },
        };
        let mut end = closing(&scope, outcome);
        let Change::Finish(finished) = &mut end.change else {
            panic!("an end");
        };
        finished.tree_usage.usage.cost = cost.map(Cost);
        store.write(end).await.expect("closed");
        runs.push(scope.run);
    }
    let active = root();
    run_of(store, &active, "a", "go").await;
    store.write(starting(&active)).await.expect("started");

    let overloaded = RunFilter {
        error_code: Some(FailureCode::ProviderOverloaded),
        ..page()
    };
    assert_eq!(listed(store, overloaded.clone()).await, [runs[3], runs[1]]);
    let completed = RunFilter {
        status: Some(Status::Completed),
        ..overloaded.clone()
    };
    assert!(listed(store, completed).await.is_empty());
    let cheap = RunFilter {
        max_cost: Some(Cost(5)),
        ..page()
    };
    assert_eq!(listed(store, cheap.clone()).await, [runs[1], runs[0]]);
    let between = RunFilter {
        min_cost: Some(Cost(3)),
        ..cheap
    };
    assert_eq!(listed(store, between).await, [runs[1]]);
    let all = RunFilter {
        min_cost: Some(Cost(6)),
        text: SearchText::parse("GO"),
        ..overloaded
    };
    assert_eq!(listed(store, all).await, [runs[3]]);
}

/// A page ends after some bytes of texts, however many runs match the rest of the filter.
async fn a_search_goes_on_where_an_empty_page_ended(opened: &Opened) {
    const RUNS: usize = 45;
    let store = &*opened.store;
    let oldest = root();
    run_of(store, &oldest, "a", "the needle").await;
    for _ in 0..RUNS {
        run_of(store, &root(), "a", "the haystack").await;
    }
    let database = opened.database();
    let large = match database {
        Database::Sqlite(_) => "hex(zeroblob(1048576))",
        Database::Postgres(_) => "convert_to(repeat('0', 2097152), 'UTF8')",
    };
    database.execute(&format!("UPDATE runs SET content = {large}"));

    let first = store.list(of("NEEDLE")).await.expect("a page");
    assert!(first.runs.is_empty(), "{} runs", first.runs.len());
    let (mut next, mut pages) = (first.next, 1);
    let mut found = Vec::new();
    while next.is_some() {
        let before = next;
        let page = store.list(RunFilter {
            before,
            ..of("NEEDLE")
        });
        let page = page.await.expect("a page");
        found.extend(page.runs.iter().map(|run| run.id));
        assert!(page.next.is_none_or(|next| Some(next) < before));
        (next, pages) = (page.next, pages + 1);
    }
    assert_eq!(found, [oldest.run]);
    assert!((2..=RUNS + 1).contains(&pages), "{pages} pages");
}

/// Each status is counted up to the limit, by what indexes contain.
async fn runs_are_counted_by_status(opened: &Opened) {
    let store = &*opened.store;
    for n in 0..9 {
        let scope = root();
        run_of(store, &scope, if n == 0 { "a" } else { "b" }, "go").await;
        match n {
            0..5 => drop(store.write(completing(&scope, "x")).await.expect("closed")),
            5..7 => drop(store.write(starting(&scope)).await.expect("started")),
            _ => {}
        }
        store
            .write(opening(&child(&scope), "b"))
            .await
            .expect("opened");
    }
    let counts = async |filter| {
        let counts = store
            .count(filter, Status::ALL.into())
            .await
            .expect("counts");
        let count = |it: StatusCount| (it.runs > 0).then_some((it.status, it.runs, it.is_minimum));
        counts.into_iter().filter_map(count).collect::<Vec<_>>()
    };
    let all = [
        (Status::Queued, 2, false),
        (Status::Running, 2, false),
        (Status::Completed, 5, false),
    ];
    assert_eq!(counts(page()).await, all);
    let some = RunFilter {
        agent: Some("b".to_owned()),
        limit: 3,
        ..page()
    };
    let completed = (Status::Completed, 3, true);
    assert_eq!(counts(some.clone()).await, [all[0], all[1], completed]);
    let status = Some(Status::Failed);
    let same = counts(RunFilter { status, ..some }).await;
    assert_eq!(same, [all[0], all[1], completed]);
}

shared_stories!(
    inputs_and_final_texts_are_searched,
    a_part_of_an_id_finds_its_run,
    runs_are_found_by_error_and_range_of_cost,
    a_search_goes_on_where_an_empty_page_ended,
    runs_are_counted_by_status,
);
