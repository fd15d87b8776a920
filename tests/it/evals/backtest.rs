//! Backtests: recorded trees are played again with another definition, and nothing with an effect is performed.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use axum::Router;
use axum::extract::State;
use axum::http::Method as RequestMethod;
use reqwest::Method;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use crate::evals::{SCORED, create, finished};
use crate::support::app::{Setup, TestApp, key, send};
use crate::support::gate::Gate;
use crate::support::http_server::serve;
use crate::support::provider::answer::{ScriptedAnswer, calls, delegates, says};
use crate::tools::approvals::{careful, decide, requests, writes, wrote};

/// A service whose answers differ each time.
struct Tickets {
    address: String,
    seen: Arc<Seen>,
    _server: JoinSet<()>,
}

#[derive(Default)]
struct Seen {
    reads: AtomicUsize,
    writes: AtomicUsize,
}

impl Tickets {
    async fn start() -> Self {
        let seen = Arc::new(Seen::default());
        let routes = Router::new()
            .fallback(respond)
            .with_state(Arc::clone(&seen));
        let (address, server) = serve(routes).await;
        Self {
            address: address.to_string(),
            seen,
            _server: server,
        }
    }

    fn reads(&self) -> usize {
        self.seen.reads.load(Ordering::Relaxed)
    }

    fn writes(&self) -> usize {
        self.seen.writes.load(Ordering::Relaxed)
    }

    /// A planner and its clerk, who comments tickets.
    fn setup(&self) -> Setup {
        TestApp::setup()
            .config("[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]")
            .agent("boss", "sub_agents = [\"clerk\"]\n")
            .agent("clerk", &self.tools())
    }

    fn tools(&self) -> String {
        let tool = |name: &str, method: &str| {
            format!(
                "[[http_tools]]\nname = \"{name}\"\ndescription = \"{name}\"\nmethod = \"{method}\"\n\
                 url = \"http://{}/{{id}}\"\n\
                 parameters = {{ type = \"object\", properties = {{ id = {{ type = \"integer\" }}, at = {{ type = \"string\" }} }} }}\n",
                self.address
            )
        };
        [
            tool("comment", "POST"),
            tool("find", "GET"),
            tool("close", "DELETE"),
        ]
        .concat()
    }
}

async fn respond(State(seen): State<Arc<Seen>>, method: RequestMethod) -> String {
    let (kind, counter) = match method {
        RequestMethod::GET => ("read", &seen.reads),
        _ => ("write", &seen.writes),
    };
    format!("{kind} {}", counter.fetch_add(1, Ordering::Relaxed) + 1)
}

/// The planner has its clerk do the work, whose calls are these, one a turn.
fn script(app: &TestApp, tool_calls: Vec<(&'static str, Value)>) {
    app.provider.always("boss", |request| match request.turn() {
        1 => delegates([("clerk", "do it")]),
        _ => says("good"),
    });
    app.provider.always("clerk", move |request| {
        match tool_calls.get(request.turn() - 1) {
            Some((tool, arguments)) => calls([(*tool, arguments.clone())]),
            None => says("done"),
        }
    });
}

/// What the clerk knew at the end of its last run.
fn last_results(app: &TestApp, model: &str) -> Vec<String> {
    let last = app.provider.requests_for(model).pop();
    last.expect("a request").tool_results()
}

async fn first_run(app: &TestApp, eval: &Value) -> Value {
    let id = eval["id"].as_str().expect("an id");
    let page = app.get(&format!("/evals/{id}/cases")).await.json();
    page["data"][0]["runs"][0].clone()
}

#[tokio::test]
async fn recorded_results_are_used_up_in_order_and_nothing_is_performed() {
    let tickets = Tickets::start().await;
    let app = tickets.setup().spawn().await;
    let comment = |at: &str| ("comment", json!({"id": 7, "at": at}));
    script(
        &app,
        vec![
            comment("1 ms"),
            ("close", json!({"id": 7})),
            comment("2 ms"),
        ],
    );
    let source = app.run("boss", "go").await;
    assert_eq!((source.output(), tickets.writes()), ("good", 3));
    assert_eq!(
        last_results(&app, "clerk"),
        ["write 1", "write 2", "write 3"]
    );

    app.write_agent(
        "boss",
        "sub_agents = [\"clerk\"]\nsystem_prompt = \"newer\"\n",
    );
    // Another order, and other times.
    script(
        &app,
        vec![
            comment("30 ms"),
            comment("40 ms"),
            ("close", json!({"id": 7})),
        ],
    );
    let cases = json!([{"id": "a", "input": "go", "run": source.id()}]);
    let body = json!({"agent": "boss", "cases": cases, "ignore": ["[0-9]+ ms"]});
    let accepted = create(&app, body.clone()).await;
    assert_eq!(accepted.json()["tools"], "recorded");
    let eval = finished(&app, &accepted).await;
    let run = first_run(&app, &eval).await;
    assert_eq!(run["outcome"], "completed", "{eval} {}", app.daemon.log());
    assert_eq!((&run["tool_calls"], tickets.writes()), (&json!(4), 3));
    assert_eq!(
        last_results(&app, "clerk"),
        ["write 1", "write 3", "write 2"]
    );
    let played = app.find(run["run_id"].as_str().expect("an id")).await;
    let label = app.get(&format!("/runs/{}", played.id())).await.json();
    assert_eq!(label["labels"]["evaluation.source"], source.id());

    // One call more than were recorded.
    script(
        &app,
        vec![comment("1 ms"), comment("2 ms"), comment("3 ms")],
    );
    let eval = finished(&app, &create(&app, body).await).await;
    let run = first_run(&app, &eval).await;
    assert_eq!(
        (&run["outcome"], &eval["result"]["diverged"]),
        (&json!("diverged"), &json!(1))
    );
    let diverged = &run["diverged"];
    assert_eq!(
        (&diverged["path"], &diverged["turn"], &diverged["tool"]),
        (&json!("boss/1.1:clerk"), &json!(3), &json!("comment"))
    );
    assert!(
        diverged["arguments"]
            .as_str()
            .is_some_and(|it| it.contains("3 ms"))
    );
    assert_eq!(tickets.writes(), 3);
}

#[tokio::test]
async fn calls_without_a_recorded_result_follow_unknown() {
    let tickets = Tickets::start().await;
    let app = tickets.setup().agent("liar", "").spawn().await;
    script(&app, vec![("find", json!({"id": 1}))]);
    let source = app.run("boss", "go").await;
    assert_eq!(tickets.reads(), 1);
    let backtest = async |unknown: &str| {
        let cases = json!([{"input": "go", "run": source.id()}]);
        let body = json!({"agent": "boss", "cases": cases, "unknown": unknown});
        let eval = finished(&app, &create(&app, body).await).await;
        assert_eq!(eval["unknown"], unknown);
        first_run(&app, &eval).await
    };
    script(&app, vec![("find", json!({"id": 2}))]);
    assert_eq!(backtest("stop").await["diverged"]["tool"], "find");
    assert_eq!(tickets.reads(), 1);
    assert_eq!(backtest("safe").await["outcome"], "completed");
    assert_eq!(
        (last_results(&app, "clerk"), tickets.reads()),
        (vec!["read 2".to_owned()], 2)
    );

    script(
        &app,
        vec![("find", json!({"id": 1})), ("close", json!({"id": 2}))],
    );
    assert_eq!(backtest("safe").await["diverged"]["tool"], "close");
    app.provider.always("liar", |_| says("closed, of course"));
    let run = backtest("agent:liar").await;
    assert_eq!(run["outcome"], "completed", "{run}");
    assert_eq!(last_results(&app, "clerk"), ["read 1", "closed, of course"]);
    let request = app.provider.requests_for("liar").pop().expect("a request");
    let task = request.user_messages().concat();
    assert!(
        task.contains("\"tool\":\"close\"") && task.contains("\"id\":2"),
        "{task}"
    );
    let tree = app
        .find(run["run_id"].as_str().expect("an id"))
        .await
        .tree_runs()
        .await;
    let warned = tree
        .iter()
        .flat_map(|run| run["warnings"].as_array().cloned());
    let warned: Vec<Value> = warned.flatten().collect();
    assert!(
        warned.iter().any(|it| it["code"] == "result_made_up"),
        "{warned:?}"
    );
    assert_eq!((tickets.reads(), tickets.writes()), (2, 0));
}

#[tokio::test]
async fn a_backtest_goes_on_after_a_kill_and_uses_no_result_twice() {
    let tickets = Tickets::start().await;
    let mut app = tickets.setup().spawn().await;
    let comment = || ("comment", json!({"id": 7}));
    script(&app, vec![comment(), comment(), comment()]);
    let source = app.run("boss", "go").await;
    let gate = Gate::closed();
    let slow = gate.clone();
    app.provider
        .always("clerk", move |request| match request.turn() {
            turn @ 1..=3 => {
                let answer = calls([comment()]);
                match turn {
                    3 => answer.after_gate(&slow),
                    _ => answer,
                }
            }
            _ => says("done"),
        });
    let seen = app.provider.requests_for("clerk").len();
    let cases = json!([{"input": "go", "run": source.id()}]);
    let accepted = create(&app, json!({"agent": "boss", "cases": cases})).await;
    app.provider.wait_for_request("clerk", seen + 3).await;
    app.crash_and_restart().await;
    gate.open();
    let eval = finished(&app, &accepted).await;
    let run = first_run(&app, &eval).await;
    assert_eq!(run["outcome"], "completed", "{eval} {}", app.daemon.log());
    assert_eq!(
        last_results(&app, "clerk"),
        ["write 1", "write 2", "write 3"]
    );
    assert_eq!(tickets.writes(), 3);
}

#[tokio::test]
async fn recorded_runs_are_cases_and_the_old_version() {
    let app = TestApp::setup().agent("solo", SCORED).spawn().await;
    app.provider.always("solo", |_| says("bad"));
    let mut sources = Vec::new();
    for number in 0..3 {
        let body = json!({"input": format!("case {number}"), "context": "so it is"});
        sources.push(app.run_with("solo", body).await.id().to_owned());
    }
    app.provider.always("solo", |_| says("good"));
    for _ in 0..2 {
        // Those of the first evaluation are no cases of the second.
        let body = json!({"agent": "solo", "since": "1h", "against": "recorded", "gates": ["fine >= 0.1"]});
        let accepted = create(&app, body).await;
        assert_eq!(accepted.json()["planned"], 6, "{}", accepted.text);
        let eval = finished(&app, &accepted).await;
        assert_eq!(eval["versions"][1]["version"], "recorded");
        let result = &eval["result"];
        let fine = &result["scorers"]["fine"];
        assert_eq!(
            (&fine["versions"], &fine["wins"]),
            (
                &json!([{"n": 3, "mean": 1.0}, {"n": 3, "mean": 0.0}]),
                &json!(3)
            ),
            "{eval}"
        );
        assert_eq!(result["gates"][0]["held"], true);
        assert!(
            result["against"]["tokens"]
                .as_f64()
                .is_some_and(|tokens| tokens > 0.0)
        );
        let olds: Vec<&Value> = result["flipped"]
            .as_array()
            .expect("cases")
            .iter()
            .map(|it| &it["a"])
            .collect();
        assert!(
            sources.iter().all(|id| olds.contains(&&json!(id))),
            "{olds:?}"
        );
    }
    let requests = app.provider.requests_for("solo");
    assert_eq!(requests.len(), 9);
    let last = requests[8].user_messages().concat();
    assert!(
        last.contains("case") && last.ends_with("so it is"),
        "{last}"
    );
    let limited = create(&app, json!({"agent": "solo", "since": "1h", "limit": 2})).await;
    assert_eq!(
        (&limited.json()["planned"], &limited.json()["tools"]),
        (&json!(2), &json!("recorded"))
    );
    for (body, why) in [
        (
            json!({"agent": "solo", "since": "soon"}),
            "an age such as 30d",
        ),
        (
            json!({"agent": "solo", "since": "1h", "limit": 0}),
            "/limit: must be from 1 to 1000",
        ),
        (
            json!({"agent": "solo", "cases": [{"input": "x"}], "against": "recorded"}),
            "has no run",
        ),
        (
            json!({"agent": "solo", "cases": [{"input": "x"}], "tools": "recorded"}),
            "no case has a run",
        ),
        (
            json!({"agent": "solo", "cases": [{"input": "x"}], "unknown": "safe"}),
            "set tools to recorded",
        ),
        (
            json!({"agent": "solo", "since": "1h", "unknown": "guess"}),
            "stop, safe or agent:NAME",
        ),
        (
            json!({"agent": "solo", "since": "1h", "ignore": ["("]}),
            "/ignore/0",
        ),
        (
            json!({"agent": "solo", "cases": [{"input": "x", "labels": {"evaluation.source": "a"}}]}),
            "choose another key",
        ),
    ] {
        let refused = create(&app, body.clone()).await;
        assert!(
            refused.problem(422).contains(why),
            "{body}: {}",
            refused.text
        );
    }
}

#[tokio::test]
async fn a_case_whose_run_is_gone_or_of_another_key_fails() {
    let tickets = Tickets::start().await;
    let app = tickets
        .setup()
        .config(&key("amy", "scopes = [\"run\", \"read\"]"))
        .config(&key("bob", "scopes = [\"run\", \"read\"]"))
        .spawn()
        .await;
    script(&app, vec![("comment", json!({"id": 7}))]);
    let request = async |key: &str, method: Method, path: &str, body: &Value| {
        send(app.request(method, path).bearer_auth(key).json(body)).await
    };
    let source = request(
        "amy",
        Method::POST,
        "/agents/boss/runs?wait=180",
        &json!({"input": "go"}),
    )
    .await;
    assert!(source.status < 300, "{}", source.text);
    let source = source.json()["id"].as_str().expect("an id").to_owned();
    for (key, run, outcome, error) in [
        ("amy", &*source, "completed", Value::Null),
        ("bob", &*source, "failed", json!("source_not_found")),
        (
            "amy",
            "run_019a1f3c-8d2e-7b40-9c55-3f1e6a7b8c9d",
            "failed",
            json!("source_not_found"),
        ),
    ] {
        let body = json!({"agent": "boss", "cases": [{"input": "go", "run": run}]});
        let accepted = request(key, Method::POST, "/evals", &body).await;
        assert_eq!(accepted.status, 202, "{}", accepted.text);
        let id = accepted.json()["id"].as_str().expect("an id").to_owned();
        let eval = loop {
            let path = format!("/evals/{id}?wait=5");
            let eval = request(key, Method::GET, &path, &json!({})).await.json();
            if !eval["finished_at"].is_null() {
                break eval;
            }
        };
        let page = request(key, Method::GET, &format!("/evals/{id}/cases"), &json!({})).await;
        let run = &page.json()["data"][0]["runs"][0];
        assert_eq!(
            (&run["outcome"], &run["error"]),
            (&json!(outcome), &error),
            "{eval}"
        );
    }
    assert_eq!(tickets.writes(), 1);
}

#[tokio::test]
async fn decisions_come_from_the_record() {
    let app = careful("").spawn().await;
    let mut cases = Vec::new();
    for (number, decision) in ["approve", "deny"].into_iter().enumerate() {
        let path = format!("{decision}.txt");
        app.provider.will("careful", [writes(&path), says("good")]);
        let run = app.start("careful", &format!("case {number}")).await;
        let request = requests(&app, run.id(), 1).await.remove(0);
        let decided = decide(&app, &request, json!({"decision": decision})).await;
        assert_eq!(decided.status, 202, "{}", decided.text);
        assert_eq!(run.wait_for_end().await.output(), "good");
        cases.push(json!({"input": path, "run": run.id()}));
    }
    let recorded: Vec<String> = last_results(&app, "careful");
    fs::remove_file(app.path("work/approve.txt")).expect("a file");
    app.provider
        .always("careful", |request| match request.turn() {
            1 => writes(request.user_messages().concat().trim()),
            _ => says("good"),
        });
    let eval = finished(
        &app,
        &create(&app, json!({"agent": "careful", "cases": cases})).await,
    )
    .await;
    assert_eq!(eval["result"]["cases"], 2, "{eval}");
    let last = app.provider.requests_for("careful").into_iter().rev();
    let results: Vec<String> = last.take(4).flat_map(|it| it.tool_results()).collect();
    assert!(results.contains(&recorded[0]), "{results:?} {recorded:?}");
    assert!(!wrote(&app, "approve.txt") && !wrote(&app, "deny.txt"));
    assert_eq!(app.get("/approvals").await.json()["data"], json!([]));
}

/// The trees of the property: what each run calls follows from its tree, its agent and its turn.
const TREES: u64 = 24;
const SERVER: &str = include_str!("../tools/mcp/server.py");

fn mix(parts: &[u64]) -> u64 {
    parts.iter().fold(0x9e37_79b9_7f4a_7c15, |state, part| {
        let mixed = (state ^ part).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed ^ (mixed >> 29)
    })
}

/// The calls of a turn; a backtest makes other ones in a third of the turns.
fn planned_calls(
    is_backtest: bool,
    tree: u64,
    agent: &str,
    turn: u64,
) -> Vec<(&'static str, Value)> {
    let agent_number = agent.len() as u64;
    let is_other = is_backtest && mix(&[tree, agent_number, turn, 1]).is_multiple_of(3);
    let seed = mix(&[tree, agent_number, turn, 10 + u64::from(is_other)]);
    let count = 1 + seed % 3;
    let one = |index: u64| {
        let choice = mix(&[seed, index]);
        let id = choice % 4;
        match choice / 4 % 8 {
            0 => ("comment", json!({ "id": id })),
            1 => ("close", json!({ "id": id })),
            2 => (
                "write_file",
                json!({"path": format!("f{id}.txt"), "content": format!("{choice}")}),
            ),
            3 => ("delete_path", json!({"path": format!("f{id}.txt")})),
            4 => ("s__echo", json!({"text": format!("say {id}")})),
            5 => (
                "run_command",
                json!({"command": format!("echo {choice} >> ran.txt")}),
            ),
            6 if agent == "boss" => (
                "call_agent",
                json!({"agent": "clerk", "task": format!("tree {tree}")}),
            ),
            _ => ("find", json!({ "id": id })),
        }
    };
    (0..count).map(one).collect()
}

fn answer(is_backtest: bool, agent: &str, turn: usize, task: &str) -> ScriptedAnswer {
    let mut words = task.split_whitespace().rev();
    let tree: Option<u64> = words.find_map(|word| word.parse().ok());
    let tree = tree.expect("the number of a tree");
    let turns = 1 + mix(&[tree, agent.len() as u64]) % 3;
    match turn as u64 <= turns {
        true => calls(planned_calls(is_backtest, tree, agent, turn as u64)),
        false => says("done"),
    }
}

fn files(dir: &Path) -> BTreeMap<String, String> {
    let entries = fs::read_dir(dir).expect("a directory").flatten();
    let files = entries.filter(|it| it.path().is_file()).map(|it| {
        let text = fs::read_to_string(it.path()).unwrap_or_default();
        (it.file_name().to_string_lossy().into_owned(), text)
    });
    files.collect()
}

#[tokio::test]
async fn a_backtest_performs_no_effect_whatever_the_trees_do() {
    let tickets = Tickets::start().await;
    let path = axed::config::environment::process_environment()
        .remove("PATH")
        .expect("a PATH");
    let tools = format!(
        "workdir = \"work\"\ntools = [\"write_file\", \"delete_path\", \"run_command\"]\n{}\
         [[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"sh\"\n\
         args = [\"-c\", \"echo started >> $HOME/starts.txt; exec python3 server.py\"]\n",
        tickets.tools()
    );
    let mut app = TestApp::setup()
        .config("[tools]\nallow_commands = true\n[tools.url_fetch]\nallow_hosts = [\"127.0.0.1\"]")
        .agent("boss", &format!("sub_agents = [\"clerk\"]\n{tools}"))
        .agent("clerk", &tools)
        .file("server.py", SERVER)
        .file("work/here.txt", "here")
        .environment("PATH", &path)
        .spawn()
        .await;
    let is_backtest = Arc::new(AtomicBool::new(false));
    for agent in ["boss", "clerk"] {
        let is_backtest = Arc::clone(&is_backtest);
        app.provider.always(agent, move |request| {
            let task = request.user_messages().concat();
            answer(
                is_backtest.load(Ordering::Relaxed),
                agent,
                request.turn(),
                &task,
            )
        });
    }
    let mut cases = Vec::new();
    for tree in 0..TREES {
        let input = format!("tree {tree}");
        let run = app.run("boss", &input).await;
        cases.push(json!({"input": input, "run": run.id()}));
    }
    let effects = |app: &TestApp| {
        let starts = fs::read_to_string(app.path("starts.txt")).unwrap_or_default();
        (tickets.writes(), files(&app.path("work")), starts)
    };
    // No server runs any more.
    app.crash_and_restart().await;
    let before = effects(&app);
    assert!(
        before.0 > 0 && before.1.len() > 1,
        "{before:?} {}",
        app.daemon.log()
    );
    is_backtest.store(true, Ordering::Relaxed);
    for unknown in ["stop", "safe"] {
        let reads = tickets.reads();
        let body = json!({"agent": "boss", "cases": cases, "unknown": unknown});
        let eval = finished(&app, &create(&app, body).await).await;
        let totals = &eval["result"];
        assert_eq!(
            (&eval["state"], &totals["errors"]),
            (&json!("completed"), &json!({})),
            "{eval}"
        );
        let (diverged, completed) = (totals["diverged"].as_u64(), totals["cases"].as_u64());
        assert!(diverged > Some(0) && completed > Some(0), "{eval}");
        assert_eq!(effects(&app), before, "{unknown}");
        assert_eq!(tickets.reads() > reads, unknown == "safe");
    }
    // The tools of the server were offered without it.
    let last = app.provider.requests_for("boss").pop().expect("a request");
    assert!(
        last.tool_names().contains(&"s__echo".to_owned()),
        "{:?}",
        last.tool_names()
    );
}
