//! `axed auth`: logins of the operator at MCP servers that require one. They are stored for the daemon, which need not run.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::anyhow;
use jiff::Timestamp;
use serde_json::{Value, json};

use crate::catalog::Rules;
use crate::catalog::reload::Catalog;
use crate::cli::exit::InvalidInput;
use crate::cli::output::{self, FormatArgs};
use crate::cli::sources::{Sources, load_quiet_config};
use crate::cli::style::Color;
use crate::cli::table::{Cell, Column, Table};
use crate::config::Config;
use crate::config::environment::{Environment, process_environment};
use crate::config::load::Flags;
use crate::domain::counted::counted;
use crate::domain::mcp::McpTransport;
use crate::domain::mcp_oauth::McpOauth;
use crate::domain::terminal_text::sanitize_line;
use crate::settings::suggestion;
use crate::tools::mcp::oauth::logins::operator::{LoggedOut, LoginStatus, Operator, OperatorError};
use crate::tools::mcp::oauth::logins::store::LoginStore;
use crate::tools::mcp::oauth::logins::{LoginError, LoginId};

const COLUMNS: [Column; 5] = [
    Column::text("server"),
    Column::flexible("login"),
    Column::flexible("scopes"),
    Column::flexible("url"),
    Column::flexible("agents"),
];

#[derive(Debug, clap::Subcommand)]
#[command(after_help = "Examples:
  axed auth login tickets
  axed auth list
  axed auth logout tickets

Logins are for MCP servers whose [mcp_servers.oauth] has grant = \"device_code\".
They are encrypted with the key in AXED_LOGIN_KEY, or in the variable that
[logins] key_env of the configuration names.

Exit codes:
  0  done
  1  denied, expired, or the authorization server does not answer properly
  2  no such server, or invalid configuration")]
pub enum Command {
    /// Log in to an MCP server with a browser, and store the login
    Login(Login),
    /// List the MCP servers that need a login, and what is stored
    List(List),
    /// Revoke and delete a login
    Logout(Logout),
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Login {
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct List {
    #[command(flatten)]
    format: FormatArgs,
    #[command(flatten)]
    files: FileArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_line_help = true)]
pub struct Logout {
    /// Delete the login even if its tokens cannot be revoked
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    server: ServerArgs,
}

#[derive(Debug, clap::Args)]
struct ServerArgs {
    /// Name of the MCP server in the agents' files
    server: String,
    /// The agent whose file is meant, if agents define the server differently
    #[arg(long, value_name = "NAME")]
    agent: Option<String>,
    #[command(flatten)]
    files: FileArgs,
}

#[derive(Debug, clap::Args)]
struct FileArgs {
    #[command(flatten)]
    sources: Sources,
    /// Data directory [default: as configured]
    #[arg(long, value_name = "DIR")]
    data: Option<PathBuf>,
}

pub async fn auth(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Login(args) => login(args.server).await?,
        Command::List(args) => list(args)?,
        Command::Logout(args) => logout(args.server, args.force).await?,
    }
    Ok(ExitCode::SUCCESS)
}

/// The logins that agents need, and where they are.
struct Logins {
    needed: Vec<NeededLogin>,
    store: LoginStore,
    environment: Environment,
}

/// A login, and the agents that use it.
struct NeededLogin {
    id: LoginId,
    oauth: McpOauth,
    agents: Vec<String>,
}

impl FileArgs {
    fn logins(self) -> anyhow::Result<Logins> {
        let flags = Flags {
            data: self.data,
            ..self.sources.flags()
        };
        let config = load_quiet_config(&flags)?;
        let environment = process_environment();
        Ok(Logins {
            needed: needed_logins(&config),
            store: LoginStore::new(&config.logins, environment.clone()),
            environment,
        })
    }
}

fn needed_logins(config: &Config) -> Vec<NeededLogin> {
    let dirs = config.agents.dirs.clone();
    let agents = Catalog::open(dirs, Rules::from_config(config)).current();
    let mut needed: Vec<NeededLogin> = Vec::new();
    for agent in agents.entries.values().filter_map(|it| it.agent.as_ref()) {
        for server in &agent.mcp_servers {
            let (Some(id), McpTransport::StreamableHttp { oauth, .. }) =
                (LoginId::of(server), &server.transport)
            else {
                continue;
            };
            let Some(oauth) = oauth else { continue };
            match needed.iter_mut().find(|it| it.id == id) {
                Some(known) => known.agents.push(agent.name.clone()),
                None => needed.push(NeededLogin {
                    id,
                    oauth: oauth.clone(),
                    agents: vec![agent.name.clone()],
                }),
            }
        }
    }
    needed.sort_by(|a, b| a.id.cmp(&b.id));
    needed
}

impl Logins {
    /// The login that the arguments name.
    fn find(&self, server: &str, agent: Option<&str>) -> anyhow::Result<&NeededLogin> {
        let is_meant = |it: &&NeededLogin| {
            it.id.server == server
                && agent.is_none_or(|agent| it.agents.iter().any(|name| name == agent))
        };
        let found: Vec<&NeededLogin> = self.needed.iter().filter(is_meant).collect();
        let text = match found.as_slice() {
            [login] => return Ok(login),
            [] => {
                let known = self.needed.iter().map(|it| it.id.server.as_str());
                let hint = suggestion::closest(server, known);
                let hint = hint.map(|name| format!("; did you mean \"{name}\"?"));
                format!(
                    "no agent has an MCP server \"{server}\" with oauth.grant = \"device_code\"{}",
                    hint.unwrap_or_default()
                )
            }
            several => {
                let agents = several.iter().map(|it| it.agents.join(", "));
                format!(
                    "agents define {server} differently ({}); choose one with --agent",
                    agents.collect::<Vec<_>>().join("; ")
                )
            }
        };
        Err(InvalidInput(text).into())
    }

    fn operator<'a>(&'a self, login: &'a NeededLogin) -> anyhow::Result<Operator<'a>> {
        let (store, environment) = (&self.store, &self.environment);
        Operator::new(&login.id, &login.oauth, store, environment).map_err(failed)
    }
}

async fn login(args: ServerArgs) -> anyhow::Result<()> {
    let logins = args.files.logins()?;
    let login = logins.find(&args.server, args.agent.as_deref())?;
    let operator = logins.operator(login)?;
    let pending = operator.begin().await.map_err(failed)?;
    let code = &pending.code;
    // The authorization server chose these texts.
    let shown = |text: &str| sanitize_line(text);
    output::print_line(format_args!(
        "Open {} and enter the code {}",
        shown(&code.verification_uri),
        shown(&code.user_code)
    ))?;
    if let Some(uri) = &code.complete_uri {
        output::print_line(format_args!("or open {}", shown(uri)))?;
    }
    output::eprint_line(format_args!(
        "axed: waiting for up to {}",
        minutes(code.lifetime)
    ));
    let (file, status) = operator.finish(pending).await.map_err(failed)?;
    output::print_line(format_args!(
        "Logged in to {} at {}: {}",
        args.server,
        login.id.url,
        describe(&status, Timestamp::now())
    ))?;
    let scopes = sanitize_line(&status.scopes.join(" "));
    output::print_line(format_args!(
        "Stored, encrypted, in {} (scopes: {})",
        file.display(),
        if scopes.is_empty() { "none" } else { &scopes }
    ))
}

/// A key that is missing or wrong is an error of the configuration.
fn failed(error: OperatorError) -> anyhow::Error {
    match error {
        OperatorError::Store(
            LoginError::NoKey { .. } | LoginError::InvalidKey { .. } | LoginError::UnreadableKey(_),
        ) => InvalidInput(error.to_string()).into(),
        _ => error.into(),
    }
}

fn minutes(time: Duration) -> String {
    match time.as_secs() {
        seconds @ 0..120 => counted(seconds, "second"),
        seconds => counted(seconds / 60, "minute"),
    }
}

/// How long a login lasts.
fn describe(status: &LoginStatus, now: Timestamp) -> String {
    let until = status.expires_at.map(|at| at.strftime("%F %H:%M UTC"));
    match (status.is_renewable, until) {
        (true, _) => "renewed by axed".to_owned(),
        (false, None) => "without an end".to_owned(),
        (false, Some(_)) if status.expires_at.is_some_and(|at| at <= now) => "expired".to_owned(),
        (false, Some(until)) => format!("until {until}"),
    }
}

async fn logout(args: ServerArgs, force: bool) -> anyhow::Result<()> {
    let logins = args.files.logins()?;
    let server = &args.server;
    let login = match logins.find(server, args.agent.as_deref()) {
        Ok(login) => login,
        Err(_) if force && args.agent.is_none() => return forget_unused(&logins, server),
        Err(error) => return Err(error),
    };
    let operator = logins.operator(login)?;
    let logged_out = match operator.log_out().await {
        Err(error) if force => {
            output::eprint_line(format_args!("axed: not revoked: {error}"));
            operator.forget().await?
        }
        Err(error) => return Err(anyhow!("{error}; --force deletes the login nevertheless")),
        Ok(logged_out) => logged_out,
    };
    let text = match logged_out {
        LoggedOut::Revoked => format!("Logged out of {server}: the tokens are revoked"),
        LoggedOut::NotRevocable => {
            format!("Deleted the login at {server}; its tokens stay valid until they expire")
        }
        LoggedOut::Missing => format!("There is no login at {server}"),
    };
    output::print_line(format_args!("{text}"))
}

/// Deletes the logins at a server that no agent's file has any more.
fn forget_unused(logins: &Logins, server: &str) -> anyhow::Result<()> {
    let unused = logins.store.unused(logins.needed.iter().map(|it| &it.id));
    let unused: Vec<LoginId> = unused
        .into_iter()
        .filter(|it| it.server == server)
        .collect();
    if unused.is_empty() {
        return Err(InvalidInput(format!("there is no login at {server}")).into());
    }
    for id in unused {
        logins.store.remove(&id)?;
        output::print_line(format_args!(
            "Deleted the login at {server} ({}); its tokens stay valid until they expire",
            id.url
        ))?;
    }
    Ok(())
}

fn list(args: List) -> anyhow::Result<()> {
    let logins = args.files.logins()?;
    let needed = logins.needed.iter();
    let needed = needed.map(|it| (it.id.clone(), it.agents.clone()));
    let unused = logins.store.unused(logins.needed.iter().map(|it| &it.id));
    let unused = unused.into_iter().map(|id| (id, Vec::new()));
    let rows: Vec<_> = needed
        .chain(unused)
        .map(|(id, agents)| (logins.store.status(&id), id, agents))
        .collect();
    if args.format.is_json() {
        let rows: Vec<Value> = rows.iter().map(row_json).collect();
        return output::print_json(&json!({ "data": rows }));
    }
    if rows.is_empty() {
        let text = "axed: no agent has an MCP server with oauth.grant = \"device_code\"";
        output::eprint_line(format_args!("{text}"));
        return Ok(());
    }
    let mut table = Table::new(COLUMNS);
    let now = Timestamp::now();
    for (status, id, agents) in &rows {
        let login = match status {
            Ok(None) => Cell::new("none").colored(Color::Yellow),
            Ok(Some(status)) => Cell::new(describe(status, now)),
            Err(error) => Cell::new(error).colored(Color::Red),
        };
        let scopes = status.as_ref().ok().and_then(Option::as_ref);
        let scopes = scopes.map(|it| it.scopes.join(" ")).unwrap_or_default();
        let agents = match agents.is_empty() {
            true => "-".to_owned(),
            false => agents.join(", "),
        };
        table.row([
            Cell::new(&id.server),
            login,
            Cell::new(scopes),
            Cell::new(&id.url),
            Cell::new(agents),
        ]);
    }
    table.print()
}

fn row_json(
    row: &(
        Result<Option<LoginStatus>, LoginError>,
        LoginId,
        Vec<String>,
    ),
) -> Value {
    let (status, id, agents) = row;
    let mut json = json!({"server": id.server, "url": id.url, "agents": agents, "login": null});
    match status {
        Ok(None) => {}
        Ok(Some(status)) => {
            json["login"] = json!({
                "since": status.since,
                "expires_at": status.expires_at,
                "renewable": status.is_renewable,
                "scopes": status.scopes,
                "issuer": status.issuer,
            });
        }
        Err(error) => json["error"] = json!(error.to_string()),
    }
    json
}
