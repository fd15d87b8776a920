//! A daemon with a fake provider, in a temporary directory.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axed::config::key_hash::KeyHash;
use reqwest::header::{HeaderMap, LOCATION};
use reqwest::{Client, Method, RequestBuilder};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::support::daemon::{Daemon, axed_command};
use crate::support::database::Database;
use crate::support::events::Events;
use crate::support::postgres::{DATABASE_URL, Postgres};
use crate::support::provider::FakeProvider;
use crate::support::run::Run;
use crate::support::{eventually, within_timeout};

/// A daemon, its provider and its files.
pub struct TestApp {
    /// The provider of the daemon's models.
    pub provider: FakeProvider,
    /// The daemon.
    pub daemon: Daemon,
    /// The HTTP client of the story.
    pub client: Client,
    home: TempDir,
    arguments: Vec<String>,
    environment: BTreeMap<String, String>,
    prefix: String,
    /// `None` if the daemon uses SQLite. Dropped after the daemon.
    postgres: Option<Postgres>,
}

/// The files and arguments of a daemon.
#[derive(Clone, Debug, Default)]
pub struct Setup {
    files: Vec<(String, String)>,
    config: String,
    server_config: String,
    arguments: Vec<String>,
    environment: BTreeMap<String, String>,
    prefix: String,
    uses_sqlite: bool,
}

/// The configuration of a key, whose secret is its name.
pub fn key(name: &str, settings: &str) -> String {
    let sha256 = KeyHash::digest(name.as_bytes());
    format!("[auth.keys.{name}]\nsha256 = \"{sha256}\"\n{settings}\n")
}

impl Setup {
    /// An agent. `name` is written for it, and `model = "anthropic/<name>"` if `toml` has no model.
    pub fn agent(self, name: &str, toml: &str) -> Self {
        self.file(&format!("agents/{name}.toml"), &agent_file(name, toml))
    }

    /// A file below the daemon's directory.
    pub fn file(mut self, path: &str, text: &str) -> Self {
        self.files.push((path.to_owned(), text.to_owned()));
        self
    }

    /// More configuration; `{provider}` is replaced by the fake provider's URL.
    pub fn config(mut self, toml: &str) -> Self {
        self.config.push_str(toml);
        self.config.push('\n');
        self
    }

    /// Configuration of `[server]`.
    pub fn server(mut self, toml: &str) -> Self {
        self.server_config.push_str(toml);
        self.server_config.push('\n');
        self
    }

    /// Serves below this path.
    pub fn prefix(mut self, prefix: &str) -> Self {
        prefix.clone_into(&mut self.prefix);
        self.server(&format!("path_prefix = \"{prefix}\""))
    }

    /// A variable of the daemon's environment.
    pub fn environment(mut self, name: &str, value: &str) -> Self {
        self.environment.insert(name.to_owned(), value.to_owned());
        self
    }

    /// An argument of `axed serve`.
    pub fn argument(mut self, argument: &str) -> Self {
        self.arguments.push(argument.to_owned());
        self
    }

    /// Uses SQLite whatever other stories use.
    pub fn sqlite(mut self) -> Self {
        self.uses_sqlite = true;
        self
    }

    /// Writes the files and starts the provider and the daemon.
    pub async fn spawn(mut self) -> TestApp {
        let postgres = match self.uses_sqlite {
            true => None,
            false => Postgres::create(),
        };
        if let Some(postgres) = &postgres {
            postgres.set_environment(&mut self.environment);
        }
        let provider = FakeProvider::start().await;
        let home = tempfile::Builder::new()
            .prefix("axed-story-")
            .tempdir()
            .expect("a temporary directory");
        let write = |path: &str, text: &str| write(&home.path().join(path), text);
        fs::create_dir_all(home.path().join("agents")).expect("a directory");
        for (path, text) in &self.files {
            write(path, text);
        }
        let mut server = self.server_config;
        if !server.contains("default_timeout") {
            // Longer than any story waits.
            server.push_str("default_timeout = 3600");
        }
        let config = format!(
            r#"[server]
{}
[providers.anthropic]
api_key = "key-of-anthropic"
base_url = "{{provider}}"
[providers.openai]
api_key = "key-of-openai"
base_url = "{{provider}}"
[providers.responses]
kind = "openai"
api = "responses"
api_key = "key-of-responses"
base_url = "{{provider}}"
[providers.ollama]
base_url = "{{provider}}"
{}"#,
            server, self.config
        );
        write(
            "config/axed.toml",
            &config.replace("{provider}", &provider.url()),
        );
        let daemon = serve(home.path(), &self.arguments, &self.environment).await;
        TestApp {
            provider,
            daemon,
            client: client(),
            home,
            arguments: self.arguments,
            environment: self.environment,
            prefix: self.prefix,
            postgres,
        }
    }
}

/// Keeps connections for less time than daemons do, so that none is closed while it is used.
pub fn client() -> Client {
    let client = Client::builder().pool_idle_timeout(Duration::from_secs(15));
    client.build().expect("a client")
}

impl TestApp {
    /// A daemon without agents.
    pub async fn spawn() -> Self {
        Setup::default().spawn().await
    }

    /// Begins the description of a daemon.
    pub fn setup() -> Setup {
        Setup::default()
    }

    /// A path below the daemon's directory.
    pub fn path(&self, path: &str) -> PathBuf {
        self.home.path().join(path)
    }

    /// The daemon's database, behind its back.
    pub fn database(&self) -> Database {
        match &self.postgres {
            Some(postgres) => Database::Postgres(postgres.url.clone()),
            None => Database::Sqlite(self.path("data/axed.db")),
        }
    }

    /// Writes an agent file, as [`Setup::agent`] does, while the daemon runs.
    pub fn write_agent(&self, name: &str, toml: &str) {
        self.write(&format!("agents/{name}.toml"), &agent_file(name, toml));
    }

    /// Writes a file below the daemon's directory.
    pub fn write(&self, path: &str, text: &str) {
        write(&self.path(path), text);
    }

    /// Runs an agent to its end.
    pub async fn run(&self, agent: &str, input: &str) -> Run<'_> {
        self.run_with(agent, json!({"input": input})).await
    }

    /// Runs an agent with this request body to its end.
    pub async fn run_with(&self, agent: &str, body: Value) -> Run<'_> {
        self.start_with(agent, body).await.wait_for_end().await
    }

    /// Starts a run.
    pub async fn start(&self, agent: &str, input: &str) -> Run<'_> {
        self.start_with(agent, json!({"input": input})).await
    }

    /// Starts a run with this request body.
    pub async fn start_with(&self, agent: &str, body: Value) -> Run<'_> {
        let accepted = self.post(&format!("/agents/{agent}/runs"), &body).await;
        assert_eq!(accepted.status, 202, "{}", accepted.text);
        Run::new(self, accepted.json())
    }

    /// The run's current state.
    pub async fn find(&self, id: &str) -> Run<'_> {
        let found = self.get(&format!("/runs/{id}")).await;
        assert_eq!(found.status, 200, "{}", found.text);
        Run::new(self, found.json())
    }

    /// Streams a run's events from the first.
    pub async fn events(&self, run: &Run<'_>) -> Events {
        self.events_at(&format!("/runs/{}/events", run.id())).await
    }

    /// Streams the events at this path.
    pub async fn events_at(&self, path: &str) -> Events {
        let request = self.request(Method::GET, path);
        let response = within_timeout(
            "the stream's head",
            request.header("accept", "text/event-stream").send(),
        )
        .await
        .expect("listen");
        Events::new(response)
    }

    /// GETs a path.
    pub async fn get(&self, path: &str) -> ApiResponse {
        send(self.request(Method::GET, path)).await
    }

    /// GETs a path until the response is as expected: for changes that no event announces.
    pub async fn get_until(
        &self,
        path: &str,
        condition: impl Fn(&ApiResponse) -> bool,
    ) -> ApiResponse {
        eventually(&format!("the expected response of {path}"), async || {
            let got = self.get(path).await;
            condition(&got).then_some(got)
        })
        .await
    }

    /// POSTs JSON.
    pub async fn post(&self, path: &str, body: &Value) -> ApiResponse {
        send(self.request(Method::POST, path).json(body)).await
    }

    /// DELETEs a path.
    pub async fn delete(&self, path: &str) -> ApiResponse {
        send(self.request(Method::DELETE, path)).await
    }

    /// A request to the daemon, below its prefix.
    pub fn request(&self, method: Method, path: &str) -> RequestBuilder {
        let url = format!("{}{}{path}", self.daemon.url, self.prefix);
        self.client.request(method, url)
    }

    /// The next daemon uses this PostgreSQL database, or SQLite.
    pub fn use_database(&mut self, postgres: Option<Postgres>) {
        match &postgres {
            Some(postgres) => postgres.set_environment(&mut self.environment),
            None => drop(self.environment.remove(DATABASE_URL)),
        }
        self.postgres = postgres;
    }

    /// Kills the daemon as a crash does, and starts another on the same directory.
    pub async fn crash_and_restart(&mut self) {
        self.daemon.kill().await;
        self.restart_after_end().await;
    }

    /// Stops the daemon as a deploy does, and starts another on the same directory.
    pub async fn restart(&mut self) {
        self.daemon.signal("TERM");
        let status = self.daemon.wait_for_exit().await;
        assert!(
            status.success(),
            "ended with {status}\n{}",
            self.daemon.log()
        );
        self.restart_after_end().await;
    }

    /// Starts another daemon on the directory of the one that has ended.
    pub async fn restart_after_end(&mut self) {
        self.daemon = serve(self.home.path(), &self.arguments, &self.environment).await;
    }
}

/// A complete response.
#[derive(Clone, Debug)]
pub struct ApiResponse {
    /// HTTP's status.
    pub status: u16,
    /// The headers.
    pub headers: HeaderMap,
    /// The body.
    pub text: String,
}

impl ApiResponse {
    /// The body as JSON.
    pub fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|why| {
            panic!("no JSON ({why}) with status {}: {}", self.status, self.text)
        })
    }

    /// A header; empty if it is missing.
    pub fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .and_then(|value| value.to_str().ok())
            .unwrap_or_default()
    }

    /// The `Location` header.
    pub fn location(&self) -> &str {
        self.header(LOCATION.as_str())
    }

    /// Checks that it is a problem of this status, in RFC 9457's form, and returns its `detail`.
    pub fn problem(&self, status: u16) -> String {
        assert_eq!(self.status, status, "{}", self.text);
        assert_eq!(self.header("content-type"), "application/problem+json");
        assert!(
            !self.header("x-request-id").is_empty(),
            "{:?}",
            self.headers
        );
        let body = self.json();
        assert_eq!(body["status"], status, "{body}");
        for key in ["type", "title", "detail", "code", "request_id"] {
            assert!(body[key].is_string(), "{key} is missing in {body}");
        }
        body["detail"].as_str().unwrap_or_default().to_owned()
    }
}

/// Sends a request and reads the complete response.
pub async fn send(request: RequestBuilder) -> ApiResponse {
    within_timeout("an answer", async {
        let response = request.send().await.expect("an answer");
        ApiResponse {
            status: response.status().as_u16(),
            headers: response.headers().clone(),
            text: response.text().await.expect("a body"),
        }
    })
    .await
}

async fn serve(home: &Path, more: &[String], environment: &BTreeMap<String, String>) -> Daemon {
    let mut arguments = vec!["serve"];
    let has = |flag: &str| more.iter().any(|argument| argument == flag);
    for (flag, value) in [
        ("--config", "config/axed.toml"),
        ("--agents", "agents"),
        ("--data", "data"),
        ("--listen", "127.0.0.1:0"),
    ] {
        if !has(flag) {
            arguments.extend([flag, value]);
        }
    }
    arguments.extend(more.iter().map(String::as_str));
    let mut command = axed_command(home, &arguments);
    command.envs(environment);
    Daemon::start(command).await
}

fn agent_file(name: &str, toml: &str) -> String {
    let model = if toml.lines().any(|line| line.starts_with("model =")) {
        String::new()
    } else {
        format!("model = \"anthropic/{name}\"\n")
    };
    format!("name = \"{name}\"\n{model}{toml}\n")
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().expect("a parent")).expect("a directory");
    // At once: nobody reads a part of it.
    let name = path.file_name().expect("a name").to_string_lossy();
    let part = path.with_file_name(format!(".{name}.part"));
    fs::write(&part, text).expect("write a file");
    fs::rename(part, path).expect("rename a file");
}
