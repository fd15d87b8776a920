//! The tools that one run may use: which are offered to the model, and which one executes a call.

use std::sync::Arc;

use indexmap::IndexMap;

use crate::config::AttachmentLimits;
use crate::domain::agent::Agent;
use crate::domain::agent::client_additions::ClientTool;
use crate::domain::event::CalledTool;
use crate::domain::input::ASK_PERSON;
use crate::domain::json_schema::Schema;
use crate::domain::mcp::TOOL_NAME_SEPARATOR;
use crate::domain::message::{ToolCall, ToolSpec, shorten, truncate_to_bytes};
use crate::domain::run::Scope;
use crate::domain::skill::READ_SKILL;
use crate::tools::call_agent::{self, CallAgent, CallableAgent};
use crate::tools::deferred;
use crate::tools::mcp::{McpToolset, UnavailableServer};
use crate::tools::registry::ToolRegistry;
use crate::tools::subagent::{self, Subagent};
use crate::tools::{
    AnswerToQuestion, AnsweredQuestions, CallContext, CallStep, Delegate, Effect, OpenCall, Probed,
    Tool, ToolOutput, ask_person, background, recall, shell, wait,
};
use crate::validation;
use crate::workdirs::workdir::Workdir;

pub struct Toolbox {
    offered_specs: Vec<ToolSpec>,
    /// The names of the tools that are found by `tool_search` instead of being offered.
    deferred: Vec<String>,
    tools: IndexMap<String, Arc<dyn Tool>>,
    /// The names of the tools that the client of the run executes.
    client_tools: Vec<String>,
    /// MCP servers that could not list their tools.
    unavailable_servers: Vec<UnavailableServer>,
    workdir: Option<Arc<Workdir>>,
    allowed_hosts: Vec<String>,
    max_result: usize,
    attachments: AttachmentLimits,
}

impl Toolbox {
    /// Builds the toolbox for a run of `agent`. `describe_agent` describes a sub-agent.
    pub fn new(
        agent: &Agent,
        scope: &Scope,
        workdir: Option<Arc<Workdir>>,
        registry: &ToolRegistry,
        mcp_toolset: McpToolset,
        describe_agent: impl Fn(&str) -> CallableAgent,
    ) -> Self {
        let mut tools = built_in_tools(agent, registry);
        // A command in this workdir would reach the daemon's own files. A call of `run_command` still gets an error
        // that says so.
        let exposes_daemon_files = workdir.as_deref().and_then(Workdir::exposed_path).is_some();
        let is_withheld = |name: &str| {
            exposes_daemon_files && name == shell::tool::NAME && registry.is_sandboxed()
        };
        // For an ad-hoc sub-agent, the caller's list alone decides.
        let allowed = agent.ad_hoc.as_ref();
        let allowed = allowed.and_then(|ad_hoc| ad_hoc.allowed_tools.as_ref());
        let is_allowed = |name: &String| allowed.is_none_or(|allowed| allowed.contains(name));
        let mut mcp_tools = mcp_toolset.tools;
        mcp_tools.retain(|(name, _)| is_allowed(name));
        // MCP tools cannot collide with built-in ones: their names contain the separator of server and tool.
        tools.extend(mcp_tools.iter().cloned());
        // The client's tools keep their names.
        let mut client_tools = agent.client_tools().iter();
        let takes_names = client_tools
            .any(|tool| [deferred::TOOL_SEARCH, deferred::TOOL_CALL].contains(&tool.name.as_str()));
        let deferral = registry.deferral().filter(|_| !takes_names);
        let deferral = deferral.and_then(|deferral| deferral.defer(mcp_tools));
        let is_deferred = |name: &str| deferral.is_some() && name.contains(TOOL_NAME_SEPARATOR);
        if agent.context.recall {
            tools.insert(recall::NAME.to_owned(), recall::tool());
        }
        if agent.ask.is_some() {
            tools.insert(ASK_PERSON.to_owned(), ask_person::tool());
        }
        if let Some(waits) = &agent.wait {
            let waiting = wait::tools(waits.max).into_iter();
            tools.extend(waiting.map(|(name, tool)| (name.to_owned(), tool)));
        }
        let names = &agent.sub_agents;
        let in_background = agent.delegation.background;
        if in_background && (!names.is_empty() || agent.subagent.is_some()) {
            let of_background = background::tools().into_iter();
            tools.extend(of_background.map(|(name, tool)| (name.to_owned(), tool)));
        }
        if !names.is_empty() {
            let agents = names.iter().map(|name| describe_agent(name)).collect();
            let tool = CallAgent::new(agents, in_background);
            tools.insert(call_agent::NAME.to_owned(), Arc::new(tool));
        }
        if let Some(settings) = &agent.subagent {
            let names = tools.keys().filter(|name| !is_withheld(name));
            let (deferred, names) = names.cloned().partition(|name| is_deferred(name));
            let tool = Subagent::new(settings.clone(), names, deferred, in_background);
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
        // At its depth limit an agent is not offered delegating tools, but a call of one still gets its error.
        let limit = agent.subagent.as_ref().map_or(0, |it| it.max_depth);
        let has_call_agent = !names.is_empty() && scope.can_delegate();
        let has_subagent = scope.depth.0 < scope.max_ad_hoc_depth(limit);
        let is_offered = |name: &str| match name {
            call_agent::NAME => has_call_agent,
            subagent::NAME => has_subagent,
            background::AWAIT_AGENTS | background::CANCEL_AGENT => has_call_agent || has_subagent,
            _ => !is_withheld(name) && (deferred.is_empty() || !name.contains(TOOL_NAME_SEPARATOR)),
        };
        let offered_tools = tools.iter().filter(|(name, _)| is_offered(name));
        let offered_tools = offered_tools.map(|(_, tool)| tool.spec());
        // A tool that the agent got since the run was accepted wins.
        let client_tools = agent.client_tools().iter();
        let client_tools = client_tools.filter(|tool| !tools.contains_key(&tool.name));
        let client_specs = client_tools.clone().map(ClientTool::spec);
        Self {
            offered_specs: offered_tools.chain(client_specs).collect(),
            client_tools: client_tools.map(|tool| tool.name.clone()).collect(),
            deferred,
            tools,
            unavailable_servers: mcp_toolset.unavailable,
            workdir,
            allowed_hosts: agent.allowed_hosts.clone(),
            max_result: registry.max_result(),
            attachments: registry.attachments(),
        }
    }

    /// The tools that the model is offered.
    pub fn offered_specs(&self) -> &[ToolSpec] {
        &self.offered_specs
    }

    /// Whether the client of the run executes the tool with this name.
    pub fn is_client_tool(&self, name: &str) -> bool {
        self.client_tools.iter().any(|tool| tool == name)
    }

    /// A result of a tool that the client executed, cut as those of other tools.
    pub fn limit_result(&self, text: String) -> String {
        truncate_with_notice(text, self.max_result)
    }

    /// The names of the tools that `tool_search` finds.
    pub fn deferred(&self) -> &[String] {
        &self.deferred
    }

    /// Resolves a `tool_call` call to the call of the tool that it names. Any other call, or one that names no MCP
    /// tool, stays as it is. Also resolves if nothing is deferred, because after a restart there may be fewer tools.
    pub fn resolve(&self, call: ToolCall) -> ToolCall {
        let is_known = |name: &str| {
            (name.contains(TOOL_NAME_SEPARATOR) && self.tools.contains_key(name))
                || self.unavailable_server(name).is_some()
        };
        let inner_call = match self.is_client_tool(&call.name) {
            true => None,
            false => deferred::inner_call(&call),
        };
        match inner_call {
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

    /// The effect of the tool with this name; `None` if there is no such tool.
    pub fn effect(&self, name: &str) -> Option<Effect> {
        match self.tools.get(name) {
            Some(tool) => Some(tool.effect()),
            // An unknown tool must not be called twice.
            None => self.unavailable_server(name).map(|_| Effect::Mutating),
        }
    }

    /// The MCP server that this tool belongs to, if that server could not list its tools.
    fn unavailable_server(&self, name: &str) -> Option<&UnavailableServer> {
        let mut servers = self.unavailable_servers.iter();
        servers.find(|it| name.starts_with(&it.prefix))
    }

    /// Whether checking the arguments is cheap enough to need no thread of its own.
    pub fn is_checked_inline(&self, call: &ToolCall) -> bool {
        let tool = self.tools.get(&call.name);
        let tool = tool.filter(|tool| tool.effect() != Effect::Delegating);
        let schema = tool.and_then(|tool| tool.schema());
        schema.is_none_or(|schema| {
            validation::check_arguments_inline(schema, &call.arguments).is_some()
        })
    }

    /// Checks that the tool exists and accepts the arguments. `key` is the API key that the run was accepted with.
    ///
    /// # Errors
    /// The text that the model gets as the result of the call.
    pub async fn check_call(&self, call: &ToolCall, key: Option<&str>) -> Result<(), String> {
        let tool = self.tools.get(&call.name);
        let tool = tool.ok_or_else(|| self.missing_tool(&call.name))?;
        let is_delegation = tool.effect() == Effect::Delegating;
        let schema = tool.schema().filter(|_| !is_delegation);
        match schema {
            Some(schema) => match coerce_arguments(call, schema, key).await {
                Ok(_) => Ok(()),
                Err(why) => Err(truncate_with_notice(why, self.max_result)),
            },
            None => Ok(()),
        }
    }

    /// Why there is no tool with this name.
    fn missing_tool(&self, name: &str) -> String {
        match self.unavailable_server(name) {
            Some(server) => server.reason.clone(),
            None => format!("Unknown tool: \"{}\"", shorten(name, 200)),
        }
    }

    /// Checks arguments that a person wrote against the schema of the tool, if it has one. Nothing is coerced: a person can
    /// correct them.
    ///
    /// # Errors
    /// One sentence for each mismatch.
    pub async fn check_arguments(
        &self,
        call: &ToolCall,
        key: Option<&str>,
    ) -> Result<(), Vec<String>> {
        let tool = self.tools.get(&call.name);
        match tool.and_then(|tool| tool.schema()) {
            Some(schema) => {
                let checked = validation::check_raw_value(schema, &call.arguments, key).await;
                checked.map_err(|errors| errors.iter().map(ToString::to_string).collect())
            }
            None => Ok(()),
        }
    }

    /// Executes a call, with what people answered to its service before. `key` is the API key that the run was accepted with.
    ///
    /// A step that ends the call has an error if there is no such tool, the arguments do not fit its schema, or the tool failed.
    /// The text is for the model.
    pub async fn call(
        &self,
        call: &ToolCall,
        scope: &Scope,
        key: Option<&str>,
        delegate: &dyn Delegate,
        answered: Option<&AnsweredQuestions>,
    ) -> CallStep {
        let Some(tool) = self.tools.get(&call.name) else {
            return CallStep::Ended(Err(self.missing_tool(&call.name)));
        };
        let context = self.context(scope, key, delegate);
        if tool.effect() == Effect::Delegating {
            // It checks its arguments and bounds its result itself.
            return CallStep::Ended(tool.call(call, context).await);
        }
        let step = match tool.schema() {
            Some(schema) => match coerce_arguments(call, schema, key).await {
                Ok(call) => tool.attempt(&call, context, answered).await,
                Err(why) => CallStep::Ended(Err(why)),
            },
            None => tool.attempt(call, context, answered).await,
        };
        self.bound(step)
    }

    /// Continues a call in flight; see [`OpenCall::resume`].
    pub async fn resume(
        &self,
        call: Box<dyn OpenCall>,
        answer: Option<AnswerToQuestion>,
    ) -> CallStep {
        self.bound(call.resume(answer).await)
    }

    /// Cuts a result to what a model may get.
    fn bound(&self, step: CallStep) -> CallStep {
        let CallStep::Ended(result) = step else {
            return step;
        };
        CallStep::Ended(match result {
            Ok(output) => Ok(ToolOutput {
                text: truncate_with_notice(output.text, self.max_result),
                ..output
            }
            .limit_attachments(self.attachments)),
            Err(text) => Err(truncate_with_notice(text, self.max_result)),
        })
    }

    /// Asks whether a call whose end is not known was performed.
    pub async fn probe(
        &self,
        call: &ToolCall,
        scope: &Scope,
        key: Option<&str>,
        delegate: &dyn Delegate,
    ) -> Probed {
        match self.tools.get(&call.name) {
            Some(tool) => tool.probe(call, self.context(scope, key, delegate)).await,
            None => Probed::Unknown,
        }
    }

    fn context<'a>(
        &'a self,
        scope: &'a Scope,
        key: Option<&'a str>,
        delegate: &'a dyn Delegate,
    ) -> CallContext<'a> {
        CallContext {
            scope,
            key,
            workdir: self.workdir.as_ref(),
            allowed_hosts: &self.allowed_hosts,
            delegate,
        }
    }
}

/// The built-in tools in the agent's list, its HTTP tools and the one for its skills, by name.
fn built_in_tools(agent: &Agent, registry: &ToolRegistry) -> IndexMap<String, Arc<dyn Tool>> {
    let names = agent.tools.iter();
    let tools = names.filter_map(|name| Some((name.clone(), Arc::clone(registry.get(name)?))));
    let http_tools = agent.http_tools.iter();
    let http_tools = http_tools.filter_map(|it| Some((it.name.clone(), registry.http_tool(it)?)));
    let read_skill = registry.skill_tool(&agent.skills);
    let read_skill = read_skill.map(|tool| (READ_SKILL.to_owned(), tool));
    tools.chain(http_tools).chain(read_skill).collect()
}

/// Returns the call with arguments that fit the schema.
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
    /// Drops attachments beyond the limits. For each limit a line of the text names the first one and counts the others.
    fn limit_attachments(mut self, limits: AttachmentLimits) -> Self {
        let AttachmentLimits {
            count: max_count,
            bytes: max_bytes,
            total: max_total,
        } = limits;
        let reasons = [
            format!("a result has at most {max_count}"),
            format!("it is larger than the server takes ({max_bytes} bytes)"),
            format!("a result has at most {max_total} bytes of them"),
        ];
        let mut dropped: [(String, usize); 3] = Default::default();
        let (mut count, mut total) = (0, 0_u64);
        self.attachments.retain(|attachment| {
            let exceeded = if count >= max_count {
                0
            } else if attachment.bytes > max_bytes as u64 {
                1
            } else if total + attachment.bytes > max_total as u64 {
                2
            } else {
                count += 1;
                total += attachment.bytes;
                return true;
            };
            let (first, others) = &mut dropped[exceeded];
            if first.is_empty() {
                *first = attachment.placeholder();
            } else {
                *others += 1;
            }
            false
        });
        for ((first, others), reason) in dropped.into_iter().zip(reasons) {
            if first.is_empty() {
                continue;
            }
            let others = match others {
                0 => String::new(),
                others => format!(" and {others} more"),
            };
            let line = format!("\n{first}{others}, left out: {reason}]");
            self.text.push_str(&line);
        }
        self
    }
}

/// Truncates the text on a character boundary, with a notice that says how to get the rest.
fn truncate_with_notice(mut text: String, max_bytes: usize) -> String {
    if text.len() <= max_bytes {
        return text;
    }
    let total_bytes = text.len();
    text.truncate(truncate_to_bytes(&text, max_bytes).len());
    text.push_str(&format!(
        "\n... (cut at {} of {total_bytes} bytes; request less at once, such as a part, a narrower pattern or an offset)",
        text.len()
    ));
    text
}

#[cfg(test)]
mod tests {
    use crate::config::AttachmentLimits;
    use crate::domain::attachment::Attachment;
    use crate::tools::ToolOutput;

    #[test]
    fn attachments_beyond_a_limit_are_named_in_one_line() {
        let image = |bytes| {
            let mut data = b"GIF89a".to_vec();
            data.resize(bytes, 0);
            Attachment::from_bytes(data.into(), None).expect("an image")
        };
        let output = ToolOutput {
            text: "text".to_owned(),
            attachments: [10, 101, 90, 90, 20, 10, 10, 10].map(image).into(),
            ..ToolOutput::default()
        };
        let limits = AttachmentLimits {
            count: 3,
            bytes: 100,
            total: 120,
        };
        let output = output.limit_attachments(limits);
        let kept: Vec<u64> = output.attachments.iter().map(|it| it.bytes).collect();
        assert_eq!(kept, [10, 90, 20]);
        assert_eq!(
            output.text,
            "text\n\
             [image: image/gif, 10 bytes and 2 more, left out: a result has at most 3]\n\
             [image: image/gif, 101 bytes, left out: it is larger than the server takes (100 bytes)]\n\
             [image: image/gif, 90 bytes, left out: a result has at most 120 bytes of them]"
        );
    }
}
