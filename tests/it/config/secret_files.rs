//! Secrets from files that variables with `_FILE` name.

use std::fs;

use axed::config::key_hash::KeyHash;
use secrecy::ExposeSecret;
use serde_json::json;

use crate::config::server::{config, error};
use crate::support::app::TestApp;
use crate::support::daemon::axed_command;
use crate::support::provider::answer::{calls, says};
use crate::support::webhook_receiver::WebhookReceiver;
use crate::support::within_timeout;
use crate::tools::run_command::{is_confined, reported, worker};

/// Two signing secrets: `whsec_` and Base64.
const OLD: &str = "whsec_AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8=";
const NEW: &str = "whsec_/////////////////////////////////////////w==";

#[test]
fn every_secret_can_come_from_a_file() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).expect("a file");
        path.display().to_string()
    };
    let sha256 = KeyHash::digest(b"key").to_string();
    let text = "[providers.own]\nkind = \"openai\"\napi_key_env = \"OWN_SECRET\"\n\
                [tools.web_search]\nurl = \"http://127.0.0.1/search\"\napi_key_env = \"SEARCH_KEY\"\n\
                [telemetry]\notlp_endpoint = \"http://127.0.0.1:4318\"\n";
    let variables = [
        ("ANTHROPIC_API_KEY_FILE", file("1", "one\n")),
        ("AXED_PROVIDERS__OPENAI__API_KEY_FILE", file("2", "two\r\n")),
        ("OWN_SECRET_FILE", file("3", "three")),
        // The second of Gemini's two variables.
        ("GOOGLE_API_KEY_FILE", file("4", "four\n")),
        (
            "AXED_PROVIDERS__OWN__HEADERS__X_TEAM_FILE",
            file("5", "five\n"),
        ),
        ("SEARCH_KEY_FILE", file("6", "six\n")),
        ("OTEL_EXPORTER_OTLP_HEADERS_FILE", file("7", "x-a=seven\n")),
        (
            "AXED_TELEMETRY__OTLP_HEADERS__X_B_FILE",
            file("8", "eight\n"),
        ),
        ("AXED_AUTH__KEYS__CI__SHA256_FILE", file("9", &sha256)),
        ("AXED_AUTH__KEYS__CI__SCOPES", "run".to_owned()),
        // Blank counts as unset, and so does the value beside a file.
        ("ANTHROPIC_API_KEY", " ".to_owned()),
        ("OPENROUTER_API_KEY_FILE", String::new()),
    ];
    let variables = variables
        .each_ref()
        .map(|(name, path)| (*name, path.as_str()));
    let config = config(text, &variables);
    let config = config.unwrap_or_else(|error| panic!("{error}"));
    let key = |name: &str| {
        let key = config.providers[name].api_key.as_ref();
        key.map(|key| key.expose_secret().to_owned())
    };
    assert_eq!(key("anthropic").as_deref(), Some("one"));
    assert_eq!(key("openai").as_deref(), Some("two"));
    assert_eq!(key("own").as_deref(), Some("three"));
    assert_eq!(key("gemini").as_deref(), Some("four"));
    assert_eq!(key("openrouter"), None);
    let header = config.providers["own"].headers["x-team"].expose_secret();
    assert_eq!(header, "five");
    let search = config.tools.web_search.expect("a search service");
    assert_eq!(search.api_key.expect("a key").expose_secret(), "six");
    let otlp = config.telemetry.otlp.expect("a collector");
    assert_eq!(otlp.headers["x-a"].expose_secret(), "seven");
    assert_eq!(otlp.headers["x_b"].expose_secret(), "eight");
    assert_eq!(config.auth.keys[0].name, "ci");
    assert_eq!(config.secret_files.len(), 9);
}

#[test]
fn an_unusable_file_is_an_error_without_its_content() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = |name: &str| dir.path().join(name).display().to_string();
    fs::write(dir.path().join("secret"), "s3cret one").expect("a file");
    fs::write(dir.path().join("lines"), "s3cret\ns3cret").expect("a file");
    fs::write(dir.path().join("empty"), "\n").expect("a file");
    fs::write(dir.path().join("large"), "s3cret".repeat(20_000)).expect("a file");
    fs::write(dir.path().join("binary"), b"s3cret\xff").expect("a file");
    for (variable, file, expected) in [
        (
            "OPENAI_API_KEY_FILE",
            "missing",
            "cannot be read: No such file",
        ),
        ("OPENAI_API_KEY_FILE", "", "is not a regular file"),
        ("OPENAI_API_KEY_FILE", "empty", "is empty"),
        ("OPENAI_API_KEY_FILE", "large", "is larger than 65536 bytes"),
        ("OPENAI_API_KEY_FILE", "binary", "is not UTF-8 text"),
        (
            "AXED_PROVIDERS__OPENAI__API_KEY_FILE",
            "missing",
            "cannot be read",
        ),
        ("HOOK_SECRET_FILE", "missing", "cannot be read"),
        (
            "OTEL_EXPORTER_OTLP_HEADERS_FILE",
            "missing",
            "cannot be read",
        ),
    ] {
        let path = path(file);
        let text = "[webhooks]\nsecret_env = \"HOOK_SECRET\"\n";
        let message = error(text, &[(variable, &path)]);
        let expected = format!("{variable}: the file {path} {expected}");
        assert!(message.starts_with(&expected), "{message}");
        assert!(!message.contains("s3cret"), "{message}");
    }
    let message = error("", &[("OPENAI_API_KEY_FILE", &path("lines"))]);
    assert_eq!(
        message,
        "OPENAI_API_KEY_FILE: contains characters that a key cannot have"
    );
    for name in ["OPENAI_API_KEY", "AXED_PROVIDERS__OPENAI__API_KEY"] {
        let file_variable = format!("{name}_FILE");
        let both = [(name, "s3cret"), (&file_variable, &path("secret"))];
        assert_eq!(
            error("", &both),
            format!("{file_variable}: {name} is set too; unset one of the two")
        );
    }
    // Only keys that can be secret have a file.
    let message = error("", &[("AXED_SERVER__LISTEN_FILE", &path("secret"))]);
    assert!(
        message.contains("unknown key \"server.listen_file\""),
        "{message}"
    );
}

#[tokio::test]
async fn a_daemon_works_with_secrets_from_files_and_hides_them_from_tools() {
    let app =
        worker("[providers.filed]\nkind = \"openai\"\napi = \"chat\"\nbase_url = \"{provider}\"\n")
            .file("work/keys/filed", "key-from-a-file\n")
            .environment("FILED_API_KEY_FILE", "work/keys/filed")
            .agent("filed", "model = \"filed/m\"")
            .agent(
                "reader",
                "workdir = \"work\"\ntools = [\"read_file\", \"grep\"]",
            )
            .spawn()
            .await;
    app.provider.will("m", [says("done")]);
    assert_eq!(app.run("filed", "go").await.output(), "done");
    let sent = app.provider.wait_for_request("m", 1).await;
    assert_eq!(sent.api_key(), Some("key-from-a-file"));

    let read = ("read_file", json!({"path": "keys/filed"}));
    let grep = ("grep", json!({"pattern": "key-from"}));
    app.provider
        .will("reader", [calls([read, grep]), says("no")]);
    app.run("reader", "go").await;
    let results = app.provider.wait_for_request("reader", 2).await;
    let results = results.tool_results().join("\n");
    assert!(results.contains("belongs to the daemon"), "{results}");
    assert!(!results.contains("key-from-a-file"), "{results}");
    app.daemon
        .wait_for_log("run_command is not offered: the workdir work contains")
        .await;
}

#[tokio::test]
async fn a_replaced_webhook_secret_signs_the_next_delivery() {
    let receiver = WebhookReceiver::start().await;
    let app = TestApp::setup()
        .config("[webhooks]\nallow_hosts = [\"127.0.0.1\"]\nsecret_env = \"HOOK_SECRET\"")
        .file("hook", &format!("{OLD}\n"))
        .environment("HOOK_SECRET_FILE", "hook")
        .agent(
            "solo",
            &format!("[webhook]\nurl = \"{}\"", receiver.url("/")),
        )
        .spawn()
        .await;
    app.provider.always("solo", |_| says("done"));
    app.run("solo", "go").await;
    assert!(receiver.wait_for_messages(1).await[0].is_signed_by(OLD));

    app.write("hook", &format!("{NEW}\n"));
    app.run("solo", "go").await;
    assert!(receiver.wait_for_messages(2).await[1].is_signed_by(NEW));
}

#[tokio::test]
async fn commands_read_the_clients_key_from_a_file() {
    let (ada, sha256) = ("very-secret-ada", KeyHash::digest(b"very-secret-ada"));
    let app = TestApp::setup()
        .config(&format!(
            "[auth.keys.ada]\nsha256 = \"{sha256}\"\nscopes = [\"read\"]"
        ))
        .file("ada", &format!("{ada}\n"))
        .spawn()
        .await;
    let list = async |file: &str| {
        let arguments = ["runs", "list", "--json", "--server", &app.daemon.url];
        let mut command = axed_command(&app.path(""), &arguments);
        command.env("AXED_KEY_FILE", file);
        let output = within_timeout("the command's end", command.output()).await;
        let output = output.expect("run axed");
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        (output.status.code(), text)
    };
    assert_eq!(list("ada").await.0, Some(0));
    let (code, text) = list("nobody").await;
    assert_eq!(code, Some(2), "{text}");
    assert!(
        text.contains("AXED_KEY_FILE: the file nobody cannot be read"),
        "{text}"
    );
}

#[tokio::test]
async fn commands_get_a_passed_variable_from_its_file() {
    let app = worker("pass_env = [\"PASSED\"]")
        .file("passed", "from-a-file\n")
        .environment("PASSED_FILE", "passed")
        .spawn()
        .await;
    if !is_confined(&app) {
        return;
    }
    let results = reported(&app, &["env", "cat ../passed"]).await;
    assert!(results[0].contains("PASSED=from-a-file"), "{}", results[0]);
    assert!(!results[0].contains("PASSED_FILE"), "{}", results[0]);
    assert!(!results[1].contains("from-a-file"), "{}", results[1]);
}
