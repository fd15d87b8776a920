//! Which tools a run may use: what is offered to the model, and who answers a call. Knows no loop.

use std::sync::Arc;

use indexmap::IndexMap;

use crate::config::AttachmentLimits;
use crate::domain::agent::Agent;
use crate::domain::event::CalledTool;
use crate::domain::json_schema::Schema;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::message::{ToolCall, ToolSpec, shorten, truncate_to_bytes};
use crate::domain::run::Scope;
use crate::tools::call_agent::{self, CallAgent};
use crate::tools::deferred;
use crate::tools::mcp::{McpToolset, UnavailableServer};
use crate::tools::registry::ToolRegistry;
use crate::tools::subagent::{self, Subagent};
use crate::tools::{CallContext, Delegate, Effect, Tool, ToolOutput, recall, shell};
use crate::validation;
use crate::workdirs::workdir::Workdir;

/// The tools of one run.
pub struct Toolbox {
    offered_specs: Vec<ToolSpec>,
    /// The names of those that are found and called instead of offered.
    deferred: Vec<String>,
    tools: IndexMap<String, Arc<dyn Tool>>,
    /// MCP servers whose tools nobody knows.
    unavailable_servers: Vec<UnavailableServer>,
    workdir: Option<Arc<Workdir>>,
    allowed_hosts: Vec<String>,
    max_result: usize,
    attachments: AttachmentLimits,
}

impl Toolbox {
    /// For a run of `agent` in that place and directory, with what its MCP servers offer. `about` gives the description of
    /// a sub-agent.
    pub fn new(
        agent: &Agent,
        scope: &Scope,
        workdir: Option<Arc<Workdir>>,
        registry: &ToolRegistry,
        mcp_toolset: McpToolset,
        describe_agent: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let mut tools: IndexMap<String, Arc<dyn Tool>> = IndexMap::new();
        for name in &agent.tools {
            if let Some(tool) = registry.get(name) {
                tools.insert(name.clone(), Arc::clone(tool));
            }
        }
        // A command would reach the daemon's own files there. Who calls it all the same gets an answer that says so.
        let exposes_daemon_files = workdir.as_deref().and_then(Workdir::exposed_path).is_some();
        let is_withheld = |name: &str| {
            exposes_daemon_files && name == shell::tool::NAME && registry.is_sandboxed()
        };
        // The list of an unnamed agent's caller decides alone.
        let allowed = agent.ad_hoc.as_ref();
        let allowed = allowed.and_then(|ad_hoc| ad_hoc.allowed_tools.as_ref());
        let is_allowed = |name: &String| allowed.is_none_or(|allowed| allowed.contains(name));
        let mut mcp_tools = mcp_toolset.tools;
        mcp_tools.retain(|(name, _)| is_allowed(name));
        // No name of theirs is one of ours: each has the separator of server and tool in it.
        tools.extend(mcp_tools.iter().cloned());
        let deferral = registry.deferral();
        let deferral = deferral.and_then(|deferral| deferral.defer(mcp_tools));
        let is_deferred = |name: &str| deferral.is_some() && name.contains(TOOL_NAME_SEPARATOR);
        if agent.context.recall {
            tools.insert(recall::NAME.to_owned(), recall::tool());
        }
        let names = &agent.sub_agents;
        if !names.is_empty() {
            let described = names
                .iter()
                .map(|name| (name.clone(), describe_agent(name)));
            let tool = CallAgent::new(described.collect());
            tools.insert(call_agent::NAME.to_owned(), Arc::new(tool));
        }
        if let Some(settings) = &agent.subagent {
            let names = tools.keys().filter(|name| !is_withheld(name));
            let (deferred, names) = names.cloned().partition(|name| is_deferred(name));
            let tool = Subagent::new(settings.clone(), names, deferred);
            tools.insert(subagent::NAME.to_owned(), Arc::new(tool));
        }
        tools.retain(|name, _| is_allowed(name));
        let deferred: Vec<String> = match &deferral {
            Some(_) => tools
                .keys()
                .filter(|name| is_deferred(name))
                .cloned()
                .collect(),
            None => Vec::new(),
        };
        tools.extend(deferral.into_iter().flatten());
        // At its limit an agent is not offered what delegates, but keeps the answer to a call of it.
        let limit = agent.subagent.as_ref().map_or(0, |it| it.max_depth);
        let is_offered = |name: &str| match name {
            call_agent::NAME => scope.can_delegate(),
            subagent::NAME => scope.depth.0 < scope.max_ad_hoc_depth(limit),
            _ => !is_withheld(name) && (deferred.is_empty() || !name.contains(TOOL_NAME_SEPARATOR)),
        };
        let offered_tools = tools.iter().filter(|(name, _)| is_offered(name));
        Self {
            offered_specs: offered_tools.map(|(_, tool)| tool.spec()).collect(),
            deferred,
            tools,
            unavailable_servers: mcp_toolset.unavailable,
            workdir,
            allowed_hosts: agent.allowed_hosts.clone(),
            max_result: registry.max_result(),
            attachments: registry.attachments(),
        }
    }

    /// What the model is told of.
    pub fn offered_specs(&self) -> &[ToolSpec] {
        &self.offered_specs
    }

    /// The names of the tools that `tool_search` finds.
    pub fn deferred(&self) -> &[String] {
        &self.deferred
    }

    /// The call that is performed: of `tool_call` that of the tool that it names, under that one's own name; any other, and
    /// one that names no tool of a server, is itself. Also if nothing is deferred: a restart may have found fewer tools.
    pub fn resolve(&self, call: ToolCall) -> ToolCall {
        let is_known = |name: &str| {
            (name.contains(TOOL_NAME_SEPARATOR) && self.tools.contains_key(name))
                || self.unavailable_server(name).is_some()
        };
        match deferred::inner_call(&call) {
            Some((name, arguments)) if is_known(&name) => ToolCall {
                name,
                arguments,
                ..call
            },
            _ => call,
        }
    }

    /// The call as events show it.
    pub fn called_tool(&self, call: &ToolCall) -> CalledTool {
        match call.name == deferred::TOOL_CALL {
            true => CalledTool::from(&self.resolve(call.clone())),
            false => CalledTool::from(call),
        }
    }

    /// What a call of that name does beside its answer; none where there is no such tool.
    pub fn effect(&self, name: &str) -> Option<Effect> {
        match self.tools.get(name) {
            Some(tool) => Some(tool.effect()),
            // What nobody knows may not be done twice.
            None => self.unavailable_server(name).map(|_| Effect::Mutating),
        }
    }

    /// The MCP server that has this tool, if any has, where nobody knows its tools.
    fn unavailable_server(&self, name: &str) -> Option<&UnavailableServer> {
        let mut servers = self.unavailable_servers.iter();
        servers.find(|it| name.starts_with(&it.prefix))
    }

    /// Whether its arguments need no thread of their own to be checked.
    pub fn is_checked_inline(&self, call: &ToolCall) -> bool {
        let tool = self.tools.get(&call.name);
        let tool = tool.filter(|tool| tool.effect() != Effect::Delegating);
        let schema = tool.and_then(|tool| tool.schema());
        schema.is_none_or(|schema| {
            validation::check_arguments_inline(schema, &call.arguments).is_some()
        })
    }

    /// Whether a call of a run that was accepted with the key of this name would come to a tool that takes its arguments.
    pub async fn can_call(&self, call: &ToolCall, key: Option<&str>) -> bool {
        let Some(tool) = self.tools.get(&call.name) else {
            return false;
        };
        let is_delegation = tool.effect() == Effect::Delegating;
        let schema = tool.schema().filter(|_| !is_delegation);
        match schema {
            Some(schema) => coerce_arguments(call, schema, key).await.is_ok(),
            None => true,
        }
    }

    /// Performs a call of a run that was accepted with the key of this name, or says that there is no such tool, or what is
    /// wrong with the arguments.
    pub async fn call(
        &self,
        call: &ToolCall,
        scope: &Scope,
        key: Option<&str>,
        delegate: &dyn Delegate,
    ) -> Result<ToolOutput, String> {
        let Some(tool) = self.tools.get(&call.name) else {
            if let Some(server) = self.unavailable_server(&call.name) {
                return Err(server.reason.clone());
            }
            return Err(format!("Unknown tool: \"{}\"", shorten(&call.name, 200)));
        };
        let context = CallContext {
            scope,
            key,
            workdir: self.workdir.as_ref(),
            allowed_hosts: &self.allowed_hosts,
            delegate,
        };
        if tool.effect() == Effect::Delegating {
            // It checks and bounds by itself.
            return tool.call(call, context).await;
        }
        let result = match tool.schema() {
            Some(schema) => match coerce_arguments(call, schema, key).await {
                Ok(call) => tool.call(&call, context).await,
                Err(why) => Err(why),
            },
            None => tool.call(call, context).await,
        };
        match result {
            Ok(output) => Ok(ToolOutput {
                text: truncate_with_notice(output.text, self.max_result),
                ..output
            }
            .limit_attachments(self.attachments)),
            Err(text) => Err(truncate_with_notice(text, self.max_result)),
        }
    }
}

/// The call with arguments that fit the schema.
async fn coerce_arguments(
    call: &ToolCall,
    schema: &Schema,
    key: Option<&str>,
) -> Result<ToolCall, String> {
    let coerced = validation::check_arguments(schema, &call.arguments, key).await;
    let coerced = coerced.and_then(|fitting| {
        serde_json::value::to_raw_value(&fitting).map_err(|error| vec![error.to_string()])
    });
    match coerced {
        Ok(arguments) => Ok(ToolCall {
            arguments: arguments.into(),
            ..call.clone()
        }),
        Err(errors) => Err(format!(
            "The arguments of {} do not fit its schema: {}",
            call.name,
            errors.join("; ")
        )),
    }
}

impl ToolOutput {
    /// With as many pictures and files as may be, and a text for those that were left out.
    fn limit_attachments(mut self, limits: AttachmentLimits) -> Self {
        let (mut count, mut total) = (0, 0_u64);
        let AttachmentLimits {
            count: max_count,
            bytes: max_bytes,
            total: max_total,
        } = limits;
        let text = &mut self.text;
        self.attachments.retain(|attachment| {
            count += 1;
            total += attachment.bytes;
            let reason = if count > max_count {
                format!("a result has at most {max_count}")
            } else if attachment.bytes > max_bytes as u64 || total > max_total as u64 {
                format!("it is larger than the server takes ({max_bytes} bytes)")
            } else {
                return true;
            };
            total -= attachment.bytes;
            text.push_str(&format!(
                "\n{}, left out: {reason}]",
                attachment.placeholder()
            ));
            false
        });
        self
    }
}

/// The text within its bound: cut on a character boundary, with a notice of how to get the rest.
fn truncate_with_notice(mut text: String, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text;
    }
    let total_bytes = text.len();
    text.truncate(truncate_to_bytes(&text, max_bytes).len());
    text.push_str(&format!(
        "\n... (cut at {} of {total_bytes} bytes; ask for less at once, such as a part, a narrower pattern or an offset)",
        text.len()
    ));
    text
}
