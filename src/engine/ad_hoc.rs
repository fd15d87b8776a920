//! Children without a name: what they are made of, which quotas bound them, and the words of their results. Knows no
//! loop.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::agent::{Agent, Budget, Delegation, Memory, ResponseFormat, Subagent};
use crate::domain::run::{Run, now};
use crate::engine::children;
use crate::engine::live::LiveRun;
use crate::engine::parts::Engine;
use crate::store::StoreError;
use crate::tools::AdHocAsk;

/// What a record says of a task whose turns ran out.
pub const INCOMPLETE: &str = "incomplete";
/// What it says of one that was done.
pub const COMPLETE: &str = "complete";

/// What an agent says of its unnamed children.
pub fn settings(caller: &Agent) -> Subagent {
    caller.subagent.clone().unwrap_or_default()
}

/// The unnamed agent: the caller's definition without its memory, and without the limits and the shape of the answer,
/// which are for what the caller itself was asked.
pub fn agent(caller: &Agent, ask: &AdHocAsk<'_>) -> Arc<Agent> {
    let mut agent = Agent {
        timeout: None,
        max_turns: ask.max_turns,
        budget: Budget::default(),
        memory: Memory::default(),
        webhook: None,
        delegation: Delegation {
            max_depth: None,
            ..caller.delegation.clone()
        },
        ad_hoc: Some(ask.ad_hoc.clone()),
        ..caller.clone()
    };
    agent.params.response_format = ResponseFormat::Text;
    let settings = settings(caller);
    agent.params.effort = settings.effort.or(agent.params.effort);
    agent.params.service = settings.service.or(agent.params.service);
    if let Some(model) = settings.model {
        agent.model = model;
        agent.fallback_models = Vec::new();
    }
    Arc::new(agent)
}

/// Whose quotas bound an unnamed child of this run: its caller's own, and the root's where that has any.
pub fn bounds(caller: &LiveRun) -> Vec<Subagent> {
    let mut bounds = vec![settings(&caller.agent)];
    let root = caller.upwards().last().filter(|root| root.parent.is_none());
    let root = root.filter(|root| root.scope.run != caller.scope.run);
    bounds.extend(root.and_then(|root| root.agent.subagent.clone()));
    bounds
}

/// Takes in what the unnamed children of a tree used in an earlier process, before anybody asks how much is left.
pub async fn read_quotas(engine: &Engine, caller: &LiveRun) -> Result<(), StoreError> {
    let tree = &caller.tree;
    if !tree.is_revived {
        return Ok(());
    }
    let read = async {
        let runs = engine.journal.store().tree(caller.scope.root).await?;
        let parent = |run: &&Run| runs.iter().find(|other| Some(other.id) == run.parent_id);
        for run in runs.iter().filter(|run| run.label.is_some()) {
            let mut above = std::iter::successors(parent(&run), parent);
            let is_counted_above = above.any(|above| above.label.is_some());
            let (time, tokens) = match is_counted_above {
                true => (0, 0),
                false => (run.work_ms(now()), run.tree.usage.tokens.total()),
            };
            let time = Duration::from_millis(time);
            tree.quotas.remember(time, tokens);
        }
        Ok(())
    };
    tree.quotas.read.get_or_try_init(|| read).await.copied()
}

/// The accounts that an unnamed child draws on.
pub fn accounts(caller: &LiveRun) -> Vec<usize> {
    let tree = &caller.tree;
    let mut drawn = caller.accounts.clone();
    for account in tree.quotas.accounts(&bounds(caller), &tree.budgets) {
        if !drawn.contains(&account) {
            drawn.push(account);
        }
    }
    drawn
}

/// The child's result for its caller's model, or why there is none.
pub fn result(ended: &Run) -> Result<String, String> {
    let text = children::result(ended).map_err(|why| failed(&why))?;
    match ended.completion_status.as_deref() {
        Some(INCOMPLETE) => Ok(format!(
            "[This result is incomplete: no turn was left after {}.]\n\n{text}",
            ended.turns
        )),
        _ => Ok(text),
    }
}

/// Why a child has no result, in the contract's words.
pub fn failed(why: &str) -> String {
    format!("Subagent task execution failed: {why}")
}
