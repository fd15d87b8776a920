//! Every built-in tool that this daemon has, made once. Knows no agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config;
use crate::tools::{Tool, files, run_command, url_fetch, web_search};

/// The built-in tools by name, with what bounds them all.
#[derive(Default)]
pub struct Shelf {
    tools: BTreeMap<&'static str, Arc<dyn Tool>>,
    max_result: usize,
}

impl Shelf {
    /// As the configuration allows.
    pub fn new(config: &config::Tools) -> Self {
        let mut tools: BTreeMap<_, _> = files::all(config.max_result).into_iter().collect();
        tools.extend(url_fetch::tool(&config.url_fetch, config.max_result));
        tools.extend(web_search::tool(config.web_search.as_ref()));
        tools.extend(run_command::offer(config));
        Self {
            tools,
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
    use crate::tools::run_command;

    /// Those that a server must allow first.
    const NOT_OFFERED: &[&str] = &["web_search", run_command::NAME];

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
            let is_offered = !NOT_OFFERED.contains(name);
            assert_eq!(shelf.get(name).is_some(), is_offered, "{name}");
        }
    }
}
