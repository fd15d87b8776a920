//! What a run and its descendants have used so far.

use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::domain::usage::{ModelUsage, TreeUsage, Usage};

/// The usage of one run: its own, and that of its whole subtree.
#[derive(Debug, Default)]
pub struct UsageCounter(Mutex<Counts>);

#[derive(Debug, Default)]
struct Counts {
    own: Usage,
    tree: TreeUsage,
    /// The own usage by model, without tool calls, in the order of the models' first replies.
    models: Vec<ModelUsage>,
}

impl UsageCounter {
    pub fn new(own: Usage, tree: TreeUsage, models: Vec<ModelUsage>) -> Self {
        Self(Mutex::new(Counts { own, tree, models }))
    }

    /// The run's own usage, and that of its subtree.
    pub fn get(&self) -> (Usage, TreeUsage) {
        let counts = self.lock();
        (counts.own, counts.tree)
    }

    /// The run's own usage by model; empty if all of it is that of `model` and has no reasoning tokens.
    pub fn models_besides(&self, model: &str) -> Vec<ModelUsage> {
        let models = &self.lock().models;
        let is_plain = |it: &ModelUsage| it.model == model && it.usage.tokens.reasoning == 0;
        match models.iter().all(is_plain) {
            true => Vec::new(),
            false => models.clone(),
        }
    }

    /// The model that was counted last for the first time.
    pub fn last_model(&self) -> Option<String> {
        Some(self.lock().models.last()?.model.clone())
    }

    pub fn add_own(&self, usage: &Usage) {
        self.lock().own.add(usage);
    }

    /// Like [`UsageCounter::add_own`], for a request to this model.
    pub fn add_own_of_model(&self, model: &str, usage: &Usage) {
        let mut counts = self.lock();
        counts.own.add(usage);
        let models = &mut counts.models;
        match models.iter_mut().find(|it| it.model == model) {
            Some(found) => found.add(usage),
            None => models.push(ModelUsage {
                model: model.to_owned(),
                usage: *usage,
            }),
        }
    }

    pub fn add_to_tree(&self, usage: &Usage) {
        self.lock().tree.usage.add(usage);
    }

    /// Counts one more run in the subtree.
    pub fn count_run(&self) {
        self.lock().tree.runs += 1;
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
