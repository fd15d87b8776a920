//! Reads the sources of the configuration and merges them: a flag beats the environment, which beats the file, which
//! beats the default.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use secrecy::SecretString;

use crate::config::environment::{Environment, env_value};
use crate::config::in_force::{self, SettingInForce};
use crate::config::load_context::LoadContext;
use crate::config::models::lookup::{self, Models, Sources as ModelSources};
use crate::config::models::row::{self, PriceRow};
use crate::config::models::table::ModelTable;
use crate::config::secrets::{self, read_secret};
use crate::config::variables::{
    apply_environment, secret_of_file_variable, secret_problem, set_at_path,
};
use crate::config::{
    Agents, Auth, Commands, Config, Data, Limits, Logins, PerKey, Provider, Runs, Tools, auth,
    budgets, data_section, providers, telemetry, web_tools,
};
use crate::domain::agent::is_agent_name;
use crate::domain::agent::model_ref::ModelRef;
use crate::settings::document::{self, Node, Origin, Problem, Table, Value};
use crate::settings::kinds::check_variable_name;
use crate::settings::kinds::resolve_path;
use crate::settings::positions::Positions;
use crate::settings::section::read_section;
use crate::settings::suggestion;
use crate::settings::table_reader::{self, TableReader};

/// The first of these that exists is read if no file is named: that of the working directory, and that of the system.
const DEFAULT_FILES: [&str; 2] = ["config/axed.toml", "/etc/axed/axed.toml"];
/// The name in `[runs.per_key]` for every key without a limit of its own.
const WILDCARD_KEY: &str = "*";

/// A document with every table whose name the user chooses, for messages about keys in the wrong table.
const SAMPLE: &str = r#"
[auth.keys."<name>"]
[budgets."<name>"]
[prices."<name>"]
long = { }
prices = [{ }]
[providers."<name>".limits."<name>"]
[providers."<name>".models."<name>"]
long = { }
prices = [{ }]
"#;

/// Settings from the command line.
#[derive(Clone, Debug, Default)]
pub struct Flags {
    pub config: Option<PathBuf>,
    pub agents: Vec<PathBuf>,
    pub data: Option<PathBuf>,
    pub listen: Option<String>,
    pub log_format: Option<String>,
}

/// An invalid configuration. The text names the file, line and key, or the variable or flag.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct ConfigError(pub String);

/// The configuration with everything that `axed config` shows.
pub struct LoadedConfig {
    /// The path of the config file for messages; without one, the paths at which there is none.
    pub file: String,
    pub file_exists: bool,
    /// `None` if the file is not TOML.
    pub config: Option<Config>,
    /// Every error.
    pub problems: Vec<Problem>,
    pub positions: Positions,
    /// Empty if there are errors.
    pub settings: Vec<SettingInForce>,
}

pub fn load(flags: &Flags, environment: &Environment) -> Result<Config, ConfigError> {
    let (file, sources) = merge_sources(flags, environment)?;
    let read = sources.and_then(|sources| sources.read(environment));
    read.map_err(|problems| ConfigError(document::format_problems(&problems, &file, "\n")))
}

/// Loads the configuration for `axed config`.
///
/// # Errors
/// The file or a flag cannot be read at all.
pub fn load_with_sources(
    flags: &Flags,
    environment: &Environment,
) -> Result<LoadedConfig, ConfigError> {
    let (file, sources) = merge_sources(flags, environment)?;
    let mut loaded = LoadedConfig {
        file,
        file_exists: true,
        config: None,
        problems: Vec::new(),
        positions: Positions::default(),
        settings: Vec::new(),
    };
    let sources = match sources {
        Ok(sources) => sources,
        Err(problems) => return Ok(LoadedConfig { problems, ..loaded }),
    };
    loaded.file_exists = sources.file.is_some();
    let table = sources.table.clone();
    loaded.positions = Positions::of(&table);
    let context = sources.context(environment);
    let known_keys = table_reader::known_keys(SAMPLE, None, |top| read_config(top, &context));
    match sources.read(environment) {
        Ok(config) => {
            loaded.settings = in_force::list(&table, &known_keys, &config, environment);
            loaded.config = Some(config);
        }
        Err(problems) => loaded.problems = problems,
    }
    Ok(loaded)
}

/// The file, the environment and the flags, merged.
struct Sources {
    /// `None` if there is no file.
    file: Option<PathBuf>,
    table: Table,
    /// Those of the environment.
    problems: Vec<Problem>,
}

/// Also returns the name of the config file for messages.
fn merge_sources(
    flags: &Flags,
    environment: &Environment,
) -> Result<(String, Result<Sources, Vec<Problem>>), ConfigError> {
    let file = find_config_file(flags, environment)?;
    let label = match &file {
        Some(path) => path.display().to_string(),
        None => DEFAULT_FILES.join(" or "),
    };
    let mut table = match &file {
        Some(path) => match document::parse(&read_file(path, &label)?) {
            Ok(table) => table,
            Err(problems) => return Ok((label, Err(problems))),
        },
        None => Table::new(),
    };
    let problems = apply_environment(&mut table, environment);
    apply_flags(&mut table, flags)?;
    let sources = Sources {
        file,
        table,
        problems,
    };
    Ok((label, Ok(sources)))
}

impl Sources {
    fn context<'e>(&self, environment: &'e Environment) -> LoadContext<'e> {
        let config_dir = match &self.file {
            Some(path) => path
                .parent()
                .filter(|dir| !dir.as_os_str().is_empty())
                .unwrap_or(Path::new(".")),
            None => Path::new("config"),
        };
        LoadContext {
            environment,
            home: env_value(environment, "HOME").map(PathBuf::from),
            config_dir: config_dir.to_owned(),
            config_file: self.file.clone().unwrap_or_else(|| DEFAULT_FILES[0].into()),
        }
    }

    fn read(self, environment: &Environment) -> Result<Config, Vec<Problem>> {
        let context = self.context(environment);
        let Self {
            mut table,
            mut problems,
            ..
        } = self;
        providers::add_builtin(&mut table, &context);
        let (config, more) =
            table_reader::read_table(table, SAMPLE, context.home.as_deref(), |top| {
                read_config(top, &context)
            });
        problems.extend(more);
        problems.extend(webhook_secret_problems(&config, environment));
        match problems.is_empty() {
            true => Ok(Config {
                secret_files: secret_files(&config, environment),
                ..config
            }),
            false => Err(problems),
        }
    }
}

/// `None` if no file is named and none of the default ones exists.
fn find_config_file(
    flags: &Flags,
    environment: &Environment,
) -> Result<Option<PathBuf>, ConfigError> {
    let named = flags.config.clone().map(|path| ("--config", path));
    let named = named
        .or_else(|| env_value(environment, "AXED_CONFIG").map(|path| ("AXED_CONFIG", path.into())));
    match named {
        Some((_, path)) if path.is_file() => Ok(Some(path)),
        Some((source, path)) => {
            let hint = suggestion::clause(suggestion::similar_file(&path));
            let (path, others) = (path.display(), DEFAULT_FILES.join(" or "));
            Err(ConfigError(format!(
                "{source}: there is no config file {path}{hint}; without it axed reads {others}, whichever is there"
            )))
        }
        None => {
            let mut files = DEFAULT_FILES.iter().map(PathBuf::from);
            Ok(files.find(|path| path.is_file()))
        }
    }
}

fn read_file(path: &Path, label: &str) -> Result<Vec<u8>, ConfigError> {
    std::fs::read(path).map_err(|error| {
        ConfigError(format!(
            "could not read config file {label}: {error}; --config or AXED_CONFIG names another one"
        ))
    })
}

fn apply_flags(table: &mut Table, flags: &Flags) -> Result<(), ConfigError> {
    let mut apply = |flag: &str, path: [&str; 2], value: Value| {
        set_at_path(table, &[], &path, &Origin::External(flag.to_owned()), value);
    };
    let utf8 = |flag: &str, path: &Path| match path.to_str() {
        Some(text) => Ok(text.to_owned()),
        None => Err(ConfigError(format!("{flag}: the path is not valid UTF-8"))),
    };
    if !flags.agents.is_empty() {
        let mut dirs = Vec::new();
        for dir in &flags.agents {
            dirs.push(Node {
                origin: Origin::External("--agents".to_owned()),
                value: Value::String(utf8("--agents", dir)?),
            });
        }
        apply("--agents", ["agents", "dirs"], Value::Array(dirs));
    }
    if let Some(dir) = &flags.data {
        let dir = utf8("--data", dir)?;
        apply("--data", ["data", "dir"], Value::String(dir));
    }
    if let Some(listen) = &flags.listen {
        let listen = Value::String(listen.clone());
        apply("--listen", ["server", "listen"], listen);
    }
    if let Some(format) = &flags.log_format {
        let format = Value::String(format.clone());
        apply("--log-format", ["telemetry", "log_format"], format);
    }
    Ok(())
}

/// The files with the secrets of webhooks are read at each delivery; here they are only checked.
fn webhook_secret_problems(config: &Config, environment: &Environment) -> Vec<Problem> {
    let names = webhook_secret_variables(config);
    let errors = names.filter_map(|name| read_secret(environment, name).err());
    errors.map(secret_problem).collect()
}

fn webhook_secret_variables(config: &Config) -> impl Iterator<Item = &str> {
    let keys = config.auth.keys.iter();
    let of_keys = keys.filter_map(|key| key.webhook_secret_env.as_deref());
    let budgets = config.budgets.iter();
    let of_budgets = budgets.filter_map(|it| it.webhook.as_ref()?.secret_env.as_deref());
    of_keys
        .chain(of_budgets)
        .chain(config.webhooks.secret_env.as_deref())
}

/// The files with secrets that the configuration uses.
fn secret_files(config: &Config, environment: &Environment) -> Vec<PathBuf> {
    let providers = config.providers.values();
    let search = config.tools.web_search.iter();
    let names = environment
        .keys()
        .filter_map(|name| secret_of_file_variable(name))
        .chain(providers.map(|provider| provider.key_env.as_str()))
        .chain(search.filter_map(|search| search.api_key_env.as_deref()))
        .chain(webhook_secret_variables(config))
        .chain([config.logins.key_env.as_str()])
        .chain(telemetry::HEADER_VARIABLES);
    let files = names.filter_map(|name| secrets::secret_file(environment, name));
    files.map(Path::to_owned).collect()
}

fn read_config(top: &mut TableReader<'_>, context: &LoadContext<'_>) -> Config {
    let auth = top.nested("auth", auth::read);
    let cluster = top.nested("cluster", |s| {
        data_section::read_cluster(s, context.environment)
    });
    let data = Data {
        cluster,
        ..top.nested("data", read_section)
    };
    let mut sources = ModelSources {
        file: top.nested("models", |s| read_models_file(s, context)),
        ..ModelSources::default()
    };
    let shipped = Models::new(sources.clone());
    let providers = top.tables_by_name("providers", |name, s| {
        providers::read(name, s, context, &shipped)
    });
    let all = providers.iter();
    sources.providers = all
        .map(|(name, provider)| (name.clone(), providers::provider_models(provider)))
        .collect();
    let models = Models::new(sources.clone());
    sources.prices = top.tables_by_name("prices", |model, s| {
        read_price(model, s, &models, &providers)
    });
    let limits: Limits = top.nested("limits", read_section);
    Config {
        server: top.nested("server", read_section),
        agents: top.nested("agents", read_agents),
        logins: Logins {
            dir: data.dir.join("logins"),
            ..top.nested("logins", read_section)
        },
        data,
        runs: top.nested("runs", |s| Runs {
            per_key: read_per_key(s, &auth),
            ..read_section(s)
        }),
        tools: top.nested("tools", |s| read_tools(s, context, &limits)),
        limits,
        webhooks: top.nested("webhooks", read_section),
        clients: top.nested("clients", read_section),
        waits: top.nested("wait", read_section),
        providers,
        models: Models::new(sources),
        budgets: budgets::read(top),
        telemetry: top.nested("telemetry", |s| telemetry::read(s, context)),
        auth,
        config_dir: context.config_dir.clone(),
        config_file: context.config_file.clone(),
        secret_files: Vec::new(),
        configured_data_dir: None,
    }
}

fn read_models_file(
    s: &mut TableReader<'_>,
    context: &LoadContext<'_>,
) -> Option<(PathBuf, ModelTable)> {
    let file = s.parsed_text("file", |text| {
        if text.is_empty() {
            return Ok(None);
        }
        let path = context
            .config_dir
            .join(resolve_path(text, context.home.as_deref())?);
        let table = lookup::read_file(&path).map_err(|why| format!("cannot be used: {why}"))?;
        Ok(Some((path, table)))
    });
    file.flatten()
}

fn read_agents(s: &mut TableReader<'_>) -> Agents {
    let node = s.peek("dirs");
    let agents: Agents = read_section(s);
    if let (Some(node), true) = (&node, agents.dirs.is_empty()) {
        s.push_invalid(node, "dirs", "must name at least one directory");
    }
    agents
}

pub(in crate::config) fn read_per_agent(
    s: &mut TableReader<'_>,
    key: &'static str,
) -> BTreeMap<String, usize> {
    s.counts_by_name(key, 1, |name| match is_agent_name(name) {
        true => Ok(()),
        false => Err("is not a valid agent name".to_owned()),
    })
}

/// A number limits every key. A table has limits by key name, with `"*"` for all others.
fn read_per_key(s: &mut TableReader<'_>, auth: &Auth) -> PerKey {
    let node = s.peek("per_key");
    if !matches!(node.map(|node| node.value), Some(Value::Table(_))) {
        return PerKey {
            named: BTreeMap::new(),
            others: s.count("per_key", 1),
        };
    }
    let mut named = s.counts_by_name("per_key", 1, |name| {
        match name == WILDCARD_KEY || auth.keys.iter().any(|key| key.name == name) {
            true => Ok(()),
            false => Err(format!(
                "is not a key of [auth.keys]; \"{WILDCARD_KEY}\" stands for all other keys"
            )),
        }
    });
    let others = named.remove(WILDCARD_KEY);
    PerKey { named, others }
}

fn read_tools(s: &mut TableReader<'_>, context: &LoadContext<'_>, limits: &Limits) -> Tools {
    let is_allowed = s.flag("allow_commands").unwrap_or(false);
    let commands = Commands {
        environment: read_command_environment(s, context),
        ..read_section(s)
    };
    Tools {
        attachments: limits.attachment_limits(),
        commands: is_allowed.then_some(commands),
        web_search: s.nested("web_search", |s| {
            web_tools::read_web_search(s, context.environment)
        }),
        ..read_section(s)
    }
}

/// Variables of the daemon's environment that every command gets. Its own temporary folder is created in `TMPDIR`.
const PASSED_VARIABLES: [&str; 4] = ["PATH", "LANG", "TZ", "TMPDIR"];
/// `PATH` of commands if the daemon itself has none.
const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

fn read_command_environment(
    s: &mut TableReader<'_>,
    context: &LoadContext<'_>,
) -> BTreeMap<String, SecretString> {
    let node = s.peek("pass_env");
    let extra = s.text_list("pass_env").unwrap_or_default();
    for name in &extra {
        let message = match (check_variable_name(name), name.as_str()) {
            (Err(_), _) => {
                "must contain names of environment variables, not their values".to_owned()
            }
            (_, "HOME" | "TMPDIR") => {
                format!("contains {name}, which axed sets for each command")
            }
            _ => continue,
        };
        if let Some(node) = &node {
            s.push_invalid(node, "pass_env", &message);
        }
    }
    let names = PASSED_VARIABLES
        .into_iter()
        .chain(extra.iter().map(String::as_str));
    let mut environment = BTreeMap::from([("PATH".to_owned(), SecretString::from(DEFAULT_PATH))]);
    for name in names {
        let value = match secrets::secret_file(context.environment, name) {
            Some(_) => read_secret(context.environment, name),
            None => Ok(context
                .environment
                .get(name)
                .cloned()
                .map(SecretString::from)),
        };
        match value {
            Ok(Some(value)) => drop(environment.insert(name.to_owned(), value)),
            Ok(None) => {}
            Err(error) => s.push_error(Origin::External(error.variable), error.reason),
        }
    }
    environment
}

/// `models` have every price but those of `[prices]`.
fn read_price(
    model: &str,
    s: &mut TableReader<'_>,
    models: &Models,
    providers: &BTreeMap<String, Provider>,
) -> PriceRow {
    let is_known = |model: &ModelRef| {
        let provider = providers.get(&model.provider);
        models.price(model).is_some() || provider.is_some_and(|it| it.kind.is_free())
    };
    match model.parse::<ModelRef>() {
        Ok(model) if !is_known(&model) => row::require_whole_price(s),
        Ok(_) => {}
        Err(_) => s.push_invalid_name(
            "is not provider/model; write one such as [prices.\"openai/gpt-6-sol\"]",
        ),
    }
    PriceRow::read(s)
}
