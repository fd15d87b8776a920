//! Every built-in tool that this daemon has, made once. Knows no agent.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::config::{self, AttachmentLimits};
use crate::fair::turns::Turns;
use crate::tools::deferred::Deferral;
use crate::tools::run_command::RunCommand;
use crate::tools::url_fetch::Downloads;
use crate::tools::{Tool, files, run_command, url_fetch, web_search};
use crate::workdirs::reserved::Reserved;

/// Pages and searches of the web that are fetched and read at once; more calls wait for their turn, by key, so that what
/// is in memory has a bound.
const WEB_AT_ONCE: usize = 64;

/// The built-in tools by name, with what bounds them all.
#[derive(Default)]
pub struct Shelf {
    tools: BTreeMap<&'static str, Arc<dyn Tool>>,
    max_result: usize,
    attachments: AttachmentLimits,
    deferral: Option<Arc<Deferral>>,
    downloads: Option<Downloads>,
    /// Whether commands are kept out of what is the daemon's own.
    confines: bool,
    /// Why there are no commands although the configuration allows them.
    no_commands: Option<String>,
}

impl Shelf {
    /// As the configuration allows. No command reaches what is reserved; what several calls share is shared out between
    /// these keys.
    pub fn new(config: &config::Tools, reserved: &Reserved, keys: &[String]) -> Self {
        let mut tools: BTreeMap<_, _> = files::all(config.max_result, config.attachments, keys)
            .into_iter()
            .collect();
        let turns = Arc::new(Turns::new(WEB_AT_ONCE, keys));
        let downloads = Downloads::new(
            &config.url_fetch,
            config.attachments.bytes,
            Arc::clone(&turns),
        );
        tools.extend(url_fetch::tool(
            &config.url_fetch,
            config.max_result,
            Arc::clone(&turns),
        ));
        tools.extend(web_search::tool(config.web_search.as_ref(), turns));
        let (command, no_commands) = match run_command::offer(config, reserved, keys) {
            Ok(command) => (command, None),
            Err(why) => {
                tracing::warn!("{why}");
                (None, Some(why))
            }
        };
        let confines = command.as_ref().is_some_and(RunCommand::confines);
        tools.extend(command.map(|tool| (run_command::NAME, Arc::new(tool) as Arc<dyn Tool>)));
        Self {
            tools,
            max_result: config.max_result,
            attachments: config.attachments,
            deferral: Deferral::new(config.deferred_above),
            downloads: Some(downloads),
            confines,
            no_commands,
        }
    }

    /// Whether this tool is there and works in the run's workdir.
    pub fn uses_workdir(&self, name: &str) -> bool {
        self.get(name).is_some_and(|tool| tool.uses_workdir())
    }

    /// Why nobody is offered `run_command` although the configuration allows it.
    pub fn no_commands(&self) -> Option<&str> {
        self.no_commands.as_deref()
    }

    /// Whether `run_command` is there and is confined.
    pub fn is_confined(&self) -> bool {
        self.confines
    }

    /// A tool; none where the configuration does not offer it.
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Tool>> {
        self.tools.get(name)
    }

    /// What fetches the pictures and files that requests name by URL.
    ///
    /// # Errors
    /// An empty shelf fetches nothing.
    pub fn downloads(&self) -> Result<&Downloads, String> {
        let downloads = self.downloads.as_ref();
        downloads.ok_or_else(|| "nothing can be fetched here".to_owned())
    }

    /// What bounds the pictures and files of a tool's result.
    pub fn attachments(&self) -> AttachmentLimits {
        self.attachments
    }

    /// What becomes of tools that are too many to offer; `None` offers all.
    pub fn deferral(&self) -> Option<&Arc<Deferral>> {
        self.deferral.as_ref()
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
    use crate::workdirs::reserved::Reserved;

    /// Those that a server must allow first.
    const NOT_OFFERED: &[&str] = &["web_search", run_command::NAME];

    #[test]
    fn an_agent_may_list_what_is_on_the_shelf() {
        let shelf = Shelf::new(&config::Tools::default(), &Reserved::default(), &[]);
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
