//! MCP servers: a process that speaks on its pipes, and one over HTTP; well-behaved and not.

use crate::support::app::{Setup, TestApp};
use crate::support::events::count;
use crate::support::provider::answer::{calls, says};
use crate::support::{eventually, within_timeout};
use crate::tools::ask_person::answer;
use axed::config::environment::process_environment;
use serde_json::{Value, json};
use std::fs;
use std::path::Path;

const SERVER: &str = include_str!("mcp/server.py");

const ALL: [&str; 11] = [
    "s__echo",
    "s__hang",
    "s__hang_reading",
    "s__die",
    "s__big",
    "s__endless",
    "s__pictures",
    "s__grow",
    "s__env",
    "s__fail",
    "s__dotted_name",
];

/// Nobody answers whether a call was done: it fails, or its run does.
pub const UNATTENDED: &str = "[runs]\nreconcile = \"fail\"";

/// A daemon with the agent `a`, whose server `s` is the script.
fn with_server(more: &str) -> Setup {
    with_mode("", more)
}

fn with_mode(mode: &str, more: &str) -> Setup {
    // What is offered nothing is not listened to when it calls.
    let own = if mode == "silent" {
        "sub_agents = [\"b\"]\n"
    } else {
        ""
    };
    let open_timeout = match more.contains("open_timeout") {
        true => "",
        false => "open_timeout = 120\n",
    };
    let agent = format!(
        "{own}[[mcp_servers]]\nname = \"s\"\ntransport = \"stdio\"\ncommand = \"python3\"\nargs = [\"server.py\", \"{mode}\"]\n\
         env = {{ TOKEN = \"${{STORY_TOKEN}}\" }}\n{open_timeout}{more}"
    );
    let path = process_environment().remove("PATH").expect("a PATH");
    TestApp::setup()
        .config(UNATTENDED)
        .file("server.py", SERVER)
        .agent("a", &agent)
        .environment("PATH", &path)
        .environment("STORY_TOKEN", "s3cret-of-the-story")
}

/// The result of one call that the agent `a` makes.
pub async fn result_of(app: &TestApp, tool: &str, arguments: Value) -> (String, bool) {
    app.provider
        .will("a", [calls([(tool, arguments)]), says("done")]);
    let run = app.run("a", "go").await;
    assert_eq!(run.status(), "completed", "{}", app.daemon.log());
    let last = app.provider.requests_for("a").pop().expect("a request");
    (last.tool_results().remove(0), last.tool_result_errors()[0])
}

/// The lines of a file that the server writes, once there are that many.
async fn lines(app: &TestApp, file: &str, many: usize) -> Vec<String> {
    eventually(&format!("{many} lines of {file}"), async || {
        let text = fs::read_to_string(app.path(file)).unwrap_or_default();
        let lines: Vec<String> = text.lines().map(str::to_owned).collect();
        (lines.len() >= many && text.ends_with('\n')).then_some(lines)
    })
    .await
}

/// Waits until the process has ended; it may still be a zombie.
async fn gone(pid: &str) {
    let stat = Path::new("/proc").join(pid).join("stat");
    eventually(&format!("the end of process {pid}"), async || {
        let is_alive = fs::read_to_string(&stat).is_ok_and(|text| !text.contains(") Z "));
        (!is_alive).then_some(())
    })
    .await;
}

#[tokio::test]
async fn tools_are_offered_and_called_over_one_connection() {
    let app = with_server("").spawn().await;
    let answer = result_of(&app, "s__echo", json!({"text": "hello"})).await;
    assert_eq!(answer, ("hello".to_owned(), false));
    let sent = &app.provider.requests_for("a")[0];
    assert_eq!(sent.tool_names(), ALL);
    let echo = &sent.tools()[0];
    assert_eq!(echo["description"], "says it again");
    assert_eq!(echo["parameters"]["required"], json!(["text"]));
    assert_eq!(sent.tools()[1]["parameters"]["properties"], json!({}));

    let (why, is_error) = result_of(&app, "s__echo", json!({})).await;
    assert!(
        is_error && why.contains("\"text\" is a required property"),
        "{why}"
    );
    let failed = result_of(&app, "s__fail", json!({})).await;
    assert_eq!(failed, ("it did not work".to_owned(), true));
    let unchecked = result_of(&app, "s__dotted_name", json!({"a": 1})).await;
    assert_eq!(unchecked.0, "dotted with {\"a\": 1}");
    let pictures = result_of(&app, "s__pictures", json!({})).await;
    assert_eq!(
        pictures.0,
        "[image: image/gif, 7 bytes]\n[resource: file:///a]"
    );
    // The picture itself is sent with it.
    let last = app.provider.requests_for("a").pop().expect("a request");
    let shown = &last.messages().last().expect("results")["content"][0]["content"][1];
    assert_eq!(shown["source"]["data"], "R0lGODlhIQ==");
    let (big, _) = result_of(&app, "s__big", json!({})).await;
    assert!(
        big.len() < 300 << 10 && big.contains("(cut at 262144 of 2000000 bytes"),
        "{}",
        big.len()
    );

    assert_eq!(lines(&app, "started", 1).await.len(), 1);
    // Three pages, once: the server declares that it sends list changes.
    assert_eq!(lines(&app, "listed", 3).await, ["start", "5", "10"]);
    let warning = "\\\"dotted/name\\\" of MCP server \\\"s\\\" is left out";
    app.daemon.wait_for_log(warning).await;
}

#[tokio::test]
async fn restricted_tools_apply_to_dry_runs_and_children() {
    let app = with_server("tools = [\"echo\", \"nonsense\"]")
        .agent("boss", "sub_agents = [\"a\"]")
        .spawn()
        .await;
    let dry = app
        .post("/agents/a/dry-run", &json!({"input": "x"}))
        .await
        .json();
    let names: Vec<&str> = dry["tools"]
        .as_array()
        .expect("tools")
        .iter()
        .filter_map(|it| it["name"].as_str())
        .collect();
    assert_eq!(names, ["s__echo"], "{dry}");
    app.provider.will(
        "boss",
        [
            calls([("call_agent", json!({"agent": "a", "task": "t"}))]),
            says("done"),
        ],
    );
    app.provider.will(
        "a",
        [
            calls([("s__echo", json!({"text": "hi"}))]),
            says("child done"),
        ],
    );
    let run = app.run("boss", "go").await;
    assert_eq!(run.output(), "done");
    let seen = app.provider.requests_for("a");
    assert_eq!(seen[0].tool_names(), ["s__echo"]);
    assert_eq!(seen[1].tool_results(), ["hi"]);
    let events = run.events().await;
    assert_eq!(count(&events, "tools.warning"), 1);
    let shown = app.get("/agents/a").await.json();
    let expected = json!([{"name": "s", "transport": "stdio", "command": "python3", "tools": ["echo", "nonsense"],
                           "timeout": 60, "open_timeout": 120, "required": false}]);
    assert_eq!(shown["mcp_servers"], expected);
}

#[tokio::test]
async fn a_changed_tool_list_applies_to_the_next_run() {
    let app = with_server("").spawn().await;
    result_of(&app, "s__grow", json!({})).await;
    let last = app.provider.requests_for("a").pop().expect("a request");
    assert_eq!(
        last.tool_names(),
        ALL,
        "the run keeps the tools that it began with"
    );
    let dry = json!({"input": "x"});
    within_timeout("the grown tool", async {
        loop {
            let got = app.post("/agents/a/dry-run", &dry).await;
            if got.text.contains("s__grown") {
                return;
            }
        }
    })
    .await;
    assert_eq!(lines(&app, "started", 1).await.len(), 1);
}

#[tokio::test]
async fn a_server_that_dies_is_an_error_and_is_restarted() {
    let app = with_server("").spawn().await;
    let (why, is_error) = result_of(&app, "s__die", json!({})).await;
    assert!(
        is_error && why.starts_with("MCP server \"s\" gave no result for the call:"),
        "{why}"
    );
    assert!(why.contains("its process ended (exit status: 3)"), "{why}");
    gone(&lines(&app, "children", 1).await[0]).await;
    within_timeout("the server again", async {
        while result_of(&app, "s__echo", json!({"text": "again"})).await.0 != "again" {}
    })
    .await;
    assert!(lines(&app, "started", 2).await.len() >= 2);
}

#[tokio::test]
async fn an_endless_message_closes_only_the_connection() {
    let app = with_server("").spawn().await;
    let (why, is_error) = result_of(&app, "s__endless", json!({})).await;
    assert!(
        is_error && why.contains("more than 16777216 bytes"),
        "{why}"
    );
    gone(&lines(&app, "started", 1).await[0]).await;
}

#[tokio::test]
async fn a_cancelled_run_notifies_the_server() {
    let app = with_server("").spawn().await;
    app.provider.will("a", [calls([("s__hang", json!({}))])]);
    let run = app.start("a", "go").await;
    lines(&app, "hanging", 1).await;
    let run = run.cancel("enough").await;
    assert_eq!(run.status(), "cancelled");
    let cancelled = lines(&app, "cancelled", 1).await;
    assert!(cancelled[0].contains("requestId"), "{cancelled:?}");
    // The connection stays open.
    assert_eq!(
        result_of(&app, "s__echo", json!({"text": "hi"})).await.0,
        "hi"
    );
    assert_eq!(lines(&app, "started", 1).await.len(), 1);
}

#[tokio::test]
async fn a_timeout_names_the_servers_that_were_starting() {
    let app = with_mode("silent", "").agent("b", "").spawn().await;
    let run = app
        .run_with("a", json!({"input": "go", "timeout": 15}))
        .await;
    assert_eq!(run.failure().0, "timeout");
    let warnings = run["warnings"].as_array().expect("warnings");
    let expected = "MCP server \"s\" had not started when the run's time was over";
    assert!(
        warnings.iter().any(|it| it["message"] == expected),
        "{warnings:?}"
    );
}

#[tokio::test]
async fn an_unavailable_server_costs_only_its_tools() {
    let app = with_mode(
        "silent",
        "open_timeout = 2\n[[mcp_servers]]\nname = \"none\"\ntransport = \"stdio\"\ncommand = \"/no/such/program\"\n\
         [[mcp_servers]]\nname = \"unset\"\ntransport = \"stdio\"\ncommand = \"python3\"\nenv = { A = \"${NOT_SET}\" }\n",
    )
    .spawn()
    .await;
    app.provider.will(
        "a",
        [
            calls([
                ("s__echo", json!({})),
                ("none__x", json!({})),
                ("other__x", json!({})),
            ]),
            says("done"),
        ],
    );
    let run = app.run("a", "go").await;
    assert_eq!(run.output(), "done");
    let last = app.provider.requests_for("a").pop().expect("a request");
    let results = last.tool_results();
    assert!(
        results[0].starts_with(
            "MCP server \"s\" is not available: it did not answer within 2s; it is still starting"
        ),
        "{results:?}"
    );
    assert!(
        results[1]
            .starts_with("MCP server \"none\" is not available: its program /no/such/program"),
        "{results:?}"
    );
    assert_eq!(results[2], "Unknown tool: \"other__x\"");
    assert_eq!(last.tool_result_errors(), [true, true, true]);
    assert_eq!(last.tool_names(), ["call_agent"]);
    let events = run.events().await;
    let warned: Vec<&str> = events
        .iter()
        .filter(|it| it.kind() == "tools.warning")
        .filter_map(|it| it["message"].as_str())
        .collect();
    assert_eq!(warned.len(), 3, "{warned:?}");
    assert!(
        warned[2].contains("its env.A needs the variable NOT_SET"),
        "{warned:?}"
    );
}

#[tokio::test]
async fn no_process_is_left_when_the_daemon_stops() {
    let mut app = with_mode("stubborn", "").spawn().await;
    result_of(&app, "s__echo", json!({"text": "hi"})).await;
    let started = lines(&app, "started", 1).await;
    let children = lines(&app, "children", 1).await;
    app.daemon.signal("TERM");
    let status = app.daemon.wait_for_exit().await;
    assert!(status.success(), "{}", app.daemon.log());
    assert_eq!(lines(&app, "refuses", 1).await.len(), 1);
    gone(&started[0]).await;
    gone(&children[0]).await;
}

#[tokio::test]
async fn an_interrupted_call_is_repeated_only_if_safe() {
    for (tool, status) in [("s__hang", "failed"), ("s__hang_reading", "completed")] {
        let mut app = with_server("").spawn().await;
        app.provider.will("a", [calls([(tool, json!({}))])]);
        let run = app.start("a", "go").await.id().to_owned();
        lines(&app, "hanging", 1).await;
        let script = SERVER.replace("note(\"hanging\", name)", "say(id, \"made again\")");
        app.write("server.py", &script);
        app.provider.will("a", [says("done")]);
        app.crash_and_restart().await;
        let run = app.find(&run).await.wait_for_end().await;
        assert_eq!(run.status(), status, "{tool}: {}", app.daemon.log());
        if status == "failed" {
            assert_eq!(run.failure().0, "interrupted");
        }
    }
}

#[tokio::test]
async fn a_call_whose_start_cannot_be_read_stops_its_run() {
    let damages = [
        ("\"tool_call_id\"", "\"tool_call_ix\""),
        ("tool.started", "tool.stbrted"),
        ("tool.started", "memory.warning"),
        (
            "{\"event\":{\"tool.started\"",
            "{\"evenu\":{\"tool.started\"",
        ),
        ("\"at\":", "\"at\":\"x\",\"ax\":"),
        ("tool.started", ""),
    ];
    for (text, by) in damages {
        let mut app = with_server("").spawn().await;
        let call = calls([("s__hang", json!({}))]);
        app.provider.will("a", [call, says("done")]);
        let id = app.start("a", "go").await.id().to_owned();
        lines(&app, "hanging", 1).await;
        let script = SERVER.replace("note(\"hanging\", name)", "say(id, \"made again\")");
        app.write("server.py", &script);
        app.daemon.kill().await;
        let db = app.database();
        let value = match by {
            "" => "NULL".to_owned(),
            by => db.replaced("entries", text, by),
        };
        let is_started = db.contains("entries", "tool.started");
        db.execute(&format!(
            "UPDATE entries SET entries = {value} WHERE {is_started}"
        ));
        app.restart_after_end().await;
        let suspended = format!("{id} is suspended, and resumed soon to try again");
        app.daemon.wait_for_log(&suspended).await;
        let log = app.daemon.log();
        assert!(log.contains("the database is damaged"), "{by}: {log}");
        let run = app.find(&id).await.cancel("damaged").await;
        assert_eq!(run.status(), "cancelled", "{by}");
        assert_eq!(app.provider.requests_for("a").len(), 1, "{by}");
    }
}

#[tokio::test]
async fn a_servers_secret_can_come_from_a_file() {
    let app = with_server("")
        .environment("STORY_TOKEN", "")
        .environment("STORY_TOKEN_FILE", "token")
        .file("token", "s3cret-of-a-file\n")
        .spawn()
        .await;
    let (env, _) = result_of(&app, "s__env", json!({})).await;
    assert!(env.contains("\"TOKEN\": \"***\""), "{env}");
    assert!(!env.contains("STORY_TOKEN"), "{env}");
    app.daemon
        .wait_for_log("MCP server s writes: my token is ***")
        .await;
}

#[tokio::test]
async fn a_server_gets_its_variables_and_they_are_never_shown() {
    let app = with_server("")
        .environment("ANTHROPIC_API_KEY", "key-of-the-operator")
        .spawn()
        .await;
    let (env, _) = result_of(&app, "s__env", json!({})).await;
    assert!(
        env.contains("\"TOKEN\": \"***\"") && !env.contains("key-of-the-operator"),
        "{env}"
    );
    assert!(!env.contains("s3cret"), "{env}");
    let (failed, is_error) = result_of(&app, "s__fail", json!({"with_token": true})).await;
    assert_eq!((failed.as_str(), is_error), ("it did not work: ***", true));
    let (files, _) = result_of(&app, "s__pictures", json!({"with_token": true})).await;
    assert!(
        files.ends_with("\n[file: ***, application/pdf, 8 bytes]"),
        "{files}"
    );
    let last = app.provider.requests_for("a").pop().expect("a request");
    assert!(!last.body.to_string().contains("s3cret"), "{}", last.body);
    for path in ["/agents/a", "/agents", "/metrics"] {
        assert!(!app.get(path).await.text.contains("s3cret"), "{path}");
    }
    app.daemon
        .wait_for_log("MCP server s writes: my token is ***")
        .await;
    assert!(!app.daemon.log().contains("s3cret"), "{}", app.daemon.log());
}

#[tokio::test]
async fn an_invalid_server_is_named() {
    let server = |rest: &str| format!("[[mcp_servers]]\nname = \"s\"\n{rest}\n");
    let stdio = "transport = \"stdio\"\ncommand = \"x\"\n";
    let cases = [
        (
            server("transport = \"stdio\"\ncomand = \"x\""),
            "unknown key \"mcp_servers[0].comand\"; did you mean \"mcp_servers[0].command\"?",
        ),
        (
            server("transport = \"stdio\""),
            "mcp_servers[0].command is required where transport is stdio",
        ),
        (
            server("transport = \"sse\""),
            "mcp_servers[0].transport must be one of: stdio, streamable-http",
        ),
        (
            server("transport = \"streamable-http\"\nurl = \"ftp://x\""),
            "mcp_servers[0].url must be a URL",
        ),
        (
            server("transport = \"streamable-http\"\nurl = \"http://a:b@x/\""),
            "must not hold a user and a password",
        ),
        (
            server(
                "transport = \"streamable-http\"\nurl = \"http://x/\"\nheaders = { Accept = \"x\" }",
            ),
            "mcp_servers[0].headers.Accept cannot be set",
        ),
        (
            server(&format!("{stdio}env = {{ A = \"${{\" }}")),
            "mcp_servers[0].env.A has a ${ that names no variable",
        ),
        (
            server(&format!("{stdio}url = \"http://x\"")),
            "mcp_servers[0].url is only for transport = \"streamable-http\"",
        ),
        (
            server(stdio).replace("\"s\"", "\"a__b\""),
            "mcp_servers[0].name must be 1 to 32 letters",
        ),
        (
            format!("{}{}", server(stdio), server(stdio)),
            "mcp_servers has two servers named \"s\"",
        ),
        (
            "mcp_servers = 3".to_owned(),
            "mcp_servers must be a list of tables",
        ),
    ];
    let mut setup = TestApp::setup();
    for (at, (toml, _)) in cases.iter().enumerate() {
        setup = setup.agent(&format!("a{at}"), toml);
    }
    let app = setup.spawn().await;
    for (at, (toml, why)) in cases.iter().enumerate() {
        let agent = app.get(&format!("/agents/a{at}")).await.json();
        let error = agent["error"].as_str().unwrap_or_default();
        assert!(error.contains(why), "{toml}\n{agent}");
    }
}

/// Published servers, which `tests/real_mcp.sh` installs into the directory AXED_REAL_MCP.
#[tokio::test]
async fn real_servers_work() {
    let Some(place) = process_environment().remove("AXED_REAL_MCP") else {
        eprintln!(
            "AXED_REAL_MCP is not set; tests/real_mcp.sh installs real MCP servers and runs this story"
        );
        return;
    };
    let scripts = Path::new(&place).join("node_modules/@modelcontextprotocol");
    let script = |name: &str| {
        scripts
            .join(name)
            .join("dist/index.js")
            .display()
            .to_string()
    };
    let (files, everything) = (script("server-filesystem"), script("server-everything"));
    let path = process_environment().remove("PATH").expect("a PATH");
    let port = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a free port")
        .local_addr()
        .expect("an address")
        .port();
    let mut web = tokio::process::Command::new("node")
        .args([&everything, "streamableHttp"])
        .env("PORT", port.to_string())
        .kill_on_drop(true)
        .spawn()
        .expect("start node");
    eventually("the real web server", async || {
        let connected = tokio::net::TcpStream::connect(("127.0.0.1", port)).await;
        connected.ok()
    })
    .await;
    let agent = format!(
        "[[mcp_servers]]\nname = \"files\"\ntransport = \"stdio\"\ncommand = \"node\"\nargs = [\"{files}\", \"agents\"]\n\
         [[mcp_servers]]\nname = \"all\"\ntransport = \"stdio\"\ncommand = \"node\"\nargs = [\"{everything}\"]\n\
         [[mcp_servers]]\nname = \"web\"\ntransport = \"streamable-http\"\nurl = \"http://127.0.0.1:{port}/mcp\"\n"
    );
    let app = TestApp::setup()
        .agent("a", &agent)
        .environment("PATH", &path)
        .spawn()
        .await;
    app.write("agents/hello.txt", "hello from a file");
    let file = app.path("agents/hello.txt").display().to_string();
    assert_eq!(
        result_of(&app, "files__read_text_file", json!({"path": file})).await,
        ("hello from a file".to_owned(), false)
    );
    let (why, is_error) = result_of(
        &app,
        "files__read_text_file",
        json!({"path": "/etc/passwd"}),
    )
    .await;
    assert!(is_error && why.contains("denied"), "{why}");
    for server in ["all", "web"] {
        let echo = result_of(&app, &format!("{server}__echo"), json!({"message": "hi"})).await;
        assert_eq!(echo, ("Echo: hi".to_owned(), false));
        let (image, _) = result_of(&app, &format!("{server}__get-tiny-image"), json!({})).await;
        assert!(image.contains("[image: image/png, "), "{image}");
        let (env, _) = result_of(
            &app,
            &format!("{server}__get-structured-content"),
            json!({"location": "Chicago"}),
        )
        .await;
        assert!(env.contains("temperature"), "{env}");
        // They ask a person: with a form, and with a page that an error requires.
        let form = "trigger-elicitation-request";
        let page = "trigger-url-elicitation";
        let login = json!({"url": "https://login.example/", "errorPath": true});
        for (tool, arguments, answers) in [
            (form, json!({}), vec![json!({"name": "Ada", "integer": 7})]),
            (page, login, vec![json!(true), json!(true)]),
        ] {
            let call = calls([(format!("{server}__{tool}"), arguments)]);
            app.provider.will("a", [call, says("done")]);
            let id = app.start("a", "go").await.id().to_owned();
            for (number, given) in answers.into_iter().enumerate() {
                let question = eventually("a question", async || {
                    let page = app.get("/inputs").await.json();
                    let question = page["data"].get(0)?.clone();
                    let suffix = format!(".input.{}", number + 1);
                    let is_next = question["id"].as_str()?.ends_with(&suffix);
                    is_next.then_some(question)
                })
                .await;
                assert_eq!(question["server"], server);
                let answered = answer(&app, &question, json!({"answer": given})).await;
                assert_eq!(answered.status, 202, "{}", answered.text);
            }
            let run = app.find(&id).await.wait_for_end().await;
            assert_eq!(run.output(), "done", "{}", app.daemon.log());
            let last = app.provider.requests_for("a").pop().expect("a request");
            let result = last.tool_results().remove(0);
            let expected = if tool == form { "Ada" } else { "completed" };
            assert!(result.contains(expected), "{server}: {tool}: {result}");
        }
    }
    web.kill().await.expect("end node");
}
