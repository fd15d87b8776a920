//! Reads `[[mcp_servers]]` of an agent file; opens no connections.

use std::collections::BTreeSet;
use std::time::Duration;

use crate::catalog::mcp_oauth;
use crate::domain::mcp::{
    DEFAULT_OPEN_TIMEOUT, DEFAULT_TIMEOUT, MAX_OPEN_TIMEOUT, McpServer, McpTransport, Template,
    is_server_name, is_variable_name,
};
use crate::settings::document::Node;
use crate::settings::table_reader::TableReader;

/// Maximum number of servers of one agent: each may be a process.
const MAX_SERVERS: usize = 32;
/// Maximum timeout of a call in seconds: one day.
const MAX_TIMEOUT_SECS: u64 = 86_400;
/// Headers that the protocol sets itself.
const RESERVED_HEADERS: [&str; 7] = [
    "accept",
    "content-length",
    "content-type",
    "host",
    "last-event-id",
    "mcp-protocol-version",
    "mcp-session-id",
];

/// Returns the servers in the file's order; invalid ones are reported as problems.
pub fn read(top: &mut TableReader<'_>, key: &'static str) -> Vec<McpServer> {
    let node = top.peek(key);
    let servers: Vec<McpServer> = top
        .table_list(key, parse_server)
        .into_iter()
        .flatten()
        .collect();
    let mut names = BTreeSet::new();
    for server in &servers {
        // Names that differ only in case would be confused.
        if !names.insert(server.name.to_ascii_lowercase()) {
            let why = format!(
                "has two servers named \"{}\"; name one otherwise",
                server.name
            );
            add_problem(top, key, node.as_ref(), &why);
        }
    }
    if servers.len() > MAX_SERVERS {
        add_problem(
            top,
            key,
            node.as_ref(),
            &format!("cannot have more than {MAX_SERVERS} servers"),
        );
    }
    servers
}

fn add_problem(top: &mut TableReader<'_>, key: &'static str, node: Option<&Node>, why: &str) {
    if let Some(node) = node {
        top.push_invalid(node, key, why);
    }
}

fn parse_server(s: &mut TableReader<'_>) -> Option<McpServer> {
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
    let name = s.parsed_text("name", |text| match is_server_name(text) {
        true => Ok(text.to_owned()),
        false => Err(
            "must be 1 to 32 letters, digits, - and _, begin with a letter or digit, hold no __ and end in no _: \
             its tools are named <name>__<tool>"
                .to_owned(),
        ),
    });
    if !has_name {
        s.push_missing("name", "is required: its tools are named <name>__<tool>");
    }
    let has_kind = s.peek("transport").is_some();
    let kind = s.one_of("transport", &kinds);
    if !has_kind {
        s.push_missing("transport", "is required: \"stdio\" or \"streamable-http\"");
    }
    let tools = s.text_list("tools").unwrap_or_default();
    let timeout = s.integer("timeout", 1..=MAX_TIMEOUT_SECS);
    let open_timeout = s.integer("open_timeout", 1..=MAX_OPEN_TIMEOUT.as_secs());
    let required = s.flag("required").unwrap_or(false);
    let transport = match kind {
        Some(Kind::Stdio) => parse_stdio(s),
        Some(Kind::StreamableHttp) => parse_streamable_http(s),
        None => {
            for key in ["command", "args", "env", "url", "headers", "oauth"] {
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
        open_timeout: open_timeout.map_or(DEFAULT_OPEN_TIMEOUT, Duration::from_secs),
        required,
    })
}

fn parse_stdio(s: &mut TableReader<'_>) -> Option<McpTransport> {
    reject_keys(s, ["url", "headers", "oauth"], "streamable-http");
    let has_command = s.peek("command").is_some();
    let command = s.parsed_text("command", |text| match text.trim() {
        "" => Err("must name a program".to_owned()),
        _ if text.contains('\0') => Err("must hold no NUL".to_owned()),
        _ => Ok(text.to_owned()),
    });
    if !has_command {
        s.push_missing("command", "is required where transport is stdio");
    }
    let args = s.text_list("args").unwrap_or_default();
    let env = s.texts_by_name("env", |name, value| match is_variable_name(name) {
        true => Template::parse(value),
        false => Err("is no variable's name: letters, digits and _, the first no digit".to_owned()),
    });
    Some(McpTransport::Stdio {
        command: command?,
        args,
        env,
    })
}

fn parse_streamable_http(s: &mut TableReader<'_>) -> Option<McpTransport> {
    reject_keys(s, ["command", "args"], "stdio");
    reject_keys(s, ["env"], "stdio");
    let has_url = s.peek("url").is_some();
    let url = s.parsed_text("url", |text| check_url(text).map(|()| text.to_owned()));
    if !has_url {
        s.push_missing("url", "is required where transport is streamable-http");
    }
    let has_oauth = s.peek("oauth").is_some();
    let headers = s.texts_by_name("headers", |name, value| {
        if http::HeaderName::from_bytes(name.as_bytes()).is_err() {
            return Err("is no header's name".to_owned());
        }
        if RESERVED_HEADERS.contains(&name.to_ascii_lowercase().as_str()) {
            return Err("cannot be set: the protocol sets it".to_owned());
        }
        if has_oauth && name.eq_ignore_ascii_case("authorization") {
            return Err("cannot be set beside oauth, which sets it".to_owned());
        }
        Template::parse(value)
    });
    let oauth = mcp_oauth::read(s);
    // Without its oauth table the server would be reached without a token.
    if has_oauth && oauth.is_none() {
        return None;
    }
    Some(McpTransport::StreamableHttp {
        url: url?,
        headers,
        oauth,
    })
}

fn reject_keys<const N: usize>(s: &mut TableReader<'_>, keys: [&'static str; N], transport: &str) {
    for key in keys {
        if let Some(node) = s.take_node(key) {
            s.push_invalid(
                &node,
                key,
                &format!("is only for transport = \"{transport}\""),
            );
        }
    }
}

fn check_url(text: &str) -> Result<(), String> {
    let expected = "must be a URL such as https://example.com/mcp";
    let uri: http::Uri = text.parse().map_err(|_| expected.to_owned())?;
    let is_http = matches!(uri.scheme_str(), Some("http" | "https"));
    let host = uri.host().unwrap_or_default();
    if !is_http || host.is_empty() {
        return Err(expected.to_owned());
    }
    let has_user = uri.authority().is_some_and(|it| it.as_str().contains('@'));
    match has_user {
        true => Err("must not hold a user and a password; put them into headers".to_owned()),
        false => Ok(()),
    }
}
