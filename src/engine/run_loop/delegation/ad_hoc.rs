//! Ad-hoc sub-agents: their definition and their quotas.

use std::sync::Arc;
use std::time::Duration;

use crate::domain::agent::response_format::ResponseFormat;
use crate::domain::agent::{Agent, Budget, Memory, SubagentSettings};
use crate::domain::run::{Run, now};
use crate::engine::context::RunContext;
use crate::engine::state::active_run::ActiveRun;
use crate::store::StoreError;
use crate::tools::AdHocRequest;

/// The definition of an ad-hoc sub-agent: its caller's, without the memory, the limits and the response format, which
/// are for the caller's own task.
pub fn derive_agent(parent: &Agent, request: &AdHocRequest<'_>) -> Arc<Agent> {
    let mut agent = Agent {
        client: None,
        pinned_agents: None,
        ad_hoc: Some(request.ad_hoc.clone()),
        ..parent.clone()
    };
    agent.timeout = None;
    agent.limits.max_turns = request.max_turns;
    agent.budget = Budget::default();
    agent.memory = Memory::default();
    agent.webhook = None;
    agent.delegation.max_depth = None;
    agent.params.response_format = ResponseFormat::Text;
    let settings = parent.subagent_settings();
    agent.params.effort = settings.effort.or(agent.params.effort);
    agent.params.service = settings.service.or(agent.params.service);
    if let Some(model) = settings.model {
        agent.model = model;
        agent.fallback_models = Vec::new();
    }
    Arc::new(agent)
}

/// The quotas that apply to an ad-hoc child of this run: its parent's, and the root's if the root has any.
pub fn quota_settings(parent: &ActiveRun) -> Vec<SubagentSettings> {
    let mut settings = vec![parent.agent.subagent_settings()];
    let root = parent
        .self_and_ancestors()
        .last()
        .filter(|root| root.parent.is_none());
    let root = root.filter(|root| root.scope.run != parent.scope.run);
    settings.extend(root.and_then(|root| root.agent.subagent.clone()));
    settings
}

/// Restores what the ad-hoc children of a recovered tree used in an earlier process. Has to run before any quota is
/// checked.
pub async fn restore_quotas(parent: &RunContext) -> Result<(), StoreError> {
    let tree = &parent.run.tree;
    if !tree.is_recovered {
        return Ok(());
    }
    let restore = async {
        let runs = parent
            .engine
            .journal
            .store()
            .tree(parent.run.scope.root)
            .await?;
        let parent_of = |run: &&Run| runs.iter().find(|other| Some(other.id) == run.parent_id);
        for run in runs.iter().filter(|run| run.label.is_some()) {
            let mut ancestors = std::iter::successors(parent_of(&run), parent_of);
            let is_counted_in_ancestor = ancestors.any(|ancestor| ancestor.label.is_some());
            let (time, tokens) = match is_counted_in_ancestor {
                true => (0, 0),
                false => (run.active_ms(now()), run.tree.usage.tokens.total()),
            };
            let time = Duration::from_millis(time);
            tree.ad_hoc_quotas.restore_child(time, tokens);
        }
        Ok(())
    };
    tree.ad_hoc_quotas
        .restored
        .get_or_try_init(|| restore)
        .await
        .copied()
}

/// The budget accounts of an ad-hoc child.
pub fn account_ids(parent: &ActiveRun) -> Vec<usize> {
    let tree = &parent.tree;
    let mut account_ids = parent.accounts.clone();
    for account in tree
        .ad_hoc_quotas
        .accounts(&quota_settings(parent), &tree.budgets)
    {
        if !account_ids.contains(&account) {
            account_ids.push(account);
        }
    }
    account_ids
}
