//! The clients of a soak: each makes runs of all kinds, one after another, and checks each of them when it has ended.

use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::soak::api::{Api, ApiResponse, Stream, is_terminal};
use crate::soak::check::{self, Expected};
use crate::soak::ledger::Ledger;
use crate::soak::provider::{Requests, input};

/// The most that a client rests between two pieces of work, in milliseconds; a daemon that is not optimised gets more rest.
const MAX_IDLE_MS: u64 = if cfg!(debug_assertions) { 8_000 } else { 1_500 };
/// Runs of a session, one behind another.
const SESSION_RUNS: usize = 3;

/// The agents of the soak, by name and by the rest of their file. The model says what the provider does.
pub const AGENTS: [(&str, &str); 11] = [
    ("plain", ""),
    ("leaf", ""),
    ("slow", ""),
    ("talker", ""),
    ("middle", "sub_agents = [\"leaf\"]"),
    ("lead", "sub_agents = [\"middle\"]"),
    ("streamer", "sub_agents = [\"leaf\"]"),
    ("longer", "sub_agents = [\"slow\"]"),
    ("long", "sub_agents = [\"longer\"]"),
    (
        "writer",
        "workdir = \"work\"\ntools = [\"write_file\", \"edit_file\"]",
    ),
    (
        "careful",
        "workdir = \"work\"\ntools = [\"write_file\"]\napprove = [\"write_file\"]",
    ),
];

/// As [`AGENTS`]: makes runs that start a command.
pub const SHELL: (&str, &str) = ("shell", "workdir = \"work\"\ntools = [\"run_command\"]");

/// One client.
pub struct Client {
    api: Api,
    requests: Requests,
    ledger: Ledger,
    number: usize,
    /// Tokens that it has used.
    tokens_used: usize,
    rng: Rng,
}

impl Client {
    /// The client of this number.
    pub fn new(number: usize, api: Api, requests: Requests, ledger: Ledger) -> Self {
        Self {
            api,
            requests,
            ledger,
            number,
            tokens_used: 0,
            rng: Rng(number as u64 + 1),
        }
    }

    /// Works until `stop`; what is begun then is brought to its end.
    pub async fn run(mut self, stop: CancellationToken) {
        let idle = Duration::from_millis(self.rng.below(MAX_IDLE_MS));
        tokio::select! {
            () = tokio::time::sleep(idle) => {}
            () = stop.cancelled() => return,
        }
        while !stop.is_cancelled() {
            if let Err(error) = self.run_one().await {
                self.ledger.report_problem(error);
            }
            let idle = Duration::from_millis(self.rng.below(MAX_IDLE_MS));
            tokio::select! {
                () = tokio::time::sleep(idle) => {}
                () = stop.cancelled() => {}
            }
        }
    }

    async fn run_one(&mut self) -> Result<(), String> {
        match self.rng.below(8) {
            0 => self.run_simple("plain").await,
            1 => self.run_simple("writer").await,
            2 => self.run_simple("shell").await,
            3 => self.run_simple("lead").await,
            4 => self.run_session().await,
            5 => self.run_streamed().await,
            6 => match self.rng.below(2) {
                0 => self.run_cancelled().await,
                _ => self.run_duplicated().await,
            },
            _ => self.run_approved().await,
        }
    }

    fn next_token(&mut self) -> String {
        self.tokens_used += 1;
        format!("{}-{}", self.number, self.tokens_used)
    }

    /// Starts a run, as a new one each time that the daemon refuses it; returns its token and id.
    async fn start_run(&mut self, agent: &str, fields: &Value) -> Result<(String, String), String> {
        loop {
            let token = self.next_token();
            let mut body = fields.clone();
            body["input"] = json!(input(&token));
            let path = format!("/agents/{agent}/runs");
            let response = self.api.post(&path, &body, None).await?;
            if response.status == 503 {
                self.ledger.record_refused(&token);
                self.back_off().await;
                continue;
            }
            return Ok((token, self.record_accepted(&response, agent)?));
        }
    }

    fn record_accepted(&self, response: &ApiResponse, agent: &str) -> Result<String, String> {
        let id = response.text("id").to_owned();
        if id.is_empty() {
            return Err(format!(
                "a run of {agent} was accepted without an id: {}",
                response.body
            ));
        }
        self.ledger.record_accepted(&id, agent);
        Ok(id)
    }

    async fn back_off(&mut self) {
        let delay = 400 + self.rng.below(1_200);
        tokio::time::sleep(Duration::from_millis(delay)).await;
    }

    async fn check(&self, id: &str, agent: &str, expected: Expected) -> Result<(), String> {
        check::check_run(&self.api, &self.requests, &self.ledger, id, expected)
            .await
            .map_err(|error| format!("{id} of {agent}: {error}"))
    }

    async fn run_simple(&mut self, agent: &str) -> Result<(), String> {
        let (token, id) = self.start_run(agent, &json!({})).await?;
        let expected = Expected::completed(format!("done {token} #"));
        self.check(&id, agent, expected).await
    }

    /// Several runs at once in one session: each must have the conversation of those before it.
    async fn run_session(&mut self) -> Result<(), String> {
        let session = format!("talk-{}-{}", self.number, self.tokens_used);
        let mut runs = Vec::new();
        for _ in 0..SESSION_RUNS {
            runs.push(
                self.start_run("talker", &json!({ "session": session }))
                    .await?,
            );
        }
        let mut tokens = Vec::new();
        for (token, id) in runs {
            tokens.push(token);
            let expected = Expected::completed(format!("got {} #", tokens.join(",")));
            self.check(&id, "talker", expected).await?;
        }
        Ok(())
    }

    /// A client that is disconnected repeatedly and continues after the last event that it has.
    async fn run_streamed(&mut self) -> Result<(), String> {
        let (token, mut stream) = loop {
            let token = self.next_token();
            let body = json!({ "input": input(&token) });
            let path = "/agents/streamer/runs";
            if let Some(stream) = self.api.start_stream(path, &body).await? {
                break (token, stream);
            }
            self.ledger.record_refused(&token);
            self.back_off().await;
        };
        let id = stream.location.rsplit('/').next().unwrap_or_default();
        let id = id.to_owned();
        self.ledger.record_accepted(&id, "streamer");
        let mut last = 0;
        loop {
            let max_events = 1 + self.rng.below(6);
            let has_ended = self
                .read_events(&mut stream, &id, &mut last, max_events)
                .await?;
            if has_ended {
                break;
            }
            drop(stream);
            self.ledger.count("streams resumed");
            stream = loop {
                if let Some(stream) = self.api.resume_stream(&id, last).await? {
                    break stream;
                }
                self.back_off().await;
            };
        }
        let expected = Expected::completed(format!("done {token} #"));
        self.check(&id, "streamer", expected.with_last_event(last))
            .await
    }

    /// Reads at most this many events; returns whether the last one ended the run.
    async fn read_events(
        &self,
        stream: &mut Stream,
        id: &str,
        last: &mut u64,
        max_events: u64,
    ) -> Result<bool, String> {
        for _ in 0..max_events {
            // Neither an error nor an end is the run's: the client comes back.
            let Ok(Some(event)) = stream.next().await else {
                return Ok(false);
            };
            let seq = event["seq"].as_u64().unwrap_or_default();
            if seq != *last + 1 {
                return Err(format!("the stream of {id} had event {seq} behind {last}"));
            }
            *last = seq;
            if check::is_end(&event, id) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Cancels a tree in the middle of its work.
    async fn run_cancelled(&mut self) -> Result<(), String> {
        let (_, id) = self.start_run("long", &json!({})).await?;
        tokio::time::sleep(Duration::from_millis(self.rng.below(2_500))).await;
        let path = format!("/runs/{id}/cancel");
        let response = self
            .api
            .post_until_accepted(&path, &json!({}), None)
            .await?;
        if !matches!(response.text("status"), "cancelling" | "cancelled") {
            return Err(format!(
                "the cancel of {id} was answered with {}",
                response.body
            ));
        }
        self.check(&id, "long", Expected::cancelled()).await
    }

    /// One request sent twice at once, until both are taken, and once more after its end.
    async fn run_duplicated(&mut self) -> Result<(), String> {
        let token = self.next_token();
        let body = json!({ "input": input(&token) });
        let path = "/agents/plain/runs";
        let send = || self.api.post_until_accepted(path, &body, Some(&token));
        let (first, second) = tokio::join!(send(), send());
        let (first, second) = (first?, second?);
        let id = self.record_accepted(&first, "plain")?;
        let expected = Expected::completed(format!("done {token} #"));
        self.check(&id, "plain", expected).await?;
        let third = send().await?;
        for other in [second, third] {
            let other = other.text("id");
            self.ledger.expect(other == id, || {
                format!("the idempotency key {token} has the runs {id} and {other}")
            });
        }
        self.ledger.count("keys repeated");
        Ok(())
    }

    /// Approves a call, or denies it, once the run waits for that.
    async fn run_approved(&mut self) -> Result<(), String> {
        let (token, id) = self.start_run("careful", &json!({})).await?;
        let call = loop {
            let path = format!("/runs/{id}/events?limit=1000");
            let events = self.api.get_all(&path, "next_none").await?;
            let requested = |event: &&Value| event["type"] == "approval.requested";
            if let Some(event) = events.iter().find(requested) {
                break event["tool_call_id"]
                    .as_str()
                    .unwrap_or_default()
                    .to_owned();
            }
            let run = self.api.get(&format!("/runs/{id}")).await?;
            if is_terminal(&run) {
                return Err(format!("{id} ended without an approval: {run}"));
            }
            self.back_off().await;
        };
        let path = format!("/runs/{id}/approvals/{call}");
        let decision = ["approve", "deny"][self.rng.below(2) as usize];
        let decision = json!({ "decision": decision });
        self.api.post_until_accepted(&path, &decision, None).await?;
        self.ledger.count("decisions");
        let expected = Expected::completed(format!("done {token} #"));
        self.check(&id, "careful", expected).await
    }
}

/// Numbers without order, the same ones in each soak.
struct Rng(u64);

impl Rng {
    fn below(&mut self, bound: u64) -> u64 {
        // Marsaglia's xorshift.
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 16) % bound
    }
}
