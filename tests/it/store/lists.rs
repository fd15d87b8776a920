//! Lists of runs over a full store: whatever a filter asks for, a page costs little, and the pages together miss nothing.

use std::time::Duration;

use axed::domain::run::{Run, RunId, Scope, Status};
use axed::domain::search_text::SearchText;
use axed::store::Change;
use axed::store::run_store::RunStore;
use axed::store::runs::RunFilter;
use jiff::Timestamp;
use serde_json::Value;
use uuid::Uuid;

use crate::store::fixtures::{Opened, child, completing, fresh, record, root, starting, write};
use crate::support::app::TestApp;
use crate::support::database::Database;
use crate::support::provider::answer::{delegates, says};

const AGENTS: [&str; 3] = ["a", "b", "c"];
const OWNERS: [Option<&str>; 3] = [None, Some("ada"), Some("bob")];

/// Numbers that look random and are the same each time.
struct Dice(u64);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (self.0 >> 33) % sides
    }

    fn one_of<T: Clone>(&mut self, of: &[T]) -> T {
        of[self.roll(of.len() as u64) as usize].clone()
    }

    fn maybe<T: Clone>(&mut self, of: &[T]) -> Option<T> {
        (self.roll(3) == 0).then(|| self.one_of(of))
    }
}

fn start() -> Timestamp {
    Timestamp::from_second(1_800_000_000).expect("a time")
}

fn at(seconds: u64) -> Timestamp {
    start() + Duration::from_secs(seconds)
}

/// All pages of a filter, one after the other.
async fn pages(store: &dyn RunStore, filter: &RunFilter) -> (Vec<RunId>, usize) {
    let (mut seen, mut before, mut count) = (Vec::new(), filter.before, 0);
    loop {
        let filter = RunFilter {
            before,
            ..filter.clone()
        };
        let page = store.list(filter.clone()).await.expect("a page");
        assert!(page.runs.len() <= filter.limit, "{filter:?}");
        seen.extend(page.runs.iter().map(|run| run.id));
        count += 1;
        let Some(next) = page.next else {
            return (seen, count);
        };
        assert!(before.is_none_or(|before| next < before), "it gets on");
        before = Some(next);
    }
}

fn fits(run: &Run, filter: &RunFilter) -> bool {
    let is = |wanted: &Option<String>, is: Option<&str>| {
        wanted.as_deref().is_none_or(|wanted| is == Some(wanted))
    };
    is(&filter.agent, Some(&run.agent))
        && is(&filter.owner, run.owner.as_deref())
        && is(&filter.session, run.session.as_deref())
        && filter.status.is_none_or(|status| status == run.status)
        && match filter.root {
            Some(root) => run.root_id == root,
            None => filter.include_children || run.parent_id.is_none(),
        }
        && (filter.labels.iter()).all(|(key, value)| run.labels.get(key) == Some(value))
        && filter.since.is_none_or(|since| run.created_at >= since)
        && filter.until.is_none_or(|until| run.created_at < until)
        && filter.text.as_ref().is_none_or(|wanted| {
            let input = run.input.to_plain_text();
            let texts = [&*input, run.content.as_deref().unwrap_or_default()];
            texts.iter().any(|text| wanted.is_in(text.as_bytes()))
        })
}

/// A store with every kind of run, and its runs, newest first.
async fn fill(store: &dyn RunStore, dice: &mut Dice) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut last: Option<Scope> = None;
    for n in 0..240 {
        let parent = last.filter(|_| dice.roll(4) == 0);
        let scope = parent.as_ref().map_or_else(root, child);
        let mut run = record(&scope, dice.one_of(&AGENTS));
        // Times that are far from those in the ids, and not in their order.
        run.created_at = at(n + dice.roll(20));
        run.owner = match parent {
            Some(parent) => runs
                .iter()
                .find(|run| run.id == parent.run)
                .and_then(|run| run.owner.clone()),
            None => dice.one_of(&OWNERS).map(str::to_owned),
        };
        if parent.is_none() {
            run.session = dice.maybe(&["s", "t"]).map(str::to_owned);
            for key in ["k", "l"] {
                let value = dice.maybe(&["v", "w"]);
                run.labels
                    .extend(value.map(|value| (key.to_owned(), value.to_owned())));
            }
            last = Some(scope);
        }
        let open = Change::Create(Box::new(fresh(run.clone())));
        store.write(write(&scope, open, 1)).await.expect("opened");
        if dice.roll(4) > 0 {
            store.write(starting(&scope)).await.expect("started");
        }
        if dice.roll(3) > 0 {
            store.write(completing(&scope, "x")).await.expect("closed");
        }
        runs.push(store.run(scope.run).await.expect("a read").expect("it"));
    }
    runs.reverse();
    runs
}

async fn pages_have_all_matching_runs_and_no_others(opened: &Opened) {
    let store = &*opened.store;
    let mut dice = Dice(7);
    let runs = fill(store, &mut dice).await;
    let text = |text: &str| text.to_owned();
    let label = |key: &str, value: &str| vec![(text(key), text(value))];
    let labels = [
        label("k", "v"),
        label("l", "w"),
        [label("k", "v"), label("l", "v")].concat(),
        label("k", "none"),
    ];
    for _ in 0..400 {
        let since = dice.maybe(&[0, 50, 200, 400]).map(at);
        let filter = RunFilter {
            agent: dice.maybe(&AGENTS).map(text),
            owner: dice.maybe(&["ada", "bob", "eve"]).map(text),
            status: dice.maybe(&Status::ALL),
            root: dice.maybe(&[runs[200].root_id, runs[100].root_id, RunId::new()]),
            include_children: dice.roll(2) == 0,
            session: dice.maybe(&["s", "t", "u"]).map(text),
            labels: dice.maybe(&labels).unwrap_or_default(),
            text: dice
                .maybe(&["X", "The Input", "none"])
                .and_then(SearchText::parse),
            since,
            until: dice.maybe(&[1, 60, 120, 300]).map(at),
            before: dice.maybe(&[runs[10].id, runs[100].id]),
            limit: dice.one_of(&[1, 3, 50]),
            ..RunFilter::default()
        };
        let is_before = |run: &&Run| filter.before.is_none_or(|before| run.id < before);
        let wanted = runs
            .iter()
            .filter(|run| fits(run, &filter))
            .filter(is_before);
        let wanted: Vec<RunId> = wanted.map(|run| run.id).collect();
        assert_eq!(pages(store, &filter).await.0, wanted, "{filter:?}");
    }
}

/// Ended runs of two owners in turn, each with an agent of its own, a second between them; returns their ids.
fn insert(database: &Database, count: u64) -> Vec<RunId> {
    let mut ids = Vec::new();
    let mut runs = Vec::new();
    let mut labels = Vec::new();
    for n in 0..count {
        let made = at(n).as_millisecond();
        let id = (u128::from(made.unsigned_abs()) << 80) | (7 << 76) | (2 << 62) | u128::from(n);
        let id = RunId(Uuid::from_u128(id));
        let key = database.id(&id.to_string());
        let (owner, agent) = [("ada", "a"), ("bob", "b")][(n % 2) as usize];
        // The oldest one alone is of both, and failed.
        let (agent, status) = if n == 0 {
            ("b", "failed")
        } else {
            (agent, "completed")
        };
        let empty = database.free_text("");
        runs.push(format!(
            "({key}, {key}, false, 0, '{status}', '{agent}', '{owner}', {made}, {made}, 0, 1, 1, 0, 0, 0, 0, 0, 0, 0, {empty}, \
             '', 1, 0, 0, 0, 0, 0, 0, 0, {empty}, '{{\"k\":\"v\",\"n\":\"{n}\"}}', false, 0, false)"
        ));
        for (name, value) in [("k", "v".to_owned()), ("n", n.to_string())] {
            let (name, value) = (database.free_text(name), database.free_text(&value));
            labels.push(format!("({name}, {value}, {key})"));
        }
        ids.push(id);
    }
    let more = match database {
        Database::Sqlite(_) => "structured",
        Database::Postgres(_) => "input_is_parts",
    };
    let columns = format!(
        "id, root, child, depth, status, agent, owner, created_at, finished_at, last_event, attempt, turns, input_tokens, \
         output_tokens, cache_read_tokens, cache_write_tokens, model_calls, tool_calls, unreported, model, agent_version, \
         tree_runs, tree_input_tokens, tree_output_tokens, tree_cache_read_tokens, tree_cache_write_tokens, \
         tree_model_calls, tree_tool_calls, tree_unreported, input, labels, stream, messages, {more}"
    );
    for (table, columns, rows) in [
        ("runs", &*columns, runs),
        ("labels", "key, value, run", labels),
    ] {
        for rows in rows.chunks(1000) {
            let rows = rows.join(", ");
            database.execute(&format!("INSERT INTO {table} ({columns}) VALUES {rows}"));
        }
    }
    ids
}

fn page() -> RunFilter {
    RunFilter {
        limit: 50,
        ..RunFilter::default()
    }
}

fn text(text: &str) -> Option<String> {
    Some(text.to_owned())
}

fn label(key: &str, value: &str) -> Vec<(String, String)> {
    vec![(key.to_owned(), value.to_owned())]
}

/// Filters that only the oldest run matches. A selective filter or a time leads to it in one page, whatever else is
/// requested.
fn filters_for_the_oldest() -> Vec<RunFilter> {
    vec![
        RunFilter {
            status: Some(Status::Failed),
            labels: label("k", "v"),
            ..page()
        },
        RunFilter {
            status: Some(Status::Failed),
            agent: text("b"),
            ..page()
        },
        RunFilter {
            status: Some(Status::Failed),
            owner: text("ada"),
            agent: text("b"),
            ..page()
        },
        RunFilter {
            labels: [label("n", "0"), label("k", "v")].concat(),
            owner: text("ada"),
            ..page()
        },
        RunFilter {
            until: Some(at(1)),
            owner: text("ada"),
            agent: text("b"),
            labels: label("k", "v"),
            ..page()
        },
        RunFilter {
            until: Some(at(1)),
            include_children: true,
            ..page()
        },
    ]
}

/// Filters that none of `count` runs matches.
fn filters_for_none(count: u64) -> Vec<RunFilter> {
    vec![
        RunFilter {
            labels: label("k", "w"),
            ..page()
        },
        RunFilter {
            labels: label("k", "w"),
            agent: text("a"),
            ..page()
        },
        RunFilter {
            agent: text("a"),
            session: text("s"),
            ..page()
        },
        RunFilter {
            status: Some(Status::Cancelled),
            labels: label("k", "v"),
            since: Some(at(9)),
            ..page()
        },
        RunFilter {
            since: Some(at(count)),
            agent: text("a"),
            owner: text("bob"),
            ..page()
        },
    ]
}

async fn a_page_ends_early_instead_of_searching_every_run(opened: &Opened) {
    const COUNT: u64 = 20_000;
    let store = &*opened.store;
    let ids = insert(&opened.database(), COUNT);
    let oldest = vec![ids[0]];
    let one = filters_for_the_oldest()
        .into_iter()
        .map(|filter| (filter, &oldest));
    let empty = Vec::new();
    let none = filters_for_none(COUNT)
        .into_iter()
        .map(|filter| (filter, &empty));
    for (filter, wanted) in one.chain(none) {
        assert_eq!(
            pages(store, &filter).await,
            (wanted.clone(), 1),
            "{filter:?}"
        );
    }

    // Many runs match each of two filters, and hardly any match both.
    let both = RunFilter {
        owner: text("ada"),
        agent: text("b"),
        ..page()
    };
    let first = store.list(both.clone()).await.expect("a page");
    assert!(first.runs.is_empty() && first.next.is_some(), "{first:?}");
    let (found, count) = pages(store, &both).await;
    assert_eq!(found, oldest);
    assert!((2..200).contains(&count), "{count} pages");
}

#[tokio::test]
async fn children_and_messages_are_paged() {
    let app = TestApp::setup()
        .agent("planner", "sub_agents = [\"reader\"]")
        .agent("reader", "")
        .spawn()
        .await;
    let long = "é".repeat(3000);
    let tasks = [("reader", "a"), ("reader", &*long), ("reader", "c")];
    app.provider
        .will("planner", [delegates(tasks), says("done")]);
    app.provider.always("reader", |_| says("read"));
    let run = app.run("planner", "go").await;

    let path = format!("/runs/{}/children", run.id());
    let tasks = |page: &Value| -> Vec<String> {
        let data = page["data"].as_array().expect("children").iter();
        data.map(|child| child["task"].as_str().expect("a task").to_owned())
            .collect()
    };
    let first = app.get(&format!("{path}?limit=2")).await.json();
    assert_eq!(tasks(&first), ["a", &*long]);
    let cursor = first["next_cursor"].as_str().expect("a next page");
    let rest = app
        .get(&format!("{path}?limit=2&cursor={cursor}"))
        .await
        .json();
    assert_eq!(tasks(&rest), ["c"]);
    assert_eq!(rest["next_cursor"], Value::Null);
    for wrong in [
        "limit=0",
        "limit=1001",
        "cursor=x",
        &*format!("cursor={}", run.id()),
    ] {
        app.get(&format!("{path}?{wrong}")).await.problem(400);
    }

    let tree = run.tree().await;
    assert_eq!(tree["children"][1]["task"], "é".repeat(2048));
    assert_eq!(tree["children"][1]["truncated"], true);
    assert_eq!(tree["children"][0].get("truncated"), None);

    let messages = format!("/runs/{}/messages", run.id());
    let whole = app.get(&messages).await.json();
    assert_eq!(whole["next_after"], Value::Null);
    let rest = app.get(&format!("{messages}?after=2")).await.json();
    assert_eq!(rest["data"][0]["role"], "tool");
    assert_eq!(
        rest["data"],
        Value::from(whole["data"].as_array().expect("data")[2..].to_vec())
    );
}

shared_stories!(
    pages_have_all_matching_runs_and_no_others,
    a_page_ends_early_instead_of_searching_every_run,
);

#[tokio::test]
async fn a_name_with_a_character_that_the_database_refuses_is_nobodys() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    app.provider.always("solo", |_| says("done"));
    let body = serde_json::json!({"input": "x", "session": "s"});
    app.run_with("solo", body).await;
    for path in ["/runs?agent=", "/sessions/s?agent=", "/usage?agent="] {
        let got = app.get(&format!("{path}%00")).await;
        let same = app.get(&format!("{path}nobody")).await;
        assert_eq!(got.status, same.status, "{path}: {}", got.text);
    }
}
