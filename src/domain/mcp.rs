//! `[[mcp_servers]]` of an agent: MCP servers that offer it tools. Only the settings; connections are elsewhere.

use std::collections::BTreeMap;
use std::fmt;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::domain::mcp_oauth::{McpOauth, McpOauthView};

/// Separates the server's name from the tool's name in the name that models see.
pub const TOOL_NAME_SEPARATOR: &str = "__";
/// The most characters of a server's name: half of the limit that providers have for a tool's name.
const MAX_SERVER_NAME: usize = 32;

/// The settings of one server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct McpServer {
    /// The prefix of its tools' names, before [`TOOL_NAME_SEPARATOR`].
    pub name: String,
    pub transport: McpTransport,
    /// The tools that the agent gets, with the server's own names; empty means all.
    pub tools: Vec<String>,
    /// The time limit of one call.
    #[serde(default = "default_timeout")]
    pub timeout: Duration,
    /// How long a run waits for the server to start and to list its tools.
    #[serde(default = "default_open_timeout")]
    pub open_timeout: Duration,
    /// Whether a run fails if the server is unavailable when the run starts.
    #[serde(default)]
    pub required: bool,
}

/// The default time limit of one call.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(60);

fn default_timeout() -> Duration {
    DEFAULT_TIMEOUT
}

/// The default time that a run waits for a server to start.
pub const DEFAULT_OPEN_TIMEOUT: Duration = Duration::from_secs(10);
/// How long a server may take to start, whether runs wait for it or not.
pub const MAX_OPEN_TIMEOUT: Duration = Duration::from_secs(600);

fn default_open_timeout() -> Duration {
    DEFAULT_OPEN_TIMEOUT
}

/// The transport to a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum McpTransport {
    /// A child process that communicates on its standard input and output.
    Stdio {
        /// The program; searched in PATH if it has no slash.
        command: String,
        args: Vec<String>,
        /// Environment variables in addition to those that every server gets.
        env: BTreeMap<String, Template>,
    },
    /// MCP's Streamable HTTP transport.
    StreamableHttp {
        /// `http://` or `https://`.
        url: String,
        /// Sent with every request.
        headers: BTreeMap<String, Template>,
        /// How access tokens are obtained, if the server requires them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        oauth: Option<McpOauth>,
    },
}

impl McpTransport {
    /// Its name in agent files.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Stdio { .. } => "stdio",
            Self::StreamableHttp { .. } => "streamable-http",
        }
    }
}

/// An MCP server, without arguments, variables, headers and the query of its URL, which may hold secrets.
#[derive(Serialize, JsonSchema)]
#[schemars(rename = "AgentMcpServer")]
pub struct McpServerView<'a> {
    /// The server's name: the prefix of its tools' names.
    name: &'a str,
    /// How axed connects to the server.
    #[schemars(extend("enum" = ["stdio", "streamable-http"]))]
    transport: &'static str,
    /// The program of a server that axed starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    command: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    args: Option<&'a [String]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    env: Option<BTreeMap<&'a str, &'a str>>,
    /// The URL of a remote server, without its query.
    #[serde(skip_serializing_if = "Option::is_none")]
    url: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(skip)]
    headers: Option<BTreeMap<&'a str, &'a str>>,
    /// How axed obtains access tokens for a remote server.
    #[serde(skip_serializing_if = "Option::is_none")]
    oauth: Option<McpOauthView<'a>>,
    /// The tools that the agent gets, with the server's own names; empty means all.
    tools: &'a [String],
    /// The longest time that one call may take, in seconds.
    timeout: u64,
    /// How long a run waits for the server to start, in seconds.
    open_timeout: u64,
    /// Whether a run fails if the server is unavailable when the run starts.
    required: bool,
}

impl<'a> McpServerView<'a> {
    /// Omits everything that may be a secret.
    pub fn for_client(server: &'a McpServer) -> Self {
        let view = Self::for_operator(server);
        Self {
            args: None,
            env: None,
            url: view.url.and_then(|url| url.split(['?', '#']).next()),
            headers: None,
            oauth: view.oauth.map(McpOauthView::for_client),
            ..view
        }
    }

    /// Shows all keys of the file, but masks texts without variables, which may be secrets.
    pub fn for_operator(server: &'a McpServer) -> Self {
        let view = Self {
            name: &server.name,
            transport: server.transport.name(),
            command: None,
            args: None,
            env: None,
            url: None,
            headers: None,
            oauth: None,
            tools: &server.tools,
            timeout: server.timeout.as_secs(),
            open_timeout: server.open_timeout.as_secs(),
            required: server.required,
        };
        match &server.transport {
            McpTransport::Stdio { command, args, env } => Self {
                command: Some(command),
                args: Some(args),
                env: Some(redacted(env)),
                ..view
            },
            McpTransport::StreamableHttp {
                url,
                headers,
                oauth,
            } => Self {
                url: Some(url),
                headers: Some(redacted(headers)),
                oauth: oauth.as_ref().map(McpOauthView::for_operator),
                ..view
            },
        }
    }
}

fn redacted(templates: &BTreeMap<String, Template>) -> BTreeMap<&str, &str> {
    let entries = templates.iter();
    let entries = entries.map(|(name, template)| (name.as_str(), template.redacted()));
    entries.collect()
}

/// A text as written, with `${VAR}`s that are expanded at the time of use. May contain secrets.
#[derive(Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Template(String);

/// A template with its variables expanded.
pub struct ExpandedTemplate {
    /// The whole text.
    pub text: String,
    /// The values of its variables.
    pub variable_values: Vec<String>,
}

impl Template {
    /// Reads a text.
    ///
    /// # Errors
    /// What is wrong with a `${`; the text follows the key's name.
    pub fn parse(text: &str) -> Result<Self, String> {
        let template = Self(text.to_owned());
        let parts = template.parts().map_err(|()| {
            "has a ${ that names no variable; write ${NAME} with letters, digits and _".to_owned()
        })?;
        drop(parts);
        Ok(template)
    }

    /// The text with every `${VAR}` replaced.
    ///
    /// # Errors
    /// The first variable that is not set.
    pub fn expand<'v>(
        &self,
        lookup: impl Fn(&str) -> Option<&'v str>,
    ) -> Result<ExpandedTemplate, String> {
        let mut expanded = ExpandedTemplate {
            text: String::new(),
            variable_values: Vec::new(),
        };
        for part in self.parts().unwrap_or_default() {
            match part {
                TemplatePart::Literal(text) => expanded.text.push_str(text),
                TemplatePart::Variable(name) => {
                    let value = lookup(name).ok_or_else(|| name.to_owned())?;
                    expanded.text.push_str(value);
                    expanded.variable_values.push(value.to_owned());
                }
            }
        }
        Ok(expanded)
    }

    /// The names of its variables.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        let parts = self.parts().unwrap_or_default().into_iter();
        parts.filter_map(|part| match part {
            TemplatePart::Literal(_) => None,
            TemplatePart::Variable(name) => Some(name),
        })
    }

    /// The template as it may be shown: masked if it has no variables, because it may be a secret.
    pub fn redacted(&self) -> &str {
        match self.0.contains("${") {
            true => &self.0,
            false => "***",
        }
    }

    fn parts(&self) -> Result<Vec<TemplatePart<'_>>, ()> {
        let mut parts = Vec::new();
        let mut rest = self.0.as_str();
        while let Some((before, after)) = rest.split_once("${") {
            let (name, after) = after.split_once('}').ok_or(())?;
            if !is_variable_name(name) {
                return Err(());
            }
            parts.extend([TemplatePart::Literal(before), TemplatePart::Variable(name)]);
            rest = after;
        }
        parts.push(TemplatePart::Literal(rest));
        Ok(parts)
    }
}

impl fmt::Debug for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.redacted())
    }
}

enum TemplatePart<'t> {
    Literal(&'t str),
    Variable(&'t str),
}

/// Whether this is a valid name of an environment variable.
pub fn is_variable_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
}

/// Whether this is a valid name of a server: providers accept it, and its end is unambiguous in a tool's name.
pub fn is_server_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_');
    (1..=MAX_SERVER_NAME).contains(&name.len())
        && name.chars().all(is_plain)
        && !name.starts_with(['-', '_'])
        && !name.ends_with('_')
        && !name.contains(TOOL_NAME_SEPARATOR)
}

#[cfg(test)]
mod tests {
    use super::{Template, is_server_name};

    #[test]
    fn variables_are_substituted_and_secrets_hidden() {
        let template = Template::parse("Bearer ${TOKEN}, $5 and ${TOKEN}").expect("a template");
        let expanded = template.expand(|name| (name == "TOKEN").then_some("secret"));
        let expanded = expanded.expect("it is set");
        assert_eq!(expanded.text, "Bearer secret, $5 and secret");
        assert!(template.variables().eq(["TOKEN", "TOKEN"]));
        assert_eq!(expanded.variable_values, ["secret", "secret"]);
        assert_eq!(template.expand(|_| None).err().as_deref(), Some("TOKEN"));
        assert_eq!(format!("{template:?}"), "Bearer ${TOKEN}, $5 and ${TOKEN}");
        let literal = Template::parse("secret").expect("a template");
        assert_eq!(format!("{literal:?}"), "***");
        for wrong in ["${", "${}", "${A B}", "a${1}", "${A"] {
            assert!(Template::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_name_shows_where_it_ends() {
        for good in ["files", "a", "git-hub_2"] {
            assert!(is_server_name(good), "{good}");
        }
        for bad in ["", "a__b", "a_", "_a", "-a", "a.b", "ä", &"a".repeat(33)] {
            assert!(!is_server_name(bad), "{bad}");
        }
    }
}
