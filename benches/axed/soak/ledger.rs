//! What the clients of a soak were answered, what they found, and what of it is wrong.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Complaints that are kept; further ones are only counted.
const MAX_PROBLEMS: usize = 40;
/// Characters of each.
const MAX_CHARS: usize = 400;

/// Shared by all clients.
#[derive(Clone, Default)]
pub struct Ledger(Arc<Mutex<Entries>>);

#[derive(Default)]
struct Entries {
    /// Accepted runs that have not been seen to end, with what they are.
    unfinished: HashMap<String, String>,
    /// The status of runs that have, by id.
    ended: HashMap<String, String>,
    /// Inputs of requests that were refused: nothing may be known of them.
    refused: HashSet<String>,
    /// Counts by name.
    counts: BTreeMap<&'static str, usize>,
    problems: Vec<String>,
    problem_count: usize,
}

impl Ledger {
    /// A run was answered 2xx.
    pub fn record_accepted(&self, id: &str, what: &str) {
        let mut entries = self.lock();
        if entries
            .unfinished
            .insert(id.to_owned(), what.to_owned())
            .is_none()
        {
            entries.count("accepted");
        }
    }

    /// A POST was answered 503.
    pub fn record_refused(&self, token: &str) {
        let mut entries = self.lock();
        entries.refused.insert(token.to_owned());
        entries.count("refused");
    }

    /// An accepted run has ended.
    pub fn record_ended(&self, id: &str, status: &str) {
        let mut entries = self.lock();
        entries.unfinished.remove(id);
        entries.ended.insert(id.to_owned(), status.to_owned());
        entries.count("ended");
    }

    /// Counts something.
    pub fn count(&self, what: &'static str) {
        self.lock().count(what);
    }

    /// How often that was counted.
    pub fn count_of(&self, what: &str) -> usize {
        self.lock().counts.get(what).copied().unwrap_or_default()
    }

    /// All counts.
    pub fn counts(&self) -> BTreeMap<&'static str, usize> {
        self.lock().counts.clone()
    }

    /// Something is wrong.
    pub fn report_problem(&self, problem: String) {
        let mut entries = self.lock();
        entries.problem_count += 1;
        if entries.problems.len() < MAX_PROBLEMS {
            let problem: String = problem.chars().take(MAX_CHARS).collect();
            println!("  WRONG: {problem}");
            entries.problems.push(problem);
        }
    }

    /// Complains unless this is so.
    pub fn expect(&self, condition: bool, problem: impl FnOnce() -> String) {
        if !condition {
            self.report_problem(problem());
        }
    }

    /// Accepted runs that have not been seen to end.
    pub fn unfinished(&self) -> Vec<(String, String)> {
        let entries = self.lock();
        let unfinished = entries.unfinished.iter();
        unfinished
            .map(|(id, what)| (id.clone(), what.clone()))
            .collect()
    }

    /// The runs that were seen to end, with their status.
    pub fn ended_runs(&self) -> HashMap<String, String> {
        self.lock().ended.clone()
    }

    /// Whether a request with this token was refused.
    pub fn was_refused(&self, token: &str) -> bool {
        self.lock().refused.contains(token)
    }

    /// What is wrong, as far as it is kept, and how many complaints there were.
    pub fn problems(&self) -> (Vec<String>, usize) {
        let entries = self.lock();
        (entries.problems.clone(), entries.problem_count)
    }

    fn lock(&self) -> MutexGuard<'_, Entries> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entries {
    fn count(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }
}
