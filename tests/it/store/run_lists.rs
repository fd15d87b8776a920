//! Runs are listed by filter, by owner and by session.

use std::time::Duration;

use axed::domain::run::{Outcome, RunId, Scope, Status};
use axed::domain::run_ref::RunRef;
use axed::domain::usage::Cost;
use axed::store::Change;
use axed::store::run_store::RunStore;
use axed::store::runs::{RunFilter, SessionQuery};
use jiff::Timestamp;

use crate::store::fixtures::{
    Opened, child, closing, completing, failure, fresh, listed, opening, page, record, root,
    starting, stored, write,
};

/// Twelve roots of two agents with different states and labels; the newest has two children.
struct ListedRuns {
    start: Timestamp,
    roots: Vec<Scope>,
    queued_child: Scope,
    ended_child: Scope,
}

impl ListedRuns {
    fn newest(&self, numbers: &[usize]) -> Vec<RunId> {
        numbers.iter().map(|n| self.roots[*n].run).collect()
    }
}

async fn write_listed_runs(store: &dyn RunStore) -> ListedRuns {
    let start = Timestamp::from_second(1_800_000_000).expect("a time");
    let mut roots = Vec::new();
    for n in 0..12_u32 {
        let scope = root();
        let mut run = record(&scope, if n % 3 == 0 { "a" } else { "b" });
        run.created_at = start + Duration::from_secs(n.into());
        if n % 2 == 0 {
            run.labels.insert("team".to_owned(), "x".to_owned());
            run.labels.insert("n".to_owned(), n.to_string());
        }
        let open = write(&scope, Change::Create(Box::new(fresh(run))), 1);
        store.write(open).await.expect("opened");
        match n {
            0..4 => drop(
                store
                    .write(completing(&scope, "done"))
                    .await
                    .expect("closed"),
            ),
            4..6 => {
                let end = Outcome::Failed {
                    failure: failure(),
                    partial: None,
                };
                store.write(closing(&scope, end)).await.expect("closed");
            }
            6..8 => drop(store.write(starting(&scope)).await.expect("started")),
            _ => {}
        }
        roots.push(scope);
    }
    let queued_child = child(&roots[11]);
    store
        .write(opening(&queued_child, "a"))
        .await
        .expect("opened");
    let ended_child = child(&roots[11]);
    store
        .write(opening(&ended_child, "a"))
        .await
        .expect("opened");
    store
        .write(completing(&ended_child, "x"))
        .await
        .expect("closed");
    ListedRuns {
        start,
        roots,
        queued_child,
        ended_child,
    }
}

async fn runs_are_listed_by_agent_and_status(opened: &Opened) {
    let store = &*opened.store;
    let runs = write_listed_runs(store).await;
    let (queued, ended) = (runs.queued_child.run, runs.ended_child.run);
    let roots = &runs.roots;
    assert_eq!(
        listed(store, page()).await,
        runs.newest(&[11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0])
    );
    let all = listed(
        store,
        RunFilter {
            include_children: true,
            ..page()
        },
    )
    .await;
    assert_eq!(all[..3], [ended, queued, roots[11].run]);
    assert_eq!(all.len(), 14);

    let a = RunFilter {
        agent: Some("a".to_owned()),
        ..page()
    };
    assert_eq!(listed(store, a.clone()).await, runs.newest(&[9, 6, 3, 0]));
    let done = RunFilter {
        status: Some(Status::Completed),
        ..a.clone()
    };
    assert_eq!(listed(store, done.clone()).await, runs.newest(&[3, 0]));
    let all_done = RunFilter {
        include_children: true,
        ..done
    };
    assert_eq!(
        listed(store, all_done).await,
        [ended, roots[3].run, roots[0].run]
    );
    for (status, wanted) in [
        (Status::Failed, runs.newest(&[5, 4])),
        (Status::Running, runs.newest(&[7, 6])),
        (Status::Queued, runs.newest(&[11, 10, 9, 8])),
        (Status::Cancelled, runs.newest(&[])),
    ] {
        let status = Some(status);
        assert_eq!(listed(store, RunFilter { status, ..page() }).await, wanted);
    }

    let tree = RunFilter {
        root: Some(roots[11].run),
        ..page()
    };
    assert_eq!(
        listed(store, tree.clone()).await,
        [ended, queued, roots[11].run]
    );
    let status = Some(Status::Queued);
    assert_eq!(
        listed(store, RunFilter { status, ..tree }).await,
        [queued, roots[11].run]
    );
}

async fn runs_are_listed_by_label_and_time(opened: &Opened) {
    let store = &*opened.store;
    let runs = write_listed_runs(store).await;
    let with = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    let labels = vec![with("team", "x")];
    let team = RunFilter { labels, ..page() };
    assert_eq!(
        listed(store, team.clone()).await,
        runs.newest(&[10, 8, 6, 4, 2, 0])
    );
    let labels = vec![with("team", "x"), with("n", "4")];
    assert_eq!(
        listed(store, RunFilter { labels, ..page() }).await,
        runs.newest(&[4])
    );
    let agent = Some("b".to_owned());
    assert_eq!(
        listed(store, RunFilter { agent, ..team }).await,
        runs.newest(&[10, 8, 4, 2])
    );

    let at = |seconds, nanos| Some(runs.start + Duration::new(seconds, nanos));
    for (since, until, wanted) in [
        (at(3, 0), at(6, 0), runs.newest(&[5, 4, 3])),
        (at(3, 1), at(6, 1), runs.newest(&[6, 5, 4])),
        (at(10, 0), None, runs.newest(&[11, 10])),
        (None, at(1, 0), runs.newest(&[0])),
    ] {
        let some = RunFilter {
            since,
            until,
            ..page()
        };
        assert_eq!(listed(store, some).await, wanted);
    }
}

async fn lists_are_paged(opened: &Opened) {
    let store = &*opened.store;
    write_listed_runs(store).await;
    let (mut seen, mut before) = (Vec::new(), None);
    loop {
        let some = RunFilter {
            before,
            limit: 5,
            ..page()
        };
        let ids = listed(store, some).await;
        assert!(ids.len() <= 5);
        before = ids.last().copied();
        if before.is_none() {
            break;
        }
        seen.extend(ids);
    }
    assert_eq!(seen, listed(store, page()).await);
    let limit = 0;
    assert!(
        listed(store, RunFilter { limit, ..page() })
            .await
            .is_empty()
    );
}

/// A list by owner has the owner's runs, ended or not, and can be combined with other filters.
async fn runs_are_listed_by_owner(opened: &Opened) {
    let store = &*opened.store;
    let mut mine = Vec::new();
    for n in 0..12 {
        let scope = root();
        let mut run = record(&scope, if n % 4 == 0 { "a" } else { "b" });
        run.owner = [None, Some("me"), Some("me too")][n % 3].map(str::to_owned);
        run.labels.insert("k".to_owned(), "v".to_owned());
        let open = write(&scope, Change::Create(Box::new(fresh(run))), 1);
        store.write(open).await.expect("opened");
        if n < 8 {
            store.write(completing(&scope, "x")).await.expect("closed");
        }
        if n % 3 == 1 {
            mine.insert(0, scope.run);
        }
    }
    let by_owner = |filter: RunFilter| {
        let owner = Some("me".to_owned());
        listed(store, RunFilter { owner, ..filter })
    };
    assert_eq!(by_owner(page()).await, mine);
    let limit = 2;
    let found = by_owner(RunFilter { limit, ..page() }).await;
    assert_eq!(found, mine[..2]);
    let before = Some(mine[1]);
    let found = by_owner(RunFilter { before, ..page() }).await;
    assert_eq!(found, mine[2..]);
    let agent = Some("a".to_owned());
    let found = by_owner(RunFilter { agent, ..page() }).await;
    assert_eq!(found, [mine[2]]);
    let status = Some(Status::Completed);
    let found = by_owner(RunFilter { status, ..page() }).await;
    assert_eq!(found, mine[1..]);
    let labels = vec![("k".to_owned(), "v".to_owned())];
    let found = by_owner(RunFilter { labels, ..page() }).await;
    assert_eq!(found, mine);
    for (root, wanted) in [(mine[3], &mine[3..]), (RunId::new(), &[])] {
        let root = Some(root);
        let found = by_owner(RunFilter { root, ..page() }).await;
        assert_eq!(found, wanted);
    }
    assert_eq!(listed(store, page()).await.len(), 12);
}

/// What a tree has cost counts: of an ended run as recorded, of another the sum of its runs.
async fn runs_are_listed_by_their_cost(opened: &Opened) {
    let store = &*opened.store;
    let mut costs = Vec::new();
    for cost in [None, Some(2), Some(5), Some(9)] {
        let scope = root();
        store.write(opening(&scope, "a")).await.expect("opened");
        let mut end = completing(&scope, "x");
        let Change::Finish(finished) = &mut end.change else {
            panic!("an end");
        };
        finished.tree_usage.usage.cost = cost.map(Cost);
        store.write(end).await.expect("closed");
        costs.insert(0, scope.run);
    }
    let active = root();
    store.write(opening(&active, "a")).await.expect("opened");
    let ended = child(&active);
    store.write(opening(&ended, "a")).await.expect("opened");
    let mut end = completing(&ended, "x");
    if let Change::Finish(finished) = &mut end.change {
        finished.progress.usage.cost = Some(Cost(6));
    }
    store.write(end).await.expect("closed");
    let from = |cost| {
        let min_cost = Some(Cost(cost));
        listed(store, RunFilter { min_cost, ..page() })
    };
    let [nine, five, two, _] = costs[..] else {
        panic!("four runs");
    };
    assert_eq!(from(1).await, [active.run, nine, five, two]);
    assert_eq!(from(6).await, [active.run, nine]);
    assert_eq!(from(7).await, [nine]);
    assert!(from(10).await.is_empty());
}

/// A session belongs to one key; its runs are listed newest first, filtered by agent and status.
async fn runs_are_found_by_session(opened: &Opened) {
    let store = &*opened.store;
    let mut all = Vec::new();
    for (owner, name, agent) in [
        (None, "s", "a"),
        (None, "s", "b"),
        (None, "s", "a"),
        (Some("ada"), "s", "a"),
        (None, "t", "a"),
    ] {
        let scope = root();
        let mut run = record(&scope, agent);
        run.owner = owner.map(str::to_owned);
        run.session = Some(name.to_owned());
        let open = write(&scope, Change::Create(Box::new(fresh(run))), 1);
        store.write(open).await.expect("opened");
        all.push(scope);
    }
    store.write(opening(&root(), "a")).await.expect("opened");
    let done = completing(&all[0], "done");
    store.write(done).await.expect("closed");
    let of_nobody = || SessionQuery {
        name: "s".to_owned(),
        limit: 50,
        ..SessionQuery::default()
    };
    let of_ada = SessionQuery {
        owner: Some("ada".to_owned()),
        ..of_nobody()
    };
    let of_a = SessionQuery {
        agent: Some("a".to_owned()),
        ..of_nobody()
    };
    let completed = SessionQuery {
        status: Some(Status::Completed),
        ..of_a.clone()
    };
    let older = SessionQuery {
        before: Some(all[1].run),
        ..of_nobody()
    };
    let one = SessionQuery {
        limit: 1,
        ..of_nobody()
    };
    for (query, expected) in [
        (of_nobody(), &[2, 1, 0][..]),
        (of_ada, &[3]),
        (of_a, &[2, 0]),
        (completed, &[0]),
        (older, &[0]),
        (one, &[2]),
    ] {
        let found = store.session_runs(query.clone()).await.expect("a read");
        let found: Vec<RunId> = found.iter().map(|run| run.id).collect();
        let expected: Vec<RunId> = expected.iter().map(|at| all[*at].run).collect();
        assert_eq!(found, expected, "{query:?}");
    }
    let first = stored(store, &all[0]).await;
    assert_eq!(first.session.as_deref(), Some("s"));
}

/// Sessions of many keys have the same name: an admin finds the runs of all.
async fn runs_of_sessions_of_many_owners_are_found(opened: &Opened) {
    let store = &*opened.store;
    let mut expected = Vec::new();
    for n in 0..70 {
        for session in ["talk", "other"] {
            let scope = root();
            let mut run = record(&scope, "a");
            run.owner = Some(format!("key{n:02}"));
            run.session = Some(session.to_owned());
            run.labels.insert("k".to_owned(), "v".to_owned());
            let open = write(&scope, Change::Create(Box::new(fresh(run))), 1);
            store.write(open).await.expect("opened");
            if n % 2 == 0 {
                store.write(completing(&scope, "done")).await.expect("done");
            }
            if session == "talk" {
                expected.insert(0, scope.run);
            }
        }
    }
    for labels in [vec![], vec![("k".to_owned(), "v".to_owned())]] {
        let mut filter = RunFilter {
            session: Some("talk".to_owned()),
            labels,
            ..page()
        };
        let mut found = Vec::new();
        loop {
            let page = store.list(filter.clone()).await.expect("a page");
            found.extend(page.runs.iter().map(|run| run.id));
            filter.before = page.next;
            if filter.before.is_none() {
                break;
            }
        }
        assert_eq!(found, expected);
    }
}

async fn runs_are_found_by_the_beginning_or_the_end_of_an_id(opened: &Opened) {
    let store = &*opened.store;
    let runs = write_listed_runs(store).await;
    let named = async |text: &str, owner: Option<&str>, limit| {
        let Ok(RunRef::Part(part)) = text.parse() else {
            panic!("{text} is no part of an id")
        };
        let found = store.runs_named(part, owner.map(str::to_owned), limit);
        found.await.expect("runs")
    };
    let [queued, running, failed] = [10, 7, 4].map(|n| runs.roots[n].run);
    let child = runs.ended_child.run;
    for id in [queued, running, failed, child] {
        let text = id.to_string();
        for part in [&text[..39], &text[4..39], &text[24..], &text[32..]] {
            assert_eq!(named(part, None, 2).await, [id], "{part}");
        }
        let end_with_prefix = format!("run_{}", &text[28..]);
        assert_eq!(named(&end_with_prefix, None, 2).await, []);
        assert_eq!(named(&text[28..], Some("ada"), 2).await, []);
    }
    let beginning = &child.to_string()[..8];
    assert_eq!(named(beginning, None, 3).await.len(), 3);
    assert_eq!(named(beginning, None, 3).await[0], child);
}

shared_stories!(
    runs_are_listed_by_agent_and_status,
    runs_are_listed_by_label_and_time,
    lists_are_paged,
    runs_are_listed_by_owner,
    runs_are_listed_by_their_cost,
    runs_are_found_by_the_beginning_or_the_end_of_an_id,
    runs_are_found_by_session,
    runs_of_sessions_of_many_owners_are_found,
);
