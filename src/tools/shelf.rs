//! Every built-in tool that this daemon has, made once. Knows no agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config;
use crate::tools::{Tool, files};

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
            tools: files::all(config.max_result).into_iter().collect(),
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

#[cfg(test)]
mod tests {
    use super::Shelf;
    use crate::config;
    use crate::domain::agent::BUILT_IN_TOOLS;

    #[test]
    fn an_agent_may_list_what_is_on_the_shelf() {
        let shelf = Shelf::new(&config::Tools::default());
        for name in shelf.tools.keys() {
            assert!(
                BUILT_IN_TOOLS.contains(name),
                "{name} is not in BUILT_IN_TOOLS"
            );
        }
        for name in BUILT_IN_TOOLS {
            assert!(shelf.get(name).is_some(), "{name} is not on the shelf");
        }
    }
}
