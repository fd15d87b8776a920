//! `axed sessions`.

use serde_json::{Value, json};

use crate::cli::home::{Ended, ended};
use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::provider::answer::says;

async fn axed(app: &TestApp, arguments: &[&str]) -> Ended {
    let arguments = [arguments, &["--server", &app.daemon.url]].concat();
    ended(axed_command(&app.path("."), &arguments)).await
}

#[tokio::test]
async fn sessions_are_listed_shown_read_and_deleted() {
    let app = TestApp::setup().agent("solo", "").spawn().await;
    let none = axed(&app, &["sessions", "list"]).await;
    assert_eq!(none.with(0), "");
    assert!(none.err.contains("no sessions at"), "{}", none.err);
    app.provider
        .will("solo", [says("one"), says("two\u{1b}[2J")]);
    let talk = |input: &str| json!({"input": input, "session": "talk"});
    app.run_with("solo", talk("1")).await;
    let last = app.run_with("solo", talk("2")).await.id().to_owned();

    let listed = axed(&app, &["sessions", "list"]).await;
    let lines: Vec<&str> = listed.with(0).lines().collect();
    assert_eq!(lines[0], "session\truns\tmessages\tagent\tage\tlast run");
    assert!(lines[1].starts_with("talk\t2\t4\tsolo\t"), "{}", lines[1]);
    assert!(lines[1].ends_with(&last), "{}", lines[1]);
    let json = axed(&app, &["sessions", "list", "-o", "json"]).await;
    let first: Value = serde_json::from_str(json.with(0)).expect("JSON");
    assert_eq!(first["name"], "talk");

    let shown = axed(&app, &["sessions", "show", "talk"]).await;
    for line in [
        "session    talk\n",
        "agent      solo\n",
        "messages   4\n",
        &last,
    ] {
        assert!(
            shown.with(0).contains(line),
            "{line:?} is not in {}",
            shown.out
        );
    }
    let messages = axed(&app, &["sessions", "messages", "talk"]).await;
    assert_eq!(
        messages.with(0),
        "user:\n1\n\nassistant:\none\n\nuser:\n2\n\nassistant:\ntwo\u{fffd}[2J\n\n"
    );
    let of_session = axed(&app, &["runs", "list", "--session", "talk"]).await;
    assert_eq!(of_session.with(0).lines().count(), 3);

    let deleted = axed(&app, &["sessions", "delete", "talk"]).await;
    assert_eq!(deleted.with(0), "session talk is deleted; its runs stay\n");
    for command in ["show", "messages", "delete"] {
        let gone = axed(&app, &["sessions", command, "talk"]).await;
        gone.with(2);
        assert!(gone.err.contains("there is no session"), "{}", gone.err);
    }
    assert_eq!(app.find(&last).await.status(), "completed");
}
