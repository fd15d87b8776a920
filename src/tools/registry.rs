//! The built-in tools of this daemon, built once from the configuration.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::config::environment::{self, Environment};
use crate::config::{self, AttachmentLimits};
use crate::domain::http_tool::HttpTool;
use crate::domain::skill;
use crate::fair::fair_semaphore::FairSemaphore;
use crate::tools::Tool;
use crate::tools::deferred::ToolDeferral;
use crate::tools::files::registry::file_tools;
use crate::tools::read_skill::ReadSkill;
use crate::tools::shell;
use crate::tools::shell::tool::RunCommand;
use crate::tools::web::http_tool::HttpToolSender;
use crate::tools::web::url_fetch::AttachmentDownloader;
use crate::tools::web::{search, url_fetch};
use crate::workdirs::registry::Workdirs;
use crate::workdirs::reserved::ReservedPaths;

/// Web fetches and searches at once, which bounds their memory. More calls wait in a fair queue by key.
const MAX_CONCURRENT_WEB_CALLS: usize = 64;

/// The built-in tools by name, and the limits that all tools share.
#[derive(Default)]
pub struct ToolRegistry {
    tools: BTreeMap<&'static str, Arc<dyn Tool>>,
    max_result: usize,
    attachments: AttachmentLimits,
    deferral: Option<Arc<ToolDeferral>>,
    downloader: Option<AttachmentDownloader>,
    http_tools: Option<Arc<HttpToolSender>>,
    /// The config directory, which skills are relative to, and the daemon's own files.
    skills: Option<(PathBuf, Arc<Workdirs>)>,
    /// Whether commands run in a sandbox that hides the daemon's own files.
    is_sandboxed: bool,
    /// Why `run_command` is missing although the configuration allows it.
    commands_disabled_reason: Option<String>,
}

impl ToolRegistry {
    /// The tools that the configuration allows. Commands cannot reach the reserved paths; shared limits are divided
    /// between `keys`. `environment` has the variables of tools that are HTTP requests.
    pub fn new(
        config: &config::Tools,
        reserved: &ReservedPaths,
        keys: &[String],
        environment: Environment,
    ) -> Self {
        let mut tools: BTreeMap<_, _> = file_tools(config.max_result, config.attachments, keys)
            .into_iter()
            .collect();
        let web_permits = Arc::new(FairSemaphore::new(MAX_CONCURRENT_WEB_CALLS, keys));
        let downloader = AttachmentDownloader::new(
            &config.url_fetch,
            config.attachments.bytes,
            Arc::clone(&web_permits),
        );
        tools.extend(url_fetch::tool(
            &config.url_fetch,
            config.max_result,
            Arc::clone(&web_permits),
        ));
        let http_tools = HttpToolSender::new(
            &config.url_fetch,
            config.max_result,
            Arc::clone(&web_permits),
            environment,
        );
        tools.extend(search::tool(config.web_search.as_ref(), web_permits));
        let (command, commands_disabled_reason) =
            match shell::tool::from_config(config, reserved, keys) {
                Ok(command) => (command, None),
                Err(reason) => {
                    tracing::warn!("{reason}");
                    (None, Some(reason.to_string()))
                }
            };
        let is_sandboxed = command.as_ref().is_some_and(RunCommand::is_sandboxed);
        tools.extend(command.map(|tool| (shell::tool::NAME, Arc::new(tool) as Arc<dyn Tool>)));
        Self {
            tools,
            max_result: config.max_result,
            attachments: config.attachments,
            deferral: ToolDeferral::new(config.deferred_above),
            downloader: Some(downloader),
            http_tools: Some(Arc::new(http_tools)),
            skills: None,
            is_sandboxed,
            commands_disabled_reason,
        }
    }

    /// Enables skills, which are relative to the config directory.
    pub fn with_skills(self, config_dir: &Path, workdirs: &Arc<Workdirs>) -> Self {
        Self {
            skills: Some((config_dir.to_owned(), Arc::clone(workdirs))),
            ..self
        }
    }

    /// Whether this tool exists and works in the run's working directory.
    pub fn uses_workdir(&self, name: &str) -> bool {
        self.get(name).is_some_and(|tool| tool.uses_workdir())
    }

    /// Why `run_command` is missing although the configuration allows it.
    pub fn commands_disabled_reason(&self) -> Option<&str> {
        self.commands_disabled_reason.as_deref()
    }

    /// Why a model is not offered this built-in tool, which its agent's file lists.
    pub fn describe_missing(&self, name: &str) -> String {
        if let (shell::tool::NAME, Some(reason)) = (name, &self.commands_disabled_reason) {
            return reason.clone();
        }
        let reason = match name {
            _ if self.get(name).is_some() => {
                "commands could reach files of the daemon from this workdir; give the agent its own workdir"
            }
            shell::tool::NAME => {
                "the server allows no commands; set allow_commands = true in [tools]"
            }
            search::NAME => "the server has no search service; set url in [tools.web_search]",
            _ => "the server does not have it",
        };
        format!("{name} is not offered: {reason}")
    }

    /// Whether `run_command` exists and is sandboxed.
    pub fn is_sandboxed(&self) -> bool {
        self.is_sandboxed
    }

    pub fn get(&self, name: &str) -> Option<&Arc<dyn Tool>> {
        self.tools.get(name)
    }

    /// The tool that an agent's file describes.
    pub fn http_tool(&self, settings: &HttpTool) -> Option<Arc<dyn Tool>> {
        self.http_tools.as_ref()?.tool(settings)
    }

    /// The tool that reads these skills of an agent's file; `None` if there are none.
    pub fn skill_tool(&self, entries: &[String]) -> Option<Arc<dyn Tool>> {
        let (config_dir, workdirs) = self.skills.as_ref().filter(|_| !entries.is_empty())?;
        let skill = |entry: &String| {
            let name = skill::name_of(entry).ok()?.to_owned();
            Some((name, environment::skill_dir(entry, config_dir)))
        };
        let skills = entries.iter().filter_map(skill).collect();
        Some(Arc::new(ReadSkill::new(skills, Arc::clone(workdirs))))
    }

    /// Fetches the images and files that requests name by URL.
    ///
    /// # Errors
    /// The registry is empty.
    pub fn downloader(&self) -> Result<&AttachmentDownloader, String> {
        let downloader = self.downloader.as_ref();
        downloader.ok_or_else(|| "this server fetches nothing".to_owned())
    }

    /// The limits on images and files in a tool's result.
    pub fn attachments(&self) -> AttachmentLimits {
        self.attachments
    }

    /// Defers MCP tools if they are too many to offer; `None` offers all of them.
    pub fn deferral(&self) -> Option<&Arc<ToolDeferral>> {
        self.deferral.as_ref()
    }

    /// Most bytes of a tool's result.
    pub fn max_result(&self) -> usize {
        self.max_result
    }
}

#[cfg(test)]
mod tests {
    use super::ToolRegistry;
    use crate::config;
    use crate::config::environment::Environment;
    use crate::domain::agent::BUILT_IN_TOOLS;
    use crate::tools::{self, Effect, shell};
    use crate::workdirs::reserved::ReservedPaths;

    /// Tools that exist only if the configuration enables them.
    const DISABLED_BY_DEFAULT: &[&str] = &["web_search", shell::tool::NAME];

    #[test]
    fn registry_matches_built_in_tools() {
        let registry = ToolRegistry::new(
            &config::Tools::default(),
            &ReservedPaths::default(),
            &[],
            Environment::new(),
        );
        for name in registry.tools.keys() {
            assert!(
                BUILT_IN_TOOLS.contains(name),
                "{name} is not in BUILT_IN_TOOLS"
            );
        }
        for name in BUILT_IN_TOOLS {
            let is_offered = !DISABLED_BY_DEFAULT.contains(name);
            assert_eq!(registry.get(name).is_some(), is_offered, "{name}");
            if let Some(tool) = registry.get(name) {
                let only_reads = tool.effect() == Effect::ReadOnly;
                assert_eq!(tools::is_reader(name), only_reads, "{name}");
            }
        }
    }
}
