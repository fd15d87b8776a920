//! Reads `[[mcp_servers]]` of an agent file. Connects to nobody.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::config::section::Section;
use crate::domain::mcp::{
    DEFAULT_TIMEOUT, McpServer, McpTransport, Template, is_server_name, is_variable,
};

/// Most servers of one agent: each may be a process.
const MOST_SERVERS: usize = 32;
/// The longest timeout of a call, in seconds: a day.
const MAX_TIMEOUT: u64 = 86_400;
/// Headers that the protocol sets itself.
const RESERVED: [&str; 7] = [
    "accept",
    "content-length",
    "content-type",
    "host",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-session-id",
];

/// The servers, in the file's order. What is wrong is kept as a problem.
pub fn read(top: &mut Section<'_>) -> Vec<McpServer> {
    let whole = top.peek("mcp_servers");
    let servers: Vec<McpServer> = top
        .each("mcp_servers", server)
        .into_iter()
        .flatten()
        .collect();
    let mut names = BTreeSet::new();
    for server in &servers {
        // Names differ in more than their case: people would mix them up.
        if !names.insert(server.name.to_ascii_lowercase()) {
            let why = format!(
                "has two servers named \"{}\"; name one otherwise",
                server.name
            );
            rule(top, &whole, &why);
        }
    }
    if servers.len() > MOST_SERVERS {
        rule(
            top,
            &whole,
            &format!("cannot have more than {MOST_SERVERS} servers"),
        );
    }
    servers
}

fn rule(top: &mut Section<'_>, node: &Option<crate::config::document::Node>, why: &str) {
    if let Some(node) = node {
        top.rule(node, "mcp_servers", why);
    }
}

fn server(s: &mut Section<'_>) -> Option<McpServer> {
    #[derive(Clone, Copy)]
    enum Kind {
        Stdio,
        StreamableHttp,
    }
    let kinds = [
        ("stdio", Kind::Stdio),
        ("streamable-http", Kind::StreamableHttp),
    ];
    let has_name = s.peek("name").is_some();
    let name = s.checked("name", |text| match is_server_name(text) {
        true => Ok(text.to_owned()),
        false => Err(
            "must be 1 to 32 letters, digits, - and _, begin with a letter or digit, hold no __ and end in no _: \
             its tools are named <name>__<tool>"
                .to_owned(),
        ),
    });
    if !has_name {
        s.missing("name", "is required: its tools are named <name>__<tool>");
    }
    let has_kind = s.peek("transport").is_some();
    let kind = s.one_of("transport", &kinds);
    if !has_kind {
        s.missing("transport", "is required: \"stdio\" or \"streamable-http\"");
    }
    let tools = s.texts("tools").unwrap_or_default();
    let timeout = s.whole("timeout", 1..=MAX_TIMEOUT);
    let required = s.flag("required").unwrap_or(false);
    let transport = match kind {
        Some(Kind::Stdio) => stdio(s),
        Some(Kind::StreamableHttp) => streamable_http(s),
        None => {
            for key in ["command", "args", "env", "url", "headers"] {
                s.ignore(key);
            }
            None
        }
    };
    Some(McpServer {
        name: name?,
        transport: transport?,
        tools,
        timeout: timeout.map_or(DEFAULT_TIMEOUT, Duration::from_secs),
        required,
    })
}

fn stdio(s: &mut Section<'_>) -> Option<McpTransport> {
    only_for(s, ["url", "headers"], "streamable-http");
    let has_command = s.peek("command").is_some();
    let command = s.checked("command", |text| match text.trim() {
        "" => Err("must name a program".to_owned()),
        _ if text.contains('\0') => Err("must hold no NUL".to_owned()),
        _ => Ok(text.to_owned()),
    });
    if !has_command {
        s.missing("command", "is required where transport is stdio");
    }
    let args = s.texts("args").unwrap_or_default();
    let env = s.texts_by_name("env", |name, value| match is_variable(name) {
        true => Template::read(value),
        false => Err("is no variable's name: letters, digits and _, the first no digit".to_owned()),
    });
    Some(McpTransport::Stdio {
        command: command?,
        args,
        env,
    })
}

fn streamable_http(s: &mut Section<'_>) -> Option<McpTransport> {
    only_for(s, ["command", "args"], "stdio");
    only_for(s, ["env"], "stdio");
    let has_url = s.peek("url").is_some();
    let url = s.checked("url", |text| check_url(text).map(|()| text.to_owned()));
    if !has_url {
        s.missing("url", "is required where transport is streamable-http");
    }
    let headers = s.texts_by_name("headers", |name, value| {
        if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
            return Err("is no header's name".to_owned());
        }
        if RESERVED.contains(&name.to_ascii_lowercase().as_str()) {
            return Err("cannot be set: the protocol sets it".to_owned());
        }
        Template::read(value)
    });
    Some(McpTransport::StreamableHttp { url: url?, headers })
}

fn only_for<const N: usize>(s: &mut Section<'_>, keys: [&'static str; N], transport: &str) {
    for key in keys {
        if let Some(node) = s.raw(key) {
            s.rule(
                &node,
                key,
                &format!("is only for transport = \"{transport}\""),
            );
        }
    }
}

fn check_url(text: &str) -> Result<(), String> {
    let wanted = "must be a URL such as https://example.com/mcp";
    let uri: http::Uri = text.parse().map_err(|_| wanted.to_owned())?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    let host = uri.host().unwrap_or_default();
    if !is_http || host.is_empty() {
        return Err(wanted.to_owned());
    }
    let has_user = uri.authority().is_some_and(|it| it.as_str().contains('@'));
    match has_user {
        true => Err("must not hold a user and a password; put them into headers".to_owned()),
        false => Ok(()),
    }
}
