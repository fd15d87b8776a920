//! One test: a recording, run as often as the command line says.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::cli::test::files::FoundFile;
use crate::cli::test::judge::JudgeError;
use crate::cli::test::{ended_run, judge, request};
use crate::cli::whole_file;
use crate::domain::run::Run;
use crate::engine::record::agent_snapshots;
use crate::engine::recording::accept;
use crate::engine::recording::assertions::{self, Failed};
use crate::engine::recording::playback::{Divergence, Live, Playback, PlaybackReport};
use crate::engine::recording::read::{self, ReadRecording};
use crate::engine::request::StartError;
use crate::engine::runner::Runner;
use crate::store::StoreError;

#[derive(Clone, Copy)]
pub struct CaseSettings {
    pub live: Live,
    pub repeat: u32,
    /// The share of the attempts that must pass.
    pub pass: f64,
    pub accept: bool,
}

pub struct Case {
    file: FoundFile,
    settings: CaseSettings,
}

pub enum Outcome {
    Passed,
    Failed,
    /// The file or the agent is invalid.
    Invalid {
        line: Option<usize>,
        message: String,
    },
    /// A live provider gave no reply.
    ProviderFailed {
        message: String,
    },
}

pub struct CaseResult {
    pub path: PathBuf,
    /// Empty if the file is invalid.
    pub agent: String,
    pub outcome: Outcome,
    pub attempts: Vec<Attempt>,
    /// Whether the file was changed.
    pub is_accepted: bool,
    pub duration: Duration,
}

/// One run of the test.
pub struct Attempt {
    /// The first difference from the recording.
    pub divergence: Option<Divergence>,
    pub failed: Vec<Failed>,
    pub runs: u64,
    pub tokens: u64,
    pub cost_usd: Option<f64>,
    report: PlaybackReport,
}

impl Attempt {
    pub fn passed(&self) -> bool {
        self.divergence.is_none() && self.failed.is_empty()
    }
}

impl CaseResult {
    pub fn passes(&self) -> usize {
        self.attempts.iter().filter(|it| it.passed()).count()
    }

    /// The first attempt that failed.
    pub fn failed_attempt(&self) -> Option<&Attempt> {
        self.attempts.iter().find(|it| !it.passed())
    }
}

impl Case {
    pub fn new(file: FoundFile, settings: CaseSettings) -> Self {
        Self { file, settings }
    }

    pub async fn run(self, runner: &Runner) -> CaseResult {
        let started = Instant::now();
        let mut result = CaseResult {
            path: self.file.path.clone(),
            agent: String::new(),
            outcome: Outcome::Failed,
            attempts: Vec::new(),
            is_accepted: false,
            duration: Duration::ZERO,
        };
        result.outcome = match Box::pin(self.run_attempts(runner, &mut result)).await {
            Ok(()) => {
                let count = result.attempts.len().max(1);
                let share = result.passes() as f64 / count as f64;
                match share >= self.settings.pass && result.passes() > 0 {
                    true => Outcome::Passed,
                    false => Outcome::Failed,
                }
            }
            Err(outcome) => outcome,
        };
        result.duration = started.elapsed();
        result
    }

    async fn run_attempts(&self, runner: &Runner, result: &mut CaseResult) -> Result<(), Outcome> {
        let file = read_text(&self.file.text)?;
        result.agent.clone_from(&file.recording.agent);
        for _ in 0..self.settings.repeat {
            let attempt = self.attempt(runner, &file).await?;
            if self.settings.accept && attempt.divergence.is_some() {
                let file = self.accept(&file, &attempt)?;
                result.is_accepted = true;
                result.attempts.push(self.attempt(runner, &file).await?);
                continue;
            }
            result.attempts.push(attempt);
        }
        Ok(())
    }

    async fn attempt(&self, runner: &Runner, file: &ReadRecording) -> Result<Attempt, Outcome> {
        let live = self.settings.live;
        let recording = Arc::clone(&file.recording);
        let playback = Arc::new(Playback::new(recording, file.ignore(), live));
        let request = request::run_request(&file.recording, Some(Arc::clone(&playback)));
        let request = request.map_err(invalid)?;
        let started = runner.start(request).await;
        let run = started.map_err(|error| start_failure(&error, live))?;
        let run = ended_run::wait(runner, &run).await.map_err(invalid)?;
        runner.end_playback(run.id);
        if let Some(message) = ended_run::provider_failure(&run).filter(|_| live.models) {
            return Err(Outcome::ProviderFailed { message });
        }
        let report = playback.finish();
        let cost_usd = match file.recording.expect.max_cost_usd {
            Some(_) => known_cost(runner, &run).await,
            None => Ok(None),
        };
        let cost_usd = cost_usd.map_err(|error| invalid(error.to_string()))?;
        let mut failed = assertions::check(&file.assertions, &run, &report.calls, cost_usd);
        if live.models {
            let judged = judge::judge(runner, &file.recording.expect.judge, &run).await;
            failed.extend(judged.map_err(|error| match error {
                JudgeError::Provider(message) => Outcome::ProviderFailed { message },
                JudgeError::Invalid(message) => invalid(message),
            })?);
        }
        Ok(Attempt {
            divergence: report.divergences.first().cloned(),
            failed,
            runs: run.tree.runs,
            tokens: run.tree.usage.tokens.total(),
            cost_usd: run.tree.usage.cost.map(|cost| cost.to_usd()),
            report,
        })
    }

    /// Writes to the file what the attempt sent, and returns the changed recording.
    fn accept(&self, file: &ReadRecording, attempt: &Attempt) -> Result<ReadRecording, Outcome> {
        let observed = &attempt.report.observed;
        let text = accept::accept(&self.file.text, &file.recording, &file.ignore(), observed);
        let text = text.map_err(|error| invalid(error.to_string()))?;
        let changed = read_text(&text)?;
        whole_file::replace(&self.file.path, &text)
            .map_err(|error| invalid(format!("could not write the file: {error}")))?;
        Ok(changed)
    }
}

fn read_text(text: &str) -> Result<ReadRecording, Outcome> {
    read::read(text).map_err(|error| Outcome::Invalid {
        line: error.line,
        message: error.message,
    })
}

fn invalid(message: String) -> Outcome {
    Outcome::Invalid {
        line: None,
        message,
    }
}

/// What the tree cost in USD; `None` if no price of its models is known.
async fn known_cost(runner: &Runner, root: &Run) -> Result<Option<f64>, StoreError> {
    let usage = &root.tree.usage;
    if let Some(cost) = usage.cost {
        return Ok(Some(cost.to_usd()));
    }
    if usage.model_calls == 0 {
        return Ok(Some(0.0));
    }
    let store = runner.store();
    for run in store.tree(root.id).await? {
        let definition = store.definition(run.id).await?;
        let agent = definition.and_then(|json| agent_snapshots::parse(&json));
        if !agent.is_some_and(|agent| runner.is_free(&agent.model.provider)) {
            return Ok(None);
        }
    }
    Ok(Some(0.0))
}

fn start_failure(error: &StartError, live: Live) -> Outcome {
    match error {
        StartError::Provider(_) if live.models => Outcome::ProviderFailed {
            message: error.to_string(),
        },
        _ => invalid(error.to_string()),
    }
}
