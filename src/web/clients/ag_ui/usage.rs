//! What the runs of a tree have used since a response began, by model.

use crate::domain::event::{EventKind, EventName};
use crate::domain::run::Run;
use crate::domain::usage::TokenUsage;
use crate::store::StoreError;
use crate::store::events::{self, EventPages};
use crate::web::clients::results;
use crate::web::error::Problem;
use crate::web::state::AppState;

/// Where a response began.
#[derive(Clone, Copy, Debug, Default)]
pub struct Baseline {
    /// What the tree had used.
    tokens: TokenUsage,
    /// The number of its last event.
    event: u64,
}

impl Baseline {
    /// Of a run that waits.
    pub fn of_waiting(run: &Run) -> Self {
        Self {
            tokens: run.tree.usage.tokens,
            event: run.last_event,
        }
    }

    /// When the run had waited for the results of a turn.
    pub async fn after_turn(state: &AppState, run: &Run, turn: u32) -> Result<Self, Problem> {
        let mut event = run.last_event;
        let mut pages = EventPages::of_run(&**state.runner.store(), run.root_id, run.id);
        'pages: while let Some(page) = pages.next().await? {
            for later in page.iter().filter(|it| it.name == EventName::TurnStarted) {
                if let EventKind::TurnStarted { turn: started, .. } = events::recorded(later)?.kind
                    && started > turn
                {
                    event = later.seq;
                    break 'pages;
                }
            }
        }
        Ok(Self {
            tokens: results::tokens_until(state, run, turn).await?,
            event,
        })
    }

    /// The tokens of the tree since then. Those of replies that were rejected count for the model of the run.
    pub async fn usage_since(
        &self,
        state: &AppState,
        run: &Run,
    ) -> Result<Vec<(String, TokenUsage)>, StoreError> {
        let mut rest = subtract(&run.tree.usage.tokens, &self.tokens);
        let mut models: Vec<(String, TokenUsage)> = Vec::new();
        let log = &**state.runner.store();
        let mut pages = EventPages::of_tree(log, run.root_id).after(self.event);
        while let Some(page) = pages.next().await? {
            for event in &page {
                let (EventName::TurnCompleted | EventName::ContextCompacted) = event.name else {
                    continue;
                };
                let kind = events::recorded(event)?.kind;
                let tokens = kind.tokens().unwrap_or_default();
                let model = match kind {
                    EventKind::TurnCompleted { model, .. } => Some(model),
                    EventKind::ContextCompacted { model, .. } => model,
                    _ => continue,
                };
                rest = subtract(&rest, &tokens);
                add(&mut models, model.as_deref().unwrap_or(&run.model), &tokens);
            }
        }
        if models.is_empty() || rest.total() > 0 {
            add(&mut models, &run.model, &rest);
        }
        Ok(models)
    }
}

fn add(models: &mut Vec<(String, TokenUsage)>, model: &str, tokens: &TokenUsage) {
    let at = models.iter().position(|(known, _)| known == model);
    let at = at.unwrap_or_else(|| {
        models.push((model.to_owned(), TokenUsage::default()));
        models.len() - 1
    });
    let sum = &mut models[at].1;
    sum.input = sum.input.saturating_add(tokens.input);
    sum.output = sum.output.saturating_add(tokens.output);
    sum.cache_read = sum.cache_read.saturating_add(tokens.cache_read);
    sum.cache_write = sum.cache_write.saturating_add(tokens.cache_write);
}

fn subtract(tokens: &TokenUsage, part: &TokenUsage) -> TokenUsage {
    TokenUsage {
        input: tokens.input.saturating_sub(part.input),
        output: tokens.output.saturating_sub(part.output),
        cache_read: tokens.cache_read.saturating_sub(part.cache_read),
        cache_write: tokens.cache_write.saturating_sub(part.cache_write),
        ..TokenUsage::default()
    }
}
