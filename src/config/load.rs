//! Reads the layers of the configuration and merges them: flag over environment over file over default.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use secrecy::SecretString;

use crate::config::document::{self, Node, Origin, Table, Value};
use crate::config::models::{Models, Priced};
use crate::config::section::{self, MAX_COUNT, Section};
use crate::config::web_tools;
use crate::config::{
    Agents, AttachmentLimits, Auth, Commands, Config, Data, Durability, Kept, Limits, PerKey,
    Retention, Runs, Server, Tools, Webhooks, auth, providers, telemetry,
};
use crate::domain::agent::{ModelRef, is_agent_name};
use crate::domain::usage::Price;
use crate::net::host_name;

/// The file that is read when nothing names one, if it is there.
const USUAL_FILE: &str = "config/axed.toml";
/// Above every price that a model could have, in USD per million tokens.
pub(in crate::config) const MAX_PRICE: f64 = 1e6;
/// The name that stands for every key without a limit of its own.
const OTHERS: &str = "*";

/// What the command line says.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    /// `--config`
    pub config: Option<PathBuf>,
    /// `--agents`, several times.
    pub agents: Vec<PathBuf>,
    /// `--data`
    pub data: Option<PathBuf>,
    /// `--listen`
    pub listen: Option<String>,
    /// `--log-format`
    pub log_format: Option<String>,
}

/// The process's environment, read once.
pub type Environment = BTreeMap<String, String>;

/// Why there is no configuration: names the file, line and key, or the variable or flag.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// The environment of this process. The only place that reads it.
pub fn environment() -> Environment {
    std::env::vars_os()
        .filter_map(|(k, v)| Some((k.into_string().ok()?, v.into_string().ok()?)))
        .collect()
}

/// The key that commands bring to a daemon: `AXED_KEY`.
pub fn client_key() -> Option<SecretString> {
    let environment = environment();
    set(&environment, "AXED_KEY").map(SecretString::from)
}

/// The secret in this variable of the process's environment, where it is set.
pub fn secret(name: &str) -> Option<SecretString> {
    set(&environment(), name).map(|secret| SecretString::from(secret.trim()))
}

/// The home directory of this process's user, for paths that begin with `~` in agent files.
pub fn home() -> Option<PathBuf> {
    std::env::home_dir().filter(|home| !home.as_os_str().is_empty())
}

/// `~` and `~/…` below `home`; anything else, and everything without a home, as it stands.
pub fn expand_home(path: &str, home: Option<&Path>) -> PathBuf {
    match (path.strip_prefix('~'), home) {
        (Some(""), Some(home)) => home.to_owned(),
        (Some(rest), Some(home)) if rest.starts_with('/') => {
            home.join(rest.trim_start_matches('/'))
        }
        _ => PathBuf::from(path),
    }
}

/// Reads and checks everything.
pub fn load(flags: &Flags, environment: &Environment) -> Result<Config, ConfigError> {
    let file = file(flags, environment)?;
    let label = file.as_deref().unwrap_or(Path::new(USUAL_FILE)).display();
    let label = label.to_string();
    let mut table = match &file {
        Some(path) => read_file(path, &label)?,
        None => Table::new(),
    };
    lay_environment_over(&mut table, environment);
    lay_flags_over(&mut table, flags)?;
    providers::add_builtin(&mut table);

    let config_dir = match &file {
        Some(path) => path
            .parent()
            .filter(|dir| !dir.as_os_str().is_empty())
            .unwrap_or(Path::new(".")),
        None => Path::new("config"),
    };
    let place = Place {
        environment,
        home: set(environment, "HOME").map(PathBuf::from),
        config_dir: config_dir.to_owned(),
        config_file: file.unwrap_or_else(|| USUAL_FILE.into()),
    };
    let (config, problems) = section::read(table, |top| config(top, &place));
    match problems.is_empty() {
        true => Ok(config),
        false => Err(ConfigError(document::tell(&problems, &label, "\n"))),
    }
}

/// What a configuration is read in.
pub(in crate::config) struct Place<'e> {
    pub(in crate::config) environment: &'e Environment,
    pub(in crate::config) home: Option<PathBuf>,
    pub(in crate::config) config_dir: PathBuf,
    pub(in crate::config) config_file: PathBuf,
}

impl Place<'_> {
    /// The path that a text names.
    pub(in crate::config) fn path(&self, text: &str) -> Result<PathBuf, String> {
        if text.trim().is_empty() {
            return Err("must not be an empty path".to_owned());
        }
        if self.home.is_none() && (text == "~" || text.starts_with("~/")) {
            return Err("begins with ~, but HOME is not set; write the whole path".to_owned());
        }
        Ok(expand_home(text, self.home.as_deref()))
    }

    /// The paths of a list.
    pub(in crate::config) fn paths(
        &self,
        section: &mut Section<'_>,
        key: &'static str,
    ) -> Option<Vec<PathBuf>> {
        let node = section.peek(key)?;
        let texts = section.texts(key)?;
        let paths: Result<Vec<PathBuf>, String> =
            texts.iter().map(|text| self.path(text)).collect();
        match paths {
            Ok(paths) => Some(paths),
            Err(why) => {
                section.rule(&node, key, &why);
                None
            }
        }
    }
}

/// A variable that is set: an empty one counts as unset.
pub(in crate::config) fn set<'e>(environment: &'e Environment, name: &str) -> Option<&'e str> {
    let value = environment.get(name)?;
    (!value.trim().is_empty()).then_some(value.as_str())
}

/// A name as variables spell it: upper case, everything but letters and digits as `_`.
pub(in crate::config) fn variable_name(name: &str) -> String {
    let spelt = name.chars().map(|c| match c.is_ascii_alphanumeric() {
        true => c.to_ascii_uppercase(),
        false => '_',
    });
    spelt.collect()
}

/// Whether a section may have this name of its writer's choice: two underscores part the steps of a variable's name.
pub fn is_plain_name(name: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    (1..=64).contains(&name.len())
        && name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(is_plain)
        && !name.contains("__")
}

/// The config file: a named one must exist.
fn file(flags: &Flags, environment: &Environment) -> Result<Option<PathBuf>, ConfigError> {
    let named = flags.config.clone().map(|path| ("--config", path));
    let named =
        named.or_else(|| set(environment, "AXED_CONFIG").map(|path| ("AXED_CONFIG", path.into())));
    match named {
        Some((_, path)) if path.is_file() => Ok(Some(path)),
        Some((by, path)) => Err(ConfigError(format!(
            "{by}: there is no config file {}",
            path.display()
        ))),
        None => Ok(Some(PathBuf::from(USUAL_FILE)).filter(|path| path.is_file())),
    }
}

fn read_file(path: &Path, label: &str) -> Result<Table, ConfigError> {
    let bytes = std::fs::read(path)
        .map_err(|error| ConfigError(format!("could not read config file {label}: {error}")))?;
    document::parse(&bytes).map_err(|problems| ConfigError(document::tell(&problems, label, "\n")))
}

/// Puts every `AXED_<SECTION>__<KEY>` in its place. Keys that do not exist are found out like those of a file.
fn lay_environment_over(table: &mut Table, environment: &Environment) {
    for name in environment.keys() {
        let Some(path) = name
            .strip_prefix("AXED_")
            .filter(|rest| rest.contains("__"))
        else {
            continue;
        };
        let Some(value) = set(environment, name) else {
            continue;
        };
        let path: Vec<&str> = path.split("__").collect();
        let origin = Origin::Outside(name.clone());
        put(table, &[], &path, &origin, from_variable(value, &origin));
    }
}

fn lay_flags_over(table: &mut Table, flags: &Flags) -> Result<(), ConfigError> {
    let mut lay = |flag: &str, path: [&str; 2], value: Value| {
        put(table, &[], &path, &Origin::Outside(flag.to_owned()), value);
    };
    let utf8 = |flag: &str, path: &Path| match path.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(ConfigError(format!("{flag}: the path is not UTF-8"))),
    };
    if !flags.agents.is_empty() {
        let mut dirs = Vec::new();
        for dir in &flags.agents {
            dirs.push(Node {
                origin: Origin::Outside("--agents".to_owned()),
                value: Value::String(utf8("--agents", dir)?),
            });
        }
        lay("--agents", ["agents", "dirs"], Value::Array(dirs));
    }
    if let Some(dir) = &flags.data {
        let dir = utf8("--data", dir)?;
        lay("--data", ["data", "dir"], Value::String(dir));
    }
    if let Some(listen) = &flags.listen {
        let listen = Value::String(listen.clone());
        lay("--listen", ["server", "listen"], listen);
    }
    if let Some(format) = &flags.log_format {
        let format = Value::String(format.clone());
        lay("--log-format", ["telemetry", "log_format"], format);
    }
    Ok(())
}

/// The value of a variable: a list or table where it is one in TOML, else text that takes the type its key wants.
fn from_variable(text: &str, origin: &Origin) -> Value {
    if text.starts_with(['[', '{'])
        && let Ok(mut table) = document::parse(format!("value = {text}").as_bytes())
        && table.len() == 1
        && let Some(mut node) = table.remove("value")
    {
        blame(&mut node, origin);
        return node.value;
    }
    Value::Untyped(text.to_owned())
}

/// Makes `origin` the origin of everything in the node.
fn blame(node: &mut Node, origin: &Origin) {
    node.origin = origin.clone();
    match &mut node.value {
        Value::Array(items) => items.iter_mut().for_each(|item| blame(item, origin)),
        Value::Table(table) => table.values_mut().for_each(|node| blame(node, origin)),
        _ => {}
    }
}

/// Sets the value at a path of a variable's parts, with the tables on the way.
fn put(table: &mut Table, above: &[&str], path: &[&str], origin: &Origin, value: Value) {
    let Some((part, rest)) = path.split_first() else {
        return;
    };
    let key = key_of(table, above, part);
    let origin_here = origin.clone();
    if rest.is_empty() {
        let node = Node {
            origin: origin_here,
            value,
        };
        table.insert(key, node);
        return;
    }
    let node = table.entry(key).or_insert_with(|| Node {
        origin: origin_here,
        value: Value::Table(Table::new()),
    });
    // Where the file has something else than a table here, that is the error to tell.
    if let Value::Table(below) = &mut node.value {
        let above: Vec<&str> = above.iter().chain([part]).copied().collect();
        put(below, &above, rest, origin, value);
    }
}

/// The key that a variable's part means: one that is there already, else the part in lower case. A header's name has
/// dashes, and a model's is taken as it stands.
fn key_of(table: &Table, above: &[&str], part: &str) -> String {
    let spelt = variable_name(part);
    let lower = part.to_ascii_lowercase();
    if table.contains_key(&lower) {
        return lower;
    }
    if let Some(known) = table.keys().find(|key| variable_name(key) == spelt) {
        return known.clone();
    }
    match above {
        [section] if section.eq_ignore_ascii_case("prices") => part.to_owned(),
        [_, _, table] if table.eq_ignore_ascii_case("headers") => lower.replace('_', "-"),
        [_, _, table] if table.eq_ignore_ascii_case("models") => part.to_owned(),
        _ => lower,
    }
}

fn config(top: &mut Section<'_>, place: &Place<'_>) -> Config {
    let auth = top.section("auth", auth::read);
    let data = top.section("data", |s| data(s, place));
    let providers = top.named("providers", |name, s| providers::read(name, s, place));
    let models = Models::new(&providers, &top.named("prices", price));
    let limits = top.section("limits", limits);
    let tools = Tools {
        attachments: limits.attachment_limits(),
        ..top.section("tools", |s| tools(s, place))
    };
    Config {
        server: top.section("server", server),
        agents: top.section("agents", |s| agents(s, place)),
        memory_dir: data.dir.join("memory"),
        data,
        runs: top.section("runs", |s| runs(s, &auth)),
        limits,
        tools,
        webhooks: top.section("webhooks", webhooks),
        providers,
        models,
        telemetry: top.section("telemetry", |s| telemetry::read(s, place)),
        auth,
        config_dir: place.config_dir.clone(),
        config_file: place.config_file.clone(),
    }
}

fn server(s: &mut Section<'_>) -> Server {
    s.unsupported("trusted_proxies");
    let seconds = |s: &mut Section<'_>, key, min, usual| {
        s.seconds(key, min).unwrap_or(Duration::from_secs(usual))
    };
    Server {
        listen: s
            .checked("listen", address)
            .unwrap_or(SocketAddr::from(([127, 0, 0, 1], 8080))),
        metrics_listen: s.checked("metrics_listen", address),
        path_prefix: s.checked("path_prefix", prefix).unwrap_or_default(),
        max_body: s.size("max_body").unwrap_or(4 << 20),
        max_pending_per_address: s.count("max_pending_per_address", 1).unwrap_or(1_000),
        max_pending_connections: s.count("max_pending_connections", 1).unwrap_or(10_000),
        max_wait: seconds(s, "max_wait", 0, 300),
        default_timeout: seconds(s, "default_timeout", 1, 120),
        max_timeout: seconds(s, "max_timeout", 1, 86_400),
        drain_timeout: seconds(s, "drain_timeout", 0, 25),
    }
}

fn agents(s: &mut Section<'_>, place: &Place<'_>) -> Agents {
    let node = s.peek("dirs");
    let dirs = place.paths(s, "dirs");
    if let (Some(node), Some([])) = (&node, dirs.as_deref()) {
        s.rule(node, "dirs", "must name at least one directory");
    }
    Agents {
        dirs: dirs.unwrap_or_else(|| vec![PathBuf::from("agents")]),
        watch: s.flag("watch").unwrap_or(true),
    }
}

fn data(s: &mut Section<'_>, place: &Place<'_>) -> Data {
    s.unsupported("url");
    let durabilities = [
        ("process", Durability::Process),
        ("power", Durability::Power),
    ];
    Data {
        dir: s
            .checked("dir", |text| place.path(text))
            .unwrap_or_else(|| PathBuf::from("data")),
        durability: s.one_of("durability", &durabilities).unwrap_or_default(),
        retention: s.section("retention", retention),
    }
}

fn retention(s: &mut Section<'_>) -> Retention {
    let all = kept(s, Kept::default());
    Retention {
        completed: s.section("completed", |s| kept(s, all)),
        failed: s.section("failed", |s| kept(s, all)),
        cancelled: s.section("cancelled", |s| kept(s, all)),
    }
}

/// What the section says, else what holds for all; 0 is no bound.
fn kept(s: &mut Section<'_>, all: Kept) -> Kept {
    Kept {
        age: s
            .age("age")
            .map_or(all.age, |age| Some(age).filter(|age| !age.is_zero())),
        count: s
            .count("count", 0)
            .map_or(all.count, |count| Some(count).filter(|count| *count > 0)),
    }
}

fn runs(s: &mut Section<'_>, auth: &Auth) -> Runs {
    let usual = Runs::default();
    let bound = |s: &mut Section<'_>, key, usual| match s.count(key, 0) {
        Some(0) => usize::MAX,
        count => count.unwrap_or(usual),
    };
    Runs {
        max_running: s.count("max_running", 1).unwrap_or(usual.max_running),
        max_queued: s.count("max_queued", 0).unwrap_or(usual.max_queued),
        max_tree: bound(s, "max_tree", usual.max_tree),
        max_live: bound(s, "max_live", usual.max_live),
        max_delegations: bound(s, "max_delegations", usual.max_delegations),
        max_calls: bound(s, "max_calls", usual.max_calls),
        per_agent: s.counts_by_name("per_agent", 1, |name| match is_agent_name(name) {
            true => Ok(()),
            false => Err("is no name that an agent can have".to_owned()),
        }),
        per_key: per_key(s, auth),
    }
}

/// A number is everybody's limit; a table has limits by the keys' names, with `"*"` for all others.
fn per_key(s: &mut Section<'_>, auth: &Auth) -> PerKey {
    let node = s.peek("per_key");
    if !matches!(node.map(|node| node.value), Some(Value::Table(_))) {
        return PerKey {
            named: BTreeMap::new(),
            others: s.count("per_key", 1),
        };
    }
    let mut named = s.counts_by_name("per_key", 1, |name| {
        match name == OTHERS || auth.keys.iter().any(|key| key.name == name) {
            true => Ok(()),
            false => Err(format!(
                "names no key of [auth.keys]; \"{OTHERS}\" names all that are not named"
            )),
        }
    });
    let others = named.remove(OTHERS);
    PerKey { named, others }
}

fn limits(s: &mut Section<'_>) -> Limits {
    let turns = |s: &mut Section<'_>, key, usual| {
        let turns = s.whole(key, 0..=MAX_COUNT);
        turns
            .and_then(|turns| u32::try_from(turns).ok())
            .unwrap_or(usual)
    };
    Limits {
        loop_warn: turns(s, "loop_warn", 3),
        loop_stop: turns(s, "loop_stop", 6),
        context_files: s.size("context_files").unwrap_or(1 << 20),
        labels: s.count("labels", 0).unwrap_or(64),
        conversation_bytes: s.size("conversation_bytes").unwrap_or(32 << 20),
        session_messages: s.count("session_messages", 1).unwrap_or(200),
        session_bytes: s.size("session_bytes").unwrap_or(1 << 20),
        attachments: s.count("attachments", 0).unwrap_or(20),
        attachment_bytes: s.size("attachment_bytes").unwrap_or(10 << 20),
    }
}

fn tools(s: &mut Section<'_>, place: &Place<'_>) -> Tools {
    let is_allowed = s.flag("allow_commands").unwrap_or(false);
    let commands = commands(s, place);
    Tools {
        roots: place.paths(s, "roots").unwrap_or_default(),
        max_result: s.size("max_result").unwrap_or(256 << 10),
        attachments: AttachmentLimits::default(),
        deferred_above: s.count("deferred_above", 0).unwrap_or(40),
        commands: is_allowed.then_some(commands),
        url_fetch: s.section("url_fetch", web_tools::url_fetch),
        web_search: s.section("web_search", |s| {
            web_tools::web_search(s, place.environment)
        }),
    }
}

/// What every command gets of the daemon's environment; `TMPDIR` is where its own temporary folder is made.
const PASSED: [&str; 4] = ["PATH", "LANG", "TZ", "TMPDIR"];
/// Where programs are where the daemon itself was not told.
const USUAL_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn commands(s: &mut Section<'_>, place: &Place<'_>) -> Commands {
    let node = s.peek("pass_env");
    let more = s.texts("pass_env").unwrap_or_default();
    for name in &more {
        let why = match (variable(name), name.as_str()) {
            (Err(_), _) => "must have names of environment variables, not their values".to_owned(),
            (_, "HOME" | "TMPDIR") => {
                format!("has {name}, which is a folder of each command's own")
            }
            _ => continue,
        };
        if let Some(node) = &node {
            s.rule(node, "pass_env", &why);
        }
    }
    let names = PASSED.into_iter().chain(more.iter().map(String::as_str));
    let passed = names.filter_map(|name| Some((name, place.environment.get(name)?.as_str())));
    let environment = [("PATH", USUAL_PATH)].into_iter().chain(passed);
    Commands {
        allow_unconfined: s.flag("allow_unconfined").unwrap_or(false),
        network: s.flag("network").unwrap_or(false),
        environment: environment
            .map(|(name, value)| (name.to_owned(), SecretString::from(value)))
            .collect(),
    }
}

fn webhooks(s: &mut Section<'_>) -> Webhooks {
    Webhooks {
        allow_hosts: allow_hosts(s),
        secret_env: s.checked("secret_env", variable),
        first_retry: s
            .whole("first_retry_ms", 1..=3_600_000)
            .map_or(Duration::from_secs(5), Duration::from_millis),
    }
}

/// Hosts that a guard lets through.
pub(in crate::config) fn allow_hosts(s: &mut Section<'_>) -> Vec<String> {
    let node = s.peek("allow_hosts");
    let hosts = s.texts("allow_hosts").unwrap_or_default();
    let allow_hosts: Vec<String> = hosts.iter().map(|host| host_name(host)).collect();
    if let Some(wrong) = hosts.iter().find(|host| !is_host(&host_name(host)))
        && let Some(node) = &node
    {
        let why = format!(
            "has {wrong:?}, which is no host; write names or addresses without scheme, port and path"
        );
        s.rule(node, "allow_hosts", &why);
    }
    allow_hosts
}

fn is_host(text: &str) -> bool {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    text.parse::<IpAddr>().is_ok() || (!text.is_empty() && text.chars().all(is_plain))
}

/// The name of an environment variable.
pub fn variable(text: &str) -> Result<String, String> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || c == '_';
    match !text.is_empty() && text.chars().all(is_plain) {
        true => Ok(text.to_owned()),
        // The text may be the secret itself, put here by mistake.
        false => {
            Err("must be the name of an environment variable, and not the secret itself".to_owned())
        }
    }
}

fn price(model: &str, s: &mut Section<'_>) -> Priced {
    if model.parse::<ModelRef>().is_err() {
        s.wrong_name("is no provider/model, such as [prices.\"openai/gpt-5\"]");
    }
    let range = 0.0..=MAX_PRICE;
    let price = Price {
        input: s.number("input", range.clone()).unwrap_or(0.0),
        output: s.number("output", range.clone()).unwrap_or(0.0),
        cache_read: s.number("cache_read", range.clone()),
        cache_write: s.number("cache_write", range.clone()),
        cache_write_1h: s.number("cache_write_1h", range),
        long: None,
    };
    Priced {
        price,
        batch: s.number("batch", 0.0..=1.0),
        flex: s.number("flex", 0.0..=1.0),
    }
}

fn address(text: &str) -> Result<SocketAddr, String> {
    // The one name that needs no resolver.
    let numeric = match text.strip_prefix("localhost:") {
        Some(port) => format!("127.0.0.1:{port}"),
        None => text.to_owned(),
    };
    numeric.parse().map_err(|_| {
        format!("is {text:?}, which is no address and port; write one such as 127.0.0.1:8080, or port 0 for a free one")
    })
}

fn prefix(text: &str) -> Result<String, String> {
    let inner = text.trim_matches('/');
    let is_plain = |c: char| c.is_ascii_alphanumeric() || matches!(c, '/' | '-' | '_' | '.' | '~');
    let is_step = |part: &str| !matches!(part, "" | "." | "..");
    match inner {
        "" => Ok(String::new()),
        _ if inner.chars().all(is_plain) && inner.split('/').all(is_step) => {
            Ok(format!("/{inner}"))
        }
        _ => Err("must be a path such as /axed, of letters, digits, - _ . ~".to_owned()),
    }
}
