//! Every built-in tool that this daemon has, made once. Knows no agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config;
use crate::tools::Tool;

/// The built-in tools by name, with what bounds them all.
#[derive(Default)]
pub struct Shelf {
    tools: BTreeMap<&'static str, Arc<dyn Tool>>,
    max_result: usize,
}

impl Shelf {
    /// As the configuration allows.
    pub fn new(config: &config::Tools) -> Self {
        Self {
            tools: BTreeMap::new(),
            max_result: config.max_result,
        }
    }

    /// A tool; none where the configuration does not offer it.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Tool>> {
        self.tools.get(name)
    }

    /// Most bytes of a tool's result.
    pub fn max_result(&self) -> usize {
        self.max_result
    }
}
